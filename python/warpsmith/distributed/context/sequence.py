"""A sequence over ranks: which tokens a rank holds, and the collectives that bring them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith._core import checks
from warpsmith.distributed.agreement import agree_on_call
from warpsmith.distributed.exchange import rank_and_size

SHARDINGS = ("zigzag", "contiguous")


def chunks_of(rank: int, ranks: int, sharding: str) -> tuple[int, ...]:
    """The chunks that a rank holds, in order. ``zigzag`` cuts the sequence into 2 chunks for each rank, else 1.

    Example:
        >>> [chunks_of(rank, 2, "zigzag") for rank in range(2)]
        [(0, 3), (1, 2)]
    """
    return (rank, 2 * ranks - 1 - rank) if sharding == "zigzag" else (rank,)


def check_sharding(op: str, sharding: str) -> None:
    checks.one_of(op, "sharding", sharding, tuple(SHARDINGS))


def in_sequence_order(parts: Sequence[Tensor], dim: int, sharding: str) -> Tensor:
    """The whole sequence, from the tokens of each rank in rank order."""
    places: list[Any] = [None] * (len(parts) * (2 if sharding == "zigzag" else 1))
    for rank, part in enumerate(parts):
        chunks = chunks_of(rank, len(parts), sharding)
        for chunk, tokens in zip(chunks, part.chunk(len(chunks), dim), strict=True):
            places[chunk] = tokens
    return torch.cat(places, dim)


def of_rank(whole: Tensor, dim: int, sharding: str, rank: int, ranks: int) -> Tensor:
    """What a rank holds of the whole sequence; a view where that is one chunk."""
    chunks = chunks_of(rank, ranks, sharding)
    length = whole.shape[dim] // (ranks * len(chunks))
    parts = [whole.narrow(dim, chunk * length, length) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather_sequence(t: Tensor, dim: int, sharding: str, group: ProcessGroup | None) -> Tensor:
    """The whole sequence on every rank. A collective."""
    _, ranks = rank_and_size(group)
    if ranks == 1:
        return t
    parts = t.new_empty((ranks, *t.shape))
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    all_gather(parts.view(ranks * t.shape[0], *t.shape[1:]), t.contiguous(), group=group)
    return in_sequence_order(list(parts.unbind()), dim, sharding)


def reduce_scatter_sequence(
    t: Tensor, dim: int, sharding: str, group: ProcessGroup | None, dtype: torch.dtype
) -> Tensor:
    """This rank's tokens of the sum over ranks: added in rank order in float32 or wider, rounded once. A collective."""
    _, ranks = rank_and_size(group)
    if ranks == 1:
        return t.to(dtype)
    parts = exchange(torch.stack([of_rank(t, dim, sharding, rank, ranks) for rank in range(ranks)]), group)
    total = parts[0].to(torch.promote_types(t.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def exchange(t: Tensor, group: ProcessGroup | None) -> Tensor:
    """Entry r of dimension 0 goes to rank r; entry r of the result came from it. A collective."""
    received = torch.empty_like(t)
    dist.all_to_all_single(received, t, group=group)
    return received


class Exchange(torch.autograd.Function):
    """:func:`exchange`, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return exchange(t.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, dim: int, sharding: str, group: ProcessGroup | None) -> Tensor:
        ctx.arguments = dim, sharding, group
        return gather_sequence(t, dim, sharding, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, sharding, group = ctx.arguments
        return reduce_scatter_sequence(grad, dim, sharding, group, grad.dtype), None, None, None


def _dimension(op: str, t: Tensor, dim: int) -> int:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: t: expected a tensor, got {type(t).__name__}")
    checks.refuse_non_int(op, "dim", dim)
    if not -t.dim() <= dim < t.dim():
        raise ValueError(
            f"{op}: dim: expected a dimension of a tensor of shape {tuple(t.shape)}, got {checks.value_text(dim)}"
        )
    return dim % t.dim()


def shard_sequence(
    t: Tensor, dim: int = 1, *, sharding: str = "zigzag", process_group: ProcessGroup | None = None
) -> Tensor:
    """This rank's tokens of a sequence that every rank has whole: of token ids, labels, positions, embeddings.

    ``zigzag`` cuts the sequence into 2 N chunks for N ranks and gives rank r the chunks r and 2 N - 1 - r, so that all
    ranks have as much to do under a causal mask. ``contiguous`` gives rank r the r-th of N chunks.

    Args:
        t: any tensor, the same on all ranks.
        dim: along which the tokens lie.
        sharding: "zigzag" or "contiguous"; the same in :func:`context_parallel_attention`.
        process_group: the ranks that share a sequence. Default: all. In a world of one, ``t`` comes back.

    What looks at neighbours must be made before: labels are shifted first, and positions are sharded like tokens,
    ``shard_sequence(torch.arange(tokens), 0)``.

    Returns:
        The tokens of this rank, 1 / N of them; differentiable. No communication.

    Raises:
        ValueError: the chunks do not divide the tokens; the message has the rank, and how many to pad.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.distributed.shard_sequence(torch.arange(8), 0)  # rank 0 of 2 would have 0, 1, 6, 7
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    dim = _dimension("shard_sequence", t, dim)
    check_sharding("shard_sequence", sharding)
    rank, ranks = rank_and_size(process_group, "shard_sequence")
    if ranks == 1:
        return t
    chunks, tokens = ranks * len(chunks_of(rank, ranks, sharding)), t.shape[dim]
    if tokens % chunks:
        raise ValueError(
            f"shard_sequence: rank {rank} of {ranks}: t: expected a multiple of {chunks} tokens along dimension {dim}, "
            f"got {tokens}: pad {-tokens % chunks}"
        )
    return of_rank(t, dim, sharding, rank, ranks)


def unshard_sequence(
    t: Tensor, dim: int = 1, *, sharding: str = "zigzag", process_group: ProcessGroup | None = None
) -> Tensor:
    """The whole sequence on every rank, from what each holds: the inverse of :func:`shard_sequence`. A collective.

    Args:
        t: this rank's tokens, of the same shape and dtype on all ranks.
        dim, sharding, process_group: as given to :func:`shard_sequence`.

    Returns:
        The tokens of all ranks in the order of the sequence. Its gradient is the sum of all ranks' gradients, added in
        float32 in rank order.

    Raises:
        TypeError, ValueError: an argument that does not fit, or parts that are not equal, on every rank (in groups of
            NCCL as :func:`context_parallel_attention` does).

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.distributed.unshard_sequence(torch.arange(4), 0)
        tensor([0, 1, 2, 3])
    """
    op = "unshard_sequence"
    _, ranks = rank_and_size(process_group, op)
    refusal: Exception | None = None
    facts: dict[str, str] = {}
    try:
        dim = _dimension(op, t, dim)
        check_sharding(op, sharding)
        if ranks > 1 and sharding == "zigzag" and t.shape[dim] % 2:
            expected = f"an even number of tokens along dimension {dim}, as shard_sequence gives"
            checks.refuse(op, "t", expected, str(t.shape[dim]))
        needs_grad = torch.is_grad_enabled() and t.requires_grad  # the backward is a collective too
        facts = {"t": f"{checks.dtype_text(t.dtype)} {checks.shape_text(t.shape)}", "requires_grad": str(needs_grad)}
        facts |= {"dim": str(dim), "sharding": sharding}
    except (TypeError, ValueError) as error:  # the other ranks wait to hear of it
        refusal = error
    agree_on_call(op, process_group, facts, refusal, "give all ranks equal parts of one sequence")
    return _Gather.apply(t, dim, sharding, process_group) if ranks > 1 else t
