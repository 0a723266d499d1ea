"""What the benchmarks share: options and the contenders that every op has."""

import functools
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from warpsmith.testing import cpu_threads, host_time_us, time_cpu, time_forward_backward, timer_of
from warpsmith.testing.gpu_timer import Timing, copy_call
from warpsmith.testing.rows import OURS, YARDSTICK, Row, make_rows

CPU_THREADS = 2


@functools.cache
def runners():
    """{op: run(device, options)} of the bench_*.py files beside this one. No rival is loaded by looking."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        found.update(module.OPS if hasattr(module, "OPS") else {path.stem.removeprefix("bench_"): module.run})
    return {name: _on_few_threads(run) for name, run in found.items()}


def _on_few_threads(run):
    """``run`` with CPU_THREADS threads of torch's."""

    def call(device, options):
        with cpu_threads(CPU_THREADS):
            return run(device, options)

    return call


@dataclass(frozen=True)
class Options:
    """rounds: samples of each contender, 0 to compile alone. only_shape: this one of a benchmark's shapes."""

    rounds: int = 25
    quick: bool = False
    compile: bool = True
    only_shape: int | None = None

    @property
    def samples(self):
        return min(self.rounds, 3) if self.quick else self.rounds

    def shapes(self, device, gpu, cpu, tiny):
        """The shapes to time on a device."""
        found = (tiny,) if self.quick else tuple(gpu if device == "cuda" else cpu)
        return found if self.only_shape is None else found[self.only_shape : self.only_shape + 1]


def compiled(fn, donate=False):
    """``fn`` under torch.compile with static shapes; unless it may donate, a backward may run again on its graph.

    Graphs come from the caches on disk where `benchmarks --warm-compile` has put them. What is tuned by timing is not
    kept there: processes that compile side by side would tune badly. No compiling process is left beside the timings.
    """
    import torch._functorch.config
    import torch._inductor.config

    torch._functorch.config.donated_buffer = donate  # with donated buffers retain_graph=True is refused
    torch._functorch.config.enable_autograd_cache = True
    torch._inductor.config.fx_graph_cache = True
    torch._inductor.config.autotune_local_cache = False
    torch._inductor.config.compile_threads = 1
    return torch.compile(fn, dynamic=False)


_spent = [0.0]


def compile_seconds():
    """Seconds that torch.compile has taken in this process."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import compilation_time_metrics as metrics

        _spent[0] += sum(sum(metrics.get(name, [])) for name in ("_compile.compile_inner", "backward._backward_impl"))
        metrics.clear()
    return _spent[0]


def forget_compiled():
    """Lets torch.compile begin anew: it would count the shapes of all cells together and give up."""
    compile_seconds()  # which some versions forget as well
    torch._dynamo.reset()


def torch_contenders(ours, eager, options):
    """Ours, torch eager and torch.compile of the same expression; the last alone where nothing is timed."""
    contenders = {OURS: ours, "torch": eager} if options.samples else {}
    if options.compile and not options.quick:
        forget_compiled()
        contenders["torch.compile"] = compiled(eager)
    return contenders


def leaves(device, *shapes):
    """Random tensors that require gradients, in the dtype of the device's figures: bfloat16, on the CPU float32."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return tuple(torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)


def cell_of(op, shape, t, *direction):
    """What rows say first: op, shape, the dtype of a tensor, and perhaps the direction."""
    return op, "x".join(map(str, shape)), str(t.dtype).removeprefix("torch."), *direction


def timed(cell, calls, device, options, floor=None, not_rivals=(YARDSTICK,), **gpu):
    """The rows of one cell, (op, shape, dtype, direction). On a GPU a copy of ``floor`` bytes joins in, and ``gpu`` are
    arguments of GpuTimer."""
    if device == "cuda" and floor:
        calls = {**calls, YARDSTICK: copy_call(floor)}
    timings = timer_of(device, options.samples, **(gpu if device == "cuda" else {}))(calls)
    return make_rows(*cell, timings, floor_bytes=floor, not_rivals=not_rivals)


def host_rows(cell, forward, inputs, dy, options, **rows):
    """Rows "host" of a cell (op, shape, dtype): of a call, and with ``inputs`` that require gradients of its backward
    too. ``forward``: {contender: function without arguments}."""
    calls, rounds = (20, 3) if options.quick else (500, 15)
    found = {f"forward, {'grad' if inputs else 'no grad'}": forward}
    if inputs:
        both = {name: lambda fn=fn: torch.autograd.grad(fn(), inputs, dy) for name, fn in forward.items()}
        found["forward + backward"] = both
    timings = {name: host_time_us(contenders, calls=calls, rounds=rounds) for name, contenders in found.items()}
    return [row for name, some in timings.items() for row in make_rows(*cell, f"host {name}", some, unit="us", **rows)]


def time_steps(cell, steps, in_a_row, options, budget_s):
    """Rows "step" of the cell (op, shape, dtype). ``steps``: {contender: function of the step's number that returns its
    loss}. So many steps are taken in a row, from an idle device, and waited for; the time is one step's."""

    def some(step):
        return [step(i) for i in range(in_a_row)][-1].item()

    calls = {name: functools.partial(some, step) for name, step in steps.items()}
    timings = time_cpu(calls, rounds=options.samples, budget_s=budget_s)
    one = {
        name: t if t.ms is None else Timing(t.ms / in_a_row, t.low_ms / in_a_row, t.high_ms / in_a_row, t.samples)
        for name, t in timings.items()
    }
    return make_rows(*cell, "step", one)


def peak_mb(step, leaves):
    """Megabytes that a step needs above what it finds; its gradients count."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def peak_rows(rows, steps, leaves_of):
    """Rows "peak memory" of those contenders of a cell that have a step and a time. ``leaves_of(contender)`` gets
    gradients."""
    return [
        Row(row.op, row.shape, row.dtype, "peak memory", name, peak_mb(steps[name], leaves_of(name)), "MB")
        for row in rows
        if row.value is not None and (name := row.contender) in steps
    ]


def time_cells(op, cell, shapes, options, counted=1):
    """The rows of an op's forward and backward. ``cell(shape)`` gives the contenders, their inputs, and how many
    elements each direction moves at least for each of the first inputs, so many as are counted."""
    rows = []
    for shape in shapes:
        contenders, inputs, elements = cell(shape)
        unit = sum(t.nbytes for t in inputs[:counted])
        assert max(elements.values()) < 32, "elements for each of the inputs, no bytes"
        floor = {direction: round(n * unit) for direction, n in elements.items()}
        rows += time_forward_backward(op, contenders, inputs, floor, rounds=options.samples)
    return rows


def time_shapes(op, ours, eager, rivals, arguments, elements, shapes, device, options):
    """The same of an op beside torch and, on a GPU, ``rivals()``. ``arguments(shape)``: the shapes of its tensors from
    that of the first; ``shapes``: those for a GPU and for the CPU, and a tiny one."""

    def cell(shape):
        tensors = leaves(device, *arguments(shape))
        contenders = torch_contenders(ours, eager, options)
        if device == "cuda":
            contenders.update(rivals())
        return contenders, tensors, elements

    return time_cells(op, cell, options.shapes(device, *shapes), options)
