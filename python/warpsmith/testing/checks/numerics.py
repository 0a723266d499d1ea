"""Values and gradients: the error law, layouts, sizes, edge values, gradcheck, repeatability."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from warpsmith.testing import sim
from warpsmith.testing.cpu_timer import cpu_threads
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.law import LIMIT, MEDIAN_LIMIT, Error, measure
from warpsmith.testing.run import (
    Unchanged,
    as_leaves,
    assert_same_bits,
    exact_result,
    flatten,
    measure_case,
    new_memory_is_filled,
    run,
    upstream,
    wanted_inputs,
)
from warpsmith.testing.sim import torch_device
from warpsmith.testing.spec import Case, Inputs, OpSpec
from warpsmith.testing.tensors import INTEGER_OF_SIZE, LAYOUTS, differing, edge_values, repeat_batch

# torch's own 1e-3 would let a factor of 1.001 pass; central differences in float64 are good to about 1e-9.
RTOL, ATOL = 1e-5, 1e-7


def check_error_law(
    spec: OpSpec, case: Case, device: str = "cpu", limit: float = LIMIT, steps: int = 0, draws: int = 1
) -> list[Error]:
    """Every output and gradient of a case obeys the law, and the inputs are left as they were.

    ``steps``: rounding steps that it allows, where they are more. ``draws``: where a result is beyond the bound,
    PyTorch's error is the largest of this many draws of the inputs, since in one draw it can be small by luck."""
    inputs = make_inputs(spec, case, device)
    with Unchanged(f"{spec.name} {case}", inputs):
        measured = measure_case(spec, case, inputs)
    errors = [replace(e, limit=limit, steps=max(e.steps, steps)) for e in measured]
    if not all(e.ok for e in errors):
        others = [measure_case(spec, case, make_inputs(spec, case, device, draw=i)) for i in range(1, draws)]
        errors = [
            replace(e, baseline=max(o.baseline for o in same)) for e, *same in zip(errors, errors, *others, strict=True)
        ]
    wrong = [str(e) for e in errors if not e.ok]
    assert not wrong, f"{spec.name} {case} on {device}: " + "; ".join(wrong)
    return errors


def check_median(spec: OpSpec, device: str = "cpu", errors: Iterable[list[Error]] | None = None) -> dict[str, float]:
    """Over the case table, the median ratio to PyTorch's error is at most 1.1 for each output and gradient."""
    if errors is None:
        errors = [measure_case(spec, case, make_inputs(spec, case, device)) for case in spec.cases_on(device)]
    ratios: dict[str, list[float]] = {}
    for case_errors in errors:
        for e in case_errors:
            ratios.setdefault(e.name, []).append(e.ratio)
    medians = {name: float(torch.tensor(r, dtype=torch.float64).quantile(0.5)) for name, r in ratios.items()}
    wrong = {name: m for name, m in medians.items() if not m <= MEDIAN_LIMIT}
    assert not wrong, f"{spec.name} on {device}: median error over PyTorch's, expected <= {MEDIAN_LIMIT}, got {wrong}"
    return medians


def layout_cases(spec: OpSpec) -> list[Case]:
    """The table's first ordinary case of each dtype in each layout."""
    dtypes = dict.fromkeys(c.dtype for c in spec.cases if c.dtype != torch.float64)
    cases = []
    for dtype in dtypes:
        try:
            base = spec.base_case(dtype)
        except ValueError:
            continue
        cases += [base.but(layout=layout) for layout in spec.layouts or LAYOUTS if layout != "contiguous"]
    return cases


def single_layout_cases(spec: OpSpec) -> list[Case]:
    """A case with one tensor alone in each layout: each floating input, and each upstream gradient.

    In 16 bits where the op has them, with rows of whole vectors: one tensor alone decides whether a kernel may read
    vectors."""
    ordinary = [c for c in spec.cases if c.layout == "contiguous" and 0 not in c.shape and c.dtype != torch.float64]
    base = min(ordinary or [spec.base_case()], key=_whole_vectors)
    inputs = make_inputs(spec, base)
    names = [n for n, t in inputs.items() if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 0]
    expanded = spec.laid_out if spec.expanded is None else spec.expanded
    gradients = [f"grad_{name}" for name in spec.outputs] if spec.differentiable else []
    alone = [
        (name, layout)
        for name in (*names, *gradients)
        for layout in spec.layouts or LAYOUTS
        if layout != "contiguous" and (layout != "expanded" or expanded is None or name in (*expanded, *gradients))
    ]
    dims = {**{name: inputs[name].dim() for name in names}, **dict.fromkeys(gradients, len(base.shape))}
    alone += [(name, f"odd_stride_{d}") for name, dim in dims.items() if dim > 2 for d in range(dim - 1)]
    # Rows of one tensor alone apart, where a block takes many: what steps by another tensor's stride is right at first.
    many = max(spec.few_enough_for_sim([c for c in ordinary if _rows(c) > 2]) or [base], key=_many_long_rows)
    found = [base.but(layouts={name: layout}) for name, layout in alone]
    return found + [many.but(layouts={name: "vectors_apart"}) for name, layout in alone if layout == "padded_rows"]


def _rows(case: Case) -> int:
    return torch.Size(case.shape[:-1]).numel()


def _many_long_rows(case: Case) -> tuple[bool, int, int]:
    return case.dtype.itemsize == 2, case.shape[-1] % 8 == 0, min(_rows(case), 64) * min(case.shape[-1], 2048)


def _whole_vectors(case: Case) -> tuple[int, ...]:
    return case.dtype.itemsize, case.shape[-1] % 16, case.shape.count(1), abs(case.shape[-1] - 512)


def size_cases(spec: OpSpec) -> list[Case]:
    """The first ordinary case with each dimension zero in turn, and with all of them one."""
    base = spec.base_case()
    cases = []
    if spec.zero_sizes:
        cases += [base.but(shape=(*base.shape[:i], 0, *base.shape[i + 1 :])) for i in range(len(base.shape))]
    if spec.one_element:
        cases.append(base.but(shape=(1,) * len(base.shape)))
    return cases


def edge_cases(spec: OpSpec, case: Case | None = None) -> list[tuple[str, str]]:
    """(input, name of an edge value) for each input and value to try."""
    inputs = make_inputs(spec, case or spec.base_case())
    names = wanted_inputs(spec, inputs) if spec.edge_inputs is None else spec.edge_inputs
    names = tuple(name for name in names if inputs.get(name) is not None)
    return [(name, value) for name in names for value in edge_values(inputs[name].dtype)]


EDGES_BESIDE_OPTIONS, MOST_OPTIONS = (("inf", 0), ("nan", 0), ("minus_inf", 1)), 24  # values, and where


def option_cases(spec: OpSpec, device: str = "cpu") -> list[Case]:
    """Cases of the table with other options each, at most ``MOST_OPTIONS``: the first of each, none of float64."""
    found: dict[str, Case] = {}
    for case in spec.cases_on(device):
        if case.layout == "contiguous" and 0 not in case.shape and case.dtype != torch.float64:
            found.setdefault(str(sorted(case.options.items(), key=str)), case)
    many = [case for case in found.values() if case.options and spec.edges_beside_options != ()]
    return many[:: -(-len(many) // MOST_OPTIONS) or 1]


def check_edges_beside_options(spec: OpSpec, case: Case, device: str = "cpu") -> None:
    """With one element infinite or NaN, in even and odd places, beside a case's options: as
    :func:`check_edge_value`."""
    bounds = {e.name: e.bound for e in measure_case(spec, case, make_inputs(spec, case, device))}
    for name in dict.fromkeys(n for n, _ in edge_cases(spec, case)):
        if name not in (spec.edges_beside_options or (name,)):
            continue
        for value, place in EDGES_BESIDE_OPTIONS:
            _check_edge(spec, case, name, value, device, bounds, place)


def check_edge_value(
    spec: OpSpec, name: str, value: str, device: str = "cpu", known: dict[str, dict[str, float]] | None = None
) -> None:
    """With one element 0, subnormal, huge, infinite or NaN, each result is right, or what PyTorch gives where that
    differs.

    Right is the rounded float64 oracle within the law's bound; the bound is taken without the edge value, whose
    magnitude would widen it. Where PyTorch overflows on its way to a finite result, or the row's largest result is
    within a factor of 64 of overflow, an infinity or a NaN passes: the order of operations decides there.

    ``known``: the bounds of cases, which are the same for every value; filled here. The lowest value lies in rows that
    are apart.
    """
    known = {} if known is None else known
    for dtype in dict.fromkeys(c.dtype for c in spec.cases_on(device) if c.dtype != torch.float64):
        try:
            case = spec.base_case(dtype)
        except ValueError:
            continue
        if value == "lowest" and "padded_rows" in (spec.layouts or LAYOUTS):
            case = case.but(layout="padded_rows")
        if str(case) not in known:
            known[str(case)] = {e.name: e.bound for e in measure_case(spec, case, make_inputs(spec, case, device))}
        _check_edge(spec, case, name, value, device, known[str(case)])


def _check_edge(
    spec: OpSpec, case: Case, name: str, value: str, device: str, bounds: dict[str, float], place: int = 0
) -> None:
    inputs = make_inputs(spec, case, device, edge=(name, edge_values(case.dtype)[value]), place=place)
    ours = run(spec.op, spec, case, inputs)
    plain = run(spec.baseline or spec.reference, spec, case, inputs).all()
    exact = exact_result(spec, case, inputs, ours)
    for what, actual in ours.all().items():
        error = measure(what, actual, exact[what], plain[what])
        bad = _unexpected(actual.cpu(), exact[what], plain[what].cpu(), bounds[what], spec.edge_steps)
        assert error.ok or not bad, (
            f"{spec.name} {case} with {name} = {value} on {device}: {error}; {bad} elements are "
            f"neither the oracle's nor PyTorch's"
        )


def _unexpected(actual: Tensor, exact: Tensor, plain: Tensor, bound: float, row_steps: int) -> int:
    """How many elements are neither the oracle's nor PyTorch's. The law's bound is taken for each row (the last
    dimension), so that the rows without the edge value are held to the ordinary one. Where PyTorch overflows in a whole
    row its error is unknown, and `row_steps` rounding steps of the row's largest finite value remain."""
    if not actual.is_floating_point():
        return int((actual != exact).sum())
    a, p, rounded = actual.double(), plain.double(), exact.to(actual.dtype).double()
    finite = p.isfinite() & rounded.isfinite()
    size = exact.abs().where(rounded.isfinite(), 0).amax(-1, keepdim=True)
    steps = row_steps * torch.finfo(actual.dtype).eps * size
    rows = (2 * (p - exact).abs().where(finite, 0).amax(-1, keepdim=True) + steps).clamp(min=bound)
    near_overflow = exact.abs().amax(-1, keepdim=True) > torch.finfo(actual.dtype).max / 64
    good = ~a.isfinite() & exact.isfinite() & (~p.isfinite() | near_overflow)
    for expected in (rounded, p):
        good |= (
            (a.isnan() & expected.isnan()) | (a == expected) | (expected.isfinite() & ((a - expected).abs() <= rows))
        )
    return int((~good).sum())


def check_gradcheck(spec: OpSpec) -> None:
    """Numerical derivatives in float64 on the CPU agree, second ones too where they are claimed, whose graph gives the
    first."""
    cases = spec.gradcheck_cases or [spec.smallest_case().but(dtype=torch.float64, dtypes={})]
    for case in cases:
        inputs = make_inputs(spec, case.but(dtype=torch.float64, dtypes={}))
        names = wanted_inputs(spec, inputs)
        leaves = as_leaves(inputs, names)

        def call(*tensors: Tensor, _inputs: dict = inputs, _names: tuple = names) -> tuple[Tensor, ...]:
            outputs = flatten(spec.op(**{**_inputs, **dict(zip(_names, tensors, strict=True))}), spec.outputs)
            return tuple(y for y in outputs.values() if y.requires_grad)

        tensors = [leaves[n] for n in names]
        assert torch.autograd.gradcheck(call, tensors, rtol=RTOL, atol=ATOL), f"{spec.name} {case}: gradcheck"
        if spec.double_backward:
            good = torch.autograd.gradgradcheck(call, tensors, rtol=RTOL, atol=ATOL)
            assert good, f"{spec.name} {case}: gradgradcheck"
            # gradgradcheck compares that formula with itself: its value must be the gradient without a graph.
            y = [t for t in call(*tensors) if t.is_floating_point()]
            dy = [torch.rand_like(t) - 0.3 for t in y]
            plain, in_graph = (
                torch.autograd.grad(y, tensors, dy, retain_graph=True, create_graph=graph, allow_unused=True)
                for graph in (False, True)
            )
            for name, a, b in zip(names, plain, in_graph, strict=True):
                same = a is b or torch.allclose(a, b, rtol=RTOL, atol=ATOL)
                assert same, f"{spec.name} {case}: the gradient of {name} under create_graph"


def check_second_derivative_is_refused(spec: OpSpec, device: str = "cpu") -> None:
    """Without a claimed second derivative, asking for one raises: it is never silently zero, nor silently lacks the
    op's part where the rest of the graph has second derivatives. Nor is it given for the upstream gradients alone."""
    case = spec.base_case()
    leaves = as_leaves(make_inputs(spec, case, device), spec.differentiable)
    names = wanted_inputs(spec, leaves)
    wanted = [leaves[n] for n in names]
    for before in (lambda t: t, torch.sin):
        outputs = flatten(spec.op(**{**leaves, **{n: before(leaves[n]) for n in names}}), spec.outputs).values()
        differentiable = [y for y in outputs if y.requires_grad]
        upstream_gradients = [torch.ones_like(y, dtype=torch.float32, requires_grad=True) for y in differentiable]
        zero = torch.zeros((), device=torch_device(device))
        for after, of in product((torch.square, lambda y: y), (wanted, upstream_gradients)):
            terms = zip(differentiable, upstream_gradients, strict=True)
            total = sum(((after(y.float()) * g).sum() for y, g in terms), zero)
            try:
                grads = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
                penalty = sum((g.float().square().sum() for g in grads if g is not None), zero)
                torch.autograd.grad(penalty, of, allow_unused=True)
            except RuntimeError as error:
                # The words of a gradient that does not require one would mean that the derivative was dropped.
                assert "does not require grad" not in str(error), f"{spec.name}: the gradient is cut off: {error}"
            else:
                raise AssertionError(f"{spec.name}: a second derivative was given though none is claimed")


REPEATS = {"cpu": 5, "cuda": 1000, "sim": sim.SCHEDULES}  # races need repetition, or other schedules


def check_repeats_bitwise(spec: OpSpec, case: Case, device: str = "cpu") -> None:
    """The same inputs give the same bits, time after time (1,000 times on CUDA, under each schedule on the sim) and,
    on the CPU, with each of the spec's numbers of threads."""
    inputs = make_inputs(spec, case, device)
    first = check_repeats(spec, case, inputs, REPEATS[device])
    if device != "cpu":
        return
    for count in spec.thread_counts:
        with cpu_threads(count):
            assert_same_bits(f"{spec.name} {case}: {count} threads", first, run(spec.op, spec, case, inputs).all())


def check_batch_repeats_bitwise(spec: OpSpec, case: Case, elements: int, device: str = "cuda") -> None:
    """The same for a batch repeated until its first input has ``elements`` elements, which fills a GPU."""
    few = make_inputs(spec, case, device)
    times = max(1, elements // max(1, few[spec.batched[0]].numel()))
    inputs = {k: repeat_batch(v, times) if k in spec.batched else v for k, v in few.items()}
    check_repeats(spec, case, inputs, REPEATS[device])


def check_repeats(spec: OpSpec, case: Case, inputs: Inputs, times: int) -> dict[str, Tensor]:
    """Runs the op once and ``times`` times more, on the sim under other schedules: the same bits, which it returns. The
    device is waited for once."""
    once = run(spec.op, spec, case, inputs)
    grads, first = upstream(spec, case, once.outputs), once.all()
    differ: dict[str, list[Tensor]] = {name: [] for name in first}
    for i in range(times):
        with sim.machine(seed=i + 1) if sim.is_loaded() else nullcontext():
            again = run(spec.op, spec, case, inputs, grads=grads).all()
        if again.keys() != first.keys():
            assert_same_bits(f"{spec.name} {case}: repeat {i + 1}", first, again)
        for name, value in first.items():
            differ[name].append(differing(value, again[name]))
    for name, found in differ.items():
        wrong = torch.stack(found).nonzero().flatten().tolist() if found else []
        where = f"{spec.name} {case}: {name}"
        assert not wrong, (
            f"{where}: {len(wrong)} of {times} repeats have other bits, the first is repeat {wrong[0] + 1}"
        )
    return first


def check_batch(spec: OpSpec, case: Case, elements: int, device: str = "cpu") -> None:
    """A batch repeated until the first batched input has more than ``elements`` elements gives the batch's bits,
    repeated.

    Gradients of inputs that are not batched are sums over the batch: theirs must be the multiple within two percent,
    of which a 16-bit gradient's own rounding takes nearly one.
    """
    few = make_inputs(spec, case, device)
    times = elements // few[spec.batched[0]].numel() + 1
    many = {k: repeat_batch(v, times) if k in spec.batched else v for k, v in few.items()}
    one = run(spec.op, spec, case, few)
    grads = upstream(spec, case, one.outputs)
    all_together = run(spec.op, spec, case, many, grads={k: repeat_batch(g, times) for k, g in grads.items()})
    single = {f"grad_{n}" for n in spec.differentiable if n not in spec.batched}
    for name, expected in one.all().items():
        got = all_together.all()[name]
        if name in single:
            limit = 0.02 * times * float(expected.double().abs().max())
            error = float((got.double() - times * expected.double()).abs().max())
            assert error <= limit, f"{spec.name}: {name} over {times} batches: error {error:.3e}, limit {limit:.3e}"
            continue
        parts = got.view(times, *expected.shape)
        bits = INTEGER_OF_SIZE[got.element_size()]
        wrong = sum(
            int((p.view(bits) != expected.view(bits)).sum()) for p in parts.split(max(1, 2**28 // expected.numel()))
        )
        assert wrong == 0, (
            f"{spec.name}: {name}: {wrong} of {got.numel()} elements differ in a batch repeated {times} times"
        )


def check_no_uninitialised_memory(spec: OpSpec, case: Case, device: str = "cpu") -> None:
    """With every new tensor filled, outputs and gradients keep their bits."""
    inputs = make_inputs(spec, case, device)
    expected = run(spec.op, spec, case, inputs).all()
    with new_memory_is_filled():
        filled = run(spec.op, spec, case, inputs).all()
    assert_same_bits(f"{spec.name} {case} with new memory filled", expected, filled)


def check_needs_input_grad(spec: OpSpec, device: str = "cpu") -> None:
    """Each gradient alone, and all but it, equal those computed together, and nothing requires a gradient that need
    not."""
    case = spec.base_case()
    inputs = make_inputs(spec, case, device)
    names = wanted_inputs(spec, inputs)
    together = run(spec.op, spec, case, inputs)
    for name in names:
        others = tuple(n for n in names if n != name)
        for wanted in [(name,), *([others] if others else [])]:
            some = run(spec.op, spec, case, inputs, wanted=wanted)
            expected = {f"grad_{n}": together.grads[f"grad_{n}"] for n in wanted}
            what = f"{spec.name}: with gradients of {', '.join(wanted)} alone"
            assert_same_bits(what, {**together.outputs, **expected}, some.all())
    plain = flatten(spec.op(**as_leaves(inputs, ())), spec.outputs)
    with torch.no_grad():
        silent = flatten(spec.op(**as_leaves(inputs, names)), spec.outputs)
    for how, outputs in (("without gradients", plain), ("under no_grad", silent)):
        graph = [n for n, y in outputs.items() if y.requires_grad]
        assert not graph, f"{spec.name} {how}: {', '.join(graph)} requires a gradient"
        assert_same_bits(f"{spec.name} {how}", together.outputs, outputs)
