"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith._core import checks
from warpsmith._core.dropout import draw_seed
from warpsmith.distributed.agreement import agree_on_call
from warpsmith.distributed.context.blocks import KEY_STEP, QUERY_STEP, Options
from warpsmith.distributed.context.modes import ContextGroup, InBlocks, context_group, ulysses
from warpsmith.distributed.context.sequence import check_sharding, chunks_of
from warpsmith.ops import _attention

_OP = "context_parallel_attention"
_MODES = ("all_gather", "ring", "ulysses")


class _Call(NamedTuple):
    """The arguments that decide what a mode can do."""

    mode: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    cu_seqlens: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    seed: Tensor | None
    return_lse: bool


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mode: str = "all_gather",
    process_group: ProcessGroup | None = None,
    sharding: str = "zigzag",
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    layout: str = "bshd",
    seed: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention within a sequence whose tokens lie on several ranks, as :func:`warpsmith.attention` gives it for the
    whole.

    .. math:: \mathrm{out}_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} \, v_j

    over the keys j of all ranks that query i sees. Each rank gives its tokens (:func:`shard_sequence`) and gets the
    result of its own queries.

    ============ ================================================ ===================================================
    mode         what travels                                     what it takes
    ============ ================================================ ===================================================
    all_gather   forward: keys and values to all ranks; backward: memory for all keys and values, in the backward also
                 the same, and their gradients back, added in     for the wider sums of their gradients
                 rank order
    ring         keys and values from rank to rank, beside the    memory for the keys and values of two ranks
                 computation; in the backward their gradients too
    ulysses      q, k, v and out: each rank computes all tokens   a number of ranks that divides the heads of q and
                 of its share of the heads                        of k
    ============ ================================================ ===================================================

    ============================== ============ ============ =========
    mask                           all_gather   ring         ulysses
    ============================== ============ ============ =========
    causal, windows, sink, softcap yes          yes          yes
    alibi_slopes                   causal       no           yes
    cu_seqlens                     yes          no windows   yes
    dropout                        chunks of 16 chunks of 32 yes
    dropout with cu_seqlens        no           no           yes
    ============================== ============ ============ =========

    Args:
        q: this rank's queries, shape (B, S / N, H, D) for N ranks. Dtypes, strides and D as for
            :func:`warpsmith.attention`.
        k: this rank's keys, shape (B, S / N, Hk, D): the same tokens.
        v: this rank's values, shape (B, S / N, Hk, Dv).
        mode: "all_gather", "ring" or "ulysses".
        process_group: the ranks that share the sequence. Default: all. A world of one is fine.
        sharding: how :func:`shard_sequence` has cut the sequence. "zigzag" gives the ranks the same work under a causal
            mask.
        dropout_p: as for :func:`warpsmith.attention`. The ranks drop the weights that one rank with all tokens would
            drop with the same seed, in every mode. A chunk (S / N tokens, half of them with zigzag) must have a
            multiple of 16 tokens in mode all_gather and of 32 in mode ring.
        seed: two int64 on the device of ``q``, which determine the dropout mask; the same on all ranks. None: each rank
            draws one from torch's default generator of that device, and that of rank 0 goes to all.
        sink: shape (H,), the same on all ranks. Its gradient is the part of this rank, as a weight's is.
        alibi_slopes: as for :func:`warpsmith.attention`; the same on all ranks.
        cu_seqlens: int32, shape (documents + 1,), the same on all ranks: the offsets of the documents in the whole
            sequence, for ``layout="thd"``. A document may lie on several ranks.
        max_seqlen: no document is longer. Needed with ``cu_seqlens``.
        causal, window_size, softmax_scale, softcap, return_lse, deterministic, layout: as for
            :func:`warpsmith.attention`. Positions count in the whole sequence.

    Returns:
        out of this rank's queries, of the dtype of ``q``; or (out, lse), lse in float32 (float64 for float64). Shapes
        and autocast as for :func:`warpsmith.attention`.

    Gradients for ``q``, ``k``, ``v`` and ``sink``, of out and of lse: those of the sum of all ranks' losses. Second
    derivatives are refused.

    Numbers: what several blocks give for one query or key has the dtype of ``q`` and is added in float32 (float64 for
    float32 and float64), then rounded once. ulysses has no such sums.
    The backward of ring makes the results of its blocks again, except on a GPU for 16-bit heads of up to 128 elements
    without softcap and dropout, whose kernels take those of the whole sequence.

    Under ``torch.compile`` a world of one is part of the graph, for every length; on several ranks the call is a graph
    break and runs as it is.

    Deterministic: every sum has a fixed order, in every mode. Modes differ from each other in rounding. The dropout
    mask is a function of ``seed``, batch entry, head, query and key, whatever the mode and the number of ranks.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a dtype, shape or number that does not fit, a group without this rank, a mask that the mode cannot
            do (with the reason), or ranks whose calls differ in a size, an option, ``return_lse`` or in whether
            gradients are needed. The ranks compare their calls before they exchange tensors, so a mistake of one rank
            is an error of all, not a hang. In groups of NCCL, where the host would have to wait for the device, a rank
            compares only calls whose sizes and options are new to it, or that it refuses: where another rank has made
            its own call before, both wait for the group's timeout.

    Source: the ring is that of Liu et al., Ring Attention with Blockwise Transformers, 2023; zigzag that of
    ring-flash-attention; ulysses that of Jacobs et al., DeepSpeed Ulysses, 2023.

    Example:
        >>> import torch, warpsmith
        >>> from warpsmith.distributed import context_parallel_attention, shard_sequence
        >>> q, k, v = (shard_sequence(torch.randn(2, 64, 4, 32)) for _ in range(3))
        >>> context_parallel_attention(q, k, v, causal=True).shape  # on 4 ranks: (2, 16, 4, 32)
        torch.Size([2, 64, 4, 32])
    """
    place = context_group(_OP, process_group, sharding)
    attend = _attend if place.ranks == 1 else _attend_on_ranks
    return attend(
        *(place, q, k, v, mode, causal, window_size, softmax_scale, softcap, dropout_p, alibi_slopes, sink),
        *(return_lse, deterministic, layout, seed, cu_seqlens, max_seqlen),
    )


def _attend(
    place: ContextGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: str,
    causal: bool,
    window_size: Sequence[int] | None,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    return_lse: bool,
    deterministic: bool,
    layout: str,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor | tuple[Tensor, Tensor]:
    refusal: Exception | None = None
    facts: dict[str, str] = {}
    try:
        which = _attention.choice(_OP, "layout", layout, _attention.LAYOUTS)
        _attention.choice(_OP, "mode", mode, _MODES)
        check_sharding(_OP, place.sharding)
        # The raw op would refuse deterministic when keys are on their way, and nobody takes them.
        checks.flags(_OP, causal=causal, return_lse=return_lse, deterministic=deterministic)
        checks.tensors(_OP, q=q, k=k, v=v)
        checks.tensors(_OP, True, cu_seqlens=cu_seqlens, alibi_slopes=alibi_slopes, sink=sink, seed=seed)
        _attention.check_numbers(_OP, softmax_scale, softcap)
        checks.refuse_non_number(_OP, "dropout_p", dropout_p, "a number in [0, 1)")
        left, right = _attention.check_window(_OP, causal, window_size)
        q, k, v = _attention.under_autocast(_OP, q, k, v)
        dropout_p = dropout_p if _attention.drops(_OP, dropout_p) else 0.0
        numbers = softmax_scale, softcap, deterministic, 0 if max_seqlen is None else max_seqlen, dropout_p, place.ranks
        call = _Call(
            mode, q, k, v, Options(which, left, right, *numbers), cu_seqlens, alibi_slopes, sink, seed, return_lse
        )
        _attention.refuse_gradient(_OP, alibi_slopes=alibi_slopes)
        _check_packing(call, max_seqlen)
        _check_tensors(call)
        _check_mode(call, place)
        facts = _facts(call, place) if place.ranks > 1 else {}
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        refusal = error
    agree_on_call(_OP, place.group, facts, refusal, "give all ranks the same sizes and options")

    tensors = q, k, v, sink, cu_seqlens, alibi_slopes, _seed(call, place)
    if mode == "ulysses" or place.ranks == 1:
        out, lse = ulysses(*tensors, call.options, place, return_lse)
    else:
        out, lse = InBlocks.apply(*tensors, call.options, place, mode)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


# Tracing would compare the ranks' calls step by step, and break at each collective.
_attend_on_ranks: Any = torch._disable_dynamo(_attend)  # type: ignore[attr-defined]


def _seed(call: _Call, place: ContextGroup) -> Tensor | None:
    """The seed of all ranks, None without dropout. A collective if none is given."""
    if call.options.dropout_p == 0:
        return None
    if call.seed is not None:
        return call.seed
    seed = draw_seed(call.q)  # on every rank, so that generators that were in the same state stay so
    if place.ranks > 1:
        dist.broadcast(seed, 0 if place.group is None else dist.get_global_rank(place.group, 0), place.group)
    return seed


def _check_packing(call: _Call, max_seqlen: Any) -> None:
    if call.cu_seqlens is None:
        if max_seqlen is not None:
            checks.refuse(_OP, "max_seqlen", "None without cu_seqlens", checks.value_text(max_seqlen))
        return
    if call.options.layout != _attention.LAYOUTS.index("thd"):
        checks.refuse(_OP, "layout", "thd with cu_seqlens", _attention.LAYOUTS[call.options.layout])
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int) or max_seqlen < 1:
        checks.refuse(_OP, "max_seqlen", "an integer >= 1 with cu_seqlens", str(max_seqlen))


def _check_tensors(call: _Call) -> None:
    """What the op itself would refuse, and what it would not."""
    q, k, o, cu = call.q, call.k, call.options, call.cu_seqlens
    inputs = (
        *(q, k, call.v, cu, cu, call.alibi_slopes, None, call.sink, call.seed, o.max_seqlen, o.max_seqlen),
        *(o.layout, 0, True, o.left, o.right, o.softmax_scale, o.softcap, o.dropout_p, o.deterministic),
    )
    problem = _attention._check_inputs(_OP, inputs)
    if problem.k[1] != problem.q[1]:
        checks.refuse(_OP, "k", f"{problem.q[1]} tokens, as q has", str(problem.k[1]))


def _check_mode(call: _Call, place: ContextGroup) -> None:
    q, k, o, mode = call.q, call.k, call.options, call.mode
    tokens, chunks = q.shape[o.dims.tokens], len(chunks_of(place.rank, place.ranks, place.sharding))
    if place.ranks > 1 and tokens % chunks:
        got = f"{tokens}: pad the sequence to a multiple of {place.ranks * chunks}, or take sharding='contiguous'"
        checks.refuse(_OP, "q", "an even number of tokens of each rank for sharding zigzag", got)
    if mode == "ulysses":
        for name, t in (("q", q), ("k", k)):
            if t.shape[o.dims.heads] % place.ranks:
                got = f"{t.shape[o.dims.heads]}: take mode='all_gather' or 'ring', or fewer ranks"
                checks.refuse(_OP, name, f"a number of heads that {place.ranks} ranks divide, in mode ulysses", got)
    if o.dropout_p > 0 and place.ranks > 1 and mode != "ulysses":
        _check_dropout(call, place, tokens // chunks)
    if call.alibi_slopes is not None and (mode == "ring" or (mode == "all_gather" and o.right != 0)):
        reason = f"None in mode {mode}" + (" without causal=True" if mode == "all_gather" else "")
        checks.refuse(
            _OP,
            "alibi_slopes",
            f"{reason} (the op counts distances from where a call's last query meets its last key)",
            "a tensor: take mode='ulysses'",
        )
    if mode == "ring" and call.cu_seqlens is not None and (o.left >= 0 or o.right > 0):
        reason = "where a document's window ends in a block depends on offsets that only the device knows"
        got = f"({o.left}, {o.right}): take mode='all_gather' or 'ulysses'"
        checks.refuse(_OP, "window_size", f"None with cu_seqlens in mode ring ({reason})", got)


def _check_dropout(call: _Call, place: ContextGroup, chunk: int) -> None:
    mode, step = call.mode, QUERY_STEP if call.mode == "all_gather" else KEY_STEP
    if call.cu_seqlens is not None:
        reason = "the mask counts within a document, which may begin anywhere in a rank's tokens"
        got = f"{call.options.dropout_p}: take mode='ulysses'"
        checks.refuse(_OP, "dropout_p", f"0 with cu_seqlens in mode {mode} ({reason})", got)
    if chunk % step:
        several = place.ranks * len(chunks_of(place.rank, place.ranks, place.sharding)) * step
        got = f"{chunk}: pad the sequence to a multiple of {several}, or take mode='ulysses'"
        checks.refuse(_OP, "q", f"chunks of a multiple of {step} tokens for dropout in mode {mode}", got)


def _facts(call: _Call, place: ContextGroup) -> dict[str, str]:
    """What must be the same on all ranks, by argument. All that decides which collectives run is part of it."""
    o, tensors = call.options, {"q": call.q, "k": call.k, "v": call.v}
    optional = {"cu_seqlens": call.cu_seqlens, "sink": call.sink, "alibi_slopes": call.alibi_slopes}
    if o.dropout_p > 0:
        optional["seed"] = call.seed
    wanted = [name for name, t in tensors.items() if torch.is_grad_enabled() and t.requires_grad]
    if call.mode != "ulysses":  # one backward gives the gradients of all
        with_sink = torch.is_grad_enabled() and call.sink is not None and call.sink.requires_grad
        wanted = ["q, k or v"] if wanted or with_sink else []
    return {
        "mode": call.mode,
        "sharding": place.sharding,
        "layout": _attention.LAYOUTS[o.layout],
        **{name: _text(t) for name, t in tensors.items()},
        "window_size": f"({o.left}, {o.right})",
        "softmax_scale": str(o.softmax_scale),
        "softcap": str(o.softcap),
        "dropout_p": str(o.dropout_p),
        "deterministic": str(o.deterministic),
        "return_lse": str(bool(call.return_lse)),
        **{name: "None" if t is None else _text(t) for name, t in optional.items()},
        "max_seqlen": str(o.max_seqlen or None),
        "requires_grad": ", ".join(wanted) or "none",
    }


def _text(t: Tensor) -> str:
    return f"{checks.dtype_text(t.dtype)} {checks.shape_text(t.shape)}"
