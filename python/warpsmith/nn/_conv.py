"""ConvBNReLU, torch's convolution and all behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.nn._batch_norm import BatchNorm2d


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
        owner, where = "ConvBNReLU", dict[str, Any](device=device, dtype=dtype)
        checks.sizes(owner, 1, in_channels=in_channels, out_channels=out_channels, groups=groups)
        checks.refuse_non_eps(owner, eps)
        if momentum is not None:
            checks.refuse_non_number(owner, "momentum", momentum, "a finite number of float32, or None")
            checks.finite(owner, "momentum", momentum, torch.float32)
        checks.one_of(owner, "activation", activation, (None, "relu"))
        checks.flags(owner, bias=bias)
        sizes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        kernel, step, apart = (checks.counts(owner, name, size, 1) for name, size in sizes.items())
        same = tuple((k - 1) // 2 * d for k, d in zip(kernel, apart, strict=True))
        around = same if padding is None else checks.counts(owner, "padding", padding, 0)
        if in_channels % groups or out_channels % groups:
            checks.refuse(owner, "groups", "a divisor of both numbers of channels", str(groups))
        given: Any = (in_channels, out_channels, kernel, step, around, apart, groups, bias)
        super().__init__(
            nn.Conv2d(*given, **where),
            BatchNorm2d(out_channels, eps, momentum, activation=activation, **where),
        )

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``relu(norm(conv(input)) + residual)``."""
        conv, norm = self
        return norm(conv(input), residual)
