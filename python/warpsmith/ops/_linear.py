"""The linear family: fakes, gradients, and the same in plain torch operations."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from warpsmith import _C
from warpsmith._core import checks
from warpsmith._core.library import (
    Gradients,
    Saved,
    Wants,
    _without_wrapper,
    call_raw,
    differentiable,
    raw,
    register_fake,
)
from warpsmith._core.main_grad import PLAIN, Destination, adds_to_main_grad, check_main_grad, reduced_parameter
from warpsmith.ops._activation import gelu, silu
from warpsmith.ops.activation import geglu, reglu, swiglu

LINEAR, MLP, GATED = "linear", "mlp", "gated_linear"
ACTIVATIONS: tuple[str, ...] = _C.LINEAR_ACTIVATIONS  # by their numbers in the schemas; the first is none
NONE, RELU = 0, ACTIVATIONS.index("relu")


def activation_number(op: str, activation: str | None, none_allowed: bool = False) -> int:
    """The number of an activation in the schemas."""
    if activation is None and none_allowed:
        return NONE
    if not isinstance(activation, str) or activation not in ACTIVATIONS[1:]:
        known = ", ".join(map(repr, ACTIVATIONS[1:]))
        expected = f"one of {'None, ' * none_allowed}{known}"
        checks.refuse(op, "activation", expected, checks.quoted_text(activation))
    return ACTIVATIONS.index(activation)


def library_choice(problem: Mapping[str, Any]) -> dict[str, int]:
    """What cuBLASLt would run for a problem of ``warpsmith.plan`` on the current device: algorithm, tile and stages by
    its own numbers, split-K, and the bytes of its workspace. Empty without a device, or where it has nothing."""
    if not torch.cuda.is_available() or not hasattr(raw, "_cublas_lt_choice"):
        return {}
    sizes = (problem[name] for name in ("rows", "in_features", "out_features"))
    found = raw._cublas_lt_choice(torch.cuda.current_device(), *sizes)
    if found[0] < 0:
        return {}
    return dict(zip(("algorithm", "tile", "stages", "split_k", "workspace_bytes"), found, strict=True))


def cast_operands(*tensors: Any) -> Sequence[Any]:
    """As torch does for a product: under autocast the operands are cast to its dtype."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    ]


def under_autocast(op: str, **tensors: Tensor | None) -> Sequence[Any]:
    """:func:`cast_operands` of an op's arguments, the first of which must be a tensor."""
    first = next(iter(tensors.values()))
    if not isinstance(first, Tensor):
        checks.refuse_type(op, next(iter(tensors)), "a tensor", first)
    return cast_operands(*tensors.values())


_OWN = os.environ.get("WARPSMITH_OWN_PRODUCT") or "auto"
_MAY_BE_TORCHS = _OWN in ("auto", "0")  # else products are ours, too
_FEW = 1 << 20  # elements of an output whose bias may get its gradient by torch; 2 MB of bfloat16, not measured


# Multiplications of a layer from which on our product may pay (csrc/kernels/linear/product_config.h).
_OWN_PAYS = 3e10 if _OWN != "0" else float("inf")


# Asked of x, weight and bias. Torch itself refuses a weight of another dtype than x's, but under autocast, where both
# are cast, and a bias of another number of elements than the weight's rows, but one. float64 runs on the CPU alone.
# None: size and gradients decide. With a main_grad: in none of the modes in which `differentiable` goes other ways.
_MODES = (
    torch.is_grad_enabled,
    torch._C._is_any_autocast_enabled,
    torch._C._are_functorch_transforms_active,
    torch._C._is_tracing,
)
_is_plain_layer = _C.plain_layers(Tensor.__dlpack_c_exchange_api__, PLAIN, _MODES, _OWN_PAYS)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a card."""
    return torch.cuda.get_device_capability(device)


def may_pay(x: Tensor, *weights: Tensor) -> bool:
    """Whether our own product of a layer, or of several, may be faster than torch's."""
    products = x.numel() * sum(w.numel() for w in weights)  # times the width; of small layers nothing else is asked
    if products < _OWN_PAYS or not x.is_cuda or x.dtype.itemsize != 2 or products < _OWN_PAYS * x.size(-1):
        return False
    return capability(x.device) == (9, 0)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, by our own product where that may pay, for the forward of an autograd.Function."""
    if not may_pay(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    return call_raw(raw.linear_inference.default, x, None, weight, bias, None, 0)


def input_product(dy: Tensor, weight: Tensor) -> Tensor:
    """``dy.mm(weight)`` likewise, for its backward."""
    if not may_pay(dy, weight):
        return dy.mm(weight)
    wanted = True, False, False
    return call_raw(_raw_linear_backward, dy, None, weight, None, dy.new_empty(0), 0, None, *wanted)[0]


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """:func:`product` for each weight of one input, in one launch where that pays."""
    if len(weights) > 1 and may_pay(x, *weights):
        return call_raw(raw.linear_siblings.default, x, list(weights), list(biases))
    return [product(x, w, b) for w, b in zip(weights, biases, strict=True)]


def input_products(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of ``dy.mm(weight)``, likewise; rounded once then, and else for each weight."""
    if len(weights) > 1 and may_pay(dys[0], *weights):
        return call_raw(raw.linear_siblings_input_gradient.default, list(dys), list(weights))
    dx = input_product(dys[0], weights[0])
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(dy, weight)
    return dx


def is_torchs(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch's own layer, where it takes the operands, computes the same as ``linear`` without activation,
    residual and main_grad, in less of the host's time: products are torch's in both, but ours are the gradients of the
    bias of a large layer, of a weight that lies transposed, and of another dtype than the weight's."""
    if is_dynamo_compiling() or not _MAY_BE_TORCHS:
        return False
    found = _is_plain_layer(x, weight, bias)
    if found is not None:
        return found
    if may_pay(x, weight):
        return False
    if not torch.is_grad_enabled():
        return True
    if bias is not None and bias.requires_grad and x.numel() * weight.size(0) > _FEW * x.size(-1):
        return False
    return not weight.requires_grad or (weight.is_contiguous() and _wide_gradient(weight) is None)


# ---- the checks of csrc/bindings/linear.cpp and csrc/bindings/support/linear.h, in their order


def _check_x(op: str, x: Tensor) -> torch.dtype:
    dtype = checks.float_dtype(op, "x", x)
    checks.at_least_one_dimension(op, "x", x)
    return dtype


def _check_layer(op: str, like: Tensor, width: Any, names: Sequence[str], weight: Tensor, bias: Tensor | None) -> None:
    checks.float_dtype(op, names[0], weight)
    checks.same_dtype(op, names[0], weight, like)
    if weight.dim() != 2 or checks.known(weight.shape[1] != width):
        checks.refuse(op, names[0], f"shape (N, {width})", checks.shape_text(weight.shape))
    checks.same_device(op, names[0], weight, like)
    if bias is not None:
        checks.parameter(op, names[1], bias, like, weight.shape[:1])


def _check_rows(op: str, argument: str, t: Tensor, like: Tensor, columns: Any) -> None:
    checks.float_dtype(op, argument, t)
    checks.alike(op, argument, t, like, (*like.shape[:-1], columns))


# ---- fakes


def _new(like: Tensor, columns: Any, wanted: bool = True) -> Tensor:
    """Contiguous, with the leading dimensions of ``like``; without elements if it is not wanted."""
    return like.new_empty((*like.shape[:-1], columns) if wanted else (0,))


def _new_weight_gradient(weight: Tensor, like: Tensor, wanted: bool, dtype: torch.dtype | None = None) -> Tensor:
    """It lies as the weight does."""
    if not wanted:
        return like.new_empty((0,))
    if checks.known(weight.stride(0) == 1) and checks.known(weight.stride(1) > 1):
        return weight.new_empty_strided(weight.shape, (1, weight.shape[0]), dtype=dtype or weight.dtype)
    return weight.new_empty(weight.shape, dtype=dtype or weight.dtype)


def _new_bias_gradient(bias: Tensor | None, like: Tensor, wanted: bool) -> Tensor:
    return like.new_empty((0,)) if bias is None or not wanted else bias.new_empty(bias.shape)


def _fake_linear(a: Any) -> tuple[Tensor, Tensor]:
    x, weight = a.x, a.weight
    _check_x(LINEAR, x)
    _check_layer(LINEAR, x, x.shape[-1], ("weight", "bias"), weight, a.bias)
    if a.residual is not None:
        _check_rows(LINEAR, "residual", a.residual, x, weight.shape[0])
    checks.main_grad(LINEAR, a.main_grad, weight, transposed=True)
    keeps = a.activation != NONE and (a.activation != RELU or a.residual is not None)
    return _new(x, weight.shape[0]), _new(x, weight.shape[0], keeps)


def _fake_linear_backward(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx = _new(a.dy, a.weight.shape[1], a.want_dx)
    dweight = _new_weight_gradient(a.weight, a.dy, a.want_dweight, a.dweight_dtype)
    return dx, dweight, _new_bias_gradient(a.bias, a.dy, a.want_dbias)


def _fake_linear_backward_main_grad(a: Any) -> tuple[Tensor, Tensor]:
    checks.main_grad("linear_backward", a.main_grad, a.weight, transposed=True)
    return _new(a.dy, a.weight.shape[1], a.want_dx), _new_bias_gradient(a.bias, a.dy, a.want_dbias)


def _fake_siblings(a: Any) -> list[Tensor]:
    op, x, weights, biases = "linear_siblings", a.x, a.weights, a.biases
    _check_x(op, x)
    if not weights or len(weights) != len(biases):
        checks.refuse(op, "biases", "one for each of one or more weights", str(len(biases)))
    for weight, bias in zip(weights, biases, strict=True):
        _check_layer(op, x, x.shape[-1], ("weights", "biases"), weight, bias)
    return [_new(x, weight.shape[0]) for weight in weights]


def _fake_siblings_input_gradient(a: Any) -> Tensor:
    op, dys, weights = "linear_siblings_input_gradient", a.dys, a.weights
    if not weights or len(weights) != len(dys):
        checks.refuse(op, "dys", "one for each of one or more weights", str(len(dys)))
    for dy, weight in zip(dys, weights, strict=True):
        _check_layer(op, dys[0], weights[0].shape[-1], ("weights", "biases"), weight, None)
        _check_rows(op, "dys", dy, dys[0], weight.shape[0])
    return _new(dys[0], weights[0].shape[1])


def _fake_mlp(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = a.x
    _check_x(MLP, x)
    _check_layer(MLP, x, x.shape[-1], ("w1", "b1"), a.w1, a.b1)
    hidden = a.w1.shape[0]
    _check_layer(MLP, x, hidden, ("w2", "b2"), a.w2, a.b2)
    return _new(x, a.w2.shape[0]), _new(x, hidden, a.activation != RELU), _new(x, hidden)


def _fake_mlp_backward(a: Any) -> tuple[Tensor, ...]:
    of_first = _new_weight_gradient(a.w1, a.x, a.want_dw1), _new_bias_gradient(a.b1, a.x, a.want_db1)
    of_second = _new_weight_gradient(a.w2, a.x, a.want_dw2), _new_bias_gradient(a.b2, a.x, a.want_db2)
    return _new(a.x, a.x.shape[-1], a.want_dx), *of_first, *of_second


def _check_gated_main_grads(op: str, a: Any) -> None:
    checks.main_grad(op, a.gate_main_grad, a.gate_weight, _OF_MAIN_GRADS[0], transposed=True)
    checks.main_grad(op, a.up_main_grad, a.up_weight, _OF_MAIN_GRADS[1], transposed=True)


def _fake_gated(a: Any) -> tuple[Tensor, ...]:
    x, gate_weight, up_weight = a.x, a.gate_weight, a.up_weight
    _check_x(GATED, x)
    _check_layer(GATED, x, x.shape[-1], ("gate_weight", "gate_bias"), gate_weight, a.gate_bias)
    _check_layer(GATED, x, x.shape[-1], ("up_weight", "up_bias"), up_weight, a.up_bias)
    if checks.known(up_weight.shape[0] != gate_weight.shape[0]):
        expected = f"shape {checks.shape_text(gate_weight.shape)}"
        checks.refuse(GATED, "up_weight", expected, checks.shape_text(up_weight.shape))
    _check_gated_main_grads(GATED, a)
    return tuple(_new(x, gate_weight.shape[0]) for _ in range(3))


def _gated_bias_gradients(a: Any) -> tuple[Tensor, Tensor]:
    of_gate = _new_bias_gradient(a.gate_bias, a.x, a.want_dgate_bias)
    return of_gate, _new_bias_gradient(a.up_bias, a.x, a.want_dup_bias)


def _fake_gated_backward(a: Any) -> tuple[Tensor, ...]:
    of_gate = _new_weight_gradient(a.gate_weight, a.x, a.want_dgate_weight)
    of_up = _new_weight_gradient(a.up_weight, a.x, a.want_dup_weight)
    return _new(a.x, a.x.shape[-1], a.want_dx), of_gate, of_up, *_gated_bias_gradients(a)


def _fake_gated_backward_main_grads(a: Any) -> tuple[Tensor, ...]:
    _check_gated_main_grads("gated_linear_backward", a)
    return _new(a.x, a.x.shape[-1], a.want_dx), *_gated_bias_gradients(a)


for _name, _fake in (
    (("linear", "linear_forward"), _fake_linear),
    ("linear_inference", lambda a: _fake_linear(a)[0]),
    ("linear_backward", _fake_linear_backward),
    ("linear_backward_main_grad", _fake_linear_backward_main_grad),
    ("linear_siblings", _fake_siblings),
    ("linear_siblings_input_gradient", _fake_siblings_input_gradient),
    (("mlp", "mlp_forward"), _fake_mlp),
    ("mlp_inference", lambda a: _fake_mlp(a)[0]),
    ("mlp_backward", _fake_mlp_backward),
    (("gated_linear", "gated_linear_forward"), _fake_gated),
    ("gated_linear_inference", lambda a: _fake_gated(a)[0]),
    ("gated_linear_backward", _fake_gated_backward),
    ("gated_linear_backward_main_grads", _fake_gated_backward_main_grads),
):
    register_fake(_name, _fake, named=True)

# ---- in plain torch operations: forward-mode derivatives, and what second derivatives are taken of


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _activated(z: Tensor, activation: int) -> Tensor:
    name = ACTIVATIONS[activation]
    if name.startswith("gelu"):
        return functional.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"none": lambda t: t, "relu": torch.relu, "silu": functional.silu}[name](z)


def activated(z: Tensor, activation: str) -> Tensor:
    """f(z) by torch."""
    return _activated(z, ACTIVATIONS.index(activation))


def gated(gate: Tensor, up: Tensor, activation: str, *, inplace_backward: bool) -> Tensor:
    """f(gate) up by our ops."""
    if activation == "silu":
        return swiglu(gate, up, inplace_backward=inplace_backward)
    if activation == "relu":
        return reglu(gate, up, inplace_backward=inplace_backward)
    form = "tanh" if activation == "gelu_tanh" else "none"
    return geglu(gate, up, approximate=form, inplace_backward=inplace_backward)


def _plain_linear(*inputs: Any) -> Tensor:
    x, residual, weight, bias, _, activation, _ = inputs
    y = _activated(_layer(x, weight, bias), activation)
    return y if residual is None else y + residual


def _plain_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: int) -> Tensor:
    return _layer(_activated(_layer(x, w1, b1), activation), w2, b2)


def _plain_gated(*inputs: Any) -> Tensor:
    x, gate_weight, up_weight, gate_bias, up_bias, _, _, activation = inputs
    return _activated(_layer(x, gate_weight, gate_bias), activation) * _layer(x, up_weight, up_bias)


def _value_and_derivative(z: Tensor, activation: int, kept: Tensor) -> tuple[Tensor, Tensor]:
    """f(z) in the dtype of z, and f'(z) in float32 or wider. ``kept`` is what the forward saved: relu's sign is read
    there, since a z made again may round to the other side of 0."""
    wide = z.to(checks.wide_dtype(z))
    name = ACTIVATIONS[activation]
    if name == "none":
        return z, torch.ones_like(wide)
    if name == "relu":
        kept = kept.detach()
        return torch.where(kept <= 0, 0.0, z), (kept > 0).to(wide.dtype)
    value, derivative = silu(wide) if name == "silu" else gelu(wide, name == "gelu_tanh")
    return value.to(z.dtype), derivative


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _bias_gradient(dz: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else _rows(dz).sum(0).to(bias.dtype)


def _of_layer(dz: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of a layer's input, weight and bias."""
    return dz.matmul(weight), _rows(dz).t().mm(_rows(x)), _bias_gradient(dz, bias)


# ---- gradients


def _save_linear(inputs: Any, outputs: Any) -> dict[str, Any]:
    y, z = outputs
    of_relu = inputs.activation == RELU and inputs.residual is None
    return {
        # The weight's gradient needs x, and so do second derivatives through an activation.
        "x": inputs.x if inputs.weight.requires_grad or inputs.activation != NONE else None,
        "weight": inputs.weight,
        "bias": inputs.bias,
        "z": y if of_relu else z,
        "activation": inputs.activation,
        "batch_invariant": inputs.batch_invariant,
        "destination": Destination.of(LINEAR, inputs.main_grad),
    }


def _wide_gradient(weight: Tensor) -> torch.dtype | None:
    """float32, if the user wants that of a 16-bit weight: ``weight.grad_dtype``, which leaves alone have."""
    if weight.dtype.itemsize != 2 or not weight.is_leaf or getattr(weight, "grad_dtype", None) != torch.float32:
        return None
    return torch.float32


def _linear_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    x, weight, bias, z, activation = saved.x, saved.weight, saved.bias, saved.z, saved.activation
    main_grad = saved.destination.takes(wants.weight)
    gradients: dict[str, Tensor | None] = {"residual": dy}
    if main_grad is not None:
        wanted: tuple[bool, ...] = wants.x, wants.bias, saved.batch_invariant
        dx, dbias = call_raw(_raw_main_grad, dy, x, weight, bias, z, main_grad, activation, *wanted)
        dweight = saved.destination.nothing_for(weight)
    else:
        wide = _wide_gradient(weight) if wants.weight else None
        wanted = wants.x, wants.weight, wants.bias, saved.batch_invariant
        dx, dweight, dbias = call_raw(_raw_linear_backward, dy, x, weight, bias, z, activation, wide, *wanted)
    return gradients | {"x": dx, "weight": dweight, "bias": dbias}


def _refuse_second_derivative() -> NoReturn:
    checks.refuse(LINEAR, "main_grad", "None where a second derivative is taken", "a tensor")


def _linear_twice(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    if saved.destination.takes(wants.weight) is not None:
        _refuse_second_derivative()
    dz, x = dy, saved.x
    if saved.activation != NONE:
        derivative = _value_and_derivative(_layer(x, saved.weight, saved.bias), saved.activation, saved.z)[1]
        dz = (dy * derivative).to(dy.dtype)
    if x is None:  # the weight has no gradient
        return {"residual": dy, "x": dz.matmul(saved.weight), "bias": _bias_gradient(dz, saved.bias)}
    dx, dweight, dbias = _of_layer(dz, x, saved.weight, saved.bias)
    return {"residual": dy, "x": dx, "weight": dweight, "bias": dbias}


def _mlp_gradients(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    wanted = {n: getattr(wants, n) for n in ("x", "w1", "b1", "w2", "b2")}
    found = call_raw(
        _raw_mlp_backward,
        *(dy, saved.x, saved.w1, saved.b1, saved.w2, saved.b2, saved.z, saved.h, saved.activation),
        *wanted.values(),
    )
    return dict(zip(wanted, found, strict=True))


def _mlp_twice(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    h, derivative = _value_and_derivative(_layer(saved.x, saved.w1, saved.b1), saved.activation, saved.h)
    dh, dw2, db2 = _of_layer(dy, h, saved.w2, saved.b2)
    dx, dw1, db1 = _of_layer((dh * derivative).to(dy.dtype), saved.x, saved.w1, saved.b1)
    return {"x": dx, "w1": dw1, "b1": db1, "w2": dw2, "b2": db2}


_OF_GATED = ("x", "gate_weight", "up_weight", "gate_bias", "up_bias")
_OF_MAIN_GRADS = ("main_grads[0]", "main_grads[1]")


def check_main_grads(main_grads: Any, **given: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two places for the gradients of ``gated_linear``'s weights."""
    if not isinstance(main_grads, (tuple, list)) or len(main_grads) != 2:
        checks.refuse(GATED, "main_grads", "two tensors, or None", checks.value_text(main_grads))
    of_gate, of_up = main_grads
    for argument, main_grad, own, other in zip(
        _OF_MAIN_GRADS, main_grads, _OF_GATED[1:3], (None, of_gate), strict=True
    ):
        weight = given[own]
        others = {name: t for name, t in given.items() if name != own} | {_OF_MAIN_GRADS[0]: other}
        check_main_grad(GATED, main_grad, weight, argument, **others)  # type: ignore[arg-type]
    return of_gate, of_up


def _save_gated(inputs: Any, outputs: Any) -> dict[str, Any]:
    _, gate, up = outputs
    destinations = Destination.of(GATED, inputs.gate_main_grad), Destination.of(GATED, inputs.up_main_grad)
    of_inputs = {name: getattr(inputs, name) for name in (*_OF_GATED, "activation")}
    return of_inputs | {"gate": gate, "up": up, "of_gate": destinations[0], "of_up": destinations[1]}


def _gated_gradients(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    tensors = *(getattr(saved, n) for n in _OF_GATED), saved.gate, saved.up
    main_grads = saved.of_gate.takes(wants.gate_weight), saved.of_up.takes(wants.up_weight)
    if main_grads == (None, None):
        wanted = (getattr(wants, n) for n in _OF_GATED)
        found = call_raw(_raw_gated_backward, dy, *tensors, saved.activation, *wanted)
        return dict(zip(_OF_GATED, found, strict=True))
    others = wants.x, wants.gate_bias, wants.up_bias
    dx, *dbiases = call_raw(_raw_gated_main_grads, dy, *tensors, *main_grads, saved.activation, *others)
    weights = (saved.of_gate, saved.gate_weight), (saved.of_up, saved.up_weight)
    dweights = (
        None if to is None else destination.nothing_for(w)
        for to, (destination, w) in zip(main_grads, weights, strict=True)
    )
    return dict(zip(_OF_GATED, (dx, *dweights, *dbiases), strict=True))


def _gated_twice(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    if saved.of_gate.takes(wants.gate_weight) is not None or saved.of_up.takes(wants.up_weight) is not None:
        checks.refuse(GATED, "main_grads", "None where a second derivative is taken", "two tensors")
    x, gate_weight, up_weight, gate_bias, up_bias = (getattr(saved, n) for n in _OF_GATED)
    value, derivative = _value_and_derivative(_layer(x, gate_weight, gate_bias), saved.activation, saved.gate)
    dgate = (dy * _layer(x, up_weight, up_bias) * derivative).to(dy.dtype)
    dx, dgate_weight, dgate_bias = _of_layer(dgate, x, gate_weight, gate_bias)
    dx_up, dup_weight, dup_bias = _of_layer(dy * value, x, up_weight, up_bias)
    return dict(zip(_OF_GATED, (dx + dx_up, dgate_weight, dup_weight, dgate_bias, dup_bias), strict=True))


class _WithMainGrad(torch.autograd.Function):
    """The weight has a gradient. kept: bias, of which the backward reads the shape alone, main_grad, and the parameter
    of one that is reduced over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: tuple[Tensor | None, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            _refuse_second_derivative()
        x, weight = ctx.saved_tensors
        bias, main_grad, parameter = ctx.kept
        of_x, _, of_bias, _ = ctx.needs_input_grad
        if parameter is not None:
            adds_to_main_grad(LINEAR, parameter)
        add_to = _raw_main_grad if is_dynamo_compiling() else _add_to
        dx, dbias = call_raw(add_to, dy, x, weight, bias, dy, main_grad, NONE, of_x, of_bias, False)
        dweight = torch.zeros_like(weight) if parameter is None else None
        return dx if of_x else None, dweight, dbias if of_bias else None, None


_WithMainGrad.__name__ = _WithMainGrad.__qualname__ = LINEAR
_WithMainGrad._backward_cls.__name__ = _WithMainGrad._backward_cls.__qualname__ = f"{LINEAR}Backward"
_with_main_grad = super(torch.autograd.Function, _WithMainGrad).apply


def with_main_grad(x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor | None:
    """:func:`linear` with a main_grad where its product is torch's, in less of the host's time; else None."""
    if is_dynamo_compiling() or not _MAY_BE_TORCHS or forward_ad._current_level >= 0:
        return None
    if not _is_plain_layer(x, weight, bias, main_grad):
        return None
    return _with_main_grad(x, weight, bias, (bias, main_grad, reduced_parameter(LINEAR, main_grad, weight)))


_raw_linear_backward = raw.linear_backward.default
_raw_main_grad = raw.linear_backward_main_grad.default
_add_to = _without_wrapper(_raw_main_grad)
_raw_mlp_backward = raw.mlp_backward.default
_raw_gated_backward = raw.gated_linear_backward.default
_raw_gated_main_grads = raw.gated_linear_backward_main_grads.default

linear = differentiable(
    LINEAR,
    forward=raw.linear_forward.default,
    inference=raw.linear_inference.default,
    rows=2,
    save=_save_linear,
    backward=_linear_backward,
    differentiable_backward=_linear_twice,
    plain=_plain_linear,
)
mlp = differentiable(
    MLP,
    forward=raw.mlp_forward.default,
    inference=raw.mlp_inference.default,
    rows=1,
    save=("x", "w1", "b1", "w2", "b2", "z", "h", "activation"),
    backward=_mlp_gradients,
    differentiable_backward=_mlp_twice,
    plain=_plain_mlp,
)
gated_linear = differentiable(
    GATED,
    forward=raw.gated_linear_forward.default,
    inference=raw.gated_linear_inference.default,
    rows=1,
    save=_save_gated,
    backward=_gated_gradients,
    differentiable_backward=_gated_twice,
    plain=_plain_gated,
)
