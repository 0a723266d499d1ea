"""batch_norm in training with the statistics of the batches of several ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpsmith._core.library import call_raw, raw


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks, ...): the values of every rank, so that each adds them in rank order to the same bits."""
    ranks, rows = dist.get_world_size(group), len(values)
    found = values.new_empty((ranks * rows, *values.shape[1:]))  # gloo takes no other shape
    dist.all_gather_into_tensor(found, values, group=group)
    return found.unflatten(0, (ranks, rows))


class _AcrossRanks(torch.autograd.Function):
    """Two collectives of the local statistics: mean, variance and count forward, two sums a channel backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        of_ranks = _gathered(call_raw(raw.batch_norm_statistics.default, x), group)
        given = x, residual, weight, bias, running_mean, running_var, of_ranks, momentum, eps, relu
        y, mean, rstd, mask = call_raw(raw.batch_norm_forward_of_ranks.default, *given)
        ctx.save_for_backward(x, weight, bias, mean, rstd, mask, of_ranks)
        ctx.relu, ctx.group = relu, group
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *given, of_ranks = ctx.saved_tensors
        want_x, want_residual, *wants = ctx.needs_input_grad[:4]
        sums, dweight, dbias = call_raw(raw.batch_norm_sums.default, dy, *given, ctx.relu, *wants)
        dx = dresidual = None
        if want_x or want_residual:
            gathered = _gathered(sums, ctx.group), of_ranks, ctx.relu, want_x, want_residual
            dx, dresidual = call_raw(raw.batch_norm_backward_of_ranks.default, dy, *given, *gathered)
        found = dx, dresidual if ctx.relu else dy, dweight, dbias
        wanted = (t if want else None for t, want in zip(found, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * 6)


@torch._disable_dynamo  # type: ignore[attr-defined]  # the public name imports the compiler
def batch_norm_of_ranks(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    residual: Tensor | None,
    activation: str | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """batch_norm in training, where the batch is that of all ranks of ``group``."""
    del training
    relu = activation is not None
    return _AcrossRanks.apply(x, residual, weight, bias, running_mean, running_var, momentum, eps, relu, group)
