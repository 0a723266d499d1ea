"""GroupNorm, torch's module with SiLU behind it in one op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.ops.group_norm import group_norm

_OWNER = "GroupNorm"

torch.fx.wrap("group_norm")  # torch.fx.symbolic_trace keeps this call whole


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` by :func:`warpsmith.group_norm`, with torch's constructor and ``state_dict``.

    Args:
        num_groups: of equally many channels.
        num_channels: channels C.
        eps: added to the variance.
        affine: whether there are ``weight`` and ``bias``.
        device, dtype: of the parameters. float32 beside 16-bit activations is fine.
        bias: whether there is a ``bias`` beside the weight.
        activation: None or ``"silu"``.

    Shapes: input (N, C, ...), best in ``channels_last``, which the result is in. Dtypes, determinism and errors: as
    :func:`warpsmith.group_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.GroupNorm(4, 8, activation="silu")
        >>> norm(torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        checks.sizes(_OWNER, 1, num_groups=num_groups, num_channels=num_channels)
        checks.refuse_non_eps(_OWNER, eps)
        checks.flags(_OWNER, affine=affine, bias=bias)
        checks.one_of(_OWNER, "activation", activation, (None, "silu"))
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.activation = activation

    def reset_parameters(self) -> None:
        """Sets the weight to ones and the bias to zeros."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises each group of channels of each sample, and applies the activation."""
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        """torch's, and the activation."""
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")
