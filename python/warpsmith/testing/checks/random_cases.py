"""Random cases of an op, on every device from one strategy."""

from contextlib import nullcontext
from typing import Any

import torch

from warpsmith.testing import sim
from warpsmith.testing.checks.numerics import check_error_law, check_repeats
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.spec import Case, OpSpec
from warpsmith.testing.tensors import LAYOUTS

# Wider than the law's own 2, 2 and 1: in some of thousands of small cases PyTorch is right to one rounding step.
LIMIT, STEPS, DRAWS = 3.0, 8, 8
LARGEST = 2**13  # elements of a case
MOST_LAYOUTS = 3  # tensors of one case that lie in some way of their own
MOST_OPTIONS = 2  # of other lines of the table, in one case


def strategy(spec: OpSpec, device: str = "cpu") -> Any:
    """A hypothesis strategy of the op's cases: a line of its table with other sizes and layouts.

    A size is often a neighbour of the line's own; options of other lines join its own, where the op takes them all;
    single inputs and upstream gradients lie in layouts of their own;
    gradients of some inputs alone are asked for, from some outputs alone. ``spec.redraw`` draws options anew and mends
    sizes that do not go with them.
    """
    from hypothesis import assume
    from hypothesis import strategies as st

    table = [c for c in spec.cases_on(device) if 0 not in c.shape and torch.Size(c.shape).numel() <= LARGEST]
    gradients = [f"grad_{name}" for name in spec.outputs] if spec.differentiable else []
    expanded = spec.laid_out if spec.expanded is None else spec.expanded
    kinds = [layout for layout in spec.layouts or LAYOUTS if layout != "contiguous"]
    options = [pair for case in table for pair in case.options.items()]
    options = [pair for i, pair in enumerate(options) if pair not in options[:i]]

    @st.composite
    def cases(draw: Any) -> Case:
        case = draw(st.sampled_from(table))
        own = case.options
        near = (st.sampled_from([max(1, n - 1), n, n + 1, 2 * n + 1]) for n in case.shape)
        sizes = (st.one_of(likely, st.integers(1, 2 * n + 8)) for likely, n in zip(near, case.shape, strict=True))
        case = case.but(shape=tuple(draw(size) for size in sizes))
        others = draw(st.lists(st.sampled_from(options), max_size=MOST_OPTIONS)) if options else []
        mixed = {**case.options, **dict(others)}
        if mixed != case.options:
            case = case.but(options=mixed)
        if spec.redraw is not None:
            case = spec.redraw(draw, st, case)
        assume(torch.Size(case.shape).numel() <= LARGEST)
        assume(mixed == own or taken(spec, case))
        tensors = {n: t for n, t in make_inputs(spec, case).items() if isinstance(t, torch.Tensor)}
        # The two numbers of a seed are adjacent, by its contract.
        names = [name for name, t in tensors.items() if t.dim() > 0 and name != "seed"]
        pairs = st.tuples(st.sampled_from([*names, *gradients]), st.sampled_from(kinds))
        found = dict(draw(st.lists(pairs, max_size=MOST_LAYOUTS)))
        may_be = names if expanded is None else expanded
        layouts = {n: kind for n, kind in found.items() if kind != "expanded" or n in may_be or n in gradients}
        learned, outputs = [n for n in spec.differentiable if n in tensors], [*spec.outputs]
        wanted = draw(st.lists(st.sampled_from(learned), unique=True)) if learned else []
        unused = draw(st.lists(st.sampled_from(outputs), unique=True, max_size=len(outputs) - 1))
        return case.but(layouts=layouts, wanted=tuple(wanted), unused=tuple(unused))

    return cases()


def taken(spec: OpSpec, case: Case) -> bool:
    """Whether the op takes a mixture of options."""
    try:
        with torch.no_grad():
            spec.op(**make_inputs(spec, case))
    except (ValueError, TypeError):
        return False
    return True


def check_random_cases(spec: OpSpec, count: int, device: str = "cpu") -> None:
    """The law, a little wider, holds in so many random cases; a failing one is made smaller first.

    On the simulated kernels each runs under a schedule and on a machine of its own.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(strategy(spec, device), st.integers(0, 99), st.integers(1, 5))
    def holds(case: Case, seed: int, multiprocessors: int) -> None:
        with sim.machine(seed=seed, multiprocessors=multiprocessors) if device == "sim" else nullcontext():
            check_error_law(spec, case, device, limit=LIMIT, steps=STEPS, draws=DRAWS)
            if device == "sim" and seed % 4 == 0:  # again, under another schedule
                check_repeats(spec, case, make_inputs(spec, case, device), 1)

    holds()
