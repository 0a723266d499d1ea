"""What stands in the place of norms, and of what is around them, in models of images."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from warpsmith._core.modules import is_untouched, stock
from warpsmith.integrations._modules import Forward, Part, StandIn
from warpsmith.nn._dispatch import reason_for_torch_layer_norm
from warpsmith.nn.functional import is_autocast, max_pool2d
from warpsmith.ops._conv2d import result_shape
from warpsmith.ops.batch_norm import batch_norm
from warpsmith.ops.conv2d import conv2d
from warpsmith.ops.group_norm import group_norm

_ACTS = {"relu": torch.relu, "silu": nn.functional.silu}
_MODULES: dict[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu"}


def _act_of(act: Any) -> Any:
    """``"relu"``, ``"silu"`` or None; a module that must be called."""
    if isinstance(act, nn.Module):
        cls = stock(type(act))
        return _MODULES[cls] if cls in _MODULES and is_untouched(act, cls) else act
    return act


def _fits(norm: Any, x: Tensor, residual: Tensor | None, mean: Tensor | None = None) -> bool:
    """Whether an op of ours takes tensors, and is the better for it: NCHW would be copied."""
    if forward_ad._current_level >= 0 or torch.overrides.has_torch_function((x, residual)):
        return False
    if x.dim() == 4:
        adjacent = x.is_contiguous(memory_format=torch.channels_last)
    else:  # pixels in a row, as attention has them
        adjacent = x.dim() == 3 and x.transpose(1, 2).is_contiguous()
    if not adjacent or not x.numel():
        return False
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return False
    dtype = None
    for t in (*norm._parameters.values(), mean):
        if t is not None and (t.device != x.device or t.dtype != (dtype or t.dtype)):
            return False
        dtype = dtype if t is None else t.dtype
    return reason_for_torch_layer_norm(x.dtype, x.device.type, dtype, eps=norm.eps) is None


def _normalized(norm: Any, x: Tensor, residual: Tensor | None, act: str | None) -> Tensor:
    """What the forward of a torch.nn.BatchNorm2d does, with the residual and the activation behind it."""
    training, buffers = norm.training, norm._buffers  # read faster than attributes
    mean, var, share = buffers["running_mean"], buffers["running_var"], norm.momentum
    if training and norm.track_running_stats:
        steps = buffers["num_batches_tracked"]
        if steps is not None:
            steps.add_(1)
        if share is None and steps is not None:
            share = 1.0 / float(steps)
    elif training:
        mean = var = None
    statistics = mean, var, norm.weight, norm.bias, training or mean is None
    return batch_norm(x, *statistics, share or 0.0, norm.eps, residual=residual, activation=act)


def _ours(norm: Any, x: Tensor, residual: Tensor | None, act: str | None) -> Tensor | None:
    """act(norm(x) + residual) as one op; None where none of ours does that."""
    cls = stock(type(norm))
    if cls is nn.BatchNorm2d and act in (None, "relu"):
        mean = norm._buffers["running_mean"]
        if x.dim() == 4 and _fits(norm, x, residual, mean) and x.shape[1] == norm.num_features:
            if x.numel() > x.shape[1] or mean is not None and not norm.training:
                return _normalized(norm, x, residual, act)
    elif cls is nn.GroupNorm and act in (None, "silu") and residual is None:
        if _fits(norm, x, None) and x.shape[1] == norm.num_channels:
            return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, activation=act)
    return None


def normed(norm: Any, x: Tensor, residual: Tensor | None = None, act: Any = None) -> Tensor:
    """act(norm(x) + residual), as one op where that is the same."""
    kind = _act_of(act)
    if (kind is None or isinstance(kind, str)) and is_untouched(norm, stock(type(norm))):
        y = _ours(norm, x, residual, kind)
        if y is not None:
            return y
    y = norm(x)
    y = y if residual is None else y + residual
    return _ACTS[act](y) if isinstance(act, str) else y if act is None else act(y)


def norm_alone(old: Forward) -> Forward:
    def forward(self: Any, input: Tensor) -> Tensor:
        y = _ours(self, input, None, None)
        return old(self, input) if y is None else y

    return forward


def pooled(old: Forward) -> Forward:
    def forward(self: Any, input: Tensor) -> Any:
        given = self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        return max_pool2d(input, *given, return_indices=self.return_indices)

    return forward


# ---- batch norm in the weights of the convolution before it


def _fold(conv: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution that does the norm too. Made at each call: fused steps of optimizers, replays of
    graphs and `.data` change tensors unseen, and these are a few small ops beside a convolution."""
    tensors = (conv.weight, conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    weight, bias, scale, shift, mean, var = (None if t is None else t.to(wide) for t in tensors)
    assert weight is not None and mean is not None and var is not None  # of a norm that keeps statistics
    rstd = torch.rsqrt(var + norm.eps)
    scale = rstd if scale is None else rstd * scale
    shift = -mean * scale + (0 if shift is None else shift) + (0 if bias is None else bias * scale)
    return (weight * scale.view(-1, 1, 1, 1)).to(conv.weight.dtype), shift.to(conv.weight.dtype)


def folded(conv: Any, norm: Any, x: Tensor, residual: Tensor | None = None, act: Any = None) -> Tensor:
    """act(norm(conv(x)) + residual): in evaluation without gradients, the norm is in the convolution's weights."""
    kind = _act_of(act)
    evaluates = not norm.training and norm.running_mean is not None and not torch.is_grad_enabled()
    untouched = is_untouched(conv, nn.Conv2d) and is_untouched(norm, nn.BatchNorm2d)
    if not evaluates or not untouched or not (kind is None or isinstance(kind, str)):
        return normed(norm, conv(x), residual, act)
    weight, bias = _fold(conv, norm)
    given = conv.stride, conv.padding, conv.dilation, conv.groups
    dtype = torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype
    shape = result_shape(x, weight, *given[:3])
    fits = residual is None or (residual.dtype == dtype and tuple(residual.shape) == shape)
    if conv.padding_mode == "zeros" and fits:
        return conv2d(x, weight, bias, *given, activation=kind, residual=residual)
    y = conv._conv_forward(x, weight, bias)
    y = y if residual is None else y + residual
    return y if kind is None else _ACTS[kind](y)


# ---- blocks of diffusers, whose forwards torch.fx cannot follow: their norms do what the activation would


class _Block(StandIn):
    """A block in its class's forward."""

    def __init__(self, of: Any, norms: tuple[str, ...], act: str) -> None:
        super().__init__(of)
        self._activated: Any = None
        for name in norms:
            if getattr(of, name) is not None:
                setattr(self, name, self._norm(getattr(of, name), getattr(of, act)))
        setattr(self, act, self._act(getattr(of, act)))

    def _norm(self, norm: Any, act: Any) -> Any:
        def call(x: Tensor, *more: Any, **options: Any) -> Tensor:
            if more or options:
                return norm(x, *more, **options)
            self._activated = normed(norm, x, None, act)
            return self._activated

        return call

    def _act(self, act: Any) -> Any:
        return lambda x: x if x is self._activated else act(x)


def _activating(old: Forward) -> Forward:
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        plain = getattr(self, "time_embedding_norm", "default") == "default"
        names, act = _BLOCKS[stock(type(self)).__name__]
        return old(_Block(self, names if plain else names[:1], act), *arguments, **options)

    return forward


_BLOCKS: dict[str, tuple[tuple[str, ...], str]] = {"ResnetBlock2D": (("norm1", "norm2"), "nonlinearity")}
_BLOCKS |= dict.fromkeys(
    ("UNet2DModel", "UNet2DConditionModel", "Encoder", "Decoder"), (("conv_norm_out",), "conv_act")
)
_OF_BLOCKS = ("diffusers.models.resnet", "diffusers.models.unets.", "diffusers.models.autoencoders.vae")
_GROUP_NORMS = Part("", "warpsmith.group_norm with silu", _activating)


def block_of_diffusers(cls: type) -> Part | None:
    known = cls.__module__.startswith(_OF_BLOCKS) and cls.__name__ in _BLOCKS
    return _GROUP_NORMS if known else None
