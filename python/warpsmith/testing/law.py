"""The error law: an op may be at most twice as wrong as plain PyTorch in the same dtype.

Both are measured against a float64 oracle on the same rounded inputs. For each output and each gradient of each case

    max|op - oracle| <= 2 max|PyTorch - oracle| + 2 rounding steps,

where a rounding step is half a unit in the last place (ulp) of the largest value of the oracle, in the output's
dtype; and over the case table the median of max|op - oracle| / max(max|PyTorch - oracle|, 1 ulp) is at most 1.1. The
form of the rule is FlashAttention's (https://github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from warpsmith.testing.sim import is_loaded

LIMIT = 2.0
ROUNDING_STEPS = 2
# float32 on the simulated kernels: PyTorch's side is its CPU kernel, which adds in another order than its CUDA kernel.
# In a case of few elements it can be right to one step (rms_norm 5x8, grad_weight: 1.6 steps, ours 5.6).
ROUNDING_STEPS_SIM_FLOAT32 = 4
MEDIAN_LIMIT = 1.1
# A float64 oracle is itself rounded in float64, so float64 results are held to this many ulp of the largest value, or
# of 1 where that is more: cancellation leaves both sides of the comparison equally wrong.
FLOAT64_ULPS = 64


@dataclass(frozen=True)
class Error:
    """How wrong one output is, beside plain PyTorch.

    Attributes:
        name: of the output or gradient.
        error: max|op - oracle|; infinite where NaNs or infinities, shape or dtype are not as they must be.
        baseline: max|PyTorch - oracle|.
        floor: the ulp of the largest value (float64: 64 times that, and of a value of at least 1).
        reason: why ``error`` is infinite.
        steps: rounding steps that the bound allows beside PyTorch's error.
        limit: how many times PyTorch's error it allows.
    """

    name: str
    error: float
    baseline: float
    floor: float
    reason: str = ""
    steps: int = ROUNDING_STEPS
    limit: float = LIMIT

    @property
    def bound(self) -> float:
        """The largest error that the law allows."""
        return self.limit * self.baseline + self.steps * self.floor / 2

    @property
    def ratio(self) -> float:
        """Error over PyTorch's, whose error counts as at least one ulp."""
        if self.error == 0:
            return 0.0
        return self.error / max(self.baseline, self.floor)

    @property
    def ok(self) -> bool:
        """Whether the law holds."""
        return self.error <= self.bound

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: error {self.error:.3e}, PyTorch {self.baseline:.3e}, bound {self.bound:.3e}{why}"


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of a floating dtype at a value's magnitude.

    Example:
        >>> ulp(1.5, torch.float16) == 2**-10, ulp(4.0, torch.float16) == 2**-8
        (True, True)
    """
    info = torch.finfo(dtype)
    magnitude = min(max(abs(value), info.smallest_normal), info.max)
    return math.ldexp(info.eps, math.frexp(magnitude)[1] - 1)


def measure(
    name: str,
    actual: Tensor,
    oracle: Tensor,
    baseline: Tensor,
    sim_float32_steps: int = ROUNDING_STEPS_SIM_FLOAT32,
) -> Error:
    """Compares an op's result with the float64 oracle and with plain PyTorch's result in the same dtype.

    Where the oracle, rounded, is not finite, ``actual`` must be the same infinity or NaN. Where PyTorch is not finite
    though the oracle is (an overflow on its way), ``actual`` may be what PyTorch gives. Integers and booleans must be
    equal.
    """
    if actual.shape != baseline.shape or actual.dtype != baseline.dtype:
        got, want = (f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for t in (actual, baseline))
        return Error(name, math.inf, 0.0, 0.0, f"expected {want}, got {got}")
    actual, oracle, baseline = (t.detach().cpu() for t in (actual, oracle, baseline))
    if not actual.is_floating_point():
        same = torch.equal(actual, baseline)
        return Error(name, 0.0 if same else math.inf, 0.0, 0.0, "" if same else "integers differ")
    if actual.numel() == 0:
        return Error(name, 0.0, 0.0, 0.0)

    dtype = actual.dtype
    rounded = oracle.to(dtype)
    must_match = ~rounded.isfinite()
    as_pytorch = ~baseline.isfinite() & _same_special(actual, baseline)
    special_ok = _same_special(actual, rounded) | as_pytorch
    compared = rounded.isfinite() & ~as_pytorch
    largest = float(oracle[rounded.isfinite()].abs().max()) if bool(rounded.isfinite().any()) else 0.0
    floor = FLOAT64_ULPS * ulp(max(largest, 1.0), dtype) if dtype == torch.float64 else ulp(largest, dtype)
    base = _largest_difference(baseline, oracle, compared & baseline.isfinite())
    if not bool(special_ok[must_match].all()):
        return Error(name, math.inf, base, floor, "inf or nan is not where it must be")
    if not bool(actual[compared].isfinite().all()):
        return Error(name, math.inf, base, floor, "inf or nan where the oracle is finite")
    steps = sim_float32_steps if is_loaded() and dtype == torch.float32 else ROUNDING_STEPS
    return Error(name, _largest_difference(actual, oracle, compared), base, floor, steps=steps)


def _same_special(a: Tensor, b: Tensor) -> Tensor:
    return (a.isnan() & b.isnan()) | (a.isinf() & (a == b))


def _largest_difference(a: Tensor, oracle: Tensor, where: Tensor) -> float:
    if not bool(where.any()):
        return 0.0
    return float((a.double() - oracle.double())[where].abs().max())
