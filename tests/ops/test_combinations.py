"""What the specs of this folder vary one at a time, two at a time and at random: options, each gradient alone, layouts,
sizes; and gradients with a graph beside gradients without one."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from warpsmith.testing.checks.integration import MESSAGE_FORM
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.law import ulp
from warpsmith.testing.run import (
    Unchanged,
    as_leaves,
    assert_same_bits,
    flatten,
    measure_case,
    run,
    upstream,
    wanted_inputs,
)
from warpsmith.testing.sim import is_loaded
from warpsmith.testing.tensors import LAYOUTS

from tests.ops.test_documented_bytes import FAMILY, specs

DEVICE = "sim" if is_loaded() else "cpu"
FEW = 10_000 if DEVICE == "cpu" else 1000  # elements of a case whose options are paired
LARGEST = 96  # size of a dimension of a random case
LUCK = 16  # times PyTorch's error, or ulps of the largest value
LEAST = torch.finfo(torch.float32).eps  # of a result that is the difference of others
RANDOM_CASES = 2000 if DEVICE == "cpu" else 500  # of a family
every_op = pytest.mark.parametrize("name", specs())


def size(case):
    return torch.Size(case.shape).numel()


def single_options(spec):
    """Every option with every value that the table has, each with the smallest case that has it."""
    found = {}
    for case in sorted(spec.cases_on(DEVICE), key=size):
        if 0 in case.shape or case.dtype == torch.float64:
            continue
        for key, value in case.options.items():
            found.setdefault((key, str(value)), (case, {key: value}))
    return list(found.values())


def pairs(spec):
    """Options of two rows of the table: the case in the shape of each row."""
    for (a, first), (b, second) in itertools.combinations(single_options(spec), 2):
        if first.keys() != second.keys():
            options, dtypes = {**first, **second}, {**a.dtypes, **b.dtypes}
            yield [c.but(options={**c.options, **options}, dtypes=dtypes) for c in (a, b) if size(c) <= FEW]


def attempted(spec, case):
    """Whether the op takes a case; what it refuses it refuses in its own words. More than the law allows, for
    in a drawn case of few elements PyTorch's error may be small by luck."""
    try:
        inputs = make_inputs(spec, case, DEVICE)
    except (AssertionError, IndexError, RuntimeError):  # options of the table that make no problem together
        return False
    try:
        with Unchanged(f"{spec.name} {case}", inputs):
            errors = measure_case(spec, case, inputs)
    except (ValueError, TypeError) as error:
        if not MESSAGE_FORM.match(str(error)):
            raise AssertionError(f"{case}: {error!r}") from error
        return False
    wrong = [str(e) for e in errors if not e.error <= LUCK * (e.baseline + max(e.floor, LEAST))]
    assert not wrong, f"{spec.name} {case}: {wrong}"
    return True


def assert_close(what, expected, found):
    assert expected.keys() == found.keys(), what
    for n, a in expected.items():
        b = found[n].detach()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {n}"
        if a.numel():
            limit = LUCK * max(ulp(float(a.abs().max()), a.dtype), LEAST)
            worst = float((a.double() - b.double()).abs().max())
            assert worst <= limit, f"{what}: {n}: {worst} apart, limit {limit}"


@every_op
def test_options_two_at_a_time_and_each_gradient_alone(name):
    spec, taken, refused = specs()[name], 0, []
    for ways in pairs(spec):
        case = next((c for c in ways if attempted(spec, c)), None)
        if case is None:
            refused += ways
            continue
        taken += 1
        inputs = make_inputs(spec, case, DEVICE)
        together = run(spec.op, spec, case, inputs)
        for wanted in wanted_inputs(spec, inputs):
            alone = run(spec.op, spec, case, inputs, wanted=(wanted,))
            expected = {k: g for k, g in together.grads.items() if k == f"grad_{wanted}"}
            assert_close(f"{name} {case}: gradient of {wanted} alone", expected, alone.grads)
            assert_same_bits(f"{name} {case}: outputs beside it", together.outputs, alone.outputs)
    assert len(refused) <= taken


@every_op
def test_a_gradient_with_a_graph_is_that_without(name):
    """gradgradcheck compares a wrong gradient of this form with itself."""
    spec = specs()[name]
    for case in [spec.base_case(), *(c for c, _ in single_options(spec))]:
        leaves = as_leaves(make_inputs(spec, case, DEVICE), spec.differentiable)
        wanted = wanted_inputs(spec, leaves)
        if not wanted:
            continue
        outputs = {n: y for n, y in flatten(spec.op(**leaves), spec.outputs).items() if y.requires_grad}
        up = upstream(spec, case, outputs)
        found = [
            torch.autograd.grad(
                [*outputs.values()],
                [leaves[n] for n in wanted],
                [up[n].requires_grad_(learned) for n in outputs],
                create_graph=graph,
                retain_graph=True,
                allow_unused=True,
            )
            for graph, learned in ((False, False), (True, False), (True, True))
        ]
        for other in found[1:]:
            given = [{n: g for n, g in zip(wanted, grads, strict=True) if g is not None} for grads in (found[0], other)]
            assert_close(f"{name} {case}", *given)


@st.composite
def cases(draw, spec):
    """A row of the table with sizes, options, dtypes and layouts of others; then with fewer of them, should its sizes
    and options not fit."""
    table = [c for c in spec.cases_on(DEVICE) if size(c) <= FEW / 4 and 0 not in c.shape] or [spec.smallest_case()]
    base = draw(st.sampled_from(table))
    shape = []
    for i, here in enumerate(base.shape):
        seen = sorted({s for c in table if len(c.shape) == len(base.shape) and (s := c.shape[i]) <= LARGEST}) or [here]
        free = any(s % 2 for s in seen if s > 1)  # no number of heads, nor a width of vectors
        shape.append(draw(st.sampled_from(seen) | st.integers(1, 40) if free else st.sampled_from(seen)))
    options = draw(st.lists(st.sampled_from(all_options(spec.name)), max_size=2)) if all_options(spec.name) else []
    names = [n for n, t in base_inputs(spec.name, base).items() if t.is_floating_point() and t.dim() > 0]
    names += [f"grad_{n}" for n in spec.outputs]
    ways = [way for way in spec.layouts or LAYOUTS if way != "expanded"]
    layouts = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(ways), max_size=3))
    laid_out = base.but(layouts=layouts, dtype=draw(st.sampled_from([c.dtype for c in table])))
    sized = laid_out.but(shape=tuple(shape))
    options = functools.reduce(lambda a, b: {**a, **b}, options, dict(base.options))
    return [sized.but(options=options), laid_out.but(options=options), sized, laid_out]


@functools.cache
def all_options(name):
    found = [option for _, option in single_options(specs()[name])]
    return [o for o in found if not any(isinstance(v, int) and v > LARGEST for v in o.values())]


def base_inputs(name, case):
    return {k: t for k, t in make_inputs(specs()[name], case).items() if isinstance(t, torch.Tensor)}


@every_op
def test_random_cases_obey_the_law(name, figure):
    family = [other for other in specs() if FAMILY.get(other) == FAMILY.get(name)]
    wanted, tried = -(-RANDOM_CASES // len(family)), []

    @settings(
        max_examples=wanted, deadline=None, database=None, derandomize=True, print_blob=False,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases(specs()[name]))
    def holds(drawn):
        tried.append(next((i for i, case in enumerate(drawn) if attempted(specs()[name], case)), None))

    holds()
    figure(f"{name}: {len(tried)} random cases, {tried.count(0)} with all that was drawn")
    assert None not in tried
