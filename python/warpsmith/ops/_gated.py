"""What the gated activations share: fakes, autograd and the in-place backward of ``y = f(gate) * up``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from warpsmith.ops import _check, _dtensor
from warpsmith.ops._library import Gradients, Saved, Wants, call_raw, differentiable, is_batched, raw, register_fake

# f and its derivative in plain torch operations, for second derivatives: (x, *extra) -> (f(x), f'(x)).
Function = Callable[..., tuple[Tensor, Tensor]]

_Op = TypeVar("_Op", bound=Callable[..., Tensor])
_SHARED = "Arguments, result, gradients and errors are those of every gated activation."
_SECTIONS = """\
Args:
    gate: shape (..., F), float32, float16, bfloat16, or float64 on the CPU; without ``up`` of shape (..., 2F) and
        holding ``[gate, up]`` along the last dimension, as one matrix product gives them. Any strides: rows that
        lie at one stride with adjacent columns are read where they are, others are copied once.
    up: of the shape, dtype and device of ``gate``, or None.
{argument}    inplace_backward: lets the backward write the gradients over ``gate`` and ``up``, whose values are
        lost by then. That saves their memory. Where they are not contiguous or share memory, and under
        ``torch.compile``, new tensors are made all the same. A second backward, and that of any other operation that
        kept those tensors, is refused by autograd. No tensor may be a leaf that requires a gradient.

Returns:
    A contiguous tensor of shape (..., F) and the dtype of ``gate``. Arithmetic is float32 (float64 for float64) and
    rounds once. Under autocast nothing is cast.

Gradients for both inputs, and theirs in turn (composed of plain torch operations). The backward recomputes the
activation: nothing but the inputs is kept, and the gradient of a packed input is written as one tensor.

Deterministic. Moves 3 elements of memory for each of ``y`` forward and 5 backward.

Raises:
    ValueError: a dtype, shape or device that does not fit, an odd last dimension without ``up``, {error}or a leaf with
        ``inplace_backward``."""


def documented(argument: str = "", error: str = "") -> Callable[[_Op], _Op]:
    """Writes the sections that gated activations share into a docstring, in the place of the sentence that names them.

    Args:
        argument: the line of a further argument.
        error: what else is refused.
    """
    sections = _SECTIONS.format(argument=argument and f"    {argument}\n", error=error and f"{error}, ")

    def write(op: _Op) -> _Op:
        op.__doc__ = inspect.cleandoc(op.__doc__ or "").replace(_SHARED, sections)
        return op

    return write


def _check_inputs(op: str, gate: Tensor, up: Tensor | None) -> None:
    _check.float_dtype(op, "gate", gate)
    if up is not None:
        _check.float_dtype(op, "up", up)
        _check.same_dtype(op, "up", up, gate)
        _check.same_shape(op, "up", up, gate.shape)
        _check.same_device(op, "up", up, gate)
    _check.at_least_one_dimension(op, "gate", gate)
    if up is None and _check.known(gate.shape[-1] % 2 != 0):
        expected = "an even last dimension when there is no up"
        _check.refuse(op, "gate", expected, f"shape {_check.shape_text(gate.shape)}")


def _output_shape(gate: Tensor, up: Tensor | None) -> tuple[int, ...]:
    return tuple(gate.shape) if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)


def _check_backward(op: str, dy: Tensor, gate: Tensor, up: Tensor | None) -> None:
    _check_inputs(op, gate, up)
    _check.float_dtype(op, "dy", dy)
    _check.same_dtype(op, "dy", dy, gate)
    _check.same_shape(op, "dy", dy, _output_shape(gate, up))
    _check.same_device(op, "dy", dy, gate)


def _is_plain_and_contiguous(t: Tensor) -> bool:
    # Fake, functional and batched tensors are not plain: a traced backward overwrites nothing. What has the negative
    # bit (`z.conj().imag`) does not hold its values.
    return type(t) is Tensor and t.is_contiguous() and not t.is_neg()


def may_overwrite(gate: Tensor, up: Tensor | None) -> bool:
    if not _is_plain_and_contiguous(gate):
        return False
    if up is None:
        return True
    if not _is_plain_and_contiguous(up):
        return False
    size = gate.numel() * gate.element_size()
    return abs(gate.data_ptr() - up.data_ptr()) >= size


def gradient_in_place_of(t: Tensor) -> Tensor:
    # The new version number makes a second backward that would read the old values an error, as after torch's own
    # in-place operations.
    torch.autograd.graph.increment_version(t)
    return t.detach()


def gated(name: str, function: Function) -> Callable[..., Tensor]:
    """The function ``(gate, up, inplace_backward, *extra) -> y`` of an op whose raw ops ``name``, ``name_forward``,
    ``name_backward`` and ``name_backward_`` take ``extra`` last."""
    raw_backward = getattr(raw, name + "_backward").default
    raw_backward_inplace = getattr(raw, name + "_backward_").default

    def fake_forward(gate: Tensor, up: Tensor | None, inplace_backward: bool, *extra: Any) -> Tensor:
        _check_inputs(name, gate, up)
        return gate.new_empty(_output_shape(gate, up))

    def fake_backward(
        dy: Tensor, gate: Tensor, up: Tensor | None, want_dgate: bool, want_dup: bool, *extra: Any
    ) -> tuple[Tensor, Tensor]:
        _check_backward(name + "_backward", dy, gate, up)
        dgate = gate.new_empty(gate.shape if want_dgate else (0,))
        dup = gate.new_empty(up.shape if up is not None and want_dup else (0,))
        return dgate, dup

    def fake_backward_inplace(dy: Tensor, gate: Tensor, up: Tensor | None, *_: Any) -> None:
        _check_backward(name + "_backward", dy, gate, up)

    def fake_backward_with_output(dy: Tensor, gate: Tensor, up: Tensor | None, *_: Any) -> None:
        _check_backward(name + "_backward", dy, gate, up)

    register_fake(name + "_backward_with_output_", fake_backward_with_output)
    register_fake(name, fake_forward)
    register_fake(name + "_forward", fake_forward)
    register_fake(name + "_backward", fake_backward)
    register_fake(name + "_backward_", fake_backward_inplace)

    options = [a.name for a in raw_backward._schema.arguments[5:]]

    def backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        gate, up = saved.gate, saved.up
        extra = [getattr(saved, option) for option in options]
        if saved.inplace_backward and not is_batched(dy) and may_overwrite(gate, up):
            call_raw(raw_backward_inplace, dy, gate, up, wants.gate, wants.up, *extra)
            dgate = gradient_in_place_of(gate) if wants.gate else None
            return {"gate": dgate, "up": gradient_in_place_of(up) if wants.up else None}
        dgate, dup = call_raw(raw_backward, dy, gate, up, wants.gate, wants.up, *extra)
        return {"gate": dgate, "up": dup}

    def differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        gate, up = saved.gate, saved.up
        math = torch.float64 if gate.dtype == torch.float64 else torch.float32
        g, u = gate.chunk(2, -1) if up is None else (gate, up)
        value, derivative = function(g.to(math), *(getattr(saved, option) for option in options))
        dgate = (dy.to(math) * u.to(math) * derivative).to(gate.dtype)
        dup = (dy.to(math) * value).to(gate.dtype)
        return {"gate": torch.cat([dgate, dup], -1)} if up is None else {"gate": dgate, "up": dup}

    def plain(gate: Tensor, up: Tensor | None, inplace_backward: bool, *extra: Any) -> Tensor:
        math = torch.float64 if gate.dtype == torch.float64 else torch.float32
        g, u = gate.chunk(2, -1) if up is None else (gate, up)
        return (function(g.to(math), *extra)[0] * u.to(math)).to(gate.dtype)

    call = differentiable(
        name,
        forward=getattr(raw, name + "_forward").default,
        rows=2,
        save=("gate", "up", "inplace_backward", *options),
        backward=backward,
        differentiable_backward=differentiable_backward,
        plain=plain,
    )

    def checked(gate: Tensor, up: Tensor | None, inplace_backward: bool, *extra: Any) -> Tensor:
        if inplace_backward is not False:
            _check.flags(name, inplace_backward=inplace_backward)
        if inplace_backward:
            for argument, t in (("gate", gate), ("up", up)):
                if isinstance(t, Tensor) and t.requires_grad and t.is_leaf:
                    _check.refuse(name, argument, "a computed tensor for inplace_backward", "a leaf that requires grad")
            # A change of its local part is not seen by what else has saved a DTensor: it is left as it is.
            inplace_backward = not _dtensor.is_dtensor(gate)
        return call(gate, up, inplace_backward, *extra)

    return checked
