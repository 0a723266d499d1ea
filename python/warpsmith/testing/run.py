"""Runs a function forward and backward and keeps everything by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from warpsmith.testing.law import Error, measure
from warpsmith.testing.spec import Case, Inputs, OpSpec
from warpsmith.testing.tensors import Random, bitwise_equal, different_bits, lay_out, seed_of


class Result(NamedTuple):
    """Outputs and gradients, by name; a gradient is named ``grad_<input>``."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        """Outputs and gradients together."""
        return {**self.outputs, **self.grads}


def flatten(outputs: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """An op's return value as a dict; outputs that are None are left out."""
    values = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if len(values) != len(names):
        raise AssertionError(f"expected {len(names)} outputs ({', '.join(names)}), got {len(values)}")
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, Tensor)}


def as_leaves(inputs: Inputs, wanted: Sequence[str]) -> Inputs:
    """The inputs as leaves of a fresh graph: those named require a gradient. Strides stay."""
    return {k: v.detach().requires_grad_(k in wanted) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def wanted_inputs(spec: OpSpec, inputs: Inputs) -> tuple[str, ...]:
    """The differentiable inputs that are tensors in this case (an optional one may be None)."""
    return tuple(n for n in spec.differentiable if isinstance(inputs.get(n), Tensor))


def upstream(spec: OpSpec, case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random gradients of all floating outputs: one draw for a case, rounded to the output's dtype, laid out as the
    case says."""
    grads = {}
    for name, y in outputs.items():
        if y.is_floating_point():
            drawn = Random(seed_of(spec.name, name, case.shape)).normal(y.shape)
            layout = case.layouts.get(f"grad_{name}", case.layout)
            grads[name] = lay_out(drawn.to(dtype=y.dtype, device=y.device), layout)
    return grads


def run(
    fn: Callable[..., Any],
    spec: OpSpec,
    case: Case,
    inputs: Inputs,
    grads: dict[str, Tensor] | None = None,
    wanted: Sequence[str] | None = None,
) -> Result:
    """Calls ``fn(**inputs)`` and takes the gradients of the ``wanted`` inputs (by default those of the case).

    ``grads``: the upstream gradients; drawn by :func:`upstream` if not given.
    """
    wanted = case.wanted or wanted_inputs(spec, inputs) if wanted is None else wanted
    leaves = as_leaves(inputs, wanted)
    outputs = flatten(fn(**leaves), spec.outputs)
    result: dict[str, Tensor] = {}
    if wanted:
        grads = upstream(spec, case, outputs) if grads is None else grads
        with_graph = {name: y for name, y in outputs.items() if y.requires_grad and name not in case.unused}
        if not with_graph and not case.unused:
            raise AssertionError(f"{spec.name}: no output has a gradient though {', '.join(wanted)} require one")
        found: Sequence[Tensor | None]
        if with_graph:
            arguments = [*with_graph.values()], [leaves[n] for n in wanted], [grads[n] for n in with_graph]
            # Of what an unused output alone depends on PyTorch has no gradient, where an op may have zeros.
            found = torch.autograd.grad(*arguments, allow_unused=True, materialize_grads=bool(case.unused))
        else:
            found = [torch.zeros_like(leaves[n]) for n in wanted]
        result = {f"grad_{n}": g for n, g in zip(wanted, found, strict=True) if g is not None}
    return Result({n: y.detach() for n, y in outputs.items()}, result)


class FirstCalls(TorchDispatchMode):
    """Keeps the positional arguments of the first call of each op of the dispatcher, as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op not in self.arguments:
            self.arguments[op] = tree_map_only(Tensor, lambda t: t.detach().clone(), args)
        return op(*args, **(kwargs or {}))


def raw_arguments(spec: OpSpec, op: Any, inputs: Inputs) -> tuple[Any, ...]:
    """Positional arguments for an op of ``spec.opcheck``."""
    said = spec.opcheck[op]
    if said is not None:
        return said(inputs)
    case = spec.base_case()
    with FirstCalls() as calls:
        run(spec.op, spec, case, inputs)
        run(spec.op, spec, case, inputs, wanted=())
    for other, arguments in sorted(calls.arguments.items(), key=lambda call: call[0] is not op):
        if other is op or _take_the_same(op, other, len(arguments)):
            return arguments
    raise AssertionError(f"{spec.name}: opcheck: a call reaches neither {op} nor an op of the same arguments")


def _take_the_same(op: Any, other: Any, count: int) -> bool:
    ours, theirs = ([(a.name, str(a.type)) for a in o._schema.arguments[:count]] for o in (op, other))
    has_defaults = all(a.has_default_value() for a in op._schema.arguments[count:])
    return op.namespace == other.namespace and ours == theirs and has_defaults


@contextmanager
def new_memory_is_filled() -> Iterator[None]:
    """New tensors are NaN, or the largest integer, as torch's deterministic mode makes them."""
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def measure_case(spec: OpSpec, case: Case, inputs: Inputs) -> list[Error]:
    """The error of every output and gradient of a case, beside plain PyTorch on the same device. What the op leaves as
    the memory was is NaN; on a card only in a check of its own."""
    on_card = any(isinstance(t, Tensor) and t.is_cuda for t in inputs.values())
    with nullcontext() if on_card else new_memory_is_filled():
        ours = run(spec.op, spec, case, inputs)
    plain = run(spec.baseline or spec.reference, spec, case, inputs)
    exact = exact_result(spec, case, inputs, ours)
    missing = plain.all().keys() ^ ours.all().keys()
    if missing:
        raise AssertionError(
            f"{spec.name} {case}: outputs and gradients differ from PyTorch's in {', '.join(sorted(missing))}"
        )
    steps = spec.sim_float32_steps
    return [measure(name, actual, exact[name], plain.all()[name], steps) for name, actual in ours.all().items()]


def exact_result(
    spec: OpSpec, case: Case, inputs: Inputs, like: Result, grads: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The oracle's outputs and gradients: float64 on the CPU, from the rounded inputs and the rounded upstream
    gradients."""
    wide = {k: _widen(v) for k, v in inputs.items()}
    grads = upstream(spec, case, like.outputs) if grads is None else grads
    grads = {n: _widen(g) for n, g in grads.items()}
    oracle = spec.oracle
    fn = spec.reference if oracle is None else (lambda **kw: oracle(case, **kw))
    return run(fn, spec, case, wide, grads).all()


def _widen(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def assert_same_bits(what: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Fails unless two results have the same names and the same bits."""
    if first.keys() != second.keys():
        raise AssertionError(f"{what}: results differ in {', '.join(sorted(first.keys() ^ second.keys()))}")
    for name, a in first.items():
        if not bitwise_equal(a, second[name]):
            raise AssertionError(f"{what}: {name}: {different_bits(a, second[name])}")


class Unchanged:
    """Fails on exit if an input's bits or version, or the random state, changed inside the block."""

    def __init__(self, what: str, inputs: Inputs) -> None:
        self.what = what
        self.tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and not v.is_meta}

    def __enter__(self) -> None:
        self.before = {k: (v.detach().clone(), v._version) for k, v in self.tensors.items()}
        self.random_state = torch.get_rng_state()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        for name, tensor in self.tensors.items():
            value, version = self.before[name]
            if not bitwise_equal(tensor, value) or tensor._version != version:
                raise AssertionError(f"{self.what}: {name} was changed")
        if not torch.equal(self.random_state, torch.get_rng_state()):
            raise AssertionError(f"{self.what}: the random state was changed")
