"""BatchNorm2d, torch's module with the residual and ReLU behind it in one op; ConvBNReLU, a convolution before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.ops.batch_norm import batch_norm

_OWNER = "BatchNorm2d"


def _share_of_batch(x: Tensor, steps: Tensor | None, momentum: float | None) -> float:
    """Counts a step; the share of its batch in the new running statistics. momentum None: that of a plain average."""
    if x.dim() != 4:
        raise ValueError(f"expected 4D input (got {x.dim()}D input)")  # torch's words
    if steps is not None:
        steps.add_(1)
        if momentum is None:
            return 1.0 / float(steps)
    return 0.0 if momentum is None else momentum


# torch.fx.symbolic_trace keeps these calls whole; that of x makes the step part of the graph.
torch.fx.wrap("batch_norm")
torch.fx.wrap("_share_of_batch")


def normalize(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """What the forward of a torch.nn.BatchNorm2d, the residual and the activation behind it make of x."""
    training, buffers = norm.training, norm._buffers  # read faster than attributes
    mean, var = buffers["running_mean"], buffers["running_var"]
    if training and not norm.track_running_stats:
        mean = var = None
    steps = buffers["num_batches_tracked"] if training and norm.track_running_stats else None
    share = _share_of_batch(x, steps, norm.momentum)
    return batch_norm(
        x,
        mean,
        var,
        norm.weight,
        norm.bias,
        training or mean is None,
        share,
        norm.eps,
        residual=residual,
        activation=activation,
    )


def _check(owner: str, eps: float, momentum: float | None, activation: str | None) -> None:
    checks.refuse_non_eps(owner, eps)
    if momentum is not None:
        checks.refuse_non_number(owner, "momentum", momentum, "a finite number of float32, or None")
        checks.finite(owner, "momentum", momentum, torch.float32)
    checks.one_of(owner, "activation", activation, (None, "relu"))


class BatchNorm2d(nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` by :func:`warpsmith.batch_norm`, with torch's constructor and ``state_dict``.

    Args:
        num_features: channels C.
        eps: added to the variance.
        momentum: the share of a batch in the new running statistics; None: the average over all batches.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: whether there are running statistics; without them evaluation takes those of its batch.
        device, dtype: of parameters and statistics. float32 beside 16-bit activations is fine.
        bias: whether there is a ``bias`` beside the weight.
        activation: None or ``"relu"``, behind the residual.

    Shapes: input (N, C, H, W), best in ``channels_last``, and ``residual`` of the same shape; the result is
    ``channels_last``. Dtypes, determinism and errors: as :func:`warpsmith.batch_norm`. ``momentum=None`` makes the host
    wait for the device at each step, as torch's module does.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.BatchNorm2d(8, activation="relu")
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> norm(x, residual=x).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        checks.sizes(_OWNER, 1, num_features=num_features)
        _check(_OWNER, eps, momentum, activation)
        checks.flags(_OWNER, affine=affine, track_running_stats=track_running_stats, bias=bias)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.activation = activation

    def reset_parameters(self) -> None:
        """Sets weight and variance to ones, the others to zeros."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalises ``input`` channel by channel, adds ``residual``, and applies the activation."""
        return normalize(self, input, residual, self.activation)

    def extra_repr(self) -> str:
        """torch's, and the activation."""
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")


def _pair(owner: str, name: str, value: int | tuple[int, int], least: int) -> tuple[int, ...]:
    values = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    for size in values:
        checks.count(owner, name, size, f"a whole number >= {least}, or two", least)
    return values


class ConvBNReLU(nn.Sequential):
    """A convolution, batch norm, a residual and ReLU: torch's ``Conv2d``, and all behind it as one op.

    Item 0 is a ``torch.nn.Conv2d``, item 1 a :class:`BatchNorm2d`; ``state_dict`` has the keys of torch's or
    torchvision's ``Sequential`` of the two. Put it into ``channels_last``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups: of the convolution. padding None:
            that of an unchanged size at stride 1, for odd kernels.
        bias: whether the convolution has one. The norm takes it away again.
        eps, momentum: of the norm.
        activation: ``"relu"`` or None, behind the residual.
        device, dtype: of parameters and statistics.

    Shapes: input (N, C, H, W), ``residual`` of the result's shape. Dtypes, determinism, errors: as
    :class:`BatchNorm2d`.

    Example:
        >>> import torch, warpsmith
        >>> layer = warpsmith.nn.ConvBNReLU(3, 8, 3, stride=2).to(memory_format=torch.channels_last)
        >>> layer(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | None = None,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        activation: str | None = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        owner, where = "ConvBNReLU", {"device": device, "dtype": dtype}
        checks.sizes(owner, 1, in_channels=in_channels, out_channels=out_channels, groups=groups)
        _check(owner, eps, momentum, activation)
        checks.flags(owner, bias=bias)
        sizes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        kernel, step, apart = (_pair(owner, name, size, 1) for name, size in sizes.items())
        same = tuple((k - 1) // 2 * d for k, d in zip(kernel, apart, strict=True))
        around = same if padding is None else _pair(owner, "padding", padding, 0)
        if in_channels % groups or out_channels % groups:
            checks.refuse(owner, "groups", "a divisor of both numbers of channels", str(groups))
        given: Any = (in_channels, out_channels, kernel, step, around, apart, groups, bias)
        super().__init__(
            nn.Conv2d(*given, **where),  # type: ignore[arg-type]
            BatchNorm2d(out_channels, eps, momentum, activation=activation, **where),
        )

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``relu(norm(conv(input)) + residual)``."""
        conv, norm = self
        return norm(conv(input), residual)
