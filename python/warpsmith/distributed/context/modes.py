"""The three ways of context parallel attention: all keys gathered, keys in a ring, heads instead of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith._core.library import _once
from warpsmith.distributed.context.blocks import (
    Block,
    Given,
    Options,
    Results,
    accepts_whole_results,
    backward_block,
    empty_results,
    forward_block,
    gather_block,
    merge_block,
    narrowed,
    queries_of,
    ring_block,
    unmerge_block,
    wider,
)
from warpsmith.distributed.context.sequence import (
    Exchange,
    chunks_of,
    gather_sequence,
    in_sequence_order,
    of_rank,
)
from warpsmith.distributed.context.sequence import reduce_scatter_sequence as reduce_scatter
from warpsmith.distributed.exchange import rank_and_size
from warpsmith.ops._attention import attend

_KEYS, _GRADIENTS = 1, 2  # tags: between two ranks both may be under way


class ContextGroup(NamedTuple):
    """Where a call runs: its ranks, and how the sequence lies on them."""

    group: ProcessGroup | None
    sharding: str
    rank: int
    ranks: int

    def chunks(self, rank: int, tokens: int) -> list[tuple[int, int]]:
        """(first token in the rank's own, first token in the sequence) of each chunk of a rank with so many tokens."""
        chunks = chunks_of(rank, self.ranks, self.sharding)
        length = tokens // len(chunks)
        return [(i * length, chunk * length) for i, chunk in enumerate(chunks)]


def context_group(op: str, group: ProcessGroup | None, sharding: str) -> ContextGroup:
    return ContextGroup(group, sharding, *rank_and_size(group, op))


def _unpack(kv: Tensor, k: Tensor) -> list[Tensor]:
    """k and v of a tensor that holds both, side by side in each head: one collective instead of two."""
    return list(kv.split([k.shape[-1], kv.shape[-1] - k.shape[-1]], -1))


def _gather_blocks(q: Tensor, place: ContextGroup, o: Options, packed: bool) -> list[Block]:
    own = q.shape[o.dims.tokens]
    chunks = place.chunks(place.rank, own)
    length, tokens = own // len(chunks), own * place.ranks
    return [gather_block(start, at, length, tokens, o.left, o.right, packed) for start, at in chunks]


def _ring_blocks(q: Tensor, source: int, place: ContextGroup, o: Options) -> Iterator[Block]:
    """The blocks of this rank's queries and the keys of rank ``source``."""
    own = q.shape[o.dims.tokens]
    queries, keys = place.chunks(place.rank, own), place.chunks(source, own)
    for q_start, q_at in queries:
        for k_start, k_at in keys:
            block = ring_block(q_start, k_start, q_at, k_at, own // len(queries), o.left, o.right)
            if block is not None:
                yield block


class _Gradients:
    """The sums over blocks of a rank's gradients, in float32 or wider."""

    def __init__(self, saved: tuple[Tensor, ...], o: Options, want_sink: bool) -> None:
        self.saved, self.o, self.want_sink = saved, o, want_sink
        self.dq = torch.zeros_like(saved[0], dtype=wider(saved[0].dtype))
        self.dsink: Tensor | None = None

    def add(self, b: Block, dkv: Tensor, kv: list[Tensor], results: Results, dout: Tensor, dlse: Tensor | None) -> None:
        """A block's gradients, from those of its results; those of keys and values go into ``dkv``."""
        q, _, _, sink, cu, alibi, seed, *_ = self.saved
        dq, dk, dv, dsink = backward_block(
            self.o, b, dout, dlse, (q, kv[0], kv[1]), Given(cu, alibi, sink, seed), *results, self.want_sink
        )
        tokens = self.o.dims.tokens
        self.dq.narrow(tokens, b.q_start, b.q_len).add_(dq)
        for total, part in zip(_unpack(dkv, dk), (dk, dv), strict=True):
            total.narrow(tokens, b.k_start, b.k_len).add_(part)
        if dsink is not None:
            self.dsink = dsink.to(wider(dsink.dtype)) if self.dsink is None else self.dsink + dsink

    def results(self, dkv: Tensor) -> tuple[Tensor | None, ...]:
        q, k, _, sink = self.saved[:4]
        dk, dv = _unpack(dkv.to(k.dtype), k)
        dsink = None if self.dsink is None else self.dsink.to(sink.dtype)
        return self.dq.to(q.dtype), dk, dv, dsink, None, None, None, None, None


class _Passing:
    """A tensor on its way to the next rank, while that of the rank before comes in."""

    def __init__(self, t: Tensor, place: ContextGroup, tag: int) -> None:
        self._received = torch.empty_like(t)
        after, before = (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks
        if place.group is not None:
            after, before = (dist.get_global_rank(place.group, rank) for rank in (after, before))
        both = [
            dist.P2POp(dist.isend, t, after, place.group, tag),
            dist.P2POp(dist.irecv, self._received, before, place.group, tag),
        ]
        self._sent = t  # must live until it is gone
        self._work = dist.batch_isend_irecv(both)

    def arrived(self) -> Tensor:
        for work in self._work:
            work.wait()
        return self._received


def _gathered(q: Tensor, k: Tensor, v: Tensor, given: Given, o: Options, place: ContextGroup) -> Results:
    """Every rank has all keys and values during the call; they are gathered again for the backward, not kept."""
    kv = gather_sequence(torch.cat([k, v], -1), o.dims.tokens, place.sharding, place.group)
    keys, values = _unpack(kv, k)
    blocks = _gather_blocks(q, place, o, given.cu_seqlens is not None)
    parts = [forward_block(o, b, q, keys, values, given) for b in blocks]
    if len(parts) == 1:
        return parts[0]
    lse, lse_rest = (torch.cat([p[i] for p in parts], -1) for i in (1, 2))
    return torch.cat([p[0] for p in parts], o.dims.tokens), lse, lse_rest


def _gathered_backward(sums: _Gradients, dout: Tensor, dlse: Tensor | None, place: ContextGroup) -> Tensor:
    q, k, v, _, cu, _, _, out, lse, lse_rest = sums.saved
    tokens = sums.o.dims.tokens
    kv = gather_sequence(torch.cat([k, v], -1), tokens, place.sharding, place.group)
    keys, dkv = _unpack(kv, k), torch.zeros_like(kv, dtype=wider(kv.dtype))
    for b in _gather_blocks(q, place, sums.o, cu is not None):
        part, part_dout = (queries_of(t, tokens, b) for t in (out, dout))
        part_dlse = None if dlse is None else queries_of(dlse, -1, b)
        results = part, queries_of(lse, -1, b), queries_of(lse_rest, -1, b)
        sums.add(b, dkv, keys, results, part_dout, part_dlse)
    return reduce_scatter(dkv, tokens, place.sharding, place.group, k.dtype)


def _ring(q: Tensor, k: Tensor, v: Tensor, given: Given, o: Options, place: ContextGroup) -> Results:
    """Keys and values go from rank to rank; each rank adds up what its queries see of them."""
    wide_out, lse = empty_results(q, v, o)
    kv = torch.cat([k, v], -1)
    for step in range(place.ranks):
        coming = _Passing(kv, place, _KEYS) if step + 1 < place.ranks else None
        keys, values = _unpack(kv, k)
        for b in _ring_blocks(q, (place.rank - step) % place.ranks, place, o):
            merge_block(wide_out, lse, b, *forward_block(o, b, q, keys, values, given), o)
        if coming is not None:
            kv = coming.arrived()
    return wide_out.to(q.dtype), *narrowed(lse, torch.promote_types(q.dtype, torch.float32))


def _ring_backward(sums: _Gradients, dout: Tensor, dlse: Tensor | None, place: ContextGroup) -> Tensor:
    q, k, v, sink, cu, alibi, seed, out, lse, lse_rest = sums.saved
    o = sums.o
    kv, given = torch.cat([k, v], -1), Given(cu, alibi, sink, seed)
    whole = accepts_whole_results(o, q, v, given)  # else the block's own results are made again
    passed: _Passing | None = None
    for step in range(place.ranks):
        coming = _Passing(kv, place, _KEYS) if step + 1 < place.ranks else None
        # This rank's part of the gradients of the keys at hand; the sum of the ranks before it arrives meanwhile.
        dkv, keys = torch.zeros_like(kv, dtype=wider(kv.dtype)), _unpack(kv, k)
        for b in _ring_blocks(q, (place.rank - step) % place.ranks, place, o):
            whole_out = queries_of(out, o.dims.tokens, b)
            results = whole_out, queries_of(lse, -1, b), queries_of(lse_rest, -1, b)
            upstream = queries_of(dout, o.dims.tokens, b), None if dlse is None else queries_of(dlse, -1, b)
            if not whole:
                own = forward_block(o, b, q, keys[0], keys[1], given)
                results, upstream = own, unmerge_block(*own, *results, *upstream, o)
            sums.add(b, dkv, keys, results, *upstream)
        if passed is not None:
            dkv += passed.arrived()
        if place.ranks > 1:
            passed = _Passing(dkv, place, _GRADIENTS)  # after the last step to the rank whose keys they are
        if coming is not None:
            kv = coming.arrived()
    return dkv if passed is None else passed.arrived()


_FORWARD = {"all_gather": _gathered, "ring": _ring}
_BACKWARD = {"all_gather": _gathered_backward, "ring": _ring_backward}


class InBlocks(torch.autograd.Function):
    """Attention of a rank's queries to the keys of all ranks, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        cu: Tensor | None,
        alibi: Tensor | None,
        seed: Tensor | None,
        o: Options,
        place: ContextGroup,
        mode: str,
    ) -> tuple[Tensor, Tensor]:
        out, lse, lse_rest = _FORWARD[mode](q, k, v, Given(cu, alibi, sink, seed), o, place)
        ctx.save_for_backward(q, k, v, sink, cu, alibi, seed, out, lse, lse_rest)
        ctx.o, ctx.place, ctx.mode = o, place, mode
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def _formula(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: an activation checkpoint makes them again, and allows no second look
        dout = torch.zeros_like(saved[7]) if dout is None else dout
        sums = _Gradients(saved, ctx.o, ctx.needs_input_grad[3])
        return *sums.results(_BACKWARD[ctx.mode](sums, dout, dlse, ctx.place)), None

    backward = staticmethod(_once("context_parallel_attention", _formula))


def ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    cu: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    o: Options,
    place: ContextGroup,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Each rank computes all tokens of its share of the heads: an all-to-all before and one after. On one rank
    the op itself."""
    tokens, heads = o.dims.tokens, o.dims.heads

    def to_heads(t: Tensor) -> Tensor:
        if place.ranks == 1:
            return t
        parts = Exchange.apply(torch.stack(t.chunk(place.ranks, heads)), place.group)
        return in_sequence_order(parts.unbind(), tokens, place.sharding)

    def to_tokens(t: Tensor, tokens: int, heads: int) -> Tensor:
        if place.ranks == 1:
            return t
        parts = [of_rank(t, tokens, place.sharding, rank, place.ranks) for rank in range(place.ranks)]
        return torch.cat(Exchange.apply(torch.stack(parts), place.group).unbind(), heads)

    all_heads = q.shape[heads]
    share = all_heads // place.ranks
    own = slice(place.rank * share, (place.rank + 1) * share)
    sink = None if sink is None else sink[own]
    alibi = None if alibi is None else alibi[..., own].contiguous()
    q, k, v = (to_heads(t) for t in (q, k, v))
    whole = seed is None or place.ranks == 1
    of_all = None if whole else (0, o.max_seqlen or q.shape[tokens], 0, own.start, all_heads)
    out, lse = attend(
        *(q, k, v, cu, cu, alibi, None, sink, seed, o.max_seqlen, o.max_seqlen, o.layout, 0, True, o.left, o.right),
        *(o.softmax_scale, o.softcap, o.dropout_p, o.deterministic, of_all),
    )
    return to_tokens(out, tokens, heads), to_tokens(lse, -1, -2) if return_lse else None
