"""Parameters, gradients, orders of execution and comparisons that the tests of optimizers share.

Under ``--sim`` the tests run the CUDA kernels on CPU tensors (warpsmith.testing.sim).
"""

import copy

import pytest
import torch
from torch import nn
from warpsmith.testing import bitwise_equal, cpu_threads, sim

ON_SIM = sim.is_loaded()
STEPS = 20 if ON_SIM else 200  # of a trajectory
# Numbers of CPU threads, or on the sim seeds of its schedule. Bits must not depend on them.
ORDERS = range(sim.SCHEDULES) if ON_SIM else (2, 1)


def in_order(number):
    return sim.machine(seed=number) if ON_SIM else cpu_threads(number)


def moved(step):
    """Bytes of global memory that a step's kernels read and write, on the sim."""
    return sim.counted(step)[1]


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


def assert_one_result(make, lengths, dtype=torch.float32, cuts=True, both=False):
    """Asserts that bits depend on the steps alone: not on the order of execution, not on a state dict in between,
    and (``cuts``) not on whether the elements are one parameter or several. ``make(params, lr)`` makes the optimizer.
    ``both``: also tests the order and the state dict with several parameters."""
    draw = torch.Generator().manual_seed(3)
    whole, *grads = (torch.randn(sum(lengths), generator=draw).to(dtype) for _ in range(7))

    def trained(split=False, order=ORDERS[0], resume=False):
        def pieces(t):
            return [part.clone() for part in t.split(lengths)] if split else [t.clone()]

        params, first = [nn.Parameter(t) for t in pieces(whole)], 0
        for p in params:  # stochastic rounding draws by the element's number in the whole, also where a cut is odd
            p.first_element = first
            first += p.numel()
        optimizer = make(params, 1e-2)
        with in_order(order):
            for i, gradient in enumerate(grads):
                for p, g in zip(params, pieces(gradient), strict=True):
                    p.grad = g
                if resume and i == 3:
                    state = copy.deepcopy(optimizer.state_dict())
                    optimizer = make(params, 0.5)
                    optimizer.load_state_dict(state)
                optimizer.step()
        return torch.cat([p.detach() for p in params])

    for split in (False, True) if both else (False,):
        expected = trained(split)
        for other in (trained(split, resume=True), *(trained(split, order) for order in ORDERS)):
            assert bitwise_equal(other, expected)
    assert not cuts or bitwise_equal(trained(), trained(split=True))
