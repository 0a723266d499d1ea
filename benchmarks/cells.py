"""What the benchmarks share: options and the contenders that every op has."""

from dataclasses import dataclass

import torch
from warpsmith.testing.rows import OURS

CPU_THREADS = 2


@dataclass(frozen=True)
class Options:
    rounds: int = 25
    quick: bool = False
    compile: bool = True

    @property
    def samples(self):
        return 3 if self.quick else self.rounds


def compiled(fn):
    """``fn`` under torch.compile with static shapes, such that a backward may run again on its graph."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # with donated buffers retain_graph=True is refused
    return torch.compile(fn, dynamic=False)


def torch_contenders(ours, eager, options):
    """Ours, torch eager and torch.compile of the same expression."""
    contenders = {OURS: ours, "torch": eager}
    if options.compile and not options.quick:
        torch._dynamo.reset()
        contenders["torch.compile"] = compiled(eager)
    return contenders
