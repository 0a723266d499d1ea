"""The rule by which a scaler adapts its scale, and what it refuses of the settings of that rule."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check


def check_settings(op: str, min_scale: float, max_scale: float, hysteresis: int) -> None:
    """Raises ValueError where the bounds of a scale are none, or its hysteresis is no number of overflows."""
    if not max_scale >= 0:
        _check.refuse(op, "max_scale", "a number >= 0", str(max_scale))
    if not 0 <= min_scale <= max_scale:
        _check.refuse(op, "min_scale", f"a number from 0 to max_scale = {max_scale}", str(min_scale))
    if not hysteresis >= 1:
        _check.refuse(op, "hysteresis", "a number of overflows >= 1", str(hysteresis))


def check_loaded(op: str, scale: float, min_scale: float, max_scale: float, hysteresis: int, left: int) -> None:
    """The same of a loaded state, whose scale may lie outside of the bounds. ``left``: overflows until it shrinks."""
    check_settings(op, min_scale, max_scale, hysteresis)
    if not 0 <= left <= hysteresis:
        _check.refuse(op, "_hysteresis_tracker", f"a number from 0 to hysteresis = {hysteresis}", str(left))
    if not scale >= 0:
        _check.refuse(op, "scale", "a number >= 0", str(scale))


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
