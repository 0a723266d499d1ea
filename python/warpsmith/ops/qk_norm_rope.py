from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check, _rotary
from warpsmith.ops._library import Saved, call_raw, differentiable, raw, register_fake
from warpsmith.ops.rope import rotate

_OP = "qk_norm_rope"


def _check_weight(op: str, argument: str, weight: Tensor, q: Tensor) -> None:
    dtype = _check.float_dtype(op, argument, weight)
    half = q.dtype.itemsize == 2
    if dtype != q.dtype and not (half and dtype == torch.float32):
        expected = _check.dtype_text(q.dtype) + (" or float32" if half else "")
        _check.refuse(op, argument, expected, _check.dtype_text(dtype))
    _check.same_shape(op, argument, weight, q.shape[-1:])
    _check.same_device(op, argument, weight, q)


def _check_inputs(
    op: str, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Any
) -> None:
    _rotary.check_inputs(op, q, k, cos, sin, *positions)
    _check_weight(op, "q_weight", q_weight, q)
    _check.same_dtype(op, "k_weight", k_weight, q_weight)
    _check_weight(op, "k_weight", k_weight, q)


def _fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    *positions: Any,
) -> tuple[Tensor, Tensor]:
    _check_inputs(_OP, q, k, q_weight, k_weight, cos, sin, positions)
    return _rotary.empty_heads(q), _rotary.empty_heads(k)


def _fake_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    offsets: Tensor | None,
    position_offset: Any,
    want_dq: bool,
    want_dk: bool,
    want_dq_weight: bool,
    want_dk_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = _OP + "_backward"
    _check_inputs(op, q, k, q_weight, k_weight, cos, sin, (cu_seqlens, offsets, position_offset))
    for name, gradient, x in (("dq_out", dq_out, q), ("dk_out", dk_out, k)):
        _check.same_dtype(op, name, gradient, x)
        _check.same_shape(op, name, gradient, x.shape)
        _check.same_device(op, name, gradient, x)
    return (
        _rotary.empty_heads(q) if want_dq else q.new_empty((0,)),
        _rotary.empty_heads(k) if want_dk else q.new_empty((0,)),
        q_weight.new_empty(q_weight.shape) if want_dq_weight else q.new_empty((0,)),
        k_weight.new_empty(k_weight.shape) if want_dk_weight else q.new_empty((0,)),
    )


register_fake("qk_norm_rope", _fake)
register_fake("qk_norm_rope_forward", _fake)
register_fake("qk_norm_rope_backward", _fake_backward)

_raw_backward = raw.qk_norm_rope_backward.default


def _save(inputs: Sequence[Any], outputs: Any) -> Saved:
    q, k, q_weight, k_weight, cos, sin, eps, interleaved, cu_seqlens, offsets, position_offset = inputs
    return (q, k, q_weight, k_weight, cos, sin, cu_seqlens, offsets), (eps, interleaved, position_offset)


def _no_heads(x: Tensor) -> Tensor:
    return x.narrow(-2, 0, 0)


def _backward(
    needs: Sequence[bool], tensors: Any, values: Any, dq_out: Tensor | None, dk_out: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight, cos, sin, cu_seqlens, offsets = tensors
    eps, interleaved, position_offset = values
    of_q, of_k = dq_out is not None, dk_out is not None
    wants = [needs[0] and of_q, needs[1] and of_k, needs[2] and of_q, needs[3] and of_k]
    if not any(wants):
        return (None,) * 11
    if not (wants[0] or wants[2]):  # then nothing of q is read
        q = dq_out = _no_heads(q)
    if not (wants[1] or wants[3]):
        k = dk_out = _no_heads(k)
    rest = (cos, sin, eps, interleaved, cu_seqlens, offsets, position_offset)
    grads = call_raw(_raw_backward, dq_out, dk_out, q, k, q_weight, k_weight, *rest, *wants)
    return *(g if want else None for g, want in zip(grads, wants, strict=True)), *(None,) * 7


def _differentiable_backward(
    needs: Sequence[bool], tensors: Any, values: Any, dq_out: Tensor | None, dk_out: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight, cos, sin, cu_seqlens, offsets = tensors
    eps, interleaved, position_offset = values
    math = torch.float64 if q.dtype == torch.float64 else torch.float32
    if dq_out is None and dk_out is None:
        return (None,) * 11
    gradients = [_no_heads(x) if g is None else g for g, x in ((dq_out, q), (dk_out, k))]
    turned = rotate(
        gradients[0].to(math),
        gradients[1].to(math),
        cos.to(math),
        sin.to(math),
        interleaved,
        cu_seqlens,
        offsets,
        position_offset,
        True,
    )
    inputs: list[Tensor | None] = []
    weights: list[Tensor | None] = []
    for i, (x, weight, g, given) in enumerate(((q, q_weight, turned[0], dq_out), (k, k_weight, turned[1], dk_out))):
        want_dx, want_dweight = needs[i] and given is not None, needs[2 + i] and given is not None
        wide = x.to(math)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x_hat = wide * rstd
        weighted = g * weight.to(math) if want_dx else g
        dx = rstd * (weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True)) if want_dx else None
        inputs.append(None if dx is None else dx.to(x.dtype))
        weights.append((g * x_hat).sum_to_size(weight.shape).to(weight.dtype) if want_dweight else None)
    return *inputs, *weights, *(None,) * 7


_qk_norm_rope = differentiable(
    "qk_norm_rope",
    forward=raw.qk_norm_rope_forward.default,
    public=2,
    save=_save,
    backward=_backward,
    differentiable_backward=_differentiable_backward,
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    position_offset: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    r"""RMS normalisation of each head of queries and keys, and their rotary position embedding, in one pass.

    .. math:: q \mapsto R\left(\frac{q}{\sqrt{\operatorname{mean}(q^2) + \epsilon}} \, w_q\right), \qquad
        k \mapsto R\left(\frac{k}{\sqrt{\operatorname{mean}(k^2) + \epsilon}} \, w_k\right)

    over the last dimension, where :math:`R` is :func:`warpsmith.rope`. Nothing is rounded in between.

    Args:
        q: shape (B, S, Hq, D), or (T, Hq, D) for one sequence or packed ones; float32, float16, bfloat16, or float64 on
            the CPU; strides as for :func:`warpsmith.rope`.
        k: as ``q``, with any number of heads.
        q_weight, k_weight: shape (D,), both of the dtype of ``q``, or float32 beside a 16-bit one.
        cos, sin, interleaved, cu_seqlens, position_offset: as for :func:`warpsmith.rope`.
        eps: added to the mean square, >= 0.

    Returns:
        (q, k): new tensors, contiguous in the order in which tokens and heads of the input lie. Sums and arithmetic are
        float32 (float64 for float64). Under autocast nothing is cast.

    Gradients for ``q``, ``k``, ``q_weight`` and ``k_weight``, and theirs in turn; the second derivative is composed of
    plain torch operations. The inputs are kept; the reciprocal roots are computed again.

    Deterministic: every sum has a fixed order, those of the weights' gradients too. Moves 2 elements of memory for each
    of ``q`` and ``k`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape, device or eps that does not fit; a position without a row of ``cos``, as for
            :func:`warpsmith.rope`. Where only a CUDA device knows such a position, the rotated elements of its token
            become NaN, and the weights' gradients with them.

    Source: Henry et al., Query-Key Normalization for Transformers, 2020, with RMS normalisation and RoPE as in Qwen3.

    Example:
        >>> import torch, warpsmith
        >>> rotary, w = warpsmith.nn.RotaryEmbedding(64, max_positions=16), torch.ones(64)
        >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)
        >>> q, k = warpsmith.qk_norm_rope(q, k, w, w, rotary.cos, rotary.sin)
        >>> q.square().mean(-1).allclose(torch.ones(2, 16, 8))
        True
    """
    _rotary.refuse_gradient_of_angles(_OP, cos, sin)
    offsets, offset = _rotary.split_offset(_OP, position_offset)
    q_out, k_out = _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved, cu_seqlens, offsets, offset)
    return q_out, k_out
