"""The one way in which a raw op becomes a differentiable function, in eager mode and under tracing.

Cost of an eager call was measured for every form (`docs/design/house.md`): a raw op costs what a native
torch op does, an ``autograd.Function`` with the combined ``forward(ctx, ...)`` less than any registered formula. So
eager takes those two, and ``torch.compile`` and ``torch.export`` see a second op of the public name that has a fake and
a formula.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from operator import itemgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpsmith._core import checks, dtensor
from warpsmith._core.load import load_library

load_library()

raw = torch.ops.warpsmith
_fragment = torch.library.Library("warpsmith", "FRAGMENT")

# The names under which a backward finds what an eager forward returned beyond the schema's outputs: a tensor, kept as
# autograd keeps tensors (an activation checkpoint drops it and makes it again), and an object.
MADE, STATE = "made", "state"
OUT_OF_MEMORY = "out of memory: "  # how csrc/bindings/support/errors.h marks a failed allocation


# What a backward gets and gives. `saved` has an attribute for each kept value, `wants` a bool for each argument.
Saved = Any
Wants = Any
Gradients = Mapping[str, Tensor | None]


@cache
def arguments_of(name: str) -> Any:
    """A type of the arguments of the op ``warpsmith::name`` by their names in its schema, with its defaults."""
    arguments = getattr(raw, name).default._schema.arguments
    defaults = [a.default_value for a in arguments if a.has_default_value()]
    return namedtuple("given", [a.name for a in arguments], defaults=defaults)


def register_fake(name: str | tuple[str, ...], fake: Callable, on_one_device: bool = True, named: bool = False) -> None:
    """Gives the op ``warpsmith::name``, or each of several, its outputs' shapes, dtypes, devices and strides, for fake
    and meta tensors. ``on_one_device``: a tensor on another device than the first is refused, as every binding does.
    ``named``: ``fake`` takes one object that has the arguments of the op's schema by their names.

    The kernel of the Meta key does what ``torch.library.register_fake`` does for an op that creates no unbacked sizes,
    at a quarter of its cost at import (0.025 ms against 0.11 ms).
    """
    if isinstance(name, tuple):
        for one in name:
            register_fake(one, fake, on_one_device, named)
        return

    def made(*inputs: Any, **options: Any) -> Any:
        return fake(arguments_of(name)(*inputs, **options)) if named else fake(*inputs, **options)

    def checked(*inputs: Any, **options: Any) -> Any:
        result = made(*inputs, **options)
        like: Tensor | None = None
        for i, value in enumerate(inputs):
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, Tensor) and like is None:
                    like = t
                elif isinstance(t, Tensor) and like is not None and checks.device_of(t) != checks.device_of(like):
                    checks.same_device(name, getattr(raw, name).default._schema.arguments[i].name, t, like)
        return result

    _fragment.impl(name, checked if on_one_device else made, "Meta")


def _without_wrapper(op: Callable) -> Callable:
    """What an ``OpOverload``'s Python ``__call__`` passes its arguments on to, 0.4 us cheaper. Not for traced code."""
    return getattr(op, "_op", op)


def _raise_out_of_memory(error: Exception) -> None:
    if OUT_OF_MEMORY in str(error) and "cuda" in str(error):
        raise torch.OutOfMemoryError(str(error).splitlines()[0]) from None


def _is_int(value: Any) -> bool:
    """Whether torch takes it for an integer. Of tensors it takes those of one integer without dimensions."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return checks.is_int64(value)


# What an argument of a schema's type is called in errors, and what fits it. The dispatcher itself takes too much: True
# and tensors for numbers (their gradient is lost), every number for a bool.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "Tensor": ("a tensor", lambda value: isinstance(value, Tensor)),
    "Optional[Tensor]": ("a tensor or None", lambda value: value is None or isinstance(value, Tensor)),
    "float": ("a number", checks.is_number),
    "Optional[float]": ("a number or None", lambda value: value is None or checks.is_number(value)),
    "int": ("an integer of 64 bits", _is_int),
    "List[int]": ("a list of integers", lambda value: isinstance(value, (list, tuple)) and all(map(_is_int, value))),
    "bool": ("True or False", checks.is_flag),
}
_SCALARS = ("float", "Optional[float]", "int", "bool")
_PLAIN_TYPES = {float, int, bool, NoneType}  # a kind takes all values of such a type, but for integers out of range
Hint = Callable[[str, Any], str]  # what was meant by a value in the place of an argument; empty if there is no telling


def _no_hint(argument: str, value: Any) -> str:
    return ""


def refuse_wrong_kinds(name: str, arguments: Sequence[Any], inputs: Sequence[Any], hint: Hint = _no_hint) -> None:
    """Refuses the first of the inputs whose kind is not that of its argument in a schema."""
    for argument, value in zip(arguments, inputs, strict=False):
        expected, fits = _KINDS.get(str(argument.real_type), ("", None))
        if fits is not None and not fits(value):
            checks.refuse_type(name, argument.name, expected, value, hint(argument.name, value))


def _explain(error: Exception, name: str, arguments: Sequence[Any], inputs: Sequence[Any], hint: Hint) -> None:
    """Raises what says more than torch's error of a raw op, where there is such a thing."""
    _raise_out_of_memory(error)
    dtensor.refuse(name, [a.name for a in arguments], inputs)
    refuse_wrong_kinds(name, arguments, inputs, hint)


def call_raw(op: Callable, *inputs: Any) -> Any:
    """Calls a raw op; a failed allocation on a GPU is ``torch.OutOfMemoryError``, as for torch's own ops."""
    try:
        return op(*inputs)
    except RuntimeError as error:
        _raise_out_of_memory(error)
        raise


def is_batched(t: Tensor | None) -> bool:
    """Whether an upstream gradient stands for several: ``is_grads_batched``, ``jacobian(vectorize=True)``. torch takes
    them through a backward at once, by a ``vmap`` that knows no op that writes in place."""
    return t is not None and torch._C._functorch.is_legacy_batchedtensor(t)


def may_give_away(t: Tensor, upstream: Tensor) -> bool:
    """Whether a backward may write to a tensor that it kept and return it: nobody will run this backward again, the
    tensor is a plain one (a traced backward must not write to what its forward made), and no transform maps it."""
    if torch._C._are_functorch_transforms_active() or is_batched(upstream):
        return False
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return type(t) is Tensor and keeps_graph is not None and not keeps_graph()


def _picked(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The elements of a sequence at these places, as a tuple; ``itemgetter`` of one index would give the element."""
    if len(indices) == 1:
        (only,) = indices
        return lambda values: (values[only],)
    return itemgetter(*indices) if indices else lambda values: ()


class _Kept:
    """Splits what an op keeps for its backward into tensors and other values, and puts them together again by name."""

    def __init__(self, save: Sequence[str] | Callable[..., Mapping[str, Any]], schema: Any) -> None:
        self.arguments = [a.name for a in schema.arguments]
        self.tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)} | {r.name for r in schema.returns}
        self.by_function = save if callable(save) else None
        self.given: tuple[str, ...] = ()  # names in the order of a function's dict
        if callable(save):
            return
        places = {a.name: (0, i) for i, a in enumerate(schema.arguments)}
        places |= {r.name: (1, i) for i, r in enumerate(schema.returns)}
        self.has_more = STATE in save
        dtypes = [n.removesuffix(".dtype") for n in save if n.endswith(".dtype")]
        of_tensors, others = self.split(sorted((n for n in save if n in places), key=places.__getitem__))
        dtype_names = [f"{n}_dtype" for n in dtypes]
        more = [MADE] * self.has_more, [STATE] * self.has_more
        self.names = [*of_tensors, *more[0], *others, *dtype_names, *more[1]]
        self.outputs = len(schema.returns)
        self.of_inputs = _picked([i for where, i in map(places.__getitem__, of_tensors) if where == 0])
        self.of_outputs = _picked([i for where, i in map(places.__getitem__, of_tensors) if where == 1])
        self.values = _picked([places[n][1] for n in others])
        if dtypes:
            plain, of_dtypes = self.values, _picked([places[n][1] for n in dtypes])
            self.values = lambda inputs: (*plain(inputs), *(t.dtype for t in of_dtypes(inputs)))

    def split(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those that the schema has as tensors, and the others."""
        of_tensors, others = [n for n in names if n in self.tensors], [n for n in names if n not in self.tensors]
        self.names = [*of_tensors, *others]
        return of_tensors, others

    # Made at the first call that needs them: a class costs 0.1 ms.
    @cached_property
    def inputs(self) -> Any:
        return namedtuple("inputs", self.arguments)

    @cached_property
    def saved_type(self) -> Any:
        return namedtuple("saved", self.names)

    def lay_out(self, names: tuple[str, ...]) -> None:
        """Splits the names of the first dict of a function; every other must have the same."""
        if self.given:
            raise RuntimeError(f"save: expected {', '.join(self.given)}, got {', '.join(names)}")
        of_tensors, others = self.split(names)
        self.of_tensors, self.values = _picked([*map(names.index, of_tensors)]), _picked([*map(names.index, others)])
        self.given = names

    def keep(self, ctx: Any, inputs: Sequence[Any], outputs: Any) -> None:
        if self.by_function is not None:
            kept = self.by_function(self.inputs._make(inputs), outputs)
            names, values = tuple(kept), tuple(kept.values())
            if names != self.given:
                self.lay_out(names)
            ctx.save_for_backward(*self.of_tensors(values))
            ctx.values = self.values(values)
        else:
            all_outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if self.has_more:
                made, state = all_outputs[self.outputs :] or (None, None)
                ctx.save_for_backward(*self.of_inputs(inputs), *self.of_outputs(all_outputs), made)
                ctx.values = (*self.values(inputs), state)
            else:
                ctx.save_for_backward(*self.of_inputs(inputs), *self.of_outputs(all_outputs))
                ctx.values = self.values(inputs)
        ctx.set_materialize_grads(False)  # zeros would cost kernels, and their share of every gradient

    def saved(self, ctx: Any) -> Saved:
        return self.saved_type(*ctx.saved_tensors, *ctx.values)


def _traced_function(op: Any, kept: _Kept, formula: Callable) -> Callable:
    """The Autograd kernel of a traced op, as ``torch.library.register_autograd`` makes one, but also for functions of
    ``torch.func``: the dispatcher has found the level of the transform by then, so that an ``apply`` that looks for
    levels, and for ``setup_context``, would look twice."""
    defaults = [a.default_value for a in op._schema.arguments if a.has_default_value()]
    required = len(op._schema.arguments) - len(defaults)

    def below(keyset: Any, args: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keyset = args
            outputs = below(keyset, inputs)
            # The dispatcher leaves out last arguments that equal their defaults.
            kept.keep(ctx, (*inputs, *defaults[len(inputs) - required :]), outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs = ctx.needs_input_grad
            ctx.needs_input_grad = needs[:-1]  # without the keyset's
            try:
                return (*formula(ctx, *grads), None)
            finally:
                ctx.needs_input_grad = needs

    Traced.__name__ = Traced.__qualname__ = f"{op._opname}_traced"
    apply = super(torch.autograd.Function, Traced).apply

    def kernel(keyset: Any, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(keyset, args)
        if not torch._C._are_functorch_transforms_active():
            return apply(*args, keyset)
        from torch._functorch import autograd_function

        with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
            return apply(*args, keyset)

    return kernel


def _register_formula(name: str, kept: _Kept, formula: Callable) -> None:
    kernel: Callable | None = None

    def autograd(keyset: Any, *args: Any) -> Any:
        nonlocal kernel
        if kernel is None:  # two classes an op: made at the first traced call, not at import
            kernel = _traced_function(getattr(raw, name).default, kept, formula)
        return kernel(keyset, *args)

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


def _no_forward_mode(name: str) -> Callable:
    """The ``jvp`` of an op without forward-mode derivatives: torch's own refusal does not name the op."""

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"{name}: expected derivatives in backward mode, got forward mode: it has no formula")

    return jvp


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
    save: Sequence[str] | Callable[[Any, Any], Mapping[str, Any]],
    backward: Callable[..., Gradients],
    differentiable_backward: Callable[..., Gradients] | None = None,
    plain: Callable | None = None,
    hint: Hint = _no_hint,
    title: Callable[[Sequence[Any]], str] | None = None,
    registers: bool = True,
) -> Callable:
    """Builds the eager and traced function of an op.

    name: of the traced op, whose schema and kernel live in C++ and equal those of ``forward``.
    forward(*inputs): the raw op; its first ``public`` outputs are the function's, the others are kept for backward.
    inference(*inputs): the raw op to call when no gradient is needed; gives the public outputs alone. Default:
        ``forward``.
    rows: how many of the first inputs hold rows that the op treats each by itself, as it does those of its public
        outputs; the other tensors are parameters. With DTensors each rank then computes its rows
        (``dtensor.py``). 0: DTensors are refused.
    save: names of the arguments and outputs in the schema that backward needs, "x.dtype" for a dtype alone (kept as
        ``x_dtype``), and both ``MADE`` and ``STATE`` for a tensor or None, and an object, that an eager ``forward``
        returns after those outputs (None under tracing and in transforms). Or ``save(inputs, outputs)``, which returns
        everything to keep by name, always the same names; ``inputs`` has an attribute for each argument. Names that the
        schema has as tensors hold tensors or None, others no tensors.
    backward(saved, wants, *grads): returns a gradient by the name of its argument. ``saved`` has an attribute for each
        kept value, ``wants`` one for each argument, True where a gradient is asked for. Gradients that are not wanted
        are dropped. ``grads`` has one entry for each public output, None where that output was not used.
    differentiable_backward: the same in plain torch operations, used only when a derivative of the gradient may be
        taken (``create_graph=True``). Without it a second derivative is refused: a raw op has none, and silence would
        mean zero.
    plain(*inputs): the public outputs in plain torch operations, which is what forward-mode derivatives (``jvp``,
        ``jacfwd``, dual tensors) are taken of. Without it they are refused.
    hint(argument, value): what an error about a value of a wrong Python type says beside.
    title(inputs): the name of the public function in such an error, where several share the op. Default: ``name``.
    registers: False: the op has its formula from another call, whose eager ``forward`` is another.
    """
    traced = getattr(raw, name).default
    schema = traced._schema.arguments
    names = [a.name for a in schema]
    tensor_arguments = [i for i, a in enumerate(traced._schema.arguments) if "Tensor" in str(a.type)]
    scalars_of = _picked([i for i, a in enumerate(schema) if str(a.real_type) in _SCALARS])
    known_types: set[tuple[type, ...]] = set()  # of scalars, in calls that were checked
    place = {argument: i for i, argument in enumerate(names)}
    kept = _Kept(save, traced._schema)

    one_of_several = public == 1 and len(traced._schema.returns) > 1
    eager_forward, eager_inference = _without_wrapper(forward), _without_wrapper(inference or forward)
    is_compiling, in_transform = torch.compiler.is_compiling, torch._C._are_functorch_transforms_active
    is_grad_enabled, is_tracing = torch.is_grad_enabled, torch._C._is_tracing
    common = dtensor.PLAIN

    def public_part(outputs: Any) -> Any:
        if not isinstance(outputs, tuple):
            return outputs
        return outputs[0] if public == 1 else outputs[:public]

    def formula(ctx: Any, *grads: Tensor | None) -> Any:
        grads = grads[:public]
        needs = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(needs)
        if len(needs) < len(names):  # traced: the dispatcher leaves out last arguments that equal their defaults
            needs = (*needs, *(False,) * (len(names) - len(needs)))
        if grads[0] is not None or any(g is not None for g in grads):  # a generator costs 0.3 us
            twice = differentiable_backward is not None and torch.is_grad_enabled()
            use: Callable = differentiable_backward if twice else backward  # type: ignore[assignment]
            for argument, gradient in use(kept.saved(ctx), kept.inputs._make(needs), *grads).items():
                i = place[argument]
                if needs[i]:
                    gradients[i] = gradient
        return tuple(gradients)

    formula_of_grads: Callable = formula if differentiable_backward is not None else _once(name, formula)

    refuse_jvp = _no_forward_mode(name)

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs = eager_forward(*inputs)
            kept.keep(ctx, inputs, outputs)
            return outputs[0] if one_of_several else public_part(outputs)

        backward = staticmethod(formula_of_grads)
        jvp = staticmethod(refuse_jvp)

    class ApplyInTransform(torch.autograd.Function):
        # torch.func wants forward and setup_context apart (17 us a call dearer); then every output is the function's.
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            kept.keep(ctx, inputs, output)

        backward = staticmethod(formula_of_grads)
        jvp = staticmethod(refuse_jvp)

    Apply.__name__ = Apply.__qualname__ = name
    # What grad_fn, anomaly mode and errors of torch call the op.
    Apply._backward_cls.__name__ = Apply._backward_cls.__qualname__ = f"{name}Backward"
    if registers:
        _register_formula(name, kept, formula_of_grads)
    # Function.apply without its Python wrapper, which looks for torch.func transforms: `call` has done that (1.5 us).
    apply = super(torch.autograd.Function, Apply).apply

    def in_plain_operations(*inputs: Any) -> Any:
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):  # what the op refuses, by its fake
            forward(*(t.new_empty(t.shape, device="meta") if isinstance(t, Tensor) else t for t in inputs))
        return plain(*inputs)  # type: ignore[misc]

    def check_scalars(types: tuple[type, ...], inputs: Sequence[Any]) -> None:
        refuse_wrong_kinds(title(inputs) if title else name, schema, inputs, hint)
        if _PLAIN_TYPES.issuperset(types):
            known_types.add(types)

    def call(*inputs: Any) -> Any:
        if rows and type(inputs[0]) not in common and dtensor.is_dtensor(inputs[0]):
            return dtensor.on_local_rows(name, names, rows, inputs, call, forward)
        if is_compiling():
            return public_part(traced(*inputs))
        if is_tracing():  # torch.jit.trace would record a Function as a call of Python
            return public_part(traced(*inputs))
        types = (*map(type, scalars_of(inputs)),)
        if types not in known_types:
            check_scalars(types, inputs)
        try:
            if in_transform():
                if plain is not None and forward_ad._current_level >= 0:
                    return in_plain_operations(*inputs)
                return public_part(ApplyInTransform.apply(*inputs))
            if is_grad_enabled():
                for i in tensor_arguments:
                    if getattr(inputs[i], "requires_grad", False):
                        if plain is not None and forward_ad._current_level >= 0:
                            return in_plain_operations(*inputs)
                        return apply(*inputs)
            # torch refuses dual tensors in a Function without jvp; a raw op would drop them without a word.
            if forward_ad._current_level >= 0:
                return apply(*inputs) if plain is None else in_plain_operations(*inputs)
            return public_part(eager_inference(*inputs))
        except (RuntimeError, ValueError) as error:  # of torch; its error may fail to print a long integer
            if ": expected " not in str(error):
                _explain(error, title(inputs) if title else name, schema, inputs, hint)
            raise

    return call
