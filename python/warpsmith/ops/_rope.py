"""rope and qk_norm_rope: checks for fake and meta tensors, in the words of csrc/bindings/rope.cpp, fakes, gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.checks import dtype_text, known, possible, refuse, shape_text
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake

# What is said beside where q and k seem to lie as transformers has them.
_HEADS_FIRST = "; q and k are (batch, tokens, heads, head_dim): transpose(1, 2) of (batch, heads, tokens, head_dim)"


def _check_inputs(op: str, a: Any) -> None:
    """Everything that does not depend on values, and the offset beside cos of a row for each token. a: the arguments of
    a raw op."""
    q, k, cos = a.q, a.k, a.cos
    dtype = checks.float_dtype(op, "q", q)
    _check_heads(op, q, k, a.cu_seqlens is not None)
    checks.same_dtype(op, "k", k, q)
    checks.same_device(op, "k", k, q)
    checks.dtype_beside(op, "cos", cos, dtype)
    checks.same_device(op, "cos", cos, q)
    _check_angles(op, q, cos)
    checks.alike(op, "sin", a.sin, cos)
    _check_positions(op, q, cos, a.cu_seqlens, a.offsets, a.position_offset)


def _check_heads(op: str, q: Tensor, k: Tensor, packed: bool) -> None:
    if packed and q.dim() != 3:
        refuse(op, "q", "shape (tokens, heads, head_dim) beside cu_seqlens", shape_text(q.shape))
    if q.dim() not in (3, 4):
        expected = "shape (batch, tokens, heads, head_dim) or (tokens, heads, head_dim)"
        refuse(op, "q", expected, shape_text(q.shape))
    same = k.dim() == q.dim() and not any(known(k.shape[i] != q.shape[i]) for i in range(q.dim()) if i != q.dim() - 2)
    if not same:
        heads_first = k.dim() == 4 and q.dim() == 4 and (*k.shape[:1], *k.shape[2:]) == (*q.shape[:1], *q.shape[2:])
        expected = f"the shape of q but for its heads, {shape_text(q.shape)}"
        refuse(op, "k", expected, shape_text(k.shape) + _HEADS_FIRST * heads_first)


def _check_angles(op: str, q: Tensor, cos: Tensor) -> None:
    if cos.dim() not in (2, 3):
        expected = "shape (positions, rotary_dim / 2) or (batch, tokens, rotary_dim)"
        refuse(op, "cos", expected, shape_text(cos.shape))
    rotary_dim = 2 * cos.shape[-1]
    if cos.dim() == 3:
        rotary_dim = cos.shape[-1]
        batch, tokens = (q.shape[0] if q.dim() == 4 else 1), q.shape[-3]
        if (known(cos.shape[0] != batch) and known(cos.shape[0] != 1)) or known(cos.shape[1] != tokens):
            got = shape_text(cos.shape) + _HEADS_FIRST * (q.dim() == 4 and cos.shape[1] == q.shape[2])
            refuse(op, "cos", f"shape ({batch} or 1, {tokens}, rotary_dim)", got)
        if known(rotary_dim % 2 != 0):
            refuse(op, "cos", "an even rotary dimension", shape_text(cos.shape))
    if known(rotary_dim > q.shape[-1]):
        got = f"{rotary_dim} of shape {shape_text(cos.shape)}"
        refuse(op, "cos", f"a rotary dimension of at most {q.shape[-1]}", got)


def _check_positions(
    op: str, q: Tensor, cos: Tensor, cu_seqlens: Tensor | None, offsets: Tensor | None, position_offset: Any
) -> None:
    if cos.dim() == 3:
        if cu_seqlens is not None:
            refuse(op, "cu_seqlens", "None beside cos of a row for each token", "a tensor")
        if offsets is not None:
            refuse(op, "position_offset", "0 beside cos of a row for each token", "a tensor")
        if known(position_offset != 0):
            refuse(op, "position_offset", "0 beside cos of a row for each token", str(position_offset))
        return
    entries = q.shape[0] if q.dim() == 4 else 1
    if cu_seqlens is not None:
        checks.offsets(op, "cu_seqlens", cu_seqlens, q)
        entries = cu_seqlens.shape[0] - 1
    if offsets is not None:
        if offsets.dtype not in (torch.int32, torch.int64):
            refuse(op, "position_offset", "int32 or int64", dtype_text(offsets.dtype))
        if offsets.dim() > 1 or (offsets.dim() == 1 and known(offsets.shape[0] != entries)):
            refuse(op, "position_offset", f"shape () or ({entries})", shape_text(offsets.shape))
        checks.same_device(op, "position_offset", offsets, q)


def _empty_heads(x: Tensor) -> Tensor:
    """A new tensor like ``x``, contiguous in the order in which tokens and heads of ``x`` lie."""
    tokens, heads = x.shape[-3], x.shape[-2]
    if possible(tokens > 1) and possible(heads > 1) and possible(x.stride(-2) > x.stride(-3)):
        return x.new_empty((*x.shape[:-3], heads, tokens, x.shape[-1])).transpose(-3, -2)
    return x.new_empty(x.shape)


def split_offset(op: str, position_offset: Any) -> tuple[Tensor | None, Any]:
    """``position_offset`` as the raw ops take it: a tensor or None, and a number."""
    if isinstance(position_offset, Tensor):
        return position_offset, 0
    checks.refuse_non_int64(op, "position_offset", position_offset, "an integer or a tensor of integers")
    return None, position_offset


def refuse_gradient_of_angles(op: str, cos: Tensor, sin: Tensor) -> None:
    """cos and sin have no gradient: one that wants it is refused, not given none."""
    for name, t in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and getattr(t, "requires_grad", False):
            refuse(op, name, "a tensor that requires no gradient", "one that does")


def no_heads(x: Tensor) -> Tensor:
    """``x`` without its heads: stands for a tensor that is absent or not wanted."""
    return x.narrow(-2, 0, 0)


def keys_or_none(op: str, q: Tensor, k: Tensor | None) -> Tensor:
    """``k`` as the raw ops take it."""
    if k is not None:
        return k
    if not isinstance(q, Tensor):
        checks.refuse_type(op, "q", "a tensor", q)
    if q.dim() < 2:
        refuse(op, "q", "shape (batch, tokens, heads, head_dim) or (tokens, heads, head_dim)", shape_text(q.shape))
    return no_heads(q)


# rope


def _fake_rope(a: Any) -> tuple[Tensor, Tensor]:
    _check_inputs("rope", a)
    return _empty_heads(a.q), _empty_heads(a.k)


register_fake(("rope", "rope_forward"), _fake_rope, named=True)
register_fake("rope_inplace", lambda a: _check_inputs("rope", a), named=True)

_raw_rope = raw.rope_forward.default
_call_raw_rope = partial(call_raw, _raw_rope)


def _positions(saved: Saved) -> tuple[Any, ...]:
    return saved.cu_seqlens, saved.offsets, saved.position_offset


def _turn_back(call: Callable, saved: Saved, wants: Wants, dq: Tensor | None, dk: Tensor | None) -> Gradients:
    """The same rotation by the negative angle."""
    want_q, want_k = wants.q and dq is not None, wants.k and dk is not None
    if not (want_q or want_k):
        return {}
    q = dq if want_q else no_heads(dk)  # type: ignore[arg-type]
    k = dk if want_k else no_heads(dq)  # type: ignore[arg-type]
    grads = call(q, k, saved.cos, saved.sin, saved.interleaved, *_positions(saved), not saved.inverse)
    return {"q": grads[0] if want_q else None, "k": grads[1] if want_k else None}


def _plain_rope(*inputs: Any) -> tuple[Tensor, Tensor]:
    from warpsmith.reference.rope import rope

    q, k, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse = inputs
    positions = {"cu_seqlens": cu_seqlens, "position_offset": position_offset if offsets is None else offsets}
    return rope(q, k, cos, -sin if inverse else sin, interleaved=interleaved, **positions)  # type: ignore[return-value]


# (q, k, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse) -> (q, k)
rotate: Callable = differentiable(
    "rope",
    forward=_raw_rope,
    public=2,
    save=("cos", "sin", "interleaved", "cu_seqlens", "offsets", "position_offset", "inverse"),
    backward=partial(_turn_back, _call_raw_rope),
    differentiable_backward=lambda *given: _turn_back(rotate, *given),
    plain=_plain_rope,
)


class _Written(torch.autograd.Function):
    """The gradient of one tensor that the caller has rotated in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *others: Any) -> Tensor:
        cu_seqlens, offsets, position_offset, inverse = others
        ctx.save_for_backward(cos, sin, cu_seqlens, offsets)
        ctx.values = interleaved, position_offset, inverse
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call = rotate if torch.is_grad_enabled() else _call_raw_rope
        cos, sin, cu_seqlens, offsets = ctx.saved_tensors
        interleaved, position_offset, inverse = ctx.values
        (dx,) = grads
        back = call(dx, no_heads(dx), cos, sin, interleaved, cu_seqlens, offsets, position_offset, not inverse)
        return back[0], *(None,) * 7


def rotate_inplace(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """One launch for both; then a node of the graph for each, because torch allows a function one output where the
    input that it writes to is a view, as q and k of one projection are."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            checks.refuse_type("rope", name, "a tensor", x)
        checks.overwritable("rope", name, x)
    in_graph = [torch.is_grad_enabled() and x.requires_grad for x in (q, k)]
    if any(in_graph):
        cos, sin, _, cu_seqlens, offsets = arguments[:5]
        kept = ("cos", cos), ("sin", sin), ("cu_seqlens", cu_seqlens), ("position_offset", offsets)
        for name, t in kept:
            checks.keepable("rope", name, t)
    with torch.no_grad():
        call_raw(raw.rope_inplace.default, q, k, *arguments)
    for x in (q, k):
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
    if in_graph[0]:
        q = _Written.apply(q, *arguments)
    if in_graph[1] and k.numel():
        k = _Written.apply(k, *arguments)
    return q, k


# qk_norm_rope


def _check_norm_inputs(op: str, a: Any) -> None:
    _check_inputs(op, a)
    checks.pair(op, a.q, a.q.shape[-1:], q_weight=a.q_weight, k_weight=a.k_weight)


def _fake_norm(a: Any) -> tuple[Tensor, Tensor]:
    _check_norm_inputs("qk_norm_rope", a)
    checks.refuse_non_eps("qk_norm_rope", a.eps)
    return _empty_heads(a.q), _empty_heads(a.k)


def _fake_norm_backward(a: Any) -> tuple[Tensor, ...]:
    op, q, k = "qk_norm_rope_backward", a.q, a.k
    _check_norm_inputs(op, a)
    for name, gradient, x in (("dq_out", a.dq_out, q), ("dk_out", a.dk_out, k)):
        checks.alike(op, name, gradient, x)
    return (
        _empty_heads(q) if a.want_dq else q.new_empty((0,)),
        _empty_heads(k) if a.want_dk else q.new_empty((0,)),
        a.q_weight.new_empty(a.q_weight.shape) if a.want_dq_weight else q.new_empty((0,)),
        a.k_weight.new_empty(a.k_weight.shape) if a.want_dk_weight else q.new_empty((0,)),
    )


register_fake(("qk_norm_rope", "qk_norm_rope_forward"), _fake_norm, named=True)
register_fake("qk_norm_rope_backward", _fake_norm_backward, named=True)

_NORM_ARGUMENTS = ("q", "k", "q_weight", "k_weight")


def _backward_norm(saved: Saved, wants: Wants, dq_out: Tensor | None, dk_out: Tensor | None) -> Gradients:
    q, k, weights = saved.q, saved.k, (saved.q_weight, saved.k_weight)
    of_q, of_k = dq_out is not None, dk_out is not None
    wanted = [wants.q and of_q, wants.k and of_k, wants.q_weight and of_q, wants.k_weight and of_k]
    if not any(wanted):
        return {}
    if not (wanted[0] or wanted[2]):  # then nothing of q is read
        q = dq_out = no_heads(q)
    if not (wanted[1] or wanted[3]):
        k = dk_out = no_heads(k)
    rest = (saved.cos, saved.sin, saved.eps, saved.interleaved, *_positions(saved))
    grads = call_raw(raw.qk_norm_rope_backward.default, dq_out, dk_out, q, k, *weights, *rest, *wanted)
    return {name: g for name, g, want in zip(_NORM_ARGUMENTS, grads, wanted, strict=True) if want}


def _differentiable_backward_norm(
    saved: Saved, wants: Wants, dq_out: Tensor | None, dk_out: Tensor | None
) -> Gradients:
    q, k = saved.q, saved.k
    math = checks.wide_dtype(q)
    gradients = [(no_heads(x) if g is None else g).to(math) for g, x in ((dq_out, q), (dk_out, k))]
    angles = (saved.cos.to(math), saved.sin.to(math), saved.interleaved)
    turned = rotate(*gradients, *angles, *_positions(saved), True)
    found: dict[str, Tensor] = {}
    for name, x, weight, g, given in (
        ("q", q, saved.q_weight, turned[0], dq_out),
        ("k", k, saved.k_weight, turned[1], dk_out),
    ):
        if given is None:
            continue
        wide = x.to(math)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + saved.eps)
        x_hat = wide * rstd
        if getattr(wants, name):
            weighted = g * weight.to(math)
            found[name] = (rstd * (weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True))).to(x.dtype)
        if getattr(wants, name + "_weight"):
            found[name + "_weight"] = (g * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    return found


def _plain_norm(*inputs: Any) -> tuple[Tensor, Tensor]:
    from warpsmith.reference.rope import qk_norm_rope

    *tensors, eps, interleaved, cu_seqlens, offsets, position_offset = inputs
    positions = {"cu_seqlens": cu_seqlens, "position_offset": position_offset if offsets is None else offsets}
    return qk_norm_rope(*tensors, eps=eps, interleaved=interleaved, **positions)


# (q, k, q_weight, k_weight, cos, sin, eps, interleaved, cu_seqlens, offsets, position_offset) -> (q, k)
norm_and_rotate: Callable = differentiable(
    "qk_norm_rope",
    forward=raw.qk_norm_rope_forward.default,
    public=2,
    save=(*_NORM_ARGUMENTS, "cos", "sin", "eps", "interleaved", "cu_seqlens", "offsets", "position_offset"),
    backward=_backward_norm,
    differentiable_backward=_differentiable_backward_norm,
    plain=_plain_norm,
)
