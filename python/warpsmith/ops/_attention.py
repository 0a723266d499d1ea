"""The raw ops of attention and attention_varlen: fakes, which repeat the checks of the C++ binding, and gradients."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.checks import known, possible, refuse, shape_text
from warpsmith._core.dropout import check_seed, draw_seed
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake
from warpsmith.ops._linear import cast_operands

LAYOUTS = ("bshd", "bhsd", "thd")
_THD = 2
_MOST = 2.0**127  # of softmax_scale and softcap in float32: their products with log2(e) are finite
_SEED = 8  # its place among the inputs of the raw ops


class Dims(NamedTuple):
    """The positions of the dimensions of a tensor of heads; ``batch`` is None without a batch dimension."""

    rank: int
    batch: int | None
    tokens: int
    heads: int


def dims_of(layout: int, stacked: bool) -> Dims:
    more = int(stacked)
    if layout == _THD:
        return Dims(3 + more, None, 0, 1 + more)
    return Dims(4 + more, 0, 1, 2 + more) if layout == 0 else Dims(4 + more, 0, 2 + more, 1 + more)


def _layout_text(layout: int, count: int) -> str:
    several = f"{count}, " if count else ""
    if layout == _THD:
        return f"shape (tokens, {several}heads, head_dim)"
    if layout == 0:
        return f"shape (batch, tokens, {several}heads, head_dim)"
    return f"shape (batch, {several}heads, tokens, head_dim)"


def _check_rank(op: str, argument: str, t: Tensor, layout: int, count: int) -> None:
    dims = dims_of(layout, count > 0)
    if t.dim() != dims.rank or (count and known(t.shape[dims.heads - 1] != count)):
        refuse(op, argument, _layout_text(layout, count), shape_text(t.shape))


class Problem(NamedTuple):
    """The sizes of a problem. ``q``, ``k`` and ``v`` are (batch entries, tokens, heads, elements) of the tensors."""

    q: tuple
    k: tuple
    v: tuple
    full: tuple  # (batch, heads, seqlen_q, seqlen_k): the shape to which a bias broadcasts


def _sizes(t: Tensor, dims: Dims, heads: Any) -> tuple:
    return 1 if dims.batch is None else t.shape[0], t.shape[dims.tokens], heads, t.shape[-1]


def split_sizes(q: Tensor, k: Tensor | None, v: Tensor | None, layout: int, kv_heads: int) -> tuple:
    plain, stacked = dims_of(layout, False), dims_of(layout, True)
    if k is not None:
        dims = plain if v is not None else stacked
        of_k = _sizes(k, dims, k.shape[dims.heads])
        of_v = of_k if v is None else _sizes(v, plain, v.shape[plain.heads])
        return _sizes(q, plain, q.shape[plain.heads]), of_k, of_v
    if not kv_heads:
        return (_sizes(q, stacked, q.shape[stacked.heads]),) * 3
    of_k = _sizes(q, plain, kv_heads)
    return _sizes(q, plain, q.shape[plain.heads] - 2 * kv_heads), of_k, of_k


def _check_heads(op: str, q: Tensor, k: Tensor | None, v: Tensor | None, layout: int, kv_heads: int) -> tuple:
    checks.float_dtype(op, "q", q)
    if k is None and v is not None:
        refuse(op, "k", "a tensor beside v", "None")
    _check_rank(op, "q", q, layout, 3 if k is None and not kv_heads else 0)
    for name, t, count in (("k", k, 0 if v is not None else 2), ("v", v, 0)):
        if t is not None:
            checks.float_dtype(op, name, t)
            checks.same_dtype(op, name, t, q)
            _check_rank(op, name, t, layout, count)
            checks.same_device(op, name, t, q)
    if k is None and kv_heads:
        heads = q.shape[dims_of(layout, False).heads]
        if known(kv_heads < 0) or known(kv_heads > (heads - 1) // 2):
            refuse(op, "kv_heads", f"from 1 to {(heads - 1) // 2} of {heads} heads", str(kv_heads))
    sizes = of_q, of_k, of_v = split_sizes(q, k, v, layout, kv_heads)
    name_k = "q" if k is None else "k"
    name_v = name_k if v is None else "v"
    for name, what, got, expected in (
        (name_k, "batch entries", of_k[0], of_q[0]),
        (name_k, "elements a head", of_k[3], of_q[3]),
        (name_v, "batch entries", of_v[0], of_k[0]),
        (name_v, "tokens", of_v[1], of_k[1]),
        (name_v, "heads", of_v[2], of_k[2]),
    ):
        if known(got != expected):
            refuse(op, name, f"{expected} {what}", str(got))
    for name, width in (("q", of_q[3]), (name_v, of_v[3])):
        if known(width < 8) or known(width > 256) or known(width % 8 != 0):
            refuse(op, name, "8 to 256 elements a head, in steps of 8", str(width))
    if known(of_q[2] != 0) if known(of_k[2] == 0) else known(of_q[2] % of_k[2] != 0):
        refuse(op, name_k, f"a number of heads that divides {of_q[2]}", str(of_k[2]))
    return sizes


def _check_packed(op: str, q: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: Any, max_k: Any) -> Any:
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is None:
            refuse(op, name, "a tensor", "None")
            return None
        checks.offsets(op, name, cu, q)
    assert cu_q is not None
    assert cu_k is not None
    checks.same_shape(op, "cu_seqlens_k", cu_k, cu_q.shape)
    for name, length in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if known(length < 0):
            refuse(op, name, "an integer >= 0", str(length))
    return cu_q.shape[0] - 1


def _check_bias(op: str, bias: Tensor, q: Tensor, full: tuple) -> None:
    if bias.dtype != torch.bool:
        checks.dtype_beside(op, "bias", bias, q.dtype)
    fits = bias.dim() <= 4 and all(
        not (known(size != 1) and known(size != whole))
        for size, whole in zip(bias.shape, full[4 - bias.dim() :], strict=True)
    )
    if not fits:
        refuse(op, "bias", f"a shape that broadcasts to {shape_text(full)}", shape_text(bias.shape))
    checks.same_device(op, "bias", bias, q)


def _check_inputs(op: str, inputs: Sequence[Any], place: Sequence[Any] | None = None) -> Problem:
    """The checks of csrc/bindings/attention.cpp, in the same order, except those of the entries of cu_seqlens.
    ``inputs``: up to ``deterministic``; ``place``: ``dropout_place``."""
    q, k, v, cu_q, cu_k, alibi_slopes, bias, sink, seed, max_q, max_k, layout, kv_heads = inputs[:13]
    _, window_left, window_right, softmax_scale, softcap, dropout_p, _ = inputs[13:20]
    of_q, of_k, of_v = _check_heads(op, q, k, v, layout, kv_heads)
    batch, seqlen_q, seqlen_k = of_q[0], of_q[1], of_k[1]
    if cu_q is not None or cu_k is not None:
        batch, seqlen_q, seqlen_k = _check_packed(op, q, cu_q, cu_k, max_q, max_k), max_q, max_k
    full = batch, of_q[2], seqlen_q, seqlen_k
    for size in (window_left, window_right):
        if known(size < -1):
            refuse(op, "window_size", "two integers >= -1", str(size))
    if softmax_scale is not None and not -math.inf < softmax_scale < math.inf:
        refuse(op, "softmax_scale", "a finite number", f"{softmax_scale:f}")
    if not 0 <= softcap < math.inf:
        refuse(op, "softcap", "a finite number >= 0", f"{softcap:f}")
    if q.dtype != torch.float64:
        scale = of_q[3] ** -0.5 if softmax_scale is None else abs(softmax_scale)
        if scale > _MOST:
            refuse(op, "softmax_scale", "at most 2^127 in size", f"{softmax_scale:g}")
        if softcap > _MOST:
            refuse(op, "softcap", "at most 2^127", f"{softcap:g}")
        if softcap > 0 and scale / softcap > _MOST:
            refuse(op, "softcap", "at least 2^-127 of softmax_scale", f"{softcap:g}")
    if alibi_slopes is not None:
        shape = full[:2] if alibi_slopes.dim() == 2 else full[1:2]
        checks.exactly(op, "alibi_slopes", alibi_slopes, torch.float32, shape, q)
    if bias is not None:
        _check_bias(op, bias, q, full)
    if sink is not None:
        checks.parameter(op, "sink", sink, q, full[1:2])
    if drops(op, dropout_p):
        check_seed(op, seed, q)
    if place is not None:
        _check_place(op, place, cu_q is not None, full)
    return Problem(of_q, of_k, of_v, full)


def _check_place(op: str, place: Sequence[Any], packed: bool, full: tuple) -> None:
    def refuse_place(expected: str, got: Any) -> None:
        refuse(op, "dropout_place", expected, str(got))

    if len(place) != 5:
        refuse_place("5 integers", len(place))
    for i in place:
        if known(i < 0) or known(i >= 2**31):
            refuse_place("integers from 0 to 2147483647", i)
    first_query, queries, first_key, first_head, heads = place
    if packed and (first_query or first_key):
        refuse_place("0 as first query and first key with cu_seqlens", first_query or first_key)
    if first_query % 16:
        refuse_place("a multiple of 16 as first query", first_query)
    if first_key % 32:
        refuse_place("a multiple of 32 as first key", first_key)
    _, heads_q, seqlen_q, seqlen_k = full
    if known(queries < first_query + seqlen_q):
        refuse_place(f"at least {first_query + seqlen_q} queries", queries)
    if known(first_key + seqlen_k >= 2**31):
        refuse_place("keys that end at 2147483647 at most", first_key + seqlen_k)
    if known(heads < first_head + heads_q):
        refuse_place(f"at least {first_head + heads_q} heads", heads)


def _op_name(inputs: Sequence[Any]) -> str:
    return "attention" if inputs[3] is None and inputs[4] is None else "attention_varlen"


def _empty_heads(t: Tensor, layout: int, stacked: bool, one: bool, heads: Any, width: Any) -> Tensor:
    """A new tensor like ``t``, contiguous, with tokens and heads in the order that they have in the memory of ``t``.
    With ``one``, without the dimension that stacks q, k and v."""
    dims = dims_of(layout, stacked)
    batch = [] if dims.batch is None else [t.shape[0]]
    several = [t.shape[dims.heads - 1]] if stacked and not one else []
    tokens = t.shape[dims.tokens]
    sizes = possible(tokens > 1) and possible(t.shape[dims.heads] > 1)
    head_major = sizes and possible(t.stride(dims.heads) > t.stride(dims.tokens))
    # Allocate in memory order, then view in the order of the layout.
    if head_major:
        made = t.new_empty((*batch, *several, heads, tokens, width))
        return made if layout == 1 else made.movedim(-2, len(batch))
    made = t.new_empty((*batch, tokens, *several, heads, width))
    return made.movedim(len(batch), -2) if layout == 1 else made


def _lse_shape(problem: Problem, layout: int) -> tuple:
    batch, tokens, heads, _ = problem.q
    return (heads, tokens) if layout == _THD else (batch, heads, tokens)


def _fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, layout, kv_heads = inputs[0], inputs[1], inputs[11], inputs[12]
    # The dispatcher leaves out a last argument that equals its default.
    problem = _check_inputs(_op_name(inputs), inputs, *inputs[20:])
    out = _empty_heads(q, layout, k is None and not kv_heads, True, problem.q[2], problem.v[3])
    lse, lse_rest = (q.new_empty(_lse_shape(problem, layout), dtype=checks.wide_dtype(q)) for _ in range(2))
    return out, lse, lse_rest


def _fake_backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    inputs, (out, lse, want_dbias, want_dsink) = rest[:20], rest[20:24]
    # The dispatcher leaves out last arguments that equal their defaults.
    place, lse_rest = (*rest[24:], None, None)[:2]
    q, k, v, layout, kv_heads = *inputs[:3], inputs[11], inputs[12]
    op = _op_name(inputs) + "_backward"
    problem = _check_inputs(op, inputs, place)
    plain = dims_of(layout, False)
    for name, t in (("dout", dout), ("out", out)):
        checks.same_dtype(op, name, t, q)
        _check_rank(op, name, t, layout, 0)
        expected = *problem.q[:3], problem.v[3]
        if any(known(a != b) for a, b in zip(_sizes(t, plain, t.shape[plain.heads]), expected, strict=True)):
            refuse(op, name, "the shape of the output", shape_text(t.shape))
        checks.same_device(op, name, t, q)
    for name, t in (("lse", lse), ("dlse", dlse), ("lse_rest", lse_rest)):
        if t is not None:
            checks.exactly(op, name, t, checks.wide_dtype(q), _lse_shape(problem, layout), q)

    def like(t: Tensor | None, stacked: bool) -> Tensor:
        if t is None:
            return q.new_empty((0,))
        return _empty_heads(t, layout, stacked, False, t.shape[dims_of(layout, stacked).heads], t.shape[-1])

    bias, sink = inputs[6], inputs[7]
    return (
        like(q, k is None and not kv_heads),
        like(k, v is None),
        like(v, False),
        bias.new_empty(bias.shape) if want_dbias else q.new_empty((0,)),
        sink.new_empty(sink.shape) if want_dsink else q.new_empty((0,)),
    )


register_fake(("attention", "attention_forward"), _fake)
register_fake("attention_backward", _fake_backward)

_raw_backward = raw.attention_backward.default


_ARGUMENTS = [a.name for a in raw.attention_forward.default._schema.arguments]


def _backward(saved: Saved, wants: Wants, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
    if dout is None:
        dout = torch.zeros_like(saved.out)
    *inputs, place = (getattr(saved, argument) for argument in _ARGUMENTS)
    # The raw op knows a bias by its address, and one without elements has none. A traced size of 0 is an int too.
    empty_bias = wants.bias and isinstance(saved.bias.numel(), int) and saved.bias.numel() == 0
    wants_bias = wants.bias and not empty_bias
    dq, dk, dv, dbias, dsink = call_raw(
        _raw_backward, dout, dlse, *inputs, saved.out, saved.lse, wants_bias, wants.sink, place, saved.lse_rest
    )
    return {"q": dq, "k": dk, "v": dv, "bias": torch.empty_like(saved.bias) if empty_bias else dbias, "sink": dsink}


attend = differentiable(
    "attention",
    forward=raw.attention_forward.default,
    public=2,
    save=(*_ARGUMENTS, "out", "lse", "lse_rest"),
    backward=_backward,
    title=_op_name,
)


def under_autocast(op: str, q: Tensor, *others: Tensor | None) -> Sequence[Any]:
    """Casts the operands under autocast, as torch does for ``scaled_dot_product_attention``."""
    if not isinstance(q, Tensor):
        raise TypeError(f"{op}: q: expected a tensor, got {type(q).__name__}")
    return cast_operands(q, *others)


def refuse_gradient(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors that require a gradient, for inputs that have none: silence would leave ``.grad`` empty."""
    for name, t in tensors.items():
        if t is not None and torch.is_grad_enabled() and getattr(t, "requires_grad", False):
            refuse(op, name, "a tensor that requires no gradient", "one that does")


def check_window(op: str, causal: bool, window_size: Sequence[int] | None) -> tuple[Any, Any]:
    """Returns (left, right); -1: no limit."""
    if window_size is None:
        return -1, 0 if causal else -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        refuse(op, "window_size", "two integers >= -1, or None", checks.value_text(window_size))
    left, right = window_size
    for name, size in (("window_left", left), ("window_right", right)):
        if not checks.is_integer(size):
            refuse(op, "window_size", "two integers >= -1, or None", checks.value_text(window_size))
        checks.refuse_non_int64(op, name, size)
    return left, 0 if causal and right != 0 and right >= -1 else right


def kv_heads_of(op: str, k: Tensor | None, v: Tensor | None, kv_heads: int | None) -> int:
    """``kv_heads`` as the raw ops take it, 0 for None. Refuses v without k, which no packing has."""
    if k is None and v is not None:
        refuse(op, "k", "a tensor beside v", "None")
    if kv_heads is None:
        return 0
    checks.refuse_non_int64(op, "kv_heads", kv_heads, "an integer >= 1, or None")
    if k is not None:
        refuse(op, "kv_heads", "None beside k: q holds its own heads alone", str(kv_heads))
    if kv_heads < 1:
        refuse(op, "kv_heads", "an integer >= 1, or None", str(kv_heads))
    return kv_heads


def check_numbers(op: str, softmax_scale: float | None, softcap: float) -> None:
    if softmax_scale is not None:
        checks.refuse_non_number(op, "softmax_scale", softmax_scale, "a number or None")
    checks.refuse_non_number(op, "softcap", softcap)


def drops(op: str, dropout_p: float) -> bool:
    """Whether there is dropout. Checks ``dropout_p`` before a seed is drawn: bad input must not move the generator."""
    checks.refuse_non_number(op, "dropout_p", dropout_p, "a number in [0, 1)")
    if not 0 <= dropout_p < 1:
        refuse(op, "dropout_p", "a number in [0, 1)", f"{dropout_p:f}")
    return dropout_p > 0


def with_seed(op: str, *inputs: Any) -> tuple[Any, ...]:
    """The inputs of :data:`attend`, with a seed from torch's generator where there is dropout without one. The seed is
    drawn after all checks: a call that is refused must not move the generator."""
    if not drops(op, inputs[18]) or inputs[_SEED] is not None:
        return inputs
    if not all(t is None or isinstance(t, Tensor) for t in inputs[:_SEED]):
        return inputs  # which the raw op refuses
    problem = _check_inputs(op, inputs)
    if not torch.compiler.is_compiling():
        for name, cu, total, longest in zip(
            ("q", "k"), inputs[3:5], (problem.q[1], problem.k[1]), problem.full[2:], strict=True
        ):
            if cu is not None and cu.device.type == "cpu":
                _check_offsets(op, name, cu.tolist(), total, longest)
    return *inputs[:_SEED], draw_seed(inputs[0]), *inputs[_SEED + 1 :]


def _check_offsets(op: str, name: str, cu: list[int], total: int, longest: int) -> None:
    """The checks of the entries of cu_seqlens, which the C++ binding makes on the CPU."""
    if cu[0] != 0:
        refuse(op, f"cu_seqlens_{name}", "0 as the first offset", str(cu[0]))
    for i, (begin, end) in enumerate(pairwise(cu)):
        if end < begin or end > total:
            expected = f"offsets that never fall, of at most {total} tokens"
            refuse(op, f"cu_seqlens_{name}", expected, f"{end} after {begin} at index {i + 1}")
        if end - begin > longest:
            refuse(op, f"max_seqlen_{name}", f"at least {end - begin}, the length of sequence {i}", str(longest))


def choice(op: str, argument: str, value: Any, allowed: Sequence[str]) -> int:
    if not isinstance(value, str) or value not in allowed:
        refuse(op, argument, "one of " + ", ".join(allowed), checks.value_text(value))
    return allowed.index(value)
