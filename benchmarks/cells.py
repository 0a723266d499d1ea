"""What the benchmarks share: options, contenders, and one cell's forward and backward."""

from dataclasses import dataclass

import torch
from warpsmith.testing import GpuTimer, time_cpu
from warpsmith.testing.gpu_timer import copy_call
from warpsmith.testing.rows import OURS, YARDSTICK, make_rows

CPU_THREADS = 2


@dataclass(frozen=True)
class Options:
    rounds: int = 25
    quick: bool = False
    compile: bool = True


def timer(device, options, **gpu):
    """The function that times ``{name: callable}`` on a device."""
    rounds = 3 if options.quick else options.rounds
    if device == "cuda":
        return GpuTimer(rounds=rounds, **gpu).time
    return lambda contenders: time_cpu(contenders, rounds=rounds)


def compiled(fn):
    """``fn`` under torch.compile with static shapes, such that a backward may run again on its graph."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # with donated buffers retain_graph=True is refused
    return torch.compile(fn, dynamic=False)


def forward_and_backward(op, shape, dtype, contenders, inputs, floor, device, options):
    """Rows of a cell: forward with gradients recorded, then backward alone (of all inputs, on a retained graph).

    contenders: {name: function of the inputs}. floor: least bytes moved, {"forward": n, "backward": n}.
    """
    measure = timer(device, options)
    names = {"shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch.")}
    rows = []
    forward = {name: (lambda fn=fn: fn(*inputs)) for name, fn in contenders.items()}
    rows += _rows(op, names, "forward", forward, floor, device, measure)

    backward = {}
    grad = torch.randn(shape, device=device).to(dtype)
    for name, fn in contenders.items():
        try:
            y = fn(*inputs)
        except Exception:
            continue  # its forward row says why
        backward[name] = lambda y=y: torch.autograd.grad(y, inputs, grad, retain_graph=True)
    rows += _rows(op, names, "backward", backward, floor, device, measure)
    return rows


def _rows(op, names, direction, contenders, floor, device, measure):
    if device == "cuda":
        contenders = {**contenders, YARDSTICK: copy_call(floor[direction])}
    return make_rows(op, **names, direction=direction, timings=measure(contenders), floor_bytes=floor[direction])


def torch_contenders(ours, eager, options):
    """Ours, torch eager and torch.compile of the same expression."""
    contenders = {OURS: ours, "torch": eager}
    if options.compile and not options.quick:
        torch._dynamo.reset()
        contenders["torch.compile"] = compiled(eager)
    return contenders
