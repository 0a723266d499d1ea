"""The activation family: the fakes and the differentiable functions of gated and biased activations, made from their
schemas, and gelu and silu in plain torch operations for second derivatives."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from warpsmith._core import checks, dtensor
from warpsmith._core.library import (
    Gradients,
    Saved,
    Wants,
    _without_wrapper,
    call_raw,
    differentiable,
    is_batched,
    raw,
    register_fake,
)
from warpsmith.ops._quantize import FLOATS, check_dtype
from warpsmith.ops._shared_casts import Source, fake_rows, leave_cast


def gelu(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """gelu(x), exact or by tanh, and its derivative."""
    if tanh:
        twice = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(twice * x * (1 + 0.044715 * x * x))
        return x * s, s + x * s * (1 - s) * twice * (1 + 3 * 0.044715 * x * x)
    cdf = 0.5 * torch.erfc(-x / math.sqrt(2))
    return x * cdf, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def is_tanh(op: str, approximate: str) -> bool:
    """The flag of the raw ops for torch's argument ``approximate``."""
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        checks.refuse(op, "approximate", "'none' or 'tanh'", checks.quoted_text(approximate))
    return approximate == "tanh"


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(x) and its derivative."""
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


# f and its derivative in plain torch operations, for second derivatives: (x, *extra) -> (f(x), f'(x)).
WithDerivative = Callable[..., tuple[Tensor, Tensor]]

_Op = TypeVar("_Op", bound=Callable[..., Tensor])
# What the docstrings of a body's ops share, in the place of the sentence that names it.
_SHARED = re.compile(r"Arguments, result, gradients and errors are those of every (?:gated|biased) activation\.")
GATED = """\
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
BIASED = """\
Args:
    x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
        with adjacent columns are read where they are, others are copied once.
    bias: shape (F,), the dtype of ``x``, or float32 beside a 16-bit ``x``.
{argument}
Returns:
    A contiguous tensor of the shape and dtype of ``x``. The sum and all arithmetic are float32 (float64 for
    float64), rounded once. Under autocast nothing is cast.

Gradients for both inputs, and theirs in turn (composed of plain torch operations). The backward recomputes the
activation: nothing but the inputs is kept.

Deterministic: the sum over rows that is the gradient of the bias has a fixed order. Moves 2 elements of memory for
each of ``x`` forward and 3 backward.

Raises:
    ValueError: {error}a dtype, shape or device that does not fit."""


def documented(sections: str, argument: str = "", error: str = "") -> Callable[[_Op], _Op]:
    """Writes these sections into a docstring.

    Args:
        sections: ``GATED`` or ``BIASED``.
        argument: the line of a further argument.
        error: what else is refused.
    """
    text = sections.format(argument=argument and f"    {argument}\n", error=error and f"{error}, ")

    def write(op: _Op) -> _Op:
        op.__doc__ = _SHARED.sub(lambda _: text, inspect.cleandoc(op.__doc__ or ""))
        return op

    return write


def _check_inputs(op: str, gate: Tensor, up: Tensor | None) -> None:
    checks.float_dtype(op, "gate", gate)
    if up is not None:
        checks.float_dtype(op, "up", up)
        checks.alike(op, "up", up, gate)
    checks.at_least_one_dimension(op, "gate", gate)
    if up is None and checks.known(gate.shape[-1] % 2 != 0):
        expected = "an even last dimension when there is no up"
        checks.refuse(op, "gate", expected, f"shape {checks.shape_text(gate.shape)}")


def _output_shape(gate: Tensor, up: Tensor | None) -> tuple[int, ...]:
    return tuple(gate.shape) if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)


def _check_backward(op: str, dy: Tensor, gate: Tensor, up: Tensor | None) -> None:
    _check_inputs(op, gate, up)
    checks.float_dtype(op, "dy", dy)
    checks.alike(op, "dy", dy, gate, _output_shape(gate, up))


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


def gated(name: str, function: WithDerivative) -> Callable[..., Tensor]:
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

    def fake_in_place(dy: Tensor, gate: Tensor, up: Tensor | None, *_: Any) -> None:
        _check_backward(name + "_backward", dy, gate, up)

    register_fake((name, name + "_forward"), fake_forward)
    register_fake(name + "_backward", fake_backward)
    register_fake((name + "_backward_", name + "_backward_with_output_"), fake_in_place)

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
        math = checks.wide_dtype(gate)
        g, u = gate.chunk(2, -1) if up is None else (gate, up)
        value, derivative = function(g.to(math), *(getattr(saved, option) for option in options))
        dgate = (dy.to(math) * u.to(math) * derivative).to(gate.dtype)
        dup = (dy.to(math) * value).to(gate.dtype)
        return {"gate": torch.cat([dgate, dup], -1)} if up is None else {"gate": dgate, "up": dup}

    def plain(gate: Tensor, up: Tensor | None, inplace_backward: bool, *extra: Any) -> Tensor:
        math = checks.wide_dtype(gate)
        g, u = gate.chunk(2, -1) if up is None else (gate, up)
        return (function(g.to(math), *extra)[0] * u.to(math)).to(gate.dtype)

    build = functools.partial(
        differentiable,
        name,
        inference=getattr(raw, name + "_forward").default,
        rows=2,
        save=("gate", "up", "inplace_backward", *options),
        backward=backward,
        differentiable_backward=differentiable_backward,
        plain=plain,
    )
    call = build(forward=getattr(raw, name + "_forward").default)
    if hasattr(raw, name + "_fp8"):

        def fake_fp8(gate: Tensor, up: Tensor | None, inplace_backward: bool) -> tuple[Tensor, ...]:
            check_dtype(name, "gate", gate.dtype, FLOATS)
            y = fake_forward(gate, up, inplace_backward)
            return y, *fake_rows(y)

        register_fake(name + "_fp8", fake_fp8)
        raw_cast = _without_wrapper(getattr(raw, name + "_fp8").default)

        def cast(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
            _, data, scale, _ = call_raw(raw_cast, gate, up, False)
            return data, scale

        leave_cast(name, build, lambda inputs, _: Source(cast, *(t for t in inputs[:2] if t is not None), in_all=True))

    def checked(gate: Tensor, up: Tensor | None, inplace_backward: bool, *extra: Any) -> Tensor:
        if inplace_backward is not False:
            checks.flags(name, inplace_backward=inplace_backward)
        if inplace_backward:
            for argument, t in (("gate", gate), ("up", up)):
                if isinstance(t, Tensor) and t.requires_grad and t.is_leaf:
                    checks.refuse(name, argument, "a computed tensor for inplace_backward", "a leaf that requires grad")
            # A change of its local part is not seen by what else has saved a DTensor: it is left as it is.
            inplace_backward = not dtensor.is_dtensor(gate)
        return call(gate, up, inplace_backward, *extra)

    return checked


def _check_biased(op: str, x: Tensor, bias: Tensor) -> None:
    checks.float_dtype(op, "x", x)
    checks.at_least_one_dimension(op, "x", x)
    checks.parameter(op, "bias", bias, x, x.shape[-1:])


def biased(name: str, function: WithDerivative) -> Callable[..., Tensor]:
    """The function ``(x, bias, *extra) -> y`` of an op whose raw ops ``name``, ``name_forward`` and ``name_backward``
    take ``extra`` last."""
    raw_backward = getattr(raw, name + "_backward").default

    def fake_forward(x: Tensor, bias: Tensor, *extra: Any) -> Tensor:
        _check_biased(name, x, bias)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def fake_backward(
        dy: Tensor, x: Tensor, bias: Tensor, want_dx: bool, want_dbias: bool, *extra: Any
    ) -> tuple[Tensor, Tensor]:
        op = name + "_backward"
        _check_biased(op, x, bias)
        checks.float_dtype(op, "dy", dy)
        checks.alike(op, "dy", dy, x)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want_dx else x.new_empty((0,))
        return dx, bias.new_empty(bias.shape) if want_dbias else x.new_empty((0,))

    register_fake((name, name + "_forward"), fake_forward)
    register_fake(name + "_backward", fake_backward)

    options = [a.name for a in raw_backward._schema.arguments[5:]]

    def backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        extra = [getattr(saved, option) for option in options]
        dx, dbias = call_raw(raw_backward, dy, saved.x, saved.bias, wants.x, wants.bias, *extra)
        return {"x": dx, "bias": dbias}

    def differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        x, bias = saved.x, saved.bias
        math = checks.wide_dtype(x)
        derivative = function(x.to(math) + bias.to(math), *(getattr(saved, option) for option in options))[1]
        g = dy.to(math) * derivative
        return {"x": g.to(x.dtype), "bias": g.sum_to_size(bias.shape).to(bias.dtype)}

    def plain(x: Tensor, bias: Tensor, *extra: Any) -> Tensor:
        math = checks.wide_dtype(x)
        return function(x.to(math) + bias.to(math), *extra)[0].to(x.dtype)

    return differentiable(
        name,
        forward=getattr(raw, name + "_forward").default,
        rows=1,
        save=("x", "bias", *options),
        backward=backward,
        differentiable_backward=differentiable_backward,
        plain=plain,
    )
