"""conv2d's checks, its choice of a way, and what follows torch's convolution."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._core import checks
from warpsmith._core.dtensor import PLAIN, is_dtensor
from warpsmith.ops.activation import bias_relu, bias_silu

NAME = "conv2d"
ACTIVATIONS = (None, "relu", "silu")
# Where torch adds the bias in a pass of its own. On the CPU its convolution adds it to sums that are not rounded yet.
OWN_PASS_ON = ("cuda",)
HAS_CUDNN = torch.backends.cudnn.is_available()  # Dynamo of torch 2.11 cannot trace the call
ALONE, CUDNN = "torch.conv2d", "torch.cudnn_convolution_relu"
PASS, COMPOSED = (
    "torch.conv2d, then warpsmith's bias and activation in one pass",
    "torch.conv2d, then torch's operations",
)


def way(
    dtype: torch.dtype,
    device: str = "cuda",
    channels_last: bool = True,
    bias: bool = True,
    activation: str | None = None,
    residual: bool = False,
    gradients: bool = True,
    deterministic: bool = False,
) -> tuple[str, str]:
    """What a call runs, and why. ``deterministic``: whether torch was asked for deterministic algorithms."""
    if activation is None and not residual:
        return ALONE, "nothing but a bias stands behind the convolution"
    half = dtype in (torch.float16, torch.bfloat16)
    if device == "cuda" and activation == "relu" and half and not gradients and not deterministic:
        return CUDNN, "cuDNN has convolution, sum and ReLU as one kernel in 16 bits, without gradients"
    if activation is None or not bias:
        return COMPOSED, "there is no bias and activation to join"
    if not channels_last:
        return COMPOSED, "x is not in channels_last"
    if device not in OWN_PASS_ON:
        return COMPOSED, f"on {device} the convolution adds the bias itself"
    if dtype is torch.float64 and device == "cuda":
        return COMPOSED, "float64 is fused on the CPU alone"
    return PASS, "fused"


def same_padding(weight: Tensor, dilation: Sequence[int]) -> tuple[int, ...]:
    """The rows and columns that padding="same" adds, on both sides together."""
    return tuple(d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True))


def result_shape(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> tuple[int, ...]:
    """Of a convolution, from pairs of numbers, or "same" or "valid". A size below 1: the kernel does not fit."""
    reach = same_padding(weight, dilation)
    added = reach if padding == "same" else (0, 0) if padding == "valid" else tuple(2 * p for p in padding)
    sizes = zip(x.shape[-2:], added, reach, stride, strict=True)
    return (*x.shape[:-3], weight.shape[0], *((n + a - r - 1) // s + 1 for n, a, r, s in sizes))


def checked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    activation: str | None,
    residual: Tensor | None,
) -> tuple[tuple[int, int], Any, tuple[int, int]]:
    """Stride, padding and dilation as pairs, or padding as its word. Refuses what does not fit."""
    if not isinstance(weight, Tensor):  # x was looked at for autocast
        checks.refuse_type(NAME, "weight", "a tensor", weight)
    for name, t in (("bias", bias), ("residual", residual)):
        if not (t is None or isinstance(t, Tensor)):
            checks.refuse_type(NAME, name, "a tensor or None", t)
    checks.one_of(NAME, "activation", activation, ACTIVATIONS)
    stride, dilation = checks.counts(NAME, "stride", stride, 1), checks.counts(NAME, "dilation", dilation, 1)
    if not isinstance(padding, str):
        padding = checks.counts(NAME, "padding", padding, 0)
    else:
        checks.one_of(NAME, "padding", padding, ("same", "valid"))
        if padding == "same" and stride != (1, 1):
            checks.refuse(NAME, "padding", f"numbers beside a stride of {stride}", padding)
    checks.sizes(NAME, 1, groups=groups)
    if x.dtype not in checks.FLOAT_DTYPES:
        checks.refuse(NAME, "x", "float32, float16, bfloat16 or float64", checks.dtype_text(x.dtype))
    if x.dim() not in (3, 4):
        checks.refuse(NAME, "x", "shape (N, C, H, W) or (C, H, W)", checks.shape_text(x.shape))
    if weight.dim() != 4 or checks.known(weight.numel() == 0):
        checks.refuse(NAME, "weight", "shape (O, C / groups, kH, kW), none of it 0", checks.shape_text(weight.shape))
    # A kernel of 1 has no holes. torch 2.13 crashes on the CPU in some calls of 16 bits that give it some.
    dilation = (1 if weight.shape[2] == 1 else dilation[0], 1 if weight.shape[3] == 1 else dilation[1])
    channels, filters = x.shape[-3], weight.shape[0]
    if checks.known(channels % groups + filters % groups != 0):
        checks.refuse(NAME, "groups", f"a divisor of {channels} channels and {filters} filters", str(groups))
    if weight.shape[1] * groups != channels or weight.dtype != x.dtype or weight.device != x.device:
        checks.alike(NAME, "weight", weight, x, (filters, channels // groups, *weight.shape[2:]))
    if bias is not None:
        checks.alike(NAME, "bias", bias, x, (filters,))
    shape = result_shape(x, weight, stride, padding, dilation)
    if checks.known(shape[-2] < 1) or checks.known(shape[-1] < 1):
        reach = checks.shape_text([r + 1 for r in same_padding(weight, dilation)])
        checks.refuse(NAME, "x", f"at least {reach} pixels with its padding", checks.shape_text(x.shape))
    if residual is not None:
        checks.alike(NAME, "residual", residual, x, shape)
    return stride, padding, dilation


def _has_gradients(*tensors: Tensor | None) -> bool:
    """Whether a derivative may be asked for, or others than torch's kernels answer."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    if any(t is not None and type(t) not in PLAIN for t in tensors):
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: Any,
    dilation: tuple[int, ...],
    groups: int,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    pixels = x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1 and not is_dtensor(x)
    added = same_padding(weight, dilation) if padding == "same" else (0, 0)
    cudnn = torch.backends.cudnn
    usable = x.is_cuda and x.dim() == 4 and HAS_CUDNN and cudnn.enabled and not any(a % 2 for a in added)
    calls, _ = way(
        x.dtype,
        x.device.type,
        pixels,
        bias is not None,
        activation,
        residual is not None,
        not usable or _has_gradients(x, weight, bias, residual),
        torch.are_deterministic_algorithms_enabled() or cudnn.deterministic,
    )
    if calls == CUDNN:
        around = [a // 2 for a in added] if isinstance(padding, str) else padding
        given = stride, around, dilation, groups
        if residual is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *given)
        return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *given)
    y = F.conv2d(x, weight, None if calls == PASS else bias, stride, padding, dilation, groups)
    y = y if residual is None else y + residual
    if calls == PASS and bias is not None:
        return (bias_relu if activation == "relu" else bias_silu)(y.movedim(1, -1), bias).movedim(-1, 1)
    return torch.relu(y) if activation == "relu" else F.silu(y) if activation else y
