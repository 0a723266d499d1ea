"""Losses over classes that lie on several ranks, as tensor parallelism leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith._core import checks
from warpsmith._core.library import _once, call_raw, raw
from warpsmith.distributed.agreement import agree_on_call
from warpsmith.distributed.exchange import rank_and_size
from warpsmith.distributed.gradients.hook import _all_gather
from warpsmith.ops._cross_entropy import (
    NONE,
    check_inputs,
    check_labels_on_host,
    check_options,
    reduction_number,
)

_LOSS, _LINEAR = "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"
_CHUNK_BYTES = 64 << 20  # of logits that exist at a time
_IGNORED = -1  # among local targets


class _Options(NamedTuple):
    ignore_index: int
    reduction: str
    z_loss: float
    softcap: float


class _Targets(NamedTuple):
    """Of each row: the class within this rank's shard (0 where another rank has it), who has it, what counts."""

    local: Tensor
    here: Tensor
    ignored: Tensor
    bad: Tensor  # no class, nor ignore_index


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    process_group: ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    r"""Cross-entropy of logits whose classes lie on several ranks: what :func:`warpsmith.cross_entropy` gives for all.

    Rank r of N has the logits of the classes from :math:`r V / N` on, as ``ColwiseParallel`` of the last layer gives
    them. Each row's largest logit, sum of exponentials and target logit are gathered: 12 bytes a row and rank.

    .. math::
        \mathrm{loss} = \log \sum_r s_r e^{m_r - m} + m - z_t + z_{\mathrm{loss}} \operatorname{logsumexp}(z)^2,
        \qquad m = \max_r m_r

    Args:
        logits: this rank's, shape (..., V / N), in the dtypes of :func:`warpsmith.cross_entropy`.
        target: shape (...), int64 classes in [0, V) or ``ignore_index``; the same on all ranks.
        process_group: the ranks that share the classes; default: all. A world of one is fine.
        ignore_index, reduction, z_loss, softcap: as for :func:`warpsmith.cross_entropy`.

    Returns:
        The loss, the same bits on every rank; dtype and shape as for :func:`warpsmith.cross_entropy`. The gradient for
        ``logits`` is that of this rank's classes, and the same as without the other ranks but for rounding. A second
        derivative is refused.

    A collective: every rank must call. Deterministic: ranks are added in their order. A target out of range gives NaN
    on CUDA.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: as :func:`warpsmith.cross_entropy`; a group without this rank; or ranks with other shapes, dtypes or
            options. The ranks compare their calls first, so a mistake of one rank is an error of all, not a hang. In
            groups of NCCL, where the host would have to wait for the device, a rank compares only calls whose sizes and
            options are new to it, or that it refuses: where another rank has made its own call before, both wait for
            the group's timeout.

    Source: Shoeybi et al., Megatron-LM, 2019.

    Example:
        >>> import torch, warpsmith
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> warpsmith.distributed.vocab_parallel_cross_entropy(logits, torch.tensor([0, 0]))
        tensor(0.7201)
    """

    def check() -> tuple[int, dict[str, str]]:
        checks.tensors(_LOSS, logits=logits, target=target)
        check_inputs(_LOSS, logits, target, None)
        return logits.shape[-1], {"logits": _rows_text(logits, logits.shape[-1])}

    options = _Options(ignore_index, reduction, z_loss, softcap)
    _agree(_LOSS, process_group, options, target, check)
    loss: Tensor = _Loss.apply(logits, target.long(), process_group, options)
    return loss


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    r"""Cross-entropy of ``hidden @ weight.T + bias`` whose classes lie on several ranks, without the logits in memory.

    As :func:`vocab_parallel_cross_entropy` of the logits, which exist 64 MiB at a time and are computed once more in
    the backward. The gradient for ``hidden`` is summed over the ranks, so that it is whole on each.

    Args:
        hidden: shape (..., H), the same on all ranks.
        weight: this rank's rows, shape (V / N, H), of the dtype of ``hidden``; bias: shape (V / N,) in that dtype.
        target, process_group, ignore_index, reduction, z_loss, softcap: as for :func:`vocab_parallel_cross_entropy`.

    Returns:
        The loss, as :func:`vocab_parallel_cross_entropy`. Gradients for ``hidden``, ``weight`` and ``bias`` in their
        dtype: sums over chunks and ranks are float32, and deterministic where the backend's all-reduce is. A second
        derivative is refused.

    Raises:
        TypeError, ValueError: as :func:`vocab_parallel_cross_entropy`, and of the weight and the bias.

    Source: Shoeybi et al., Megatron-LM, 2019; Wijmans et al., Cut Your Losses, 2024.

    Example:
        >>> import torch, warpsmith
        >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> warpsmith.distributed.vocab_parallel_linear_cross_entropy(hidden, weight, torch.tensor([0, 0]))
        tensor(0.7201)
    """
    options = _Options(ignore_index, reduction, z_loss, softcap)
    tensors = {"hidden": hidden, "weight": weight, "target": target} | ({} if bias is None else {"bias": bias})

    def check() -> tuple[int, dict[str, str]]:
        checks.tensors(_LINEAR, False, **tensors)
        _check_linear(hidden, weight, bias)
        check_inputs(_LINEAR, hidden, target, None)
        with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        facts = {"hidden": _rows_text(hidden, weight.shape[0]), "bias": str(bias is not None)}
        return weight.shape[0], facts | {"requires_grad": str(with_gradient)}  # the backward has a collective

    _agree(_LINEAR, process_group, options, target, check)
    loss: Tensor = _LinearLoss.apply(hidden, weight, bias, target.long(), process_group, options)
    return loss


def _check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    checks.float_dtype(_LINEAR, "hidden", hidden)
    checks.at_least_one_dimension(_LINEAR, "hidden", hidden)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        checks.refuse(_LINEAR, "weight", f"shape (classes, {hidden.shape[-1]})", checks.shape_text(weight.shape))
    for name, t, shape in (("weight", weight, weight.shape), ("bias", bias, weight.shape[:1])):
        if t is not None:
            checks.alike(_LINEAR, name, t, hidden, shape)


def _rows_text(rows: Tensor, classes: int) -> str:
    return f"{checks.dtype_text(rows.dtype)} {checks.shape_text(rows.shape[:-1])} rows of {classes} classes"


def _agree(
    op: str,
    group: ProcessGroup | None,
    options: _Options,
    target: Tensor,
    check: Callable[[], tuple[int, dict[str, str]]],
) -> None:
    """Refuses what is wrong on any rank, on every rank. check: of this rank's tensors; returns how many classes it has,
    and what must be the same on all ranks, by argument."""
    _, size = rank_and_size(group, op)
    refusal: Exception | None = None
    bad_labels: Exception | None = None
    facts: dict[str, str] = {}
    try:
        classes, facts = check()
        if not isinstance(options.reduction, str):
            checks.refuse_type(op, "reduction", "none, mean or sum", options.reduction)
        reduction_number(op, options.reduction)
        for name, value in (("z_loss", options.z_loss), ("softcap", options.softcap)):
            if not checks.is_number(value):
                checks.refuse_type(op, name, "a number", value)
        checks.refuse_non_int64(op, "ignore_index", options.ignore_index, "an int")
        check_options(op, 0.0, options.z_loss, options.softcap)
        facts |= {name: str(value) for name, value in options._asdict().items()}
        if not target.is_cuda:
            facts["target"] = f"classes in [0, {classes * size})"
            try:
                check_labels_on_host(op, target.long(), classes * size, options.ignore_index)
            except ValueError as error:  # may follow from ranks with other classes, which then is what they hear of
                bad_labels, facts["target"] = error, str(error).rpartition(", got ")[2]
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        refusal = error
    agree_on_call(op, group, facts, refusal, "give all ranks equal parts of one problem")
    if bad_labels is not None:
        raise bad_labels


def _targets(target: Tensor, classes: int, group: ProcessGroup | None, ignore_index: int) -> _Targets:
    rank, size = rank_and_size(group)
    ignored = target == ignore_index
    local = target - rank * classes
    here = (local >= 0) & (local < classes) & ~ignored
    bad = ((target < 0) | (target >= classes * size)) & ~ignored
    return _Targets(torch.where(ignored, _IGNORED, torch.where(here, local, 0)), here, ignored, bad)


def _cap(z: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z


def _statistics(logits: Tensor, t: _Targets, softcap: float) -> Tensor:
    """(3, rows): of this rank's classes the largest, the sum of exponentials relative to it; and the target's, or 0."""
    outputs = call_raw(
        raw.cross_entropy_forward.default, logits, t.local, None, _IGNORED, NONE, 0.0, 0.0, softcap, False
    )
    of_target = logits.gather(-1, t.local.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(checks.wide_dtype(logits))
    return torch.stack([*outputs[-2:], torch.where(t.here, _cap(of_target, softcap), 0.0)])


def _over_ranks(own: Tensor, group: ProcessGroup | None) -> Tensor:
    """The same of all ranks' classes."""
    _, size = rank_and_size(group)
    if size == 1:
        return own
    every = own.new_empty(size * own.shape[0], *own.shape[1:])
    _all_gather(every, own.contiguous(), group=group)
    every = every.view(size, *own.shape)
    largest = every[:, 0].amax(0)
    total, of_target = torch.zeros_like(largest), torch.zeros_like(largest)
    for part in every:
        total += part[1] * torch.where(part[0] == largest, 1.0, torch.exp(part[0] - largest))
        of_target += part[2]
    return torch.stack([largest, total, of_target])


def _loss(statistics: Tensor, t: _Targets, options: _Options) -> tuple[Tensor, Tensor]:
    """The reduced loss, and what the gradient of a row is divided by."""
    largest, total, of_target = statistics
    loss = total.log() + (largest - of_target)
    if options.z_loss:
        loss = loss + options.z_loss * (total.log() + largest).square()
    loss = torch.where(t.bad, torch.nan, torch.where(t.ignored, 0.0, loss))
    count = (~t.ignored).sum().to(loss.dtype) if options.reduction == "mean" else loss.new_ones(())
    return (loss if options.reduction == "none" else loss.sum() / count), count


def _gradient(logits: Tensor, of_rows: Tensor, statistics: Tensor, t: _Targets, options: _Options) -> Tensor:
    """For this rank's logits. of_rows: the upstream gradient of each row."""
    largest, total, _ = statistics
    of_rows = torch.where(t.bad, torch.nan, of_rows).contiguous()
    none = of_rows.new_empty(0)
    arguments = of_rows, logits, t.local, None, largest.contiguous(), total.contiguous(), none
    grad = call_raw(
        raw.cross_entropy_backward.default, *arguments, False, _IGNORED, 0.0, options.z_loss, options.softcap
    )
    # Rows whose target is elsewhere were told that it is class 0: that element once more, without the target's share.
    z = _cap(logits[..., 0].to(largest.dtype), options.softcap)
    first = of_rows * torch.exp(z - largest) / total * (1 + 2 * options.z_loss * (total.log() + largest))
    if options.softcap:
        first = first * (1 - (z / options.softcap).square())
    grad[..., 0] = torch.where(t.here | t.ignored, grad[..., 0], first.to(grad.dtype))
    return grad


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None, options: _Options) -> Tensor:
        t = _targets(target, logits.shape[-1], group, options.ignore_index)
        statistics = _over_ranks(_statistics(logits, t, options.softcap), group)
        loss, count = _loss(statistics, t, options)
        ctx.save_for_backward(logits, statistics, count, *t)
        ctx.options = options
        return loss

    @staticmethod
    def _formula(ctx: Any, upstream: Tensor) -> Any:
        logits, statistics, count, *t = ctx.saved_tensors
        of_rows = (upstream / count).expand(logits.shape[:-1])
        return _gradient(logits, of_rows, statistics, _Targets(*t), ctx.options), None, None, None

    backward = staticmethod(_once(_LOSS, _formula))


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        group: ProcessGroup | None,
        options: _Options,
    ) -> Tensor:
        t = _targets(target.flatten(), weight.shape[0], group, options.ignore_index)
        rows = hidden.reshape(-1, hidden.shape[-1])
        own = [
            _statistics(F.linear(rows[a:b], weight, bias), _Targets(*(x[a:b] for x in t)), options.softcap)
            for a, b in _chunks(len(rows), weight)
        ]
        statistics = _over_ranks(torch.cat(own, 1), group)
        loss, count = _loss(statistics, t, options)
        ctx.save_for_backward(hidden, weight, bias, statistics, count, *t)
        ctx.options, ctx.group = options, group
        return loss.view(target.shape) if options.reduction == "none" else loss

    @staticmethod
    def _formula(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight, bias, statistics, count, *t = ctx.saved_tensors
        rows = hidden.reshape(-1, hidden.shape[-1])
        of_rows = (upstream / count).expand(hidden.shape[:-1]).reshape(-1)
        wide = checks.wide_dtype(hidden)
        dhidden = torch.empty(rows.shape, dtype=wide, device=rows.device)
        dweight = torch.zeros(weight.shape, dtype=wide, device=rows.device)
        dbias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=rows.device)
        for a, b in _chunks(len(rows), weight):
            logits = F.linear(rows[a:b], weight, bias)
            part = _Targets(*(x[a:b] for x in t))
            grad = _gradient(logits, of_rows[a:b], statistics[:, a:b], part, ctx.options)
            dhidden[a:b] = grad @ weight
            dweight += grad.T @ rows[a:b]
            if dbias is not None:
                dbias += grad.sum(0, dtype=wide)
        if rank_and_size(ctx.group)[1] > 1:
            dist.all_reduce(dhidden, group=ctx.group)
        dbias = None if dbias is None else dbias.to(hidden.dtype)
        return dhidden.to(hidden.dtype).view(hidden.shape), dweight.to(weight.dtype), dbias, None, None, None

    backward = staticmethod(_once(_LINEAR, _formula))


def _chunks(rows: int, weight: Tensor) -> list[tuple[int, int]]:
    """At least one, so that no rows are a chunk too."""
    step = max(1, _CHUNK_BYTES // (weight.shape[0] * weight.element_size()))
    return [(a, min(a + step, rows)) for a in range(0, max(rows, 1), step)]
