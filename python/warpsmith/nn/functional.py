"""``torch.nn.functional`` with fused ops in it: ``import warpsmith.nn.functional as F`` in the place of torch's.

Signatures, defaults, dtypes and meaning are torch's. ``layer_norm``, ``rms_norm``, ``cross_entropy`` and
``scaled_dot_product_attention`` run our ops where these compute what torch's arguments say, and call torch where they
do not; ``warpsmith.plan("nn.functional.layer_norm", dtype="float16")`` says which, and why. Every other name is
torch's own. Under ``torch.autocast`` tensors are cast as torch casts them.

What differs: a label out of range is a ``ValueError`` on the CPU and a NaN loss on CUDA; the second derivative of
``cross_entropy`` and of attention is refused.

Example:
    >>> import torch
    >>> import warpsmith.nn.functional as F
    >>> F.layer_norm(torch.tensor([[3.0, -4.0]]), (2,))
    tensor([[ 1.0000, -1.0000]])
    >>> F.silu is torch.nn.functional.silu
    True
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as _torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith import _plan
from warpsmith.ops._library import raw
from warpsmith.ops.attention import attention
from warpsmith.ops.cross_entropy import cross_entropy as _cross_entropy
from warpsmith.ops.layer_norm import layer_norm as _layer_norm
from warpsmith.ops.rms_norm import rms_norm as _rms_norm

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda", "meta")


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})


# Why a case is torch's; None: it is ours. These functions see facts alone, so that `plan` can ask the same.


def _why_not(dtype: torch.dtype, device: str) -> str | None:
    if dtype not in _FLOATS:
        return f"{dtype} is not fused"
    if device not in _DEVICES:
        return f"there are no kernels for {device}"
    if dtype is torch.float64 and device == "cuda":
        return "float64 is fused on the CPU alone"
    return None


def _why_not_layer_norm(
    dtype: torch.dtype,
    device: str = "cuda",
    weight_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    eps: float | None = 1e-5,
) -> str | None:
    if eps is not None and not 0 <= eps < math.inf:
        return "eps is negative or not finite"
    for name, other in (("weight", weight_dtype), ("bias", bias_dtype)):
        if other is not None and other is not dtype and not (other is torch.float32 and dtype in _HALVES):
            return f"{name} is {other} beside {dtype}"
    if weight_dtype is not None and bias_dtype is not None and weight_dtype is not bias_dtype:
        return "weight and bias have two dtypes"
    return _why_not(dtype, device)


def _why_not_rms_norm(
    dtype: torch.dtype, device: str = "cuda", weight_dtype: torch.dtype | None = None, eps: float | None = None
) -> str | None:
    if weight_dtype in _HALVES:  # cast where that is exact
        weight_dtype = dtype
    return _why_not_layer_norm(dtype, device, weight_dtype, None, eps)


def _why_not_cross_entropy(
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
    if not 0 <= label_smoothing <= 1 or reduction not in ("none", "mean", "sum"):
        return "label_smoothing or reduction is none that torch takes"
    return _why_not(dtype, device)


@functools.cache
def _why_not_scaled_dot_product_attention(
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
    why = _why_not(dtype, device)
    if why is not None or device != "cuda":
        return why
    problem = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "dropout": dropout}
    masks = {"mask": mask_dtype is torch.bool, "bias": mask_dtype not in (None, torch.bool)}
    found = _plan.plan("attention", seqlen_q=1, **problem, **masks, sm90a_code=code_capability == 90)
    return None if found["backward"]["kernel"] else found["backward"]["why"]


_plan.register("nn.functional.layer_norm", "warpsmith.layer_norm", _why_not_layer_norm)
_plan.register("nn.functional.rms_norm", "warpsmith.rms_norm", _why_not_rms_norm)
_plan.register("nn.functional.cross_entropy", "warpsmith.cross_entropy", _why_not_cross_entropy)
_plan.register(
    "nn.functional.scaled_dot_product_attention", "warpsmith.attention", _why_not_scaled_dot_product_attention
)


# What no dtype tells, in the tensors themselves.


def _overridden(*tensors: Any) -> bool:
    """Whether somebody else answers for these tensors (``__torch_function__``: fx, masked tensors), or wants a
    derivative that our ops do not have (forward mode)."""
    return forward_ad._current_level >= 0 or torch.overrides.has_torch_function(tensors)


def _affine_fits(shape: tuple[int, ...], input: Tensor, *parameters: Tensor | None) -> bool:
    rank = len(shape)
    if not 0 < rank <= input.dim() or tuple(input.shape[-rank:]) != shape:
        return False
    return all(p is None or (tuple(p.shape) == shape and p.device == input.device) for p in parameters)


def is_autocast(t: Tensor) -> bool:
    """Whether ``torch.autocast`` is on for the device of a tensor."""
    kind = t.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def _autocasts(op: str, input: Tensor) -> bool:
    """Whether torch's op would cast floating tensors to float32 here."""
    key = "Autocast" + input.device.type.upper()
    return is_autocast(input) and torch._C._dispatch_has_kernel_for_dispatch_key("aten::" + op, key)


def _wide(t: Tensor | None) -> Tensor | None:
    return t.float() if t is not None and t.dtype in _HALVES else t


def _flat(t: Tensor | None, rank: int) -> Tensor | None:
    return t if t is None or rank == 1 else t.flatten(-rank)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm`` by :func:`warpsmith.layer_norm`.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.functional.layer_norm(torch.ones(2, 3, 4), (3, 4)).shape
        torch.Size([2, 3, 4])
    """
    arguments = normalized_shape, weight, bias, eps
    if _overridden(input, weight, bias):
        return _torch.layer_norm(input, *arguments)
    if _autocasts("layer_norm", input):
        input, weight, bias = _wide(input), _wide(weight), _wide(bias)  # type: ignore[assignment]
    of_weight, of_bias = None if weight is None else weight.dtype, None if bias is None else bias.dtype
    shape = tuple(normalized_shape)
    if not _affine_fits(shape, input, weight, bias) or _why_not_layer_norm(
        input.dtype, input.device.type, of_weight, of_bias, eps
    ):
        return _torch.layer_norm(input, *arguments)
    rank = len(shape)
    y = _layer_norm(_flat(input, rank), _flat(weight, rank), _flat(bias, rank), eps)  # type: ignore[arg-type]
    return y if rank == 1 else y.view(input.shape)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``torch.nn.functional.rms_norm`` by :func:`warpsmith.rms_norm`.

    Args: torch's. A 16-bit weight beside a wider input is cast to the input's dtype.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.functional.rms_norm(torch.tensor([[3.0, -4.0]]), (2,), eps=0.0)
        tensor([[ 0.8485, -1.1314]])
    """
    if _overridden(input, weight):
        return _torch.rms_norm(input, normalized_shape, weight, eps)
    if _autocasts("rms_norm", input):
        input, weight = _wide(input), _wide(weight)  # type: ignore[assignment]
    if weight is not None and weight.dtype in _HALVES and weight.dtype is not input.dtype:
        weight = weight.to(torch.float32 if input.dtype in _HALVES else input.dtype)
    shape = normalized_shape if isinstance(normalized_shape, tuple) else tuple(normalized_shape)
    if not _affine_fits(shape, input, weight) or _why_not_layer_norm(
        input.dtype, input.device.type, None if weight is None else weight.dtype, None, eps
    ):
        return _torch.rms_norm(input, normalized_shape, weight, eps)
    rank = len(shape)
    y = _rms_norm(_flat(input, rank), _flat(weight, rank), eps)  # type: ignore[arg-type]
    return y if rank == 1 else y.view(input.shape)


def classes_last(input: Tensor) -> Tensor:
    """Logits as torch has them, (N, C, ...) or (C,), with the classes last."""
    return input if input.dim() <= 2 else input.movedim(1, -1)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` by :func:`warpsmith.cross_entropy`: classes in dimension 1.

    Class probabilities are torch's. Logits (N, C, d1, ...) are read where they are if the classes are adjacent, as in
    ``logits.transpose(1, 2)`` of (N, d1, C), and copied once if not. The loss has the dtype of ``input``, float32 under
    autocast.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> logits, target = torch.zeros(2, 4, 5), torch.ones(2, 5, dtype=torch.int64)
        >>> warpsmith.nn.functional.cross_entropy(logits, target)
        tensor(1.3863)
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    if _overridden(input, target, weight):
        return _torch.cross_entropy(input, target, weight, **options)
    logits = classes_last(input)
    fits = input.dim() > 0 and target.shape == logits.shape[:-1] and logits.shape[-1] > 0
    fits = fits and target.device == input.device
    if weight is not None:
        fits = fits and weight.shape == logits.shape[-1:] and weight.device == input.device and not weight.requires_grad
    if not fits or _why_not_cross_entropy(
        input.dtype,
        input.device.type,
        target.dtype,
        None if weight is None else weight.dtype,
        label_smoothing,
        reduction,
    ):
        return _torch.cross_entropy(input, target, weight, **options)
    loss = _cross_entropy(logits, target, class_weight=weight, **options)
    return loss if is_autocast(input) else loss.to(input.dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by :func:`warpsmith.attention`, in torch's layout.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
        >>> warpsmith.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if _overridden(query, key, value, attn_mask) or not _attention_fits(query, key, value, attn_mask, **options):
        return _torch.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    return attention(  # type: ignore[return-value]  # without return_lse a tensor
        query,
        key,
        value,
        layout="bhsd",
        causal=is_causal,
        causal_align="top_left",
        softmax_scale=scale,
        bias=attn_mask,
        dropout_p=dropout_p,
    )


def _attention_fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether a call is ours: four dimensions that match, and what the kernels take."""
    if not query.dim() == key.dim() == value.dim() == 4 or (mask is not None and (is_causal or mask.dim() > 4)):
        return False
    (batch, heads, _, head_dim), (keys_batch, kv_heads, keys, width) = query.shape, key.shape
    if keys_batch != batch or width != head_dim or value.shape[:3] != key.shape[:3] or keys == 0:
        return False
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        return False
    tensors = (key, value) if mask is None or mask.dtype is torch.bool else (key, value, mask)
    kind = query.device.type
    if any(t.device != query.device for t in (key, value, mask) if t is not None) or not 0 <= dropout_p < 1:
        return False
    dtype = query.dtype
    if is_autocast(query):
        dtype = torch.get_autocast_dtype(kind)
    elif any(t.dtype is not dtype for t in tensors):
        return False
    capability = raw._code_capability(query.device.index) if kind == "cuda" else 0
    of_mask = None if mask is None else mask.dtype
    return not _why_not_scaled_dot_product_attention(
        dtype, kind, head_dim, value.shape[-1], of_mask, dropout_p > 0, capability
    )
