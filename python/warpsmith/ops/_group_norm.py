"""group_norm's fakes and gradients: raw ops of ``(x, num_groups, weight, bias, eps, silu)``."""

from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake
from warpsmith.ops._pixels import channels, check_dimensions, new_pixels, other_dimensions, parameter_gradients

NAME = "group_norm"


def _check_groups(op: str, x: Tensor, num_groups: int) -> None:
    if num_groups < 1 or checks.known(x.shape[1] % num_groups != 0):
        checks.refuse(op, "num_groups", f"a divisor of {x.shape[1]} channels", str(num_groups))


def _check(op: str, a: Any) -> None:
    """a: the arguments of a raw op."""
    check_dimensions(op, a.x)
    _check_groups(op, a.x, a.num_groups)
    checks.pair(op, a.x, a.x.shape[1:2], weight=a.weight, bias=a.bias)


def _fake_inference(a: Any) -> Tensor:
    checks.float_dtype(NAME, "x", a.x)
    _check(NAME, a)
    checks.refuse_non_eps(NAME, a.eps)
    return new_pixels(a.x)


def _fake_forward(a: Any) -> tuple[Tensor, ...]:
    y, x = _fake_inference(a), a.x
    return (y, *(x.new_empty((x.shape[0], a.num_groups), dtype=checks.wide_dtype(x)) for _ in range(2)))


def _fake_backward(a: Any) -> tuple[Tensor, ...]:
    name, dy = NAME + "_backward", a.dy
    checks.float_dtype(name, "dy", dy)
    check_dimensions(name, a.x)
    checks.alike(name, "x", a.x, dy)
    _check(name, a)
    return (new_pixels(a.x) if a.want_dx else dy.new_empty((0,)), *parameter_gradients(a))


register_fake((NAME, NAME + "_forward"), _fake_forward, named=True)
register_fake(NAME + "_inference", _fake_inference, named=True)
register_fake(NAME + "_backward", _fake_backward, named=True)


def _backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    found = call_raw(
        raw.group_norm_backward.default,
        *(dy, saved.x, saved.num_groups, saved.weight, saved.bias, saved.mean, saved.rstd, saved.silu),
        *(wants.x, wants.weight, wants.bias),
    )
    return dict(zip(("x", "weight", "bias"), found, strict=True))


def _mean_of_groups(t: Tensor, num_groups: int) -> Tensor:
    """The mean of each group of a sample, in the shape of t."""
    grouped = t.unflatten(1, (num_groups, t.shape[1] // num_groups))
    return grouped.mean(list(range(2, grouped.dim())), keepdim=True).expand_as(grouped).flatten(1, 2)


def _plain_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    """In plain torch operations, in float32 or wider: differentiable in turn."""
    wide, groups = checks.wide_dtype(saved.x), saved.num_groups
    x, g = saved.x.to(wide), dy.to(wide)
    dims = other_dimensions(x)
    centered = x - _mean_of_groups(x, groups)
    rstd = torch.rsqrt(_mean_of_groups(centered.square(), groups) + saved.eps)
    x_hat = centered * rstd
    weight = 1.0 if saved.weight is None else channels(saved.weight.to(wide), x)
    if saved.silu:
        v = x_hat * weight + (0.0 if saved.bias is None else channels(saved.bias.to(wide), x))
        s = torch.sigmoid(v)
        g = g * (s + v * s * (1 - s))
    grads: dict[str, Tensor | None] = {}
    if wants.weight:
        grads["weight"] = (g * x_hat).sum(dims).to(saved.weight.dtype)
    if wants.bias:
        grads["bias"] = g.sum(dims).to(saved.bias.dtype)
    g = g * weight
    grads["x"] = ((g - _mean_of_groups(g, groups) - x_hat * _mean_of_groups(g * x_hat, groups)) * rstd).to(dy.dtype)
    return grads


def _plain(*inputs: Any) -> Tensor:
    from warpsmith.reference.group_norm import group_norm

    *others, silu = inputs
    return group_norm(*others, activation="silu" if silu else None)


function = differentiable(
    NAME,
    forward=raw.group_norm_forward.default,
    inference=raw.group_norm_inference.default,
    public=1,
    save=("x", "num_groups", "weight", "bias", "mean", "rstd", "silu", "eps"),
    backward=_backward,
    differentiable_backward=_plain_backward,
    plain=_plain,
)
