"""A gated activation and the linear layer that reads it, as one step of autograd that keeps nothing between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpsmith._core.library import call_raw, is_batched, raw
from warpsmith.ops import _norm_linears
from warpsmith.ops._activation import gradient_in_place_of, may_overwrite
from warpsmith.ops._linear import input_product, product


def fits(gate: Tensor, up: Tensor, weight: Tensor) -> bool:
    """Whether :func:`activated_linear` may stand for the two ops: as for the norm, and the backward may overwrite gate
    and up, both of which get a gradient."""
    own = all(t.requires_grad and not t.is_leaf for t in (gate, up))
    return own and gate.shape == up.shape and _norm_linears.fits(gate, up, weight) and may_overwrite(gate, up)


class _ActivatedLinear(torch.autograd.Function):
    """Keeps gate, up and the weight. The backward of the activation makes its output again, over the gradient that it
    has read, and writes the gradients over gate and up: one activation more is written."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, op: str, extra: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.op, ctx.extra = op, extra
        h = call_raw(getattr(raw, op + "_forward").default, gate, up, True, *extra)
        return product(h, weight, None)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        if twice or is_batched(dout):
            with torch.enable_grad():
                h = getattr(raw, ctx.op).default(gate, up, False, *ctx.extra)
                out = torch.nn.functional.linear(h, weight)
            wanted = [t for t in (gate, up, weight) if t.requires_grad]
            dgate, dup, *rest = torch.autograd.grad(out, wanted, dout, create_graph=twice)
            return dgate, dup, rest[0] if rest else None, None, None
        rows = dout.reshape(-1, dout.shape[-1])
        h = input_product(rows, weight).view(gate.shape)
        call_raw(getattr(raw, ctx.op + "_backward_with_output_").default, h, gate, up, *ctx.extra)
        dweight = rows.t().mm(h.view(-1, h.shape[-1])) if ctx.needs_input_grad[2] else None
        return gradient_in_place_of(gate), gradient_in_place_of(up), dweight, None, None


def activated_linear(gate: Tensor, up: Tensor, weight: Tensor, op: str, *extra: Any) -> Tensor:
    """``h @ weight.T``, h what the gated activation ``op`` makes of gate and up (..., F), with its last arguments;
    weight (D, F). Nothing but these is kept, and the backward overwrites gate and up: a second one is refused. Second
    derivatives are composed of torch operations."""
    return _ActivatedLinear.apply(gate, up, weight, op, extra)
