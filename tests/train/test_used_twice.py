"""What is used twice: context managers within themselves and with an exception inside, and a captured step whose kinds
of inputs use different parameters."""

import contextlib
import importlib
import inspect

import pytest
import torch
import warpsmith
from replayed import Replayed
from torch import nn
from warpsmith.distributed import ShardedOptimizer
from warpsmith.testing import bitwise_equal
from warpsmith.train import CapturedStep

ROOMS = ("optim", "amp", "train", "distributed", "testing")
# Leaving these ends a job's process group, a watch or a half-written file: their own tests raise inside them.
ELSEWHERE = {"Context", "Watch", "Checkpointer"}


def is_manager(function):
    return inspect.isgeneratorfunction(getattr(function, "__wrapped__", None))


def public_managers():
    for room in map(importlib.import_module, (f"warpsmith.{room}" for room in ROOMS)):
        for name in room.__all__:
            thing = getattr(room, name)
            if is_manager(thing) or hasattr(thing, "__enter__"):
                yield name
            elif inspect.isclass(thing):
                yield from (n for n, method in vars(thing).items() if is_manager(method))


def of_average():
    p = nn.Parameter(torch.arange(3.0))
    ema = warpsmith.optim.EMA([p], 0.5)
    with torch.no_grad():
        p.add_(1)
    return ema.applied, lambda: p.detach().clone(), lambda _: bitwise_equal(p.detach(), ema.averages[0])


def of_no_sync():
    p = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([p], warpsmith.optim.SGD, stage=2, lr=0.5)

    def reduces():
        """Whether a backward is averaged, not added to ``p.grad`` alone."""
        optimizer.zero_grad()
        p.sum().backward()
        found = p.grad is None
        optimizer.zero_grad()
        return torch.tensor(found)

    return optimizer.no_sync, reduces, lambda _: not reduces()


def of_threads():
    threads = torch.get_num_threads
    return (lambda: warpsmith.testing.cpu_threads(3)), lambda: torch.tensor(threads()), lambda _: threads() == 3


def of_audit():
    def methods():
        return torch.tensor([hash(torch.cuda.synchronize) % 2**31, hash(torch.cuda.Event.synchronize) % 2**31])

    def counts(audit):
        before = audit.total
        torch.ones(()).item()
        return audit.total == before + 1

    return (lambda: warpsmith.train.sync_audit("cpu")), methods, counts


MANAGERS = {"applied": of_average, "no_sync": of_no_sync, "cpu_threads": of_threads, "sync_audit": of_audit}


def test_every_context_manager_is_known():
    assert set(public_managers()) == MANAGERS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", MANAGERS)
def test_nested_and_left_by_an_exception(name):
    with warpsmith.distributed.init(device="cpu") if name == "no_sync" else contextlib.nullcontext():
        manager, state, holds = MANAGERS[name]()
        before = state()
        with manager() as given:
            inside = state()
            assert holds(given)
            with manager() as inner:
                assert holds(inner)
            assert bitwise_equal(state(), inside), "the inner block ended the outer one"
            with pytest.raises(KeyError), manager():
                raise KeyError
            assert bitwise_equal(state(), inside), "an exception in the inner block ended the outer one"
        assert bitwise_equal(state(), before)
        for _ in range(2):
            with pytest.raises(KeyError), manager():
                with manager():
                    raise KeyError
            assert bitwise_equal(state(), before)


def of_torch():
    torch.ones(2).item()


def of_backward():
    torch.autograd.backward(torch.ones(()))


def of_autograd():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no gradient")

    Raises.apply(torch.ones((), requires_grad=True)).backward()


@pytest.mark.parametrize("raises", [of_torch, of_backward, of_autograd], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", MANAGERS)
def test_an_error_that_is_caught_inside(name, raises):
    """What a block does, it does after a call in it has raised too."""
    with warpsmith.distributed.init(device="cpu") if name == "no_sync" else contextlib.nullcontext():
        manager, state, holds = MANAGERS[name]()
        before = state()
        with manager() as given:
            with pytest.raises(RuntimeError):
                raises()
            assert holds(given)
        assert bitwise_equal(state(), before)


class Routed:
    """A model of which an input uses one half; the gradients stay after a step."""

    def __init__(self, optimizer, zero_first, set_to_none):
        torch.manual_seed(0)
        self.halves = nn.ModuleList([nn.Linear(4, 3), nn.Linear(5, 3), nn.Linear(3, 2)])
        self.optimizer = optimizer(self.halves.parameters(), lr=0.1)
        self.zero_first, self.set_to_none = zero_first, set_to_none

    def step(self, batch):
        if self.zero_first:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = self.halves[2](self.halves[batch.shape[1] - 4](batch)).square().mean()
        loss.backward()
        self.optimizer.step()
        if not self.zero_first:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return loss


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("optimizer", [warpsmith.optim.SGD, warpsmith.optim.AdamW, torch.optim.SGD])
def test_buckets_that_use_other_parameters(graphs, optimizer, zero_first, set_to_none):
    """After each step every gradient is what it is in eager mode, or None where it is None there."""
    eager, graphed = (Routed(optimizer, zero_first, set_to_none) for _ in range(2))
    Replayed.given = [graphed.halves, graphed.optimizer]
    captured = CapturedStep(graphed.step, state=Replayed.given)
    for width in (4, 4, 4, 4, 5, 5, 5, 5, 4, 5, 4, 4, 5, 5, 4):
        batch = torch.randn(6, width)
        expected, found = eager.step(batch), captured(batch)
        assert bitwise_equal(expected.detach(), found.detach())
        for p, q in zip(eager.halves.parameters(), graphed.halves.parameters(), strict=True):
            assert bitwise_equal(p.detach(), q.detach())
            assert (p.grad is None) == (q.grad is None), width
            assert p.grad is None or bitwise_equal(p.grad, q.grad), width
    # Where gradients become zeros, a graph of the CPU makes them anew, which the self-test notices.
    assert not set_to_none or captured.fallback_reason is None and sum(graph.replays for graph in graphs) > 4
