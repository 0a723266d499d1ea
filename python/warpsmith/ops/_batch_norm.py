"""batch_norm's fakes and gradients.

The raw ops ``(x, residual, weight, bias, running_mean, running_var, training, momentum, eps, relu)`` update the running
statistics in place, but for the traced one, which returns new ones that the public function copies.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._core import checks
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake
from warpsmith.ops._pixels import channels, check_dimensions, new_pixels, other_dimensions, parameter_gradients

NAME = "batch_norm"


def _rows(x: Tensor) -> Any:
    return math.prod((x.shape[0], *x.shape[2:]))


def _vector(x: Tensor) -> int:
    """Channels of a byte of the mask."""
    whole = 16 // x.dtype.itemsize
    return whole if x.shape[1] % whole == 0 else 1


def _check_forward(a: Any, training: bool) -> None:
    x, running_mean = a.x, a.running_mean
    checks.float_dtype(NAME, "x", x)
    check_dimensions(NAME, x)
    if a.residual is not None:
        checks.alike(NAME, "residual", a.residual, x)
    checks.pair(NAME, x, x.shape[1:2], weight=a.weight, bias=a.bias)
    checks.pair(NAME, x, x.shape[1:2], running_mean=running_mean, running_var=a.running_var)
    if not training and running_mean is None:
        checks.refuse(NAME, "running_mean", "a tensor when training is False", "None")
    if (running_mean is None) != (a.running_var is None):
        if running_mean is None:
            checks.refuse(NAME, "running_var", "None beside no running_mean", "a tensor")
        checks.refuse(NAME, "running_var", "a tensor beside running_mean", "None")
    checks.refuse_non_eps(NAME, a.eps)
    checks.finite(NAME, "momentum", a.momentum, x.dtype)
    if training and checks.known(_rows(x) == 1):
        expected = "more than 1 value per channel when training"
        checks.refuse(NAME, "x", expected, f"input size {checks.shape_text(x.shape)}")


def _new_statistics(a: Any) -> tuple[Tensor, ...]:
    """Mean, rstd and mask."""
    x, masked = a.x, a.residual is not None and a.relu
    mask = x.new_empty((_rows(x), x.shape[1] // _vector(x)) if masked else (0, 0), dtype=torch.uint8)
    return *(x.new_empty((x.shape[1],), dtype=checks.wide_dtype(x)) for _ in range(2)), mask


def _fake_inference(a: Any) -> tuple[Tensor, ...]:
    _check_forward(a, a.training)
    return new_pixels(a.x), a.x.new_empty((0,)), a.x.new_empty((0,))


def _fake_forward(a: Any) -> tuple[Tensor, ...]:
    return (*_fake_inference(a), *_new_statistics(a))


def _fake_forward_of_ranks(a: Any) -> tuple[Tensor, ...]:
    _check_forward(a, a.running_mean is None)
    return (new_pixels(a.x), *_new_statistics(a))


def _fake_traced(a: Any) -> tuple[Tensor, ...]:
    y, new_mean, new_var, *more = _fake_forward(a)
    if a.training and a.running_mean is not None:
        new_mean, new_var = torch.empty_like(a.running_mean), torch.empty_like(a.running_var)
    return (y, new_mean, new_var, *more)


def _check_backward(a: Any) -> None:
    name, x = NAME + "_backward", a.x
    checks.float_dtype(name, "dy", a.dy)
    check_dimensions(name, x)
    checks.alike(name, "x", x, a.dy)
    checks.pair(name, x, x.shape[1:2], weight=a.weight, bias=a.bias)


def _fake_backward_of_ranks(a: Any) -> tuple[Tensor, Tensor]:
    _check_backward(a)
    dx = new_pixels(a.x) if a.want_dx else a.dy.new_empty((0,))
    return dx, new_pixels(a.x) if a.want_dresidual and a.relu else a.dy.new_empty((0,))


def _fake_backward(a: Any) -> tuple[Tensor, ...]:
    return (*_fake_backward_of_ranks(a), *parameter_gradients(a))


def _fake_sums(a: Any) -> tuple[Tensor, ...]:
    _check_backward(a)
    return (a.x.new_empty((2, a.x.shape[1]), dtype=torch.float64), *parameter_gradients(a))


def _fake_statistics(x: Tensor) -> Tensor:
    checks.float_dtype(NAME + "_statistics", "x", x)
    check_dimensions(NAME + "_statistics", x)
    return x.new_empty((3, x.shape[1]), dtype=torch.float64)


register_fake(NAME, _fake_traced, named=True)
register_fake(NAME + "_forward", _fake_forward, named=True)
register_fake(NAME + "_inference", _fake_inference, named=True)
register_fake(NAME + "_backward", _fake_backward, named=True)
register_fake(NAME + "_statistics", _fake_statistics)
register_fake(NAME + "_forward_of_ranks", _fake_forward_of_ranks, named=True)
register_fake(NAME + "_sums", _fake_sums, named=True)
register_fake(NAME + "_backward_of_ranks", _fake_backward_of_ranks, named=True)


def _backward(saved: Saved, wants: Wants, dy: Tensor | None, *_: Tensor | None) -> Gradients:
    if dy is None:  # the running statistics are no function of the graph
        return {}
    grads: dict[str, Tensor | None] = {}
    if wants.x or wants.weight or wants.bias or (wants.residual and saved.relu):
        found = call_raw(
            raw.batch_norm_backward.default,
            *(dy, saved.x, saved.weight, saved.bias, saved.mean, saved.rstd, saved.mask, saved.training, saved.relu),
            *(wants.x, wants.residual, wants.weight, wants.bias),
        )
        grads = dict(zip(("x", "residual", "weight", "bias"), found, strict=True))
    if not saved.relu:
        grads["residual"] = dy
    return grads


def _kept_by_relu(saved: Saved, v: Tensor) -> Tensor:
    """Where ReLU kept its input: by the mask, or where there was no residual, by v."""
    if not saved.mask.numel():
        return ~(v.detach() <= 0)
    x, vector = saved.x, _vector(saved.x)
    bits = saved.mask[..., None] >> torch.arange(vector, dtype=torch.uint8, device=x.device) & 1
    return bits.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1).bool()


def _plain_backward(saved: Saved, wants: Wants, dy: Tensor | None, *_: Tensor | None) -> Gradients:
    """In plain torch operations, in float32 or wider: differentiable in turn."""
    if dy is None:
        return {}
    wide, dims = checks.wide_dtype(saved.x), other_dimensions(saved.x)
    x, g = saved.x.to(wide), dy.to(wide)
    if saved.training:
        x = x - channels(x.mean(dims), x)
        rstd = channels(torch.rsqrt(x.square().mean(dims) + saved.eps), x)
    else:
        x, rstd = x - channels(saved.mean, x), channels(saved.rstd, x)
    x_hat = x * rstd
    scale = rstd if saved.weight is None else rstd * channels(saved.weight.to(wide), x)
    if saved.relu:
        bias = 0.0 if saved.bias is None else channels(saved.bias.to(wide), x)
        g = torch.where(_kept_by_relu(saved, x * scale + bias), g, torch.zeros_like(g))
    grads: dict[str, Tensor | None] = {"residual": g.to(dy.dtype)}
    if wants.weight:
        grads["weight"] = (g * x_hat).sum(dims).to(saved.weight.dtype)
    if wants.bias:
        grads["bias"] = g.sum(dims).to(saved.bias.dtype)
    if saved.training:
        g = g - channels(g.mean(dims), g) - x_hat * channels((g * x_hat).mean(dims), g)
    grads["x"] = (scale * g).to(dy.dtype)
    return grads


def _plain(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, ...]:
    wide, dims = checks.wide_dtype(x), other_dimensions(x)
    v = x.to(wide)
    if training:
        mean = v.mean(dims)
        squares, rows = (v - channels(mean, x)).square().sum(dims), x.numel() // max(1, x.shape[1])
        var = squares / rows
        if running_mean is not None and running_var is not None:
            for old, found in ((running_mean, mean), (running_var, squares / (rows - 1))):
                new = (1 - momentum) * old.to(wide) + momentum * found.detach()
                old.copy_(forward_ad.unpack_dual(new).primal)
    else:
        mean, var = (t.to(wide) for t in (running_mean, running_var) if t is not None)
    v = (v - channels(mean, x)) * channels(torch.rsqrt(var + eps), x)
    if weight is not None:
        v = v * channels(weight.to(wide), x)
    if bias is not None:
        v = v + channels(bias.to(wide), x)
    if residual is not None:
        v = v + residual.to(wide)
    return ((torch.relu(v) if relu else v).to(x.dtype), x.new_empty((0,)), x.new_empty((0,)))


function = differentiable(
    NAME,
    forward=raw.batch_norm_forward.default,
    inference=raw.batch_norm_inference.default,
    public=3,
    save=("x", "weight", "bias", "mean", "rstd", "mask", "training", "relu", "eps"),
    backward=_backward,
    differentiable_backward=_plain_backward,
    plain=_plain,
)
