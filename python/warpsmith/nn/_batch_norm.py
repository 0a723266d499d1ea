"""BatchNorm2d and SyncBatchNorm, torch's modules with the residual and ReLU behind them in one op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.ops._batch_norm_ranks import batch_norm_of_ranks
from warpsmith.ops.batch_norm import batch_norm


def _share_of_batch(x: Tensor, dim: int | None, steps: Tensor | None, momentum: float | None) -> float:
    """Counts a step; the share of its batch in the new running statistics. momentum None: that of a plain average."""
    if dim is not None and x.dim() != dim:
        raise ValueError(f"expected {dim}D input (got {x.dim()}D input)")  # torch's words
    if steps is not None:
        steps.add_(1)
        if momentum is None:
            return 1.0 / float(steps)
    return 0.0 if momentum is None else momentum


def _check(
    owner: str, num_features: int, eps: float, momentum: float | None, activation: str | None, *flags: bool
) -> None:
    checks.sizes(owner, 1, num_features=num_features)
    checks.refuse_non_eps(owner, eps)
    if momentum is not None:
        checks.refuse_non_number(owner, "momentum", momentum, "a finite number of float32, or None")
        checks.finite(owner, "momentum", momentum, torch.float32)
    checks.flags(owner, **dict(zip(("affine", "track_running_stats", "bias"), flags, strict=True)))
    checks.one_of(owner, "activation", activation, (None, "relu"))


# torch.fx.symbolic_trace keeps these calls whole; that of x makes the step part of the graph.
torch.fx.wrap("batch_norm")
torch.fx.wrap("_share_of_batch")


class _Activated(nn.modules.batchnorm._BatchNorm):
    """What BatchNorm2d and SyncBatchNorm add to torch's modules."""

    activation: str | None
    _dim: int | None = None

    def reset_parameters(self) -> None:
        """Sets weight and variance to ones, the others to zeros."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _arguments(self, x: Tensor) -> tuple[Any, ...]:
        """Those of batch_norm: statistics, parameters, training, share of the batch, eps."""
        steps = self.num_batches_tracked if self.training and self.track_running_stats else None
        share = _share_of_batch(x, self._dim, steps, self.momentum)
        known = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if known else (None, None)
        return (*running, self.weight, self.bias, self.training or self.running_mean is None, share, self.eps)

    def extra_repr(self) -> str:
        """torch's, and the activation."""
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")


class BatchNorm2d(_Activated, nn.BatchNorm2d):
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

    _dim = 4

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
        _check("BatchNorm2d", num_features, eps, momentum, activation, affine, track_running_stats, bias)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalises ``input`` channel by channel, adds ``residual``, and applies the activation."""
        return batch_norm(input, *self._arguments(input), residual=residual, activation=self.activation)


class SyncBatchNorm(_Activated, nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` by the kernels of :func:`warpsmith.batch_norm`, with torch's constructor and
    ``state_dict``: in training, mean and variance are those of the batches of all ranks together.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias, activation: as those of
            :class:`BatchNorm2d`.
        process_group: the ranks; None: all.

    Shapes: input (N, C, ...), best in ``channels_last``; ranks may have batches of different sizes, or none. On the
    CPU by gloo, on a GPU by NCCL. In evaluation, and with one rank, as :class:`BatchNorm2d`.

    Deterministic: forward and backward gather a few numbers a channel (mean, variance and count; two sums), and every
    rank merges them in rank order, in float64, so that all have the same bits. Gradients of weight and bias are those
    of a rank's own batch, as torch's. There is no second derivative, and ``torch.compile`` breaks its graph here.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> type(warpsmith.nn.SyncBatchNorm.convert_sync_batchnorm(model)[1]) is warpsmith.nn.SyncBatchNorm
        True
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        _check("SyncBatchNorm", num_features, eps, momentum, activation, affine, track_running_stats, bias)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalises ``input`` channel by channel, adds ``residual``, and applies the activation."""
        arguments = self._arguments(input)
        others: dict[str, Any] = {"residual": residual, "activation": self.activation}
        if self.training and dist.is_available() and dist.is_initialized():
            group: Any = self.process_group or dist.group.WORLD
            if dist.get_world_size(group) > 1:
                return batch_norm_of_ranks(input, *arguments, group=group, **others)
        return batch_norm(input, *arguments, **others)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """``module`` with every batch norm in it, torch's and ours, as one of these. They share its parameters and
        statistics. ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` converts back to torch's, without activations."""
        found = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            affine = module.weight is not None
            found = cls(
                module.num_features, module.eps, module.momentum, affine, module.track_running_stats, process_group,
                bias=module.bias is not None, activation=getattr(module, "activation", None), device="meta",
            )  # fmt: skip
            for name in ("weight", "bias"):
                setattr(found, name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(found, name, getattr(module, name))
            found.training = module.training
        for name, child in module.named_children():
            found.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return found
