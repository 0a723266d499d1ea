"""What only the simulated kernels can tell: bytes moved, rows beyond 2^31 elements, what launchers refuse."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from warpsmith.testing import sim
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.law import measure
from warpsmith.testing.run import as_leaves, exact_result, flatten, raw_arguments, run, upstream, wanted_inputs
from warpsmith.testing.spec import Case, Inputs, OpSpec

FAR = 2**31  # elements, beyond which offsets need 64 bits
FAR_ROWS, FAR_COLUMNS, FAR_BLOCKS = 3, 64, 16
ENOUGH_MULTIPROCESSORS = 2**24  # for kernels whose blocks take rows in turn: each row has a block of its own


def far_cases(spec: OpSpec) -> list[Case]:
    """A few rows of each length and dtype of the table; of short rows there would be more than blocks."""
    usual = [c for c in spec.cases_on("sim") if c.layout == "contiguous" and not c.options]
    few = [c.but(shape=(FAR_ROWS, *c.shape[1:])) for c in (*usual, *spec.far_cases)]
    return list({str(c): c for c in few if torch.Size(c.shape[1:]).numel() >= FAR_COLUMNS}.values())


def far(t: Tensor, before: int) -> Tensor:
    """The tensor behind so many rows that nothing touches."""
    whole = t.new_empty((before + t.shape[0], *t.shape[1:]))
    whole[before:] = t
    return whole


def check_far_rows(spec: OpSpec, case: Case) -> None:
    """The last rows of tensors of more than 2^31 elements obey the law, on the sim: only the last blocks of each grid
    run, and memory that nothing touches does not exist."""
    inputs = make_inputs(spec, case, "sim")
    wanted = [n for n in wanted_inputs(spec, inputs) if n in spec.batched]
    plain = run(spec.baseline or spec.reference, spec, case, inputs, wanted=wanted)
    grads = upstream(spec, case, plain.outputs)
    exact = exact_result(spec, case, inputs, plain, grads)
    before = FAR // inputs[spec.batched[0]][0].numel() + 1

    with sim.machine(multiprocessors=ENOUGH_MULTIPROCESSORS, last_blocks=FAR_BLOCKS):
        far_inputs = {k: far(v, before) if k in spec.batched and v is not None else v for k, v in inputs.items()}
        ours = run(spec.op, spec, case, far_inputs, {k: far(g, before) for k, g in grads.items()}, wanted)
    errors = [measure(name, t[before:], exact[name], plain.all()[name]) for name, t in ours.all().items()]
    wrong = [str(e) for e in errors if not e.ok]
    assert not wrong, f"{spec.name} {case}, {before} rows further: " + "; ".join(wrong)


def apart(t: Tensor) -> Tensor:
    """The tensor with rows 2^30 elements apart."""
    strides = [2**30] if t.dim() > 1 else []
    for size in reversed(t.shape[1:-1]):
        strides.insert(0, strides[0] * size)
    whole = t.new_empty(sum((n - 1) * s for n, s in zip(t.shape, strides, strict=False)) + t.shape[-1])
    return whole.as_strided(t.shape, (*strides, 1)).copy_(t)


def check_rows_far_apart(spec: OpSpec) -> None:
    """Rows of the inputs and upstream gradients that lie 2^30 elements apart obey the law, on the sim."""
    base = spec.base_case()
    case = base.but(shape=(1,) * (len(base.shape) - 3) + (2, 2)[: len(base.shape) - 1] + base.shape[-1:])
    inputs = make_inputs(spec, case, "sim")
    plain = run(spec.baseline or spec.reference, spec, case, inputs)
    grads = upstream(spec, case, plain.outputs)
    exact = exact_result(spec, case, inputs, plain, grads)

    far_inputs = {k: apart(v) if k in spec.batched else v for k, v in inputs.items()}
    ours = run(spec.op, spec, case, far_inputs, {k: apart(g) for k, g in grads.items()})
    errors = [measure(name, t, exact[name], plain.all()[name]) for name, t in ours.all().items()]
    wrong = [str(e) for e in errors if not e.ok]
    assert not wrong, f"{spec.name} {case}, rows apart: " + "; ".join(wrong)


def check_kernels_ran(spec: OpSpec) -> None:
    """The simulated kernels ran, forward and backward: the checks beside this one were of them."""
    before = sim.launches()
    inputs = make_inputs(spec, spec.base_case(), "sim")
    spec.op(**as_leaves(inputs, ()))
    forward = sim.launches()
    assert forward > before, f"{spec.name}: the forward launched no kernel"
    if spec.differentiable and spec.backward_kernels:
        run(spec.op, spec, spec.base_case(), inputs)
        again = sim.launches()
        assert again - forward > forward - before, f"{spec.name}: the backward launched no kernel"


def bytes_cases(spec: OpSpec) -> list[Case]:
    """Those of one dtype, for which the formula of the floor is, without layouts."""
    usual = [c for c in spec.cases_on("sim") if c.layout == "contiguous" and not c.dtypes and not c.layouts]
    return [c for c in usual if spec.bytes_cases is None or c in spec.bytes_cases]


def check_bytes_moved(spec: OpSpec, case: Case) -> None:
    """The kernels move the bytes of ``spec.floor_bytes``, in which each result is written once, and beside them what
    ``spec.bytes_beside`` names: not a byte more or less. A gradient alone is all that is written of the gradients."""
    inputs = make_inputs(spec, case, "sim")
    main = spec.differentiable if spec.laid_out is None else spec.laid_out
    rank = inputs[main[0]].dim()
    floor = spec.floor_bytes(case) if spec.floor_bytes else {}
    beside = {"forward": (0, 0), "backward": (0, 0), **(spec.bytes_beside(case, inputs) if spec.bytes_beside else {})}

    def compare(direction: str, kind: str, moved: tuple[int, int], results: Mapping[str, Tensor]) -> None:
        read, written = beside.get(kind, beside[direction])
        result_bytes = _distinct_bytes(results.values())
        expected = floor[direction] - result_bytes + read, result_bytes + written
        assert moved == expected, (
            f"{spec.name} {case}: {kind}: bytes read and written: expected {expected}, got {moved}"
        )

    def forward(kind: str, names: Sequence[str]) -> tuple[Inputs, dict[str, Tensor]]:
        leaves = as_leaves(inputs, names)
        outputs, moved = sim.counted(lambda: flatten(spec.op(**leaves), spec.outputs))
        compare("forward", kind, moved, {n: y for n, y in outputs.items() if y.dim() == rank})
        return leaves, outputs

    def backward(names: Sequence[str]) -> tuple[dict[str, Tensor], tuple[int, int]]:
        leaves, outputs = forward("forward", names)
        grads = upstream(spec, case, outputs)
        made = {n: y for n, y in outputs.items() if y.requires_grad}
        arguments = list(made.values()), [leaves[n] for n in names], [grads[n] for n in made]
        found, moved = sim.counted(lambda: torch.autograd.grad(*arguments))
        handed_on = {g.data_ptr() for g in grads.values()}
        return {n: g for n, g in zip(names, found, strict=True) if g.data_ptr() not in handed_on}, moved

    forward("inference", ())
    wanted = wanted_inputs(spec, inputs)
    if not wanted:
        return
    together, moved = backward(wanted)
    compare("backward", "backward", moved, {n: g for n, g in together.items() if n in main})
    for name in wanted if len(wanted) > 1 else ():
        alone, (read, written) = backward((name,))
        own = _distinct_bytes(alone.values())
        more = beside.get(f"{name} alone", (0, 0))[1]
        most = own + more if name in main else moved[1] - _distinct_bytes(together.values()) + own
        assert read <= moved[0] and written <= most, (
            f"{spec.name} {case}: the gradient of {name} alone: {read, written}"
        )


def allocation_cases(spec: OpSpec) -> list[Case]:
    """Of those, the first with each of the table's options."""
    return [*{str(c.options): c for c in reversed(bytes_cases(spec))}.values()]


def check_allocated_is_written(spec: OpSpec, case: Case) -> None:
    """For each gradient alone, the backward's kernels write as many bytes as it allocates: it makes nothing that this
    gradient does not need."""
    inputs = make_inputs(spec, case, "sim")
    for name in wanted_inputs(spec, inputs):
        leaves = as_leaves(inputs, (name,))
        outputs = flatten(spec.op(**leaves), spec.outputs)
        grads = upstream(spec, case, outputs)
        made = {n: y for n, y in outputs.items() if y.requires_grad}
        arguments = [*made.values()], [leaves[name]], [grads[n] for n in made]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            _, (_, written) = sim.counted(partial(torch.autograd.grad, *arguments))
        sizes = (e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]")
        allocated = sum(n for n in sizes if n > 0)
        assert allocated <= written, f"{spec.name} {case}: {name} alone: {allocated} bytes allocated, {written} written"


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors, two of which may be one: an op may give two inputs the same gradient."""
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def check_float64_refused(spec: OpSpec) -> None:
    """No kernel takes float64, forward or backward, and its launcher says so."""
    inputs = make_inputs(spec, spec.base_case(), "sim")
    for op in spec.opcheck:
        given = tree_map_only(Tensor, _widened, raw_arguments(spec, op, inputs))
        before = sim.launches()
        try:
            if not any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in given):
                continue
            op(*given)
        except ValueError as error:
            assert "float64" in str(error), f"{op}: {error}"
        else:
            raise AssertionError(f"{op} took float64")
        assert sim.launches() == before, f"{op} launched kernels before it refused float64"


def _widened(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() and t.itemsize > 1 else t
