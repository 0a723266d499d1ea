"""``torch.nn.functional`` with fused ops in it: ``import warpsmith.nn.functional as F`` in the place of torch's.

Signatures, defaults, dtypes and meaning are torch's. ``layer_norm``, ``rms_norm``, ``batch_norm``, ``group_norm``,
``max_pool2d``, ``softmax``, ``log_softmax``, ``linear``, ``cross_entropy``, ``linear_cross_entropy`` and
``scaled_dot_product_attention`` run our ops where these compute what torch's arguments say, and call torch where they
do not; ``warpsmith.plan("nn.functional.layer_norm", dtype="float16")`` says which, and why. Every other name is torch's
own. Under ``torch.autocast`` tensors are cast as torch casts them.

What differs: a label out of range is a ``ValueError`` on the CPU and a NaN loss on CUDA; the second derivative of
``cross_entropy``, ``linear_cross_entropy`` and attention is refused.

Example:
    >>> import torch
    >>> import warpsmith.nn.functional as F
    >>> F.layer_norm(torch.tensor([[3.0, -4.0]]), (2,))
    tensor([[ 1.0000, -1.0000]])
    >>> F.silu is torch.nn.functional.silu
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as _torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._core import checks
from warpsmith._core.dtensor import is_dtensor
from warpsmith._core.library import raw
from warpsmith.nn import _composed
from warpsmith.nn._dispatch import (
    HALVES,
    reason_for_torch_batch_norm,
    reason_for_torch_cross_entropy,
    reason_for_torch_layer_norm,
    reason_for_torch_linear,
    reason_for_torch_linear_cross_entropy,
    reason_for_torch_scaled_dot_product_attention,
    reason_for_torch_softmax,
)
from warpsmith.ops.attention import attention
from warpsmith.ops.batch_norm import batch_norm as _batch_norm
from warpsmith.ops.cross_entropy import cross_entropy as _cross_entropy
from warpsmith.ops.group_norm import group_norm as _group_norm
from warpsmith.ops.linear import linear as _linear
from warpsmith.ops.linear_loss import linear_cross_entropy as _linear_cross_entropy
from warpsmith.ops.max_pool import max_pool2d as _max_pool2d
from warpsmith.ops.norm import layer_norm as _layer_norm
from warpsmith.ops.norm import rms_norm as _rms_norm
from warpsmith.ops.softmax import log_softmax as _log_softmax
from warpsmith.ops.softmax import softmax as _softmax


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})


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
    return t.float() if t is not None and t.dtype in HALVES else t


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
    if not _affine_fits(shape, input, weight, bias) or reason_for_torch_layer_norm(
        input.dtype, input.device.type, of_weight, of_bias, eps
    ):
        return _torch.layer_norm(input, *arguments)
    rank = len(shape)
    y = _layer_norm(_flat(input, rank), _flat(weight, rank), _flat(bias, rank), eps)  # type: ignore[arg-type]
    return y if rank == 1 else y.view(input.shape)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` by :func:`warpsmith.batch_norm` where ``input`` is in channels_last.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> warpsmith.nn.functional.batch_norm(x, None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])
    """
    arguments = running_mean, running_var, weight, bias, training, momentum, eps
    if _overridden(input, *arguments[:4]) or not _batch_norm_fits(input, running_mean, running_var, training, eps):
        return _torch.batch_norm(input, *arguments)
    if _autocasts("batch_norm", input):
        input, weight, bias = _wide(input), _wide(weight), _wide(bias)  # type: ignore[assignment]
    parameters = weight, bias, running_mean, running_var
    of_weight, of_bias, of_running = (None if t is None else t.dtype for t in parameters[:3])
    if not _affine_fits(tuple(input.shape[1:2]), input.movedim(1, -1), *parameters) or reason_for_torch_batch_norm(
        input.dtype, input.device.type, of_weight, of_bias, of_running, momentum, eps
    ):
        return _torch.batch_norm(input, *arguments)
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _batch_norm_fits(input: Tensor, mean: Tensor | None, var: Tensor | None, training: Any, eps: Any) -> bool:
    """Whether a call is ours as far as layout and statistics go, and training is possible."""
    pixels = input.dim() == 2 and input.is_contiguous() and input.numel() > 0
    if not (pixels or _are_pixels(input, 1)) or not isinstance(training, bool):
        return False
    if mean is None or var is None:
        known = training and mean is var
    else:
        known = mean.dtype is var.dtype and not (mean.requires_grad or var.requires_grad)
    return known and (not training or (input.numel() > input.shape[1] and eps != 0))  # else torch's error


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``torch.nn.functional.group_norm`` by :func:`warpsmith.group_norm` where ``input`` is in channels_last.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> x = torch.ones(2, 8, 3, 3).to(memory_format=torch.channels_last)
        >>> warpsmith.nn.functional.group_norm(x, 4).shape
        torch.Size([2, 8, 3, 3])
    """
    arguments = num_groups, weight, bias, eps
    if _overridden(input, weight, bias) or not _are_pixels(input, num_groups):
        return _torch.group_norm(input, *arguments)
    if _autocasts("group_norm", input):
        input, weight, bias = _wide(input), _wide(weight), _wide(bias)  # type: ignore[assignment]
    of_weight, of_bias = None if weight is None else weight.dtype, None if bias is None else bias.dtype
    if not _affine_fits(tuple(input.shape[1:2]), input.movedim(1, -1), weight, bias) or reason_for_torch_layer_norm(
        input.dtype, input.device.type, of_weight, of_bias, eps
    ):
        return _torch.group_norm(input, *arguments)
    return _group_norm(input, num_groups, weight, bias, eps)


def _are_pixels(x: Tensor, num_groups: int) -> bool:
    """Whether x lies as channels_last, which torch's result would be in, with values and whole groups of them."""
    if x.dim() != 4 or not x.numel() or num_groups < 1 or x.shape[1] % num_groups:
        return False
    sample, channel, row, pixel = x.stride()
    adjacent = channel == 1 and pixel >= x.shape[1] > 1
    return adjacent and row == pixel * x.shape[3] and sample == row * x.shape[2]


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """``torch.nn.functional.max_pool2d`` by :func:`warpsmith.max_pool2d` where ``input`` is in channels_last.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> x = torch.ones(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> warpsmith.nn.functional.max_pool2d(x, 2).shape
        torch.Size([2, 8, 2, 2])
    """
    arguments = kernel_size, stride, padding, dilation, ceil_mode
    if not (return_indices or _overridden(input)) and _are_pixels(input, 1):
        if reason_for_torch_layer_norm(input.dtype, input.device.type) is None:
            try:
                return _max_pool2d(input, *arguments)
            except (TypeError, ValueError):  # torch's error, or numbers of a kind that only torch takes
                pass
    pool: Any = _torch.max_pool2d
    return pool(input, *arguments, return_indices=return_indices)


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
    if weight is not None and weight.dtype in HALVES and weight.dtype is not input.dtype:
        weight = weight.to(torch.float32 if input.dtype in HALVES else input.dtype)
    shape = normalized_shape if isinstance(normalized_shape, tuple) else tuple(normalized_shape)
    if not _affine_fits(shape, input, weight) or reason_for_torch_layer_norm(
        input.dtype, input.device.type, None if weight is None else weight.dtype, None, eps
    ):
        return _torch.rms_norm(input, normalized_shape, weight, eps)
    rank = len(shape)
    y = _rms_norm(_flat(input, rank), _flat(weight, rank), eps)  # type: ignore[arg-type]
    return y if rank == 1 else y.view(input.shape)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.nn.functional.softmax`` by :func:`warpsmith.softmax` where ``dim`` is the last dimension.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.functional.softmax(torch.zeros(1, 2), dim=-1)
        tensor([[0.5000, 0.5000]])
    """
    result = _dtype_of_softmax("softmax", input, dim, dtype)
    if result is None:
        return _torch.softmax(input, dim, _stacklevel + 1, dtype)
    return _softmax(input, dtype=result)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """``torch.nn.functional.log_softmax`` by :func:`warpsmith.log_softmax` where ``dim`` is the last dimension.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.functional.log_softmax(torch.zeros(1, 2), dim=-1)
        tensor([[-0.6931, -0.6931]])
    """
    result = _dtype_of_softmax("log_softmax", input, dim, dtype)
    if result is None:
        return _torch.log_softmax(input, dim, _stacklevel + 1, dtype)
    return _log_softmax(input, dtype=result)


def _dtype_of_softmax(op: str, input: Tensor, dim: int | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the result where a call is ours, else None."""
    if _overridden(input) or input.layout is not torch.strided or input.is_nested or is_dtensor(input):
        return None
    if dim not in (-1, input.dim() - 1) or input.dim() == 0:
        return None
    if dtype is None:
        dtype = torch.float32 if input.dtype in HALVES and _autocasts(op + ".int", input) else input.dtype
    return None if reason_for_torch_softmax(input.dtype, input.device.type, dtype) else dtype


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` by :func:`warpsmith.linear`.

    Args: torch's.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.functional.linear(torch.ones(2, 3), torch.ones(1, 3))
        tensor([[3.],
                [3.]])
    """
    return (_linear if linear_fits(input, weight, bias) else _torch.linear)(input, weight, bias)


def linear_fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`warpsmith.linear` takes a call."""
    if _overridden(input, weight, bias):
        return False
    tensors = [t for t in (input, weight, bias) if t is not None]
    if any(t.layout is not torch.strided or t.device != input.device or is_dtensor(t) for t in tensors):
        return False
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    dtypes = [_of_product(t, input) for t in (input, weight, bias)]
    return not reason_for_torch_linear(dtypes[0], input.device.type, *dtypes[1:])


def _of_product(t: Tensor | None, input: Tensor) -> Any:
    """The dtype in which a tensor enters a product: under autocast, its."""
    cast = is_autocast(input) and t is not None and t.is_floating_point() and t.dtype is not torch.float64
    return torch.get_autocast_dtype(input.device.type) if cast else None if t is None else t.dtype


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
    if not fits or reason_for_torch_cross_entropy(
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


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """``torch.nn.functional.linear_cross_entropy`` by :func:`warpsmith.linear_cross_entropy`, without all logits in
    memory: the cross-entropy of ``linear(input, linear_weight, linear_bias)``.

    Class probabilities, weights of more than two dimensions and calls with ``options`` are torch's. Where torch
    lacks the function, as 2.11 does, these are torch's ``linear`` and ``cross_entropy``, and ``options`` are refused.
    The loss has the dtype of ``input``, float32 under autocast.

    Args: torch's.

    Raises:
        ValueError: where torch has no such function, ``options`` or a shape that does not fit.

    Example:
        >>> import torch, warpsmith
        >>> input, linear_weight = torch.ones(2, 8), torch.zeros(4, 8)
        >>> warpsmith.nn.functional.linear_cross_entropy(input, linear_weight, torch.tensor([0, 3]))
        tensor(1.3863)
    """
    of_loss: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    tensors = input, linear_weight, target, linear_bias, weight
    if _overridden(*tensors) or not _head_fits(*tensors, options=options, **of_loss):
        theirs = getattr(_torch, "linear_cross_entropy", _composed.linear_cross_entropy)
        others = {"linear_bias": linear_bias, "weight": weight, "ignore_index": ignore_index, "options": options}
        return theirs(input, linear_weight, target, **others, **of_loss)
    loss: Any = _linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias,
        class_weight=_wide(weight) if is_autocast(input) else weight,
        ignore_index=-100 if ignore_index is None else ignore_index,
        **of_loss,
    )
    return loss if is_autocast(input) else loss.to(input.dtype)


def _head_fits(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    options: Any,
) -> bool:
    """Whether a call of linear_cross_entropy is ours: rows, a matrix, class indices, and what the kernels take."""
    if input.dim() not in (1, 2) or linear_weight.dim() != 2 or target.shape != input.shape[:-1]:
        return False
    classes = linear_weight.shape[:1]
    if linear_weight.shape[1] != input.shape[-1] or classes[0] == 0:
        return False
    if any(t is not None and t.shape != classes for t in (linear_bias, weight)):
        return False
    if any(t is not None and t.device != input.device for t in (linear_weight, target, linear_bias, weight)):
        return False
    if (weight is not None and weight.requires_grad) or any(map(is_dtensor, (input, linear_weight, target))):
        return False
    return not reason_for_torch_linear_cross_entropy(
        _of_product(input, input),
        input.device.type,
        _of_product(linear_weight, input),
        _of_product(linear_bias, input),
        target.dtype,
        None if weight is None else weight.dtype,
        label_smoothing,
        reduction,
        options is not None,
        is_autocast(input),
    )


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

    Args: torch's. :func:`warpsmith.attention` rounds ``dropout_p`` to a multiple of 1 / 256.

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


# torch.compile traces what is behind a cache, and warns of the cache.
_REASON_WHEN_TRACED = reason_for_torch_scaled_dot_product_attention.__wrapped__


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) or checks.is_number(value)


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
    if not query.dim() == key.dim() == value.dim() == 4 or not (scale is None or _is_number(scale)):
        return False
    (batch, heads, _, head_dim), (keys_batch, kv_heads, keys, width) = query.shape, key.shape
    if keys_batch != batch or width != head_dim or value.shape[:3] != key.shape[:3] or keys == 0:
        return False
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        return False
    if mask is not None:
        full = batch, heads, query.shape[2], keys
        if is_causal or not 2 <= mask.dim() <= 4:
            return False
        if any(size not in (1, whole) for size, whole in zip(mask.shape, full[-mask.dim() :], strict=True)):
            return False
    tensors = (key, value) if mask is None or mask.dtype is torch.bool else (key, value, mask)
    kind = query.device.type
    if any(t.device != query.device for t in (key, value, mask) if t is not None):
        return False
    if not _is_number(dropout_p) or not 0 <= dropout_p < 1:
        return False
    dtype = query.dtype
    if is_autocast(query):
        dtype = torch.get_autocast_dtype(kind)
    elif any(t.dtype is not dtype for t in tensors):
        return False
    capability = raw._code_capability(query.device.index) if kind == "cuda" else 0
    of_mask = None if mask is None else mask.dtype
    reason = _REASON_WHEN_TRACED if torch.compiler.is_compiling() else reason_for_torch_scaled_dot_product_attention
    return not reason(dtype, kind, head_dim, value.shape[-1], of_mask, dropout_p > 0, capability)
