"""Each part of a step alone: the host waits for no number of the device, unless it is asked to raise, and what is made
has the device and dtype of what is given."""

import contextlib
import itertools
import math
import re

import pytest
import torch
import warpsmith
from torch.utils._pytree import tree_leaves
from warpsmith.testing import bitwise_equal
from warpsmith.train import sync_audit

from tests.dispatched import Beside, other_defaults
from tests.optim.optimizers import EACH_STORAGE, FULL, LAMB, LION, Options, dtype_of

ORDERS = (1, 2, math.inf)


def parameters(dtype=torch.float32, otherwise=True):
    """Large enough for 8-bit states, one transposed; one's gradient may lie otherwise than its parameter."""
    found = [torch.nn.Parameter(torch.randn(65, 66).to(dtype)) for _ in range(2)]
    found.append(torch.nn.Parameter(torch.randn(66, 65).to(dtype).t()))
    for p in found:
        p.grad = torch.randn_like(p.detach())
    found[1].grad = torch.randn(66, 65).to(dtype).t() if otherwise else found[1].grad
    return found


def of_optimizer(options):
    return lambda ps: options.ours(ps).step


def of_scaler(make, sharded=False):
    def part(ps):
        factors = [p.grad for p in ps]
        scaler, of = make(), warpsmith.optim.AdamW
        optimizer = warpsmith.distributed.ShardedOptimizer(ps, of) if sharded else of(ps)
        schedule = warpsmith.amp.DeviceLR(optimizer, warpsmith.amp.schedules.cosine(9), 9, scaler)
        loss = ps[0].detach().new_ones(())

        def steps():
            for unscales, clips in itertools.product((False, True), (None, *ORDERS)):
                if sharded:
                    optimizer.zero_grad()
                    scaler.scale(sum((p * f).sum() for p, f in zip(ps, factors, strict=True))).backward()
                scaler.scale(loss)
                if unscales:
                    scaler.unscale_(optimizer)
                if clips is not None:
                    scaler.clip_(optimizer, 1.0, clips)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()

        return steps

    return part


def of_fp8(ps):
    real = {"dtype": torch.float32, "device": "cpu"}
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, **real), torch.nn.Linear(16, 16, **real))
    recipe = warpsmith.amp.Fp8Recipe("tensor", amax="delayed")
    layers, found_inf, x = warpsmith.amp.fp8(model, recipe), torch.zeros(1, **real), torch.randn(4, 32, **real)

    def step():
        model(x).sum().backward()
        layers.update(found_inf)

    return step


def of_average(ps):
    ema, found_inf = warpsmith.optim.EMA(ps), torch.zeros_like(ps[0].detach()[0, 0], dtype=torch.float32)
    return lambda: [ema.update(flag) for flag in (None, found_inf)]


PARTS = {
    **{options.name: of_optimizer(options) for options in (*FULL, LION, LAMB, Options("Muon", {}, "plain"))},
    "EMA": of_average,
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


def and_loaded(options, params):
    """Steps, and the state in another optimizer, by way of float32."""
    optimizer = options.ours(params)

    def part():
        optimizer.step()
        loaded = options.ours(params)
        loaded.load_state_dict(warpsmith.optim.float32_states(optimizer.state_dict()))
        return tree_leaves(loaded.state_dict()["state"])

    return part


def of_sharded(ps):
    factors = [p.grad for p in ps]
    optimizer = warpsmith.distributed.ShardedOptimizer(ps, warpsmith.optim.AdamW)

    def step():
        optimizer.zero_grad()
        sum((p * f).sum() for p, f in zip(ps, factors, strict=True)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    return step


def of_fused(ps):
    optimizer = warpsmith.optim.AdamW(ps)
    optimizer.fuse(
        ema=warpsmith.optim.EMA(ps), copies={p: p.detach().bfloat16() for p in ps if p.dtype == torch.float32}
    )
    return optimizer.step


@pytest.fixture(scope="module")
def one_rank():
    with warpsmith.distributed.init(device="cpu"):
        yield


SHARDED = {"ShardedOptimizer": of_sharded}
SHARDED |= {"sharded, GradScaler": of_scaler(lambda: warpsmith.amp.GradScaler("cpu"), sharded=True)}
MADE = PARTS | SHARDED | {"fused": of_fused}


@pytest.mark.parametrize("otherwise", [False, True], ids=["like parameters", "otherwise"])
@pytest.mark.parametrize("name", MADE)
def test_the_host_does_not_wait(name, otherwise, one_rank):
    params = parameters(otherwise=otherwise)
    with Beside(math.inf) as told:
        part = MADE[name](params)
        part()  # makes states and tables
        part()
    assert told.found == []
    if name not in SHARDED:  # whose collectives end what the audit sees begin
        with sync_audit("cpu") as audit:
            part()
        assert audit.total == 0, str(audit)


# Ops of torch in a turn, each of which is a launch on a GPU; 0 of the others.
LAUNCHES = {"Muon": 17, "GradScaler": 140, "StepGuard": 124, "DeviceLR": 244, "fp8": 23}
LAUNCHES |= {"ShardedOptimizer": 59, "sharded, GradScaler": 758}


@pytest.mark.full
@pytest.mark.parametrize("name", MADE)
def test_torch_launches_no_more_beside_a_part(name, one_rank):
    part = MADE[name](parameters(otherwise=False))
    part()
    with Beside(1) as beside:
        part()
    assert len(beside.found) <= LAUNCHES.get(name, 0), beside.found


STORED = {str(options): options for options in EACH_STORAGE}


@pytest.mark.parametrize("name", [*MADE, *STORED])
def test_what_is_made_is_like_what_is_given(name, one_rank):
    results = []
    for surroundings in (contextlib.nullcontext, other_defaults):
        torch.manual_seed(0)
        params = parameters(dtype_of(STORED[name]) if name in STORED else torch.float32)
        for p in params if results else ():
            p.grad.requires_grad_()  # as of a backward with create_graph
        with surroundings():
            part = and_loaded(STORED[name], params) if name in STORED else MADE[name](params)
            found = [*(part() or ()), *(part() or ())]
        results.append([*(p.detach() for p in params), *(t for t in found if isinstance(t, torch.Tensor))])
        assert not any(t.requires_grad for t in results[-1])
    assert all(map(bitwise_equal, *results))
