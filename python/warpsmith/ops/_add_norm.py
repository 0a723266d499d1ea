"""From the name of an op that adds, perhaps drops, and normalises: its fakes and its differentiable function.

The schemas of the four ops differ in what they need alone:
``op(x, residual, weight, [bias,] [seed, p,] eps[, weight_offset])`` with bias for layer_norm and weight_offset for
rms_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check, _norm
from warpsmith.ops._dropout import check_p, check_seed
from warpsmith.ops._library import Saved, call_raw, differentiable, raw, register_fake

Gradients = tuple[Tensor | None, ...]


def add_norm(op: str, *, layer: bool, dropout: bool) -> Callable:
    """Registers the fakes of an op and builds its function, of the arguments of the schema."""
    at_seed = 4 if layer else 3
    scalars = slice(at_seed + 1, None) if dropout else slice(at_seed, None)  # p, eps, weight_offset: what there is
    affine = 2 if layer else 1  # weight, and bias

    def check(name: str, inputs: Sequence[Any]) -> None:
        x, residual, weight = inputs[:3]
        _norm.check_inputs(name, x, weight, inputs[3] if layer else None, residual)
        if dropout:
            check_p(name, inputs[at_seed + 1])
            check_seed(name, inputs[at_seed], x)

    def fake_inference(*inputs: Any) -> tuple[Tensor, Tensor]:
        check(op, inputs)
        return _norm.new_output(inputs[0]), _norm.new_output(inputs[1])

    def fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
        statistics = 2 if layer else 1  # mean and rstd
        return *fake_inference(*inputs), *(_norm.new_statistics(inputs[0]) for _ in range(statistics))

    def fake_backward(dy: Tensor, dresidual_out: Tensor | None, s: Tensor, *others: Any) -> tuple[Tensor, ...]:
        name = op + "_backward"
        _norm.check_inputs(name, dy, others[0], others[1] if layer else None, s)
        if dresidual_out is not None:
            _norm.check_gradient(name, "dresidual_out", dresidual_out, s)
        want_dx, want_dresidual, *want_affine = others[-2 - affine :]
        seed = others[2 * affine] if dropout else None
        shared = seed is None and s.dtype == dy.dtype
        return (
            _norm.new_gradient(dy, want_dx or (shared and want_dresidual), dy),
            _norm.new_gradient(s, want_dresidual and not shared, dy),
            *(_norm.new_gradient(others[i], want, dy) for i, want in enumerate(want_affine)),
        )

    register_fake(op, fake_forward)
    register_fake(op + "_forward", fake_forward)
    register_fake(op + "_inference", fake_inference)
    register_fake(op + "_backward", fake_backward)
    raw_backward = getattr(raw, op + "_backward").default
    raw_inference = getattr(raw, op + "_inference").default

    def save(inputs: Sequence[Any], outputs: Any) -> Saved:
        seed = (inputs[at_seed],) if dropout else ()
        return (outputs[1], *inputs[2 : 2 + affine], *outputs[2:], *seed), (inputs[0].dtype, *inputs[scalars])

    def backward(
        needs: Sequence[bool], tensors: Any, values: Any, dy: Tensor | None, dresidual_out: Tensor | None
    ) -> Gradients:
        dtype, *numbers = values
        s = tensors[0]
        if dy is None:
            dy = torch.zeros_like(s, dtype=dtype)
        arguments = numbers[:1] if dropout else []  # p
        if not layer:
            arguments.append(numbers[-1])  # weight_offset
        wanted = needs[: 2 + affine]
        dx, dresidual, *others = call_raw(raw_backward, dy, dresidual_out, *tensors, *arguments, *wanted)
        shared = s.dtype == dtype and not (dropout and tensors[-1] is not None)
        grads = (dx, dx if shared else dresidual, *others)
        found = (g if want else None for g, want in zip(grads, wanted, strict=True))
        return *found, *(None,) * (len(needs) - len(wanted))

    def keep_factors(like: Tensor, seed: Tensor, p: float) -> Tensor:
        """What the op multiplies each element of x by: the sum of it and nothing, for an x of ones."""
        ones, zeros = torch.ones_like(like), torch.zeros_like(like)
        weights = (None,) * affine
        return call_raw(raw_inference, ones, zeros, *weights, seed, p, 0.0, *(() if layer else (0.0,)))[1]

    def differentiable_backward(
        needs: Sequence[bool], tensors: Any, values: Any, dy: Tensor | None, dresidual_out: Tensor | None
    ) -> Gradients:
        s, weight = tensors[:2]
        dtype, *numbers = values
        if dy is None:
            dy = torch.zeros_like(s, dtype=dtype)
        eps, *offset = numbers[1:] if dropout else numbers
        if layer:
            ds, *columns = _norm.layer_norm_gradients(dy, s, weight, eps)
        else:
            ds, *columns = _norm.rms_norm_gradients(dy, s, weight, eps, *offset)
        if dresidual_out is not None:
            ds = ds + dresidual_out
        dx = ds
        if dropout and tensors[-1] is not None:
            keep = keep_factors(ds, tensors[-1], numbers[0])
            dx = torch.where(keep != 0, ds * keep, torch.zeros_like(ds))
        found = [dx.to(dtype) if needs[0] else None, ds.to(s.dtype) if needs[1] else None]
        for i, summands in enumerate(columns):
            found.append(_norm.summed_to(summands, tensors[1 + i]) if needs[2 + i] else None)
        return *found, *(None,) * (len(needs) - len(found))

    return differentiable(
        op,
        forward=getattr(raw, op + "_forward").default,
        inference=raw_inference,
        public=2,
        rows=2,
        save=save,
        backward=backward,
        differentiable_backward=differentiable_backward,
    )


def check_call(op: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """All that an op with dropout refuses, before a seed is drawn: a refused call leaves the generator as it was."""
    if not all(isinstance(t, Tensor) for t in (x, residual)):
        return  # the dispatcher says so
    _norm.check_inputs(op, x, weight, bias, residual)
    if not eps >= 0:
        _check.refuse(op, "eps", "a number >= 0", str(eps))
