"""What the benchmarks share: options and the contenders that every op has."""

import sys
from dataclasses import dataclass

import torch
from warpsmith.testing.rows import OURS

CPU_THREADS = 2


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
