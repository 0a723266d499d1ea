"""Each part of a step alone: the host waits for no number of the device, unless it is asked to raise."""

from __future__ import annotations

import math
import re

import pytest
import torch
import warpsmith
from warpsmith.train import sync_audit

from tests.optim.optimizers import FULL, LAMB, LION, Options

ORDERS = (1, 2, math.inf)


def parameters():
    """With a gradient that lies otherwise than its parameter."""
    found = [torch.nn.Parameter(torch.randn(5, 6)) for _ in range(3)]
    for p in found:
        p.grad = torch.randn(6, 5).t() if p is found[1] else torch.randn(5, 6)
    return found


def of_optimizer(options):
    return lambda ps: options.ours(ps).step


def of_scaler(make):
    def part(ps):
        optimizer, scaler = warpsmith.optim.AdamW(ps), make()
        schedule = warpsmith.amp.DeviceLR(optimizer, warpsmith.amp.schedules.cosine(9), 9, scaler)

        def steps():
            for clips in (None, *ORDERS):
                scaler.scale(torch.ones(()))
                scaler.unscale_(optimizer) if clips is None else scaler.clip_(optimizer, 1.0, clips)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()

        return steps

    return part


def of_fp8(ps):
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16))
    recipe = warpsmith.amp.Fp8Recipe("tensor", amax="delayed")
    layers, found_inf = warpsmith.amp.fp8(model, recipe), torch.zeros(1)

    def step():
        model(torch.randn(4, 32)).sum().backward()
        layers.update(found_inf)

    return step


PARTS = {
    **{options.name: of_optimizer(options) for options in (*FULL, LION, LAMB, Options("Muon", {}, "plain"))},
    "EMA": lambda ps: warpsmith.optim.EMA(ps).update,
    "grad_norm": lambda ps: lambda: [warpsmith.optim.grad_norm(ps, order) for order in ORDERS],
    "clip_grad_norm_": lambda ps: lambda: [warpsmith.optim.clip_grad_norm_(ps, 1.0, order) for order in ORDERS],
    "GradScaler": of_scaler(lambda: warpsmith.amp.GradScaler("cpu")),
    "StepGuard": of_scaler(warpsmith.amp.StepGuard),
    "DeviceLR": of_scaler(lambda: warpsmith.amp.GradScaler("cpu", hysteresis=2)),
    "fp8": of_fp8,
}
# Of a program's beginning, of what is printed or saved, of numbers.
OTHERS = {"float32_states", "Overflow", "schedules", "Fp8Layers", "Fp8Recipe"}
OTHERS |= {name for name in warpsmith.amp.__all__ if re.search("report|state", name, re.IGNORECASE)}


def test_every_part_is_asked_below():
    assert PARTS.keys() == {*warpsmith.optim.__all__, *warpsmith.amp.__all__} - OTHERS


@pytest.mark.parametrize("name", PARTS)
def test_the_host_does_not_wait(name):
    part = PARTS[name](parameters())
    part()  # makes states and tables
    with sync_audit("cpu") as audit:
        part()
    assert audit.total == 0, str(audit)
