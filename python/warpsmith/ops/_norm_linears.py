"""Linear layers of one input as one step of autograd, alone and behind an RMS norm, whose output is then not kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._core.library import call_raw, is_batched, raw
from warpsmith.ops import _linear
from warpsmith.ops._linear import input_products, products
from warpsmith.ops.norm import rms_norm

_PLAIN = (Tensor, torch.nn.Parameter)
_forward = raw.rms_norm_forward.default
_add_forward = raw.add_rms_norm_forward.default
_inference = raw.rms_norm_inference.default
_backward = raw.add_rms_norm_backward.default


def _are_plain(*tensors: Tensor) -> bool:
    """Tensors of one dtype on one device, where neither autocast nor a transform nor a tracer is at work."""
    x = tensors[0]
    return (
        all(type(t) in _PLAIN and t.dtype == x.dtype and t.device == x.device for t in tensors)
        and x.device.type in ("cpu", "cuda")
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def fits(*tensors: Tensor) -> bool:
    """Whether :func:`norm_linears` may stand for the ops that it is made of: a gradient is needed, and all tensors are
    plain."""
    return torch.is_grad_enabled() and _are_plain(*tensors) and any(t.requires_grad for t in tensors)


def may_join(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Whether :func:`linears` may stand for its layers, and have their products in one launch."""
    return _linear.may_pay(x, *weights) and _are_plain(x, *weights, *(b for b in biases if b is not None))


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _gradients(
    douts: Sequence[Tensor | None], y: Tensor, weights: Sequence[Tensor], want_y: bool, want_layers: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Of layers of y, which get douts: the gradient of y, and those of the weights, which alone need y, and biases."""
    want_weights, want_biases = want_layers[: len(weights)], want_layers[len(weights) :]
    used = [(_rows(dout), w) for dout, w in zip(douts, weights, strict=True) if dout is not None]
    dlayers = [
        _rows(dout).t().mm(_rows(y)) if want and dout is not None else None
        for dout, want in zip(douts, want_weights, strict=True)
    ]
    dlayers += [
        _rows(dout).sum(0) if want and dout is not None else None for dout, want in zip(douts, want_biases, strict=True)
    ]
    if not used or not want_y:
        return None, dlayers
    if torch.is_grad_enabled() or any(is_batched(dout) for dout, _ in used):
        (dout, w), *others = used
        dy = dout.mm(w)
        for dout, w in others:
            dy = torch.addmm(dy, dout, w)
    else:
        dy = input_products(*zip(*used, strict=True))
    lead = next(dout for dout in douts if dout is not None).shape[:-1]
    return dy.view(*lead, dy.shape[-1]), dlayers


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1 : 1 + len(weights)]) else None, *weights)
        ctx.set_materialize_grads(False)
        return tuple(products(x, weights, biases))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        want_x, *want_layers = ctx.needs_input_grad
        dx, dlayers = _gradients(douts, x, weights, want_x, want_layers)
        return dx, *dlayers


class _NormLinears(torch.autograd.Function):
    """Keeps the norm's input and rstd. The backward norms once more, which reads and writes one activation; autograd's
    own sum of the linear layers' gradients, for which it reads two and writes one a layer, is part of their products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        offset: float,
        *layers: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        if residual is None:
            y, rstd = call_raw(_forward, x, norm_weight, eps, offset)
            s = x
        else:
            y, s, rstd = call_raw(_add_forward, x, residual, norm_weight, eps, offset)
        ctx.save_for_backward(s, norm_weight, rstd, *weights)
        ctx.eps, ctx.offset = eps, offset
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:2]):
            s = s.detach()
            ctx.mark_non_differentiable(s)
        return s, *products(y, weights, biases)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        s, norm_weight, rstd, *weights = ctx.saved_tensors
        want_x, want_residual, want_norm, _, _, *want_layers = ctx.needs_input_grad
        twice = torch.is_grad_enabled()
        if twice:
            y = rms_norm(s, norm_weight, ctx.eps, ctx.offset)
        else:
            y = call_raw(_inference, s, norm_weight, ctx.eps, ctx.offset)
        dy, dlayers = _gradients(douts, y, weights, want_x or want_residual or want_norm, want_layers)
        if dy is None:
            return ds if want_x else None, ds if want_residual else None, None, None, None, *dlayers
        if twice:
            wanted = [t for t in (s, norm_weight) if t.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, dy, create_graph=True), strict=True))
            dx, dnorm = found.get(id(s)), found.get(id(norm_weight))
            if dx is not None and ds is not None:
                dx = dx + ds
        else:
            del y
            both = want_x or want_residual
            dx, _, dnorm = call_raw(_backward, dy, ds, s, norm_weight, rstd, ctx.offset, both, False, want_norm)
        return (
            dx if want_x else None,
            dx if want_residual else None,
            dnorm if want_norm else None,
            None,
            None,
            *dlayers,
        )


def norm_linears(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight_offset: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
) -> tuple[Tensor, ...]:
    """``(s, y @ W.T + b, ...)`` for each W (F, D) and b (F) or None, with s = x, or x + residual, y = rms_norm(s).

    x, residual: (..., D). All tensors are such as :func:`fits` asks for. Only s is kept of s and y. Gradients as those
    of :func:`warpsmith.add_rms_norm` and of linear layers, and theirs in turn, composed of torch operations.
    """
    biases = biases or (None,) * len(weights)
    return _NormLinears.apply(x, residual, norm_weight, eps, weight_offset, *weights, *biases)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """``x @ W.T + b`` for each W (F, D) and b (F) or None. x: (..., D). All are such as :func:`may_join` asks for."""
    if fits(x, *weights, *(b for b in biases if b is not None)):
        return _Linears.apply(x, *weights, *biases)
    return products(x, weights, biases)
