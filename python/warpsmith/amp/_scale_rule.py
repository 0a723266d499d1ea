"""The rule by which a scaler adapts its scale, and what it refuses of the settings of that rule."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks


def check_settings(op: str, min_scale: float, max_scale: float, hysteresis: int) -> None:
    """Raises ValueError where the bounds of a scale are none, or its hysteresis is no number of overflows."""
    checks.number(op, "max_scale", max_scale, "a number >= 0", lambda s: s >= 0)
    expected = f"a number from 0 to max_scale = {max_scale}"
    checks.number(op, "min_scale", min_scale, expected, lambda s: 0 <= s <= max_scale)
    _check_count(op, "hysteresis", hysteresis, "a number of overflows >= 1")


def check_factors(op: str, init_scale: float, growth_factor: float, backoff_factor: float, interval: int) -> None:
    """Raises TypeError where torch's own settings are no numbers, and ValueError where they are NaN or no interval.
    torch refuses other factors on the wrong side of 1."""
    for name, value in (
        ("init_scale", init_scale),
        ("growth_factor", growth_factor),
        ("backoff_factor", backoff_factor),
    ):
        checks.number(op, name, value, "a number", lambda v: v == v)
    if backoff_factor < 0:
        checks.refuse(op, "backoff_factor", "a number >= 0", str(backoff_factor))
    _check_count(op, "growth_interval", interval, "a number of steps >= 1")


def _check_count(op: str, argument: str, value: int, expected: str) -> None:
    """They are counted in 32 bits."""
    checks.refuse_non_int64(op, argument, value, expected)
    if not 1 <= value < 2**31:
        checks.refuse(op, argument, expected if value < 1 else "a number below 2^31", str(value))


def check_loaded(op: str, scale: float, min_scale: float, max_scale: float, hysteresis: int, left: int) -> None:
    """The same of a loaded state, whose scale may lie outside of the bounds. ``left``: overflows until it shrinks."""
    check_settings(op, min_scale, max_scale, hysteresis)
    checks.refuse_non_int64(op, "_hysteresis_tracker", left)
    if not 0 <= left <= hysteresis:
        checks.refuse(op, "_hysteresis_tracker", f"a number from 0 to hysteresis = {hysteresis}", str(left))
    checks.number(op, "scale", scale, "a number >= 0", lambda s: s >= 0)


def adapt(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    factors: tuple[float, float, int],
    left: Tensor | None,
    hysteresis: int,
) -> None:
    """torch's rule for the next scale. left: overflows until the scale shrinks, of ``hysteresis``; None: one."""
    if left is None:
        torch._amp_update_scale_(scale, growth_tracker, found_inf, *factors)
        return
    found = found_inf > 0
    left.copy_(torch.where(found, (left - 1).clamp(min=0), hysteresis))
    next_scale, next_growth = scale.clone(), growth_tracker.clone()
    torch._amp_update_scale_(next_scale, next_growth, found_inf, *factors)
    scale.copy_(torch.where(found & (left > 0), scale, next_scale))
    growth_tracker.copy_(next_growth)
