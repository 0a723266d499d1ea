"""BatchNorm2d, torch's module with the residual and ReLU behind it in one op."""

from __future__ import annotations

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
        checks.refuse_non_eps(_OWNER, eps)
        if momentum is not None:
            checks.refuse_non_number(_OWNER, "momentum", momentum, "a finite number of float32, or None")
            checks.finite(_OWNER, "momentum", momentum, torch.float32)
        checks.flags(_OWNER, affine=affine, track_running_stats=track_running_stats, bias=bias)
        checks.one_of(_OWNER, "activation", activation, (None, "relu"))
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
        steps = self.num_batches_tracked if self.training and self.track_running_stats else None
        share = _share_of_batch(input, steps, self.momentum)
        known = not self.training or self.track_running_stats
        return batch_norm(
            input,
            self.running_mean if known else None,
            self.running_var if known else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            share,
            self.eps,
            residual=residual,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """torch's, and the activation."""
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")
