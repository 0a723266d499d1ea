"""batch_norm in training with the statistics of the batches of several ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import call_raw, raw


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks, ...): the values of every rank, so that each adds them in rank order to the same bits."""
    found = values.new_empty((dist.get_world_size(group), *values.shape))
    dist.all_gather(list(found), values, group=group)
    return found


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
        own = call_raw(raw.batch_norm_statistics.default, x)
        rows = x.numel() // max(1, x.shape[1])
        of_ranks = _gathered(torch.cat((own, torch.full_like(own[:1], rows))), group)
        means, variances, counts = of_ranks.unbind(1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        squares = (counts * (variances + (means - mean).square())).sum(0)
        if running_mean is not None and running_var is not None:
            for old, found in ((running_mean, mean), (running_var, squares / (total - 1))):
                old.copy_((1 - momentum) * old + momentum * found)
        wide = checks.wide_dtype(x)
        statistics = mean.to(wide), (squares / total).to(wide)
        y, _, _, mean, rstd, mask = call_raw(
            raw.batch_norm_forward.default, x, residual, weight, bias, *statistics, False, momentum, eps, relu
        )
        ctx.save_for_backward(x, weight, bias, mean, rstd, mask)
        ctx.relu, ctx.group, ctx.total = relu, group, total
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, mask = ctx.saved_tensors
        want_x, want_residual, want_weight, want_bias = ctx.needs_input_grad[:4]
        wide = [torch.ones_like(mean) if weight is None else weight.to(mean.dtype), torch.zeros_like(mean)]
        if bias is not None:
            wide[1] = bias.to(mean.dtype)
        given = mean, rstd, mask
        _, _, of_products, of_g = call_raw(
            raw.batch_norm_backward.default, dy, x, *wide, *given, True, ctx.relu, False, False, True, True
        )
        dx = dresidual = None
        if want_x or want_residual:
            means = (_gathered(torch.stack((of_g, of_products)).double(), ctx.group).sum(0) / ctx.total).to(mean.dtype)
            dx, dresidual = call_raw(
                raw.batch_norm_backward_of_ranks.default,
                dy,
                x,
                weight,
                bias,
                *given,
                means,
                ctx.relu,
                want_x,
                want_residual,
            )
        return (
            dx if want_x else None,
            (dresidual if ctx.relu else dy) if want_residual else None,
            of_products.to(weight.dtype) if want_weight else None,
            of_g.to(bias.dtype) if want_bias else None,
            *(None,) * 6,
        )


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
