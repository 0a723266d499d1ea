"""Which calls of ``warpsmith.nn.functional`` are fused: ``reason_for_torch_...`` is None for a call of ours, else the
reason why it is torch's. The functions see facts alone, so that ``warpsmith.plan`` can ask the same."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from warpsmith import _C
from warpsmith._core import checks
from warpsmith.ops._conv2d import way as conv2d_way
from warpsmith.ops._linear import library_choice


class _Choice(NamedTuple):
    """Between an op of ours and torch's function of a name. ``reason_for_torch(**problem)``: None where it is ours; or
    the call and the reason, of more than these two."""

    ours: str
    reason_for_torch: Callable[..., str | tuple[str, str] | None]
    theirs: str


_choices: dict[str, _Choice] = {}


def register(
    name: str, ours: str, reason_for_torch: Callable[..., str | tuple[str, str] | None], theirs: str | None = None
) -> None:
    """Lets ``plan(name, **problem)`` say whether a function of torch's name calls ``ours`` or ``theirs`` (None: torch's
    function of that name), and why."""
    _choices[name] = _Choice(ours, reason_for_torch, theirs or f"torch.{name}")


def _dtype(value: Any) -> Any:

    found = getattr(torch, value, None) if isinstance(value, str) else value
    return found if isinstance(found, torch.dtype) else value


def _choose(name: str, problem: dict[str, Any]) -> dict[str, Any]:
    ours, reason_for_torch, theirs = _choices[name]
    keys = inspect.signature(reason_for_torch).parameters
    if not problem:
        optional = inspect.Parameter.empty
        return {"keys": {k: "a value" + "; may be left out" * (p.default is not optional) for k, p in keys.items()}}
    for key in problem:
        if key not in keys:
            raise ValueError(f"plan: {name}: expected arguments among {', '.join(keys)}, got {key}")
    for key, parameter in keys.items():
        if parameter.default is inspect.Parameter.empty and key not in problem:
            raise ValueError(f"plan: {name}: {key}: expected a value, got none")
    why = reason_for_torch(**{key: _dtype(v) if key.endswith("dtype") else v for key, v in problem.items()})
    if isinstance(why, tuple):
        return dict(zip(("calls", "why"), why, strict=True))
    return {"calls": ours if why is None else theirs, "why": why or "fused"}


def plan(op: str, **problem: Any) -> dict[str, Any]:
    """Says which kernel would run for a problem, and why, without running it. Needs no GPU.

    Args:
        op: name of the op, for example ``"rms_norm"``, or of a function of ``warpsmith.nn.functional``, for example
            ``"nn.functional.layer_norm"``: then ``calls`` is what would be called, ours or torch's.
        problem: sizes and dtypes of the op; a missing or unknown one is named in the error.

    Returns:
        A dict of plain values, the kernel's name, its launch configuration, and ``why``, a sentence. Without a problem:
        ``keys``, what the problem of this op is made of. Where cuBLASLt computes a product and a device is there, its
        own choice too.

    Raises:
        ValueError: an op without a chooser, or a problem that does not fit it.

    Example:
        >>> import warpsmith
        >>> warpsmith.plan("rms_norm", rows=16384, columns=4096, dtype="bfloat16")["forward"]["kernel"]
        'registers'
        >>> warpsmith.plan("linear_log_prob")["keys"]["rows"]
        'an integer >= 0'
    """
    if op in _choices:
        return _choose(op, problem)
    found = _C.plan(op, **problem)
    return found | library_choice(problem) if found.get("path") == "cublas_lt" else found


_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda", "meta")


def _reason(dtype: torch.dtype, device: str) -> str | None:
    if dtype not in _FLOATS:
        return f"{dtype} is not fused"
    if device not in _DEVICES:
        return f"there are no kernels for {device}"
    if dtype is torch.float64 and device == "cuda":
        return "float64 is fused on the CPU alone"
    return None


def reason_for_torch_layer_norm(
    dtype: torch.dtype,
    device: str = "cuda",
    weight_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    eps: float | None = 1e-5,
) -> str | None:
    if eps is not None and not (checks.is_number(eps) and 0 <= eps < math.inf):
        return "eps is no finite number >= 0"
    for name, other in (("weight", weight_dtype), ("bias", bias_dtype)):
        if other is not None and other is not dtype and not (other is torch.float32 and dtype in HALVES):
            return f"{name} is {other} beside {dtype}"
    if weight_dtype is not None and bias_dtype is not None and weight_dtype is not bias_dtype:
        return "weight and bias have two dtypes"
    return _reason(dtype, device)


def reason_for_torch_rms_norm(
    dtype: torch.dtype, device: str = "cuda", weight_dtype: torch.dtype | None = None, eps: float | None = None
) -> str | None:
    if weight_dtype in HALVES:  # cast where that is exact
        weight_dtype = dtype
    return reason_for_torch_layer_norm(dtype, device, weight_dtype, None, eps)


def reason_for_torch_batch_norm(
    dtype: torch.dtype,
    device: str = "cuda",
    weight_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    running_dtype: torch.dtype | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    channels_last: bool = True,
) -> str | None:
    if not channels_last:
        return "input is not in channels_last, as its result would be"
    if not (checks.is_number(momentum) and abs(momentum) <= torch.finfo(torch.float32).max):
        return "momentum is no finite number of float32"
    if (
        running_dtype is not None
        and running_dtype is not dtype
        and not (running_dtype is torch.float32 and dtype in HALVES)
    ):
        return f"running statistics are {running_dtype} beside {dtype}"
    return reason_for_torch_layer_norm(dtype, device, weight_dtype, bias_dtype, eps)


def reason_for_torch_softmax(
    dtype: torch.dtype, device: str = "cuda", result_dtype: torch.dtype | None = None
) -> str | None:
    if result_dtype not in (None, dtype) and not (result_dtype is torch.float32 and dtype in HALVES):
        return f"the result is {result_dtype} beside {dtype}"
    return _reason(dtype, device)


def reason_for_torch_linear(
    dtype: torch.dtype,
    device: str = "cuda",
    weight_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> str | None:
    """The dtypes are those of the product: under autocast, its."""
    for name, other in (("weight", weight_dtype), ("bias", bias_dtype)):
        if other is not None and other is not dtype:
            return f"{name} is {other} beside {dtype}"
    return _reason(dtype, device)


def reason_for_torch_cross_entropy(
    dtype: torch.dtype,
    device: str = "cuda",
    target_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> str | None:
    if target_dtype not in (torch.int64, torch.uint8):
        return f"targets are {target_dtype}: only class indices are fused"
    if weight_dtype is not None and weight_dtype is not dtype:
        return f"weight is {weight_dtype} beside {dtype}"
    if not (checks.is_number(label_smoothing) and 0 <= label_smoothing <= 1) or reduction not in (
        "none",
        "mean",
        "sum",
    ):
        return "label_smoothing or reduction is none that torch takes"
    return _reason(dtype, device)


def reason_for_torch_linear_cross_entropy(
    dtype: torch.dtype,
    device: str = "cuda",
    linear_weight_dtype: torch.dtype | None = None,
    linear_bias_dtype: torch.dtype | None = None,
    target_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    options: bool = False,
    autocast: bool = False,
) -> str | None:
    """``dtype``, ``linear_weight_dtype`` and ``linear_bias_dtype`` are those of the product: under autocast, its."""
    if options:
        return "options choose how torch takes it in chunks"
    for name, other in (("linear_weight", linear_weight_dtype), ("linear_bias", linear_bias_dtype)):
        if other is not None and other is not dtype:
            return f"{name} is {other} beside {dtype}"
    if autocast and dtype in HALVES and weight_dtype in (torch.float32, *HALVES):
        weight_dtype = dtype  # torch computes the loss in float32 then, and so do we
    return reason_for_torch_cross_entropy(dtype, device, target_dtype, weight_dtype, label_smoothing, reduction)


@functools.cache
def reason_for_torch_scaled_dot_product_attention(
    dtype: torch.dtype,
    device: str = "cuda",
    head_dim: int = 64,
    head_dim_v: int | None = None,
    mask_dtype: torch.dtype | None = None,
    dropout: bool = False,
    code_capability: int = 90,
) -> str | None:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if any(d % 8 or not 8 <= d <= 256 for d in (head_dim, head_dim_v)):
        return "head dimensions are fused from 8 to 256 in steps of 8"
    why = _reason(dtype, device)
    if why is not None or device != "cuda":
        return why
    problem = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "dropout": dropout}
    masks = {"mask": mask_dtype is torch.bool, "bias": mask_dtype not in (None, torch.bool)}
    found = plan("attention", seqlen_q=1, **problem, **masks, sm90a_code=code_capability == 90)
    return None if found["backward"]["kernel"] else found["backward"]["why"]


register("nn.functional.layer_norm", "warpsmith.layer_norm", reason_for_torch_layer_norm)
register("nn.functional.rms_norm", "warpsmith.rms_norm", reason_for_torch_rms_norm)
register("conv2d", "", conv2d_way)
register("nn.functional.batch_norm", "warpsmith.batch_norm", reason_for_torch_batch_norm)
register("nn.functional.softmax", "warpsmith.softmax", reason_for_torch_softmax)
register("nn.functional.log_softmax", "warpsmith.log_softmax", reason_for_torch_softmax)
register("nn.functional.linear", "warpsmith.linear", reason_for_torch_linear)
register("nn.functional.cross_entropy", "warpsmith.cross_entropy", reason_for_torch_cross_entropy)
register(
    "nn.functional.linear_cross_entropy",
    "warpsmith.linear_cross_entropy",
    reason_for_torch_linear_cross_entropy,
    None if hasattr(functional, "linear_cross_entropy") else "torch.nn.functional.linear and cross_entropy",
)
register(
    "nn.functional.scaled_dot_product_attention", "warpsmith.attention", reason_for_torch_scaled_dot_product_attention
)
