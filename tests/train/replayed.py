"""Captured steps on the CPU, with graphs that are none: a capture keeps the function, a replay calls it again."""

import contextlib
import sys

import torch
import warpsmith
from torch import nn
from torch.utils._pytree import tree_leaves
from warpsmith.testing import bitwise_equal
from warpsmith.train import CapturedStep
from warpsmith.train.random_state import random_state
from warpsmith.train.step_state import StepState

CALLS = 9


class Replayed:
    """Graphs of the CPU. A real capture runs Python's code and no kernel; this one puts back what the kernels did."""

    def __init__(self, device, generators):
        self.device, self.captures, self.replays, self.spoil = device, 0, 0, lambda: None
        self.made.append(self)

    @staticmethod
    def serves(device):
        return device.type == "cpu"

    @contextlib.contextmanager
    def aside(self):
        yield

    @contextlib.contextmanager
    def watched(self, found):
        item = torch.Tensor.item

        def waits(tensor):
            found(sys._getframe(1))
            return item(tensor)

        torch.Tensor.item = waits
        try:
            yield
        finally:
            torch.Tensor.item = item

    def capture(self, function):
        self.captures += 1
        state = StepState([("state", [self.given], 0)])
        copies, numbers = state.copies(), torch.get_rng_state()
        params = [t for t in state.tensors if t.requires_grad]
        try:
            result = function()
            grads = [p.grad for p in params]
        finally:
            state.restore(copies)
            torch.set_rng_state(numbers)

        def replay():
            self.replays += 1
            for p in params:
                p.grad = None
            for static, new in zip(tree_leaves(result), tree_leaves(function()), strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(new)
            for p, grad in zip(params, grads, strict=True):
                if grad is not None:
                    grad.copy_(p.grad)
                p.grad = grad
            self.spoil()

        return replay, result

    def forget(self):
        self.forgotten = getattr(self, "forgotten", 0) + 1

    def host_random_state(self):
        return {name: value for name, value in random_state().items() if name != "torch"}

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)


class Training:
    def __init__(self, optimizer=warpsmith.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-2, **options})
        self.scaler = warpsmith.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.schedule = warpsmith.amp.DeviceLR(self.optimizer, lambda t: 0.9**t, 50, self.scaler)
        self.state = [self.model, self.optimizer, self.scaler, self.schedule]

    def step(self, batch):
        loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.clip_(self.optimizer, 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss

    def captured(self, step=None, **options):
        Replayed.given = self.state
        return CapturedStep(step or self.step, state=self.state, **options)

    def tensors(self):
        return StepState([("state", [self.state], 0)]).copies()


def batches(count=CALLS, bad=()):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(8, 6, generator=generator) for _ in range(count)]
    for i in bad:
        inputs[i][0, 0] = torch.inf
    return inputs


def run(step, inputs):
    torch.manual_seed(5)
    return [step(batch).detach().clone() for batch in inputs]


def same(a, b):
    return len(a) == len(b) and all(bitwise_equal(x, y) for x, y in zip(a, b, strict=True))
