"""An RMS norm and the linear layers that read it, as one step of autograd that does not keep the norm's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._core.library import call_raw, is_batched, raw
from warpsmith.ops._linear import input_product, product
from warpsmith.ops.norm import rms_norm

_PLAIN = (Tensor, torch.nn.Parameter)
_forward = raw.rms_norm_forward.default
_add_forward = raw.add_rms_norm_forward.default
_inference = raw.rms_norm_inference.default
_backward = raw.add_rms_norm_backward.default


def fits(*tensors: Tensor) -> bool:
    """Whether :func:`norm_linears` may stand for the ops that it is made of: a gradient is needed, all tensors are
    plain and of one dtype on one device, and neither autocast nor a transform nor a tracer is at work."""
    x = tensors[0]
    return (
        torch.is_grad_enabled()
        and all(type(t) in _PLAIN and t.dtype == x.dtype and t.device == x.device for t in tensors)
        and any(t.requires_grad for t in tensors)
        and x.device.type in ("cpu", "cuda")
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


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
        return s, *(product(y, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        s, norm_weight, rstd, *weights = ctx.saved_tensors
        want_x, want_residual, want_norm, _, _, *want_layers = ctx.needs_input_grad
        want_weights, want_biases = want_layers[: len(weights)], want_layers[len(weights) :]
        twice = torch.is_grad_enabled()
        if twice:
            y = rms_norm(s, norm_weight, ctx.eps, ctx.offset)
        else:
            y = call_raw(_inference, s, norm_weight, ctx.eps, ctx.offset)
        used = [(_rows(dout), w) for dout, w in zip(douts, weights, strict=True) if dout is not None]
        dweights = [
            _rows(dout).t().mm(_rows(y)) if want and dout is not None else None
            for dout, want in zip(douts, want_weights, strict=True)
        ]
        dweights += [
            _rows(dout).sum(0) if want and dout is not None else None
            for dout, want in zip(douts, want_biases, strict=True)
        ]
        if not used or not (want_x or want_residual or want_norm):
            return ds if want_x else None, ds if want_residual else None, None, None, None, *dweights
        dout, w = used[0]
        dy = dout.mm(w) if twice or is_batched(dout) else input_product(dout, w)
        for dout, w in used[1:]:
            dy = torch.addmm(dy, dout, w) if twice or is_batched(dout) else dy.addmm_(dout, w)
        dy = dy.view(y.shape)
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
        dx = dx if want_x or want_residual else None
        return (
            dx if want_x else None,
            dx if want_residual else None,
            dnorm if want_norm else None,
            None,
            None,
            *dweights,
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
