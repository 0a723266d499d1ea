"""Attention of a rank's queries to some of the keys: which blocks there are, and one kernel call for each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core.library import call_raw, raw
from warpsmith.ops._attention import Dims, dims_of


class Options(NamedTuple):
    """What all blocks of a call share. ``left`` and ``right`` bound the window in the whole sequence, -1: no limit."""

    layout: int
    left: int
    right: int
    softmax_scale: float | None
    softcap: float
    deterministic: bool
    max_seqlen: int  # of the documents; 0: not packed
    dropout_p: float
    ranks: int

    @property
    def dims(self) -> Dims:
        return dims_of(self.layout, False)


class Given(NamedTuple):
    """The tensors beside q, k and v, the same on all ranks and for all blocks."""

    cu_seqlens: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    seed: Tensor | None  # None: no dropout


# Where the queries and keys of a block may begin in a sequence with dropout: dropout_place of the raw ops.
QUERY_STEP, KEY_STEP = 16, 32


class Block(NamedTuple):
    """Queries and keys of one kernel call. ``q_start`` counts within the rank's tokens, ``k_start`` within the keys
    at hand; ``q_at`` and ``k_at`` are the first query's and the first key's place in the whole sequence. Query i of the
    block sees its keys j with -left <= j - i - (k_len - q_len) <= right."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    left: int
    right: int
    sink: bool  # whether this block counts the sinks: one of those that a query is in
    q_at: int
    k_at: int
    # Packed documents alone: so many queries of zeros follow, so that the last document's queries end where its keys
    # do, as the window wants it.
    more: int = 0


def gather_block(q_start: int, start: int, length: int, tokens: int, left: int, right: int, packed: bool) -> Block:
    """The block of queries ``start`` to ``start + length`` of the sequence, where all its keys are at hand."""
    end = start + length
    k_len = tokens if right < 0 else min(tokens, end + right)  # no query sees the keys behind
    behind = k_len - end
    if packed:
        more = behind if right > 0 or (right < 0 and left >= 0) else 0
        return Block(q_start, length, 0, k_len, left, right, True, start, 0, more)
    # The op lets the last query meet the last key, which lies `behind` keys further than the query's own.
    low, high = left if left < 0 else left + behind, right if right < 0 else right - behind
    return Block(q_start, length, 0, k_len, low, high, True, start, 0)


def ring_block(q_start: int, k_start: int, q_at: int, k_at: int, length: int, left: int, right: int) -> Block | None:
    """The block of ``length`` queries from ``q_at`` and as many keys from ``k_at`` of the sequence; None if no query
    sees a key."""
    distance = q_at - k_at
    # Query i sees the keys j with low <= j - i <= high; both count within their chunks.
    low = -length if left < 0 else distance - left
    high = length if right < 0 else distance + right
    if low >= length or high <= -length:
        return None
    # A window that begins behind a query's own place, or ends before it, leaves out queries and keys at the ends.
    skip_k, skip_q = max(low, 0), max(-high, 0)
    low, high = low - skip_k + skip_q, high - skip_k + skip_q
    size = length - skip_k - skip_q
    # A block begins at a whole step, as dropout wants it. The queries that this adds see no key, and the keys that it
    # adds are seen by no query: the op lets the last query meet the last key, whatever comes before them.
    skip_q, skip_k, q_len, k_len = (
        skip_q - skip_q % QUERY_STEP,
        skip_k - skip_k % KEY_STEP,
        size + skip_q % QUERY_STEP,
        size + skip_k % KEY_STEP,
    )
    return Block(
        q_start + skip_q,
        q_len,
        k_start + skip_k,
        k_len,
        -1 if low <= 1 - k_len else -low,
        -1 if high >= q_len - 1 else high,
        q_at == k_at,
        q_at + skip_q,
        k_at + skip_k,
    )


Results = tuple[Tensor, Tensor, Tensor]  # out, lse, lse_rest


class _Call(NamedTuple):
    """The arguments of the raw ops that a block fixes."""

    q: Tensor
    rest: tuple[Any, ...]  # k to deterministic
    place: tuple[int, ...] | None  # dropout_place


def _call(o: Options, b: Block, q: Tensor, k: Tensor, v: Tensor, given: Given) -> _Call:
    tokens, cu = o.dims.tokens, given.cu_seqlens
    place = None if given.seed is None else (b.q_at, o.ranks * q.shape[tokens], b.k_at, 0, q.shape[o.dims.heads])
    q = _rows(q, tokens, b)
    k, v = (t.narrow(tokens, b.k_start, b.k_len) for t in (k, v))
    cu_q = cu_k = None
    longest_q = longest_k = 0
    if cu is not None:
        # A document with no part here becomes an empty one. On the device: the host does not know the offsets.
        cu_q = cu.clamp(b.q_at, b.q_at + b.q_len + b.more) - b.q_at
        cu_k = cu.clamp(b.k_at, b.k_at + b.k_len) - b.k_at
        longest_q, longest_k = (min(o.max_seqlen, n) for n in (b.q_len + b.more, b.k_len))
    sinks = given.sink if b.sink else None
    rest = (
        *(k, v, cu_q, cu_k, given.alibi_slopes, None, sinks, given.seed, longest_q, longest_k, o.layout, 0, True),
        *(b.left, b.right, o.softmax_scale, o.softcap, o.dropout_p, o.deterministic),
    )
    return _Call(q, rest, place)


def _rows(t: Tensor, dim: int, b: Block) -> Tensor:
    """The block's queries of a tensor that has the rank's along ``dim``."""
    return _with_more(queries_of(t, dim, b), dim, b)


def queries_of(t: Tensor, dim: int, b: Block) -> Tensor:
    """The rank's queries of the block, without those of zeros that may follow."""
    return t.narrow(dim, b.q_start, b.q_len)


def _with_more(t: Tensor, dim: int, b: Block) -> Tensor:
    if not b.more:
        return t
    zeros = list(t.shape)
    zeros[dim] = b.more
    return torch.cat([t, t.new_zeros(zeros)], dim)


def empty_results(q: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """out and lse over no keys, wider than what a block gives: merging adds no rounding of its own."""
    batch = () if o.dims.batch is None else q.shape[:1]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wider(q.dtype))
    return out, q.new_full((*batch, q.shape[o.dims.heads], q.shape[o.dims.tokens]), -torch.inf, dtype=torch.float64)


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are added up: float32 for 16 bits, else float64."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def merge_block(
    out: Tensor, lse: Tensor, b: Block, part: Tensor, part_lse: Tensor, part_rest: Tensor, o: Options
) -> None:
    """Adds a block's results to the block's queries of ``out`` and ``lse``, in their dtype:

    share = sigmoid(part_lse - lse),  out' = out + share (part - out),  lse' = log(exp(lse) + exp(part_lse))

    The shares of both add up to 1 whatever lse's rounding, which exp(lse - lse') of each would not.
    """
    out = out.narrow(o.dims.tokens, b.q_start, b.q_len)
    lse = lse.narrow(-1, b.q_start, b.q_len)
    part_lse = part_lse.to(lse.dtype) + part_rest
    share = torch.sigmoid(part_lse - lse).nan_to_num_(nan=0.0)  # no keys in either: -inf - -inf
    out.addcmul_(part.to(out.dtype) - out, _of_heads(share.to(out.dtype), o))
    torch.logaddexp(lse, part_lse, out=lse)


def narrowed(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """lse in a narrower dtype, and what that rounding takes from it: ``lse`` and ``lse_rest`` of the raw ops."""
    narrow = lse.to(dtype)
    return narrow, (lse - narrow).nan_to_num_(nan=0.0).to(dtype)  # no keys: -inf - -inf


def unmerge_block(
    part: Tensor,
    part_lse: Tensor,
    part_rest: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    o: Options,
) -> tuple[Tensor, Tensor]:
    """The gradients of a block's own results, from those of what :func:`merge_block` made of all; each over the block's
    queries. With share = exp(part_lse - lse):

    dpart = share dout,  dpart_lse = share (dot(dout, part - out) + dlse)
    """
    # No keys at all: -inf - -inf.
    share = torch.exp((part_lse - lse) + (part_rest - lse_rest)).nan_to_num_(nan=0.0)
    wide_dout = dout.to(wider(dout.dtype))
    more = (wide_dout * (part.to(wide_dout.dtype) - out)).sum(-1)
    more = (more if o.layout == 1 else more.transpose(-1, -2)).to(lse.dtype)
    return (wide_dout * _of_heads(share, o)).to(dout.dtype), share * (more if dlse is None else more + dlse)


def _of_heads(t: Tensor, o: Options) -> Tensor:
    """A number for each query and head, as lse has them, to be multiplied with what has the layout of q."""
    return (t if o.layout == 1 else t.transpose(-1, -2)).unsqueeze(-1)


def forward_block(o: Options, b: Block, q: Tensor, k: Tensor, v: Tensor, given: Given) -> Results:
    """out, lse and lse_rest of the block's queries over its keys alone."""
    call = _call(o, b, q, k, v, given)
    out, *statistics = call_raw(raw.attention_forward.default, call.q, *call.rest, call.place)
    lse, lse_rest = (t.narrow(-1, 0, b.q_len) for t in statistics)
    return out.narrow(o.dims.tokens, 0, b.q_len), lse, lse_rest


def accepts_whole_results(o: Options, q: Tensor, v: Tensor, given: Given) -> bool:
    """Whether :func:`backward_block` may be given out and lse of the whole sequence, with their gradients.

    It may where the kernel takes delta = dot(dout, out) as it is. Other kernels, and the CPU's, correct the rounding of
    delta by a sum over the keys at hand, which lacks the keys of the other blocks. ``tests/ops/test_attention_parts``
    tests both kinds of GPU kernels that may: Hopper and portable ones.
    """
    extended = o.softcap > 0 or given.alibi_slopes is not None or given.seed is not None
    # To 128 every GPU has such a kernel; above, it depends on the shared memory of the GPU.
    return q.is_cuda and q.element_size() == 2 and not extended and max(q.shape[-1], v.shape[-1]) <= 128


def backward_block(
    o: Options,
    b: Block,
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
    given: Given,
    out: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
    want_sink: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of a block's q, k and v, and of the sinks if it counts them.

    ``out``, ``lse`` and ``lse_rest`` are the block's own results, ``dout`` and ``dlse`` their gradients. Where
    :func:`accepts_whole_results` is true they may also be the whole sequence's.
    """
    q, k, v = saved
    call = _call(o, b, q, k, v, given)
    tokens = o.dims.tokens
    dout, out = (_with_more(t, tokens, b) for t in (dout, out))
    lse, lse_rest = (_with_more(t, -1, b).contiguous() for t in (lse, lse_rest))
    dlse = None if dlse is None else _with_more(dlse, -1, b).contiguous()
    want_sink = want_sink and b.sink
    dq, dk, dv, _, dsink = call_raw(
        raw.attention_backward.default,
        *(dout, dlse, call.q, *call.rest, out, lse, False, want_sink, call.place, lse_rest),
    )
    return dq.narrow(tokens, 0, b.q_len), dk, dv, dsink if want_sink else None
