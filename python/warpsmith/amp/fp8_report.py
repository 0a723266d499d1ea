"""What 8-bit floats would lose in each linear layer of a model, on one batch."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.amp.fp8 import layer_of
from warpsmith.ops._scaled_linear import as_recipe, forget, is_emulated
from warpsmith.ops.linear import scaled_linear
from warpsmith.ops.quantize import dequantize_fp8, quantize_fp8

_OP = "fp8_report"
_SCALINGS = ("tensor", "row", "block")  # in the order of their price
_PRODUCTS = {"y": ("x", "weight"), "dx": ("dy", "weight"), "dweight": ("dy", "x")}
_CLOSE_DB = 1.0  # a cheaper scaling is suggested where it costs no more
_LEAST_DB = 15.0  # below it a product is suggested to stay as it is
_UNDERFLOW = 0.01  # of the gradient, from which on e5m2 is suggested where it loses fewer


class Cast(NamedTuple):
    """Of one factor and scaling: signal over noise in dB, the parts of its elements that become zero and that are
    saturated, the last by the layer's own delayed scale."""

    sqnr_db: float
    underflow: float
    saturated: float


class LayerLoss(NamedTuple):
    """Of one layer: casts by (factor, scaling), factors x, weight, dy and "dy, e5m2"; what a product's casts leave, in
    dB, by (product, scaling), products y, dx and dweight; elements that are not finite; by scaling how many times as
    fast as in bfloat16 it is, empty where that was not timed; a recipe, or "keep"."""

    name: str
    casts: dict[tuple[str, str], Cast]
    products: dict[tuple[str, str], float]
    not_finite: int
    speed: dict[str, float]
    suggested: str


def _db(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


@torch.no_grad()
def _cast(t: Tensor, scaling: str, dtype: torch.dtype, known: Tensor | None) -> Cast:
    rows = t.detach().reshape(-1, t.shape[-1])
    given = known if scaling == "tensor" else None
    cast = quantize_fp8(rows, scaling, dtype, scale=given)
    values, wide = dequantize_fp8(cast), rows.float()
    finite = wide.isfinite()
    noise = (values - wide).masked_fill(~finite, 0).double().square().sum()
    signal = wide.masked_fill(~finite, 0).double().square().sum()
    lost = ((values == 0) & (wide != 0)).sum()
    some = max(rows.numel(), 1)
    return Cast(_db(float(signal), float(noise)), float(lost) / some, float(cast.counts[0]) / some)  # type: ignore[index]


@functools.cache
def _can_run(scaling: str, device: torch.device) -> bool:
    try:
        return not is_emulated(_OP, as_recipe(_OP, scaling), device, False)
    except ValueError:  # the card lacks it
        return False


def _speed(rows: int, weight: Tensor, only_on_cards: bool) -> dict[str, float]:
    """Forward and backward of a layer with its casts, that of the weight too, by scaling."""
    from torch.utils.benchmark import Timer

    scalings = [s for s in _SCALINGS if not only_on_cards or _can_run(s, weight.device)]
    if not scalings or 0 in (rows, *weight.shape):
        return {}
    like: dict[str, Any] = {"device": weight.device, "dtype": torch.bfloat16}
    x, w = (torch.randn(n, weight.shape[1], **like).requires_grad_() for n in (rows, weight.shape[0]))
    dy = torch.randn(rows, weight.shape[0], **like)

    def seconds(layer: Callable[[], Tensor]) -> float:
        def step() -> None:
            forget(w)  # as a step of training does
            torch.autograd.grad(layer(), (x, w), dy)

        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=0.05).median)

    plain = seconds(lambda: nn.functional.linear(x, w))
    return {s: plain / seconds(lambda s=s: scaled_linear(x, w, recipe=s)) for s in scalings}  # type: ignore[misc]


def _suggest(
    casts: dict[tuple[str, str], Cast], products: dict[tuple[str, str], float], speed: dict[str, float]
) -> str:
    there = [p for p in _PRODUCTS if (p, "row") in products]
    worst = {s: min(products[p, s] for p in there) for s in _SCALINGS}
    scaling = next(s for s in _SCALINGS if worst[s] >= max(worst.values()) - _CLOSE_DB)
    if products["y", scaling] < _LEAST_DB or speed.get(scaling, math.inf) < 1:
        return "keep"
    words = [scaling]
    if ("dy", scaling) in casts:
        narrow, wide = casts["dy", scaling].underflow, casts["dy, e5m2", scaling].underflow
        words += ["grad_dtype=e5m2"] * (narrow > _UNDERFLOW and wide < narrow / 2)
        words += ["wgrad=high"] * (products.get(("dweight", scaling), math.inf) < _LEAST_DB)
    return ", ".join(words)


class Fp8Report:
    """What :func:`fp8_report` found; printed it is a table.

    Attributes:
        layers: a :class:`LayerLoss` for each layer that ran, by name.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerLoss] = {}

    def __str__(self) -> str:
        head = (
            *("layer", "scaling", "y dB", "dx dB", "dweight dB"),
            *("underflow of x, dy", "saturated", "x bf16", "suggested"),
        )
        lines: list[tuple[str, ...]] = [head]
        for name, layer in self.layers.items():
            for s in _SCALINGS:
                of_products = [f"{layer.products.get((p, s), math.nan):.1f}" for p in _PRODUCTS]
                x, dy = layer.casts["x", s], layer.casts.get(("dy", s), Cast(math.nan, math.nan, 0.0))
                under, over = f"{x.underflow:.1%}, {dy.underflow:.1%}", f"{max(x.saturated, dy.saturated):.2%}"
                first = s == _SCALINGS[0]
                speed = f"{layer.speed[s]:.2f}" if s in layer.speed else ""
                last = layer.suggested if first else ""
                lines.append((name if first else "", s, *of_products, under, over, speed, last))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """A figure of matplotlib: dB of each layer's products, a panel a product. ``path``: a file for it."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2 + 0.22 * len(self.layers)), layout="constrained")
        names = list(self.layers)
        for axis, product in zip(figure.subplots(1, len(_PRODUCTS), sharey=True), _PRODUCTS, strict=True):
            for scaling in _SCALINGS:
                values = [self.layers[name].products.get((product, scaling), math.nan) for name in names]
                axis.plot(values, range(len(names)), "o", label=scaling)
            axis.axvline(_LEAST_DB, color="grey", linewidth=0.8)
            axis.set_xlabel(f"{product}: signal over noise, dB")
            axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def _watch(
    report: Fp8Report,
    rows: dict[str, tuple[int, Tensor]],
    name: str,
    module: Any,
    inputs: Any,
    named: Any,
    output: Tensor,
) -> None:
    x = inputs[0] if inputs else named["input"]
    layer = layer_of(module)
    state = None if layer is None else layer.state
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    casts: dict[tuple[str, str], Cast] = {}

    def finish() -> None:
        products = {
            (p, s): -10 * math.log10(sum(10 ** (-casts[f, s].sqnr_db / 10) for f in factors) or 1e-30)
            for p, factors in _PRODUCTS.items()
            for s in _SCALINGS
            if all((f, s) in casts for f in factors)
        }
        report.layers[name] = LayerLoss(name, casts, products, not_finite, {}, _suggest(casts, products, {}))

    rows[name] = x.numel() // max(x.shape[-1], 1), module.weight
    not_finite = int((~x.isfinite()).sum())
    for s in _SCALINGS:
        casts["x", s] = _cast(x, s, e4m3, state.x_scale if state else None)
        casts["weight", s] = _cast(module.weight, "block2d" if s == "block" else s, e4m3, None)
    finish()

    def of_gradient(dy: Tensor) -> None:
        for s in _SCALINGS:
            casts["dy", s] = _cast(dy, s, e4m3, state.dy_scale if state else None)
            casts["dy, e5m2", s] = _cast(dy, s, e5m2, None)
        finish()

    if output.requires_grad:
        output.register_hook(of_gradient)


def fp8_report(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None, *, speed: bool | None = None
) -> Fp8Report:
    """What 8-bit floats lose in each linear layer, with each scaling, on one forward and backward of a batch, and what
    they gain. The model runs as it is, converted by :func:`warpsmith.amp.fp8` or not; gradients, counts and largest
    values stay.

    Args:
        model: with ``torch.nn.Linear`` in it, and parameters that are not sharded.
        batch: a dict of keyword arguments, a tuple of arguments, or the one argument.
        loss: of what the model returns. Default: its ``loss``, or the mean of its squares.
        speed: whether a forward and backward of each layer's shapes is timed, in bfloat16 and with each scaling, all
            casts counted, a fifth of a second a shape. None: where the card multiplies 8-bit floats.

    Returns:
        :class:`Fp8Report`. The dB of a product are those of its two casts by rows, taken as independent. A cheaper
        scaling is suggested where it costs at most 1 dB; "keep" where y would keep less than 15 dB, and "wgrad=high"
        where the weight's gradient would; "grad_dtype=e5m2" where more than 1 % of the gradient's elements become zero
        and e5m2 keeps more than half of these. Where it was timed, "keep" too for a layer that would be slower.

    Raises:
        ValueError: no model.

    Example:
        >>> import torch, warpsmith
        >>> report = warpsmith.amp.fp8_report(torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.randn(32, 64))
        >>> report.layers["0"].suggested
        'tensor'
    """
    if not isinstance(model, nn.Module):
        checks.refuse(_OP, "model", "a torch.nn.Module", checks.value_text(model))
    if speed is not None:
        checks.flags(_OP, speed=speed)
    report, hooks = Fp8Report(), []
    rows: dict[str, tuple[int, Tensor]] = {}
    before = [(p, p.grad) for p in model.parameters()]
    converted = [(layer, layer.state) for m in model.modules() if (layer := layer_of(m)) is not None]
    for layer, state in converted:
        layer.state = copy.deepcopy(state)
    for p, _ in before:
        p.grad = None
    try:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.append(
                    module.register_forward_hook(functools.partial(_watch, report, rows, name), with_kwargs=True)
                )
        with torch.enable_grad():
            given = batch if isinstance(batch, (dict, tuple)) else (batch,)
            found = model(**given) if isinstance(given, dict) else model(*given)
            if loss is not None:
                value = loss(found)
            else:
                value = found.loss if getattr(found, "loss", None) is not None else found.float().square().mean()
            if value.requires_grad:
                value.backward()
    finally:
        for hook in hooks:
            hook.remove()
        for p, grad in before:
            p.grad = grad
        for layer, state in converted:
            layer.state = state
    timed: dict[Any, dict[str, float]] = {}
    for name, found in report.layers.items() if speed is not False else ():
        count, weight = rows[name]
        place = count, weight.shape, weight.device
        if place not in timed:
            timed[place] = _speed(count, weight, only_on_cards=speed is None)
        suggested = _suggest(found.casts, found.products, timed[place])
        report.layers[name] = found._replace(speed=timed[place], suggested=suggested)
    return report
