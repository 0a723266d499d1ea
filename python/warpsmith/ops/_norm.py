"""The norm family: the fakes and the differentiable function of each op, made from its schema.

``op(x, [residual,] weight, [bias,] [seed, p,] eps[, weight_offset])``: with bias for a layer norm, with weight_offset
for an RMS norm.
"""

import functools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.dropout import check_p, check_seed, draw_seed
from warpsmith._core.library import (
    Gradients,
    Saved,
    Wants,
    _without_wrapper,
    call_raw,
    differentiable,
    raw,
    register_fake,
)
from warpsmith._core.main_grad import is_gathered
from warpsmith.ops._quantize import FLOATS, check_dtype
from warpsmith.ops._shared_casts import Source, fake_rows, leave_cast

_FLOAT32_EPS = torch.finfo(torch.float32).eps
_FLOAT64_EPS = torch.finfo(torch.float64).eps


def default_eps(x: Tensor) -> float:
    """The eps of an RMS norm without one: torch's rule."""
    return _FLOAT64_EPS if getattr(x, "dtype", None) is torch.float64 else _FLOAT32_EPS


_rms_norm_fp8 = _without_wrapper(raw.rms_norm_fp8.default)


def _source(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Source | None:
    """Of an RMS norm's y: what was normed, which its backward reads. It may be wider than y. A weight that fully_shard
    has gathered may be freed when a layer's backward would read it."""
    *tensors, weight, eps, offset = inputs
    added = len(tensors) == 2
    normed = outputs[1] if added else tensors[0]
    if weight is None or normed.dtype is not outputs[0].dtype:
        return None
    if dist.is_available() and dist.is_initialized() and is_gathered(weight):
        return None

    def cast(normed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # refers to no tensor: layers keep it
        *_, data, scale, _ = call_raw(_rms_norm_fp8, normed, weight, eps, offset, added)
        return data, scale

    return Source(cast, normed, weight)


def _check_inputs(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    checks.float_dtype(op, "x", x)
    checks.at_least_one_dimension(op, "x", x)
    if residual is not None:
        checks.parameter(op, "residual", residual, x, x.shape)
    checks.pair(op, x, x.shape[-1:], weight=weight, bias=bias)


def _new_statistics(x: Tensor) -> Tensor:
    """A fake mean or rstd: one element a row."""
    return x.new_empty((math.prod(x.shape[:-1]),), dtype=checks.wide_dtype(x))


def _new_output(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _plain_gradients(
    dy: Tensor, s: Tensor, weight: Tensor | None, eps: float, weight_offset: float, layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(ds, dy * s_hat, dy) in plain torch operations, in float32 or wider: differentiable in turn."""
    wide = checks.wide_dtype(s)
    s_math, dy_math = s.to(wide), dy.to(wide)
    if layer:
        s_math = s_math - s_math.mean(-1, keepdim=True)
    rstd = torch.rsqrt(s_math.square().mean(-1, keepdim=True) + eps)
    s_hat = s_math * rstd
    g = dy_math if weight is None else dy_math * (weight.to(wide) + weight_offset)
    along = s_hat * (g * s_hat).mean(-1, keepdim=True)
    if layer:
        g = g - g.mean(-1, keepdim=True)
    return rstd * (g - along), dy_math * s_hat, dy_math


def norm(op: str) -> Callable:
    """Registers the fakes of an op and builds its function, of the arguments of the schema."""
    forward, inference, raw_backward = (
        getattr(raw, op + kind).default for kind in ("_forward", "_inference", "_backward")
    )
    arguments = [a.name for a in forward._schema.arguments]
    layer, residual, dropout = (name in arguments for name in ("bias", "residual", "seed"))
    gradients = [name for name in ("x", "residual", "weight", "bias") if name in arguments]
    s_name = "residual_out" if residual else "x"

    def fake_inference(*inputs: Any) -> Any:
        given = dict(zip(arguments, inputs, strict=True))
        x, added = given["x"], given.get("residual")
        _check_inputs(op, x, added, given["weight"], given.get("bias"))
        checks.refuse_non_eps(op, given["eps"])
        checks.finite(op, "weight_offset", given.get("weight_offset", 0.0), x.dtype)
        if dropout:
            check_p(op, given["p"])
            check_seed(op, given["seed"], x)
        return _new_output(x) if added is None else (_new_output(x), _new_output(added))

    def fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
        outputs = fake_inference(*inputs)
        statistics = [_new_statistics(inputs[0]) for _ in range(2 if layer else 1)]  # mean and rstd
        return (*outputs, *statistics) if residual else (outputs, *statistics)

    backward_arguments = [a.name for a in raw_backward._schema.arguments]

    def fake_backward(*inputs: Any) -> tuple[Tensor, ...]:
        name, given = op + "_backward", dict(zip(backward_arguments, inputs, strict=True))
        dy, s, passed = given["dy"], given[s_name], given.get("dresidual_out")
        checks.float_dtype(name, "dy", dy)
        (checks.parameter if residual else checks.alike)(name, s_name, s, dy, dy.shape)
        if passed is not None:
            checks.alike(name, "dresidual_out", passed, s)
        checks.pair(name, dy, dy.shape[-1:], weight=given["weight"], bias=given.get("bias"))
        wanted = {n: given[f"want_d{n}"] for n in gradients}
        if residual and given.get("seed") is None and s.dtype == dy.dtype:  # dx stands for both
            wanted |= {"x": wanted["x"] or wanted["residual"], "residual": False}
        like = {"x": dy, "residual": s, "weight": given["weight"], "bias": given.get("bias")}
        return tuple(_new_output(like[n]) if wanted[n] else dy.new_empty((0,)) for n in gradients)

    register_fake((op, op + "_forward"), fake_forward)
    register_fake(op + "_inference", fake_inference)
    register_fake(op + "_backward", fake_backward)

    def fake_fp8(*inputs: Any) -> tuple[Tensor, ...]:
        check_dtype(op, "x", inputs[0].dtype, FLOATS)
        y, *others = fake_forward(*inputs[: len(arguments)])
        return y, *others, *fake_rows(y)

    # What the raw backward takes between the incoming gradients and `want_dx`, and of `wants` after that.
    from_saved = attrgetter(*(n for n in backward_arguments if n not in ("dy", "dresidual_out") and n[:5] != "want_"))
    from_wants = attrgetter(*gradients)

    def zeros_for(saved: Saved) -> Tensor:
        """The gradient of a y that was not used."""
        return torch.zeros_like(saved.residual_out, dtype=saved.x_dtype)

    def backward(saved: Saved, wants: Wants, dy: Tensor | None, *passed: Tensor | None) -> Gradients:
        if dy is None:
            dy = zeros_for(saved)
        found = call_raw(raw_backward, dy, *passed, *from_saved(saved), *from_wants(wants))
        grads = dict(zip(gradients, found, strict=True))
        if residual and not (dropout and saved.seed is not None) and saved.residual_out.dtype == dy.dtype:
            grads["residual"] = grads["x"]
        return grads

    def keep_factors(like: Tensor, seed: Tensor, p: float) -> Tensor:
        """What the op multiplies each element of x by: the sum of it and nothing, for an x of ones."""
        ones, zeros = (torch.full(tuple(like.shape), v, dtype=like.dtype, device=like.device) for v in (1.0, 0.0))
        given = {"x": ones, "residual": zeros, "seed": seed, "p": p, "eps": 0.0, "weight_offset": 0.0}
        return call_raw(inference, *(given.get(name) for name in arguments))[1]

    def differentiable_backward(saved: Saved, wants: Wants, dy: Tensor | None, *passed: Tensor | None) -> Gradients:
        s = getattr(saved, s_name)
        if dy is None:
            dy = zeros_for(saved)
        offset = 0.0 if layer else saved.weight_offset
        ds, *summands = _plain_gradients(dy, s, saved.weight, saved.eps, offset, layer)
        if passed and passed[0] is not None:
            ds = ds + passed[0]
        dx = ds
        if dropout and saved.seed is not None:
            keep = keep_factors(ds, saved.seed, saved.p)
            dx = torch.where(keep != 0, ds * keep, torch.zeros_like(ds))
        grads = {"x": dx.to(dy.dtype), "residual": ds.to(s.dtype)}
        for name, columns in zip(("weight", "bias"), summands, strict=True):
            if getattr(wants, name, False):
                like = getattr(saved, name)
                grads[name] = columns.sum_to_size(like.shape).to(like.dtype)
        return {name: grads[name] for name in gradients if name in grads}

    def plain(*inputs: Any) -> Any:
        from warpsmith import reference

        given = dict(zip(arguments, inputs, strict=True))
        if dropout:
            given["training"] = given["seed"] is not None
        return getattr(reference, op)(**given)

    def hint(argument: str, value: Any) -> str:
        if argument != "weight" or residual or not isinstance(value, (int, tuple, list)):
            return ""
        return f"; torch's arguments, with normalized_shape, are those of warpsmith.nn.functional.{op}"

    kept = [n for n in arguments if n not in ("x", "residual")]
    build = functools.partial(
        differentiable,
        op,
        inference=inference,
        public=2 if residual else 1,
        rows=2 if residual else 1,
        save=(s_name, *kept, *(("mean",) if layer else ()), "rstd", *(("x.dtype",) if residual else ())),
        backward=backward,
        differentiable_backward=differentiable_backward,
        plain=plain,
        hint=hint,
    )
    if not dropout:
        register_fake(op + "_fp8", fake_fp8)
        leave_cast(op, build, None if layer else _source)  # layer_norm may add up otherwise than add_layer_norm
    return build(forward=forward)


def dropout_seed(
    op: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    eps: float,
    training: bool,
    seed: Tensor | None,
    weight_offset: float = 0.0,
) -> Tensor | None:
    """The seed of a call, drawn where none is given; None where nothing is dropped. All that the op refuses is refused
    before, so that a refused call leaves the generator as it was."""
    check_p(op, p)
    checks.flags(op, training=training)
    if not training or p == 0:
        return None
    if seed is not None:
        return seed
    if not isinstance(x, Tensor):  # which the op will refuse
        return None
    if isinstance(residual, Tensor) and isinstance(weight, (Tensor, NoneType)) and isinstance(bias, (Tensor, NoneType)):
        _check_inputs(op, x, residual, weight, bias)
        checks.refuse_non_eps(op, eps)
        checks.refuse_non_number(op, "weight_offset", weight_offset)
        checks.finite(op, "weight_offset", weight_offset, x.dtype)
    return draw_seed(x)
