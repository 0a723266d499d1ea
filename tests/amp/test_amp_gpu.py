"""warpsmith.amp on CUDA: no synchronisation, and a whole step with scaling, clipping and schedule in one graph."""

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import bitwise_equal
from warpsmith.testing.checks.cuda import no_waits

from benchmarks.bench_optim import launches

pytestmark = pytest.mark.gpu

STEPS, BAD = 12, {3, 4, 9}


def parts(dtype, kind):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator).to("cuda", dtype)) for s in ((300, 129), (7,), (2049,))]
    optimizer = warpsmith.optim.AdamW(params, lr=1e-2, precision="master" if dtype != torch.float32 else None)
    scaler = warpsmith.amp.StepGuard() if kind == "guard" else warpsmith.amp.GradScaler(growth_interval=2, hysteresis=2)
    schedule = warpsmith.amp.DeviceLR(optimizer, warpsmith.amp.schedules.cosine(20), 20, scaler)
    for p in params:
        p.grad = torch.zeros_like(p)
    return params, optimizer, scaler, schedule


def gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    values = [torch.randn(p.shape, generator=generator).to("cuda", p.dtype) for p in params]
    if step in BAD:
        values[1][2] = torch.nan
    return values


def one_step(params, optimizer, scaler, schedule, clip, values):
    for p, v in zip(params, values, strict=True):
        p.grad.copy_(scaler.scale(v.float()))
    if clip:
        scaler.clip_(optimizer, 0.1)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["scaler", "guard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_of_the_whole_step_has_the_bits_of_eager_ones(dtype, kind, clip):
    eager, graphed = parts(dtype, kind), parts(dtype, kind)
    for step in range(STEPS):
        one_step(*eager, clip, gradients(eager[0], step))
    static = gradients(graphed[0], 0)
    one_step(*graphed, clip, static)  # makes states, scale and records
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(*graphed, clip, static)
    for step in range(1, STEPS):
        for s, v in zip(static, gradients(graphed[0], step), strict=True):
            s.copy_(v)
        graph.replay()
    assert all(bitwise_equal(a, b) for a, b in zip(eager[0], graphed[0], strict=True))
    for own in (eager, graphed):
        assert own[2].skipped_steps == len(BAD) and own[3].steps_taken == STEPS - len(BAD)
        assert own[2].overflow(own[1]).bad_values == 1
    assert eager[2].state_dict() == graphed[2].state_dict()
    assert eager[3].get_last_lr() == graphed[3].get_last_lr()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_never_waits(dtype, clip, unscale):
    """bfloat16 gradients are unscaled too, for which torch's scaler has no kernel."""
    params, optimizer, scaler, schedule = parts(dtype, "scaler")
    inputs = [gradients(params, step) for step in range(4)]
    scaler.scale(torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    with no_waits():
        for values in inputs:
            for p, v in zip(params, values, strict=True):
                p.grad.copy_(scaler.scale(v.float()))
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                scaler.clip_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    assert scaler.skipped_steps == 1


def test_the_first_step_is_not_captured():
    params, optimizer, scaler, _ = parts(torch.float32, "scaler")
    with (
        pytest.raises(RuntimeError, match="take one step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        scaler.scale(torch.ones((), device="cuda"))


@pytest.mark.parametrize("clip", [False, True])
def test_parameters_on_the_cpu_wait_for_a_scale_on_the_gpu(clip):
    """A copy to the host that is not waited for would be read before it has arrived."""
    params = [nn.Parameter(torch.zeros(3, device=d)) for d in ("cpu", "cuda")]
    optimizer, scaler = warpsmith.optim.SGD(params, lr=1.0), warpsmith.amp.GradScaler(init_scale=1024.0)
    for step in range(3):
        torch.cuda._sleep(50_000_000)
        scaler.scale(torch.ones((), device="cuda"))
        for p in params:
            p.grad = torch.full_like(p, 1024.0)
        if step == 1:
            params[1].grad[0] = torch.inf
        if clip:
            scaler.clip_(optimizer, 100.0)
        scaler.step(optimizer)
        scaler.update(1024.0)
    assert all(torch.equal(p.detach().cpu(), torch.full((3,), -2.0)) for p in params)


def test_launches_of_a_scaled_and_clipped_step_of_2000_tensors():
    params = [nn.Parameter(torch.randn(64, device="cuda")) for _ in range(2000)]
    optimizer, scaler = warpsmith.optim.AdamW(params, lr=1e-3), warpsmith.amp.GradScaler(init_scale=1024.0)
    for p in params:
        p.grad = torch.ones_like(p)
    scaler.scale(torch.ones((), device="cuda"))

    def step():
        scaler.clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    assert 0 < launches(step) <= 8
