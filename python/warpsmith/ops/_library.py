"""The one way in which a raw op becomes a differentiable function, in eager mode and under tracing.

Cost of an eager call was measured for every form (`docs/design/2026-11-20-eager-call.md`): a raw op costs what a native
torch op does, an ``autograd.Function`` with the combined ``forward(ctx, ...)`` less than any registered formula. So
eager takes those two, and ``torch.compile`` and ``torch.export`` see a second op of the public name that has a fake and
a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._load import load_library
from warpsmith.ops import _dtensor

load_library()

raw = torch.ops.warpsmith
_fragment = torch.library.Library("warpsmith", "FRAGMENT")

OUT_OF_MEMORY = "out of memory: "  # how csrc/torch/support/errors.h marks a failed allocation


# What a forward keeps for its backward: tensors, and any other values.
Saved = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]


def register_fake(name: str, fake: Callable) -> None:
    """Gives the op ``warpsmith::name`` its outputs' shapes, dtypes, devices and strides, for fake and meta tensors.

    The kernel of the Meta key does what ``torch.library.register_fake`` does for an op that creates no unbacked sizes,
    at a quarter of its cost at import (0.025 ms against 0.11 ms).
    """
    _fragment.impl(name, fake, "Meta")


def _without_wrapper(op: Callable) -> Callable:
    """What an ``OpOverload``'s Python ``__call__`` passes its arguments on to, 0.4 us cheaper. Not for traced code."""
    return getattr(op, "_op", op)


def _raise_out_of_memory(error: RuntimeError) -> None:
    if OUT_OF_MEMORY in str(error) and "cuda" in str(error):
        raise torch.OutOfMemoryError(str(error).splitlines()[0]) from None


def _explain(error: RuntimeError, name: str, names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Raises what says more than torch's error of a raw op, where there is such a thing."""
    _raise_out_of_memory(error)
    _dtensor.refuse(name, names, inputs)


def call_raw(op: Callable, *inputs: Any) -> Any:
    """Calls a raw op; a failed allocation on a GPU is ``torch.OutOfMemoryError``, as for torch's own ops."""
    try:
        return op(*inputs)
    except RuntimeError as error:
        _raise_out_of_memory(error)
        raise


def _register_formula(name: str, save: Callable, formula: Callable) -> None:
    # make_autograd_impl inspects classes for 0.5 ms an op: done at the first traced call, not at import.
    kernel: Callable | None = None

    def autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            from torch._library.autograd import Info, make_autograd_impl

            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                tensors, ctx.values = save(inputs, output)
                ctx.save_for_backward(*tensors)
                ctx.set_materialize_grads(False)  # zeros would cost kernels, and their share of every gradient

            kernel = make_autograd_impl(getattr(raw, name).default, Info(formula, setup_context))
        return kernel(keyset, *args, **kwargs)

    _fragment.impl(name, autograd, "Autograd", with_keyset=True)


class _NoSecondDerivative(torch.autograd.Function):
    """Gives gradients on, tied to the tensors that they were made of, so that their derivative raises.

    torch's ``once_differentiable`` looks at the incoming gradients alone: a loss has none that requires a gradient, and
    a penalty on its gradient would come out without the part of this op, in silence.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.name}: backward: expected one derivative, got a second: its gradient has none")


def _once(name: str, formula: Callable) -> Callable:
    """The formula of an op without second derivatives."""

    def once(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return formula(ctx, *grads)
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        with torch.no_grad():
            found = formula(ctx, *grads)
        made = [g for g in found if g is not None]
        refusing = iter(_NoSecondDerivative.apply(name, len(made), *made, *sources)) if made and sources else iter(made)
        return tuple(None if g is None else next(refusing) for g in found)

    return once


def differentiable(
    name: str,
    *,
    forward: Callable,
    inference: Callable | None = None,
    public: int = 1,
    rows: int = 0,
    save: Callable[[Sequence[Any], Any], Saved],
    backward: Callable[..., Sequence[Tensor | None]],
    differentiable_backward: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Callable:
    """Builds the eager and traced function of an op.

    name: of the traced op, whose schema and kernel live in C++ and equal those of ``forward``.
    forward(*inputs): the raw op; its first ``public`` outputs are the function's, the others are kept for backward.
    inference(*inputs): the raw op to call when no gradient is needed; gives the public outputs alone. Default:
        ``forward``.
    rows: how many of the first inputs hold rows that the op treats each by itself, as it does those of its public
        outputs; the other tensors are parameters. With DTensors each rank then computes its rows
        (``_dtensor.py``). 0: DTensors are refused.
    save(inputs, outputs): what backward needs: a tuple of tensors, and one of any other values.
    backward(needs, tensors, values, *grads): a gradient or None for each input; ``needs[i]`` says whether input i wants
        one. ``grads`` has one entry for each public output, None where that output was not used.
    differentiable_backward: the same in plain torch operations, used only when a derivative of the gradient may be
        taken (``create_graph=True``). Without it a second derivative is refused: a raw op has none, and silence would
        mean zero.
    """
    traced = getattr(raw, name).default
    names = [a.name for a in traced._schema.arguments]
    tensor_arguments = [i for i, a in enumerate(traced._schema.arguments) if "Tensor" in str(a.type)]

    one_of_several = public == 1 and len(traced._schema.returns) > 1
    eager_forward, eager_inference = _without_wrapper(forward), _without_wrapper(inference or forward)
    is_compiling, in_transform = torch.compiler.is_compiling, torch._C._are_functorch_transforms_active
    is_grad_enabled = torch.is_grad_enabled
    plain = _dtensor.PLAIN

    def public_part(outputs: Any) -> Any:
        if not isinstance(outputs, tuple):
            return outputs
        return outputs[0] if public == 1 else outputs[:public]

    def formula(ctx: Any, *grads: Tensor | None) -> Any:
        grads = grads[:public]
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        use = differentiable_backward if differentiable_backward is not None and torch.is_grad_enabled() else backward
        return tuple(use(ctx.needs_input_grad, ctx.saved_tensors, ctx.values, *grads))

    formula_of_grads: Callable = formula if differentiable_backward is not None else _once(name, formula)

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            try:
                outputs = eager_forward(*inputs)
            except RuntimeError as error:
                _explain(error, name, names, inputs)
                raise
            tensors, ctx.values = save(inputs, outputs)
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            return outputs[0] if one_of_several else public_part(outputs)

        backward = staticmethod(formula_of_grads)

    class ApplyInTransform(torch.autograd.Function):
        # torch.func wants forward and setup_context apart (17 us a call dearer); then every output is the function's.
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            tensors, ctx.values = save(inputs, output)
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)

        backward = staticmethod(formula_of_grads)

    Apply.__name__ = Apply.__qualname__ = name
    _register_formula(name, save, formula_of_grads)
    # Function.apply without its Python wrapper, which looks for torch.func transforms: `call` has done that (1.5 us).
    apply = super(torch.autograd.Function, Apply).apply

    def call(*inputs: Any) -> Any:
        if rows and type(inputs[0]) not in plain and _dtensor.is_dtensor(inputs[0]):
            return _dtensor.on_local_rows(name, names, rows, inputs, call, forward)
        if is_compiling():
            return public_part(traced(*inputs))
        if in_transform():
            return public_part(ApplyInTransform.apply(*inputs))
        if is_grad_enabled():
            for i in tensor_arguments:
                if getattr(inputs[i], "requires_grad", False):
                    return apply(*inputs)
        # torch refuses dual tensors in a Function without jvp; a raw op would drop them without a word.
        if forward_ad._current_level >= 0:
            return apply(*inputs)
        try:
            return public_part(eager_inference(*inputs))
        except RuntimeError as error:
            _explain(error, name, names, inputs)
            raise

    return call
