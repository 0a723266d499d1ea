"""The checks of the C++ binding, for fake and meta tensors: same conditions, same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ")"


def refuse(op: str, argument: str, expected: str, got: str) -> None:
    """Raises the one form of error for bad input: op, argument, what was expected and what came."""
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def device_of(t: Tensor) -> torch.device:
    """The device of a tensor; inside a kernel of the Meta key a fake tensor says "meta" and keeps its own aside."""
    return getattr(t, "fake_device", None) or t.device


def float_dtype(op: str, argument: str, t: Tensor) -> torch.dtype:
    if t.dtype not in FLOAT_DTYPES:
        refuse(op, argument, "float32, float16, bfloat16 or (on the CPU) float64", dtype_text(t.dtype))
    if t.dtype == torch.float64 and device_of(t).type == "cuda":
        refuse(op, argument, "float32, float16 or bfloat16 on CUDA", "float64")
    return t.dtype


def loss_options(op: str, label_smoothing: float, z_loss: float, softcap: float) -> None:
    if not 0 <= label_smoothing <= 1:
        refuse(op, "label_smoothing", "a number from 0 to 1", f"{label_smoothing:f}")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not (value >= 0 and math.isfinite(value)):
            refuse(op, name, "a finite number >= 0", f"{value:f}")


def same_device(op: str, argument: str, t: Tensor, like: Tensor) -> None:
    if device_of(t) != device_of(like):
        refuse(op, argument, f"a tensor on {device_of(like)}", f"a tensor on {device_of(t)}")


def same_dtype(op: str, argument: str, t: Tensor, like: Tensor) -> None:
    if t.dtype != like.dtype:
        refuse(op, argument, dtype_text(like.dtype), dtype_text(t.dtype))


def same_shape(op: str, argument: str, t: Tensor, shape: Sequence[int]) -> None:
    if len(t.shape) != len(shape) or any(a != b for a, b in zip(t.shape, shape, strict=True)):
        refuse(op, argument, f"shape {shape_text(shape)}", shape_text(t.shape))


def at_least_one_dimension(op: str, argument: str, t: Tensor) -> None:
    if t.dim() == 0:
        refuse(op, argument, "at least one dimension", "a tensor without dimensions")
