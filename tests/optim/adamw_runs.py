"""Parameters, gradients, orders of execution and comparisons that the tests of optimizers share.

Under ``--sim`` the tests run the CUDA kernels on CPU tensors (warpsmith.testing.sim).
"""

import pytest
import torch
from torch import nn
from warpsmith.testing import bitwise_equal, cpu_threads, sim

ON_SIM = sim.is_loaded()
STEPS = 20 if ON_SIM else 200  # of a trajectory
# Bits depend on none of these: numbers of CPU threads, on the sim seeds of its schedule.
ORDERS = range(sim.SCHEDULES) if ON_SIM else (2, 1)


def in_order(number):
    return sim.machine(seed=number) if ON_SIM else cpu_threads(number)


def moved(step):
    """Bytes of global memory that a step's kernels read and write, on the sim."""
    before, written = sim.bytes_moved(), sim.bytes_written()
    step()
    written = sim.bytes_written() - written
    return sim.bytes_moved() - before - written, written


ON_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", ["cpu"] if ON_SIM else ["cpu", ON_CUDA])
SHAPES = [(7, 5), (), (0,), (3,), (2049,), (33, 129)]


def make_params(dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def set_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def run(optimizer, params, steps, first=0):
    for i in range(first, first + steps):
        set_grads(params, i)
        optimizer.step()


def states_of(optimizer, params):
    return [optimizer.state[p] for p in params]


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        if isinstance(x, dict):
            assert x.keys() == y.keys()
            assert_same_bits(x.values(), y.values())
        else:
            assert bitwise_equal(x.detach(), y.detach())
