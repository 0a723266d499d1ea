"""warpsmith.amp.GradScaler on DTensors: all ranks decide alike, whichever has the bad value."""

import itertools
import math
import warnings

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing.distributed import multirank


def sharded(world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,))
    placements = [((6, 4), Shard(0)), ((3,), Shard(0)), ((1,), Shard(0)), ((5,), Replicate())]
    whole = [nn.Parameter(torch.zeros(shape)) for shape, _ in placements]
    pairs = zip(whole, placements, strict=True)
    return [nn.Parameter(distribute_tensor(w.detach().clone(), mesh, [p])) for w, (_, p) in pairs], whole


def set_gradients(params, whole, step, bad):
    from torch.distributed.tensor import distribute_tensor

    generator = torch.Generator().manual_seed(step)
    for i, (p, w) in enumerate(zip(params, whole, strict=True)):
        w.grad = torch.randn(w.shape, generator=generator) * 1024
        if i == bad:
            w.grad.view(-1)[-1] = math.nan if step % 2 else math.inf
        p.grad = distribute_tensor(w.grad.clone(), p.device_mesh, p.placements)


@multirank(2, timeout_s=300)
def test_squares_of_scaled_gradients_do_not_overflow_on_ranks(rank, world_size):
    whole = nn.Parameter(torch.zeros(40_000))
    optimizer = warpsmith.distributed.ShardedOptimizer([whole], warpsmith.optim.SGD, lr=1.0)
    scaler = warpsmith.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((whole * 1e15).sum()).backward()
    assert_close(scaler.clip_(optimizer, 1.0), torch.tensor(200e15), rtol=1e-2, atol=0)
    scaler.step(optimizer)
    assert not scaler.last_skipped
    assert_close(whole.detach().norm(), torch.tensor(1.0), rtol=1e-4, atol=0)


@multirank(2, timeout_s=300)
@pytest.mark.parametrize(("norm_type", "unscale"), [(None, False), (2.0, False), (2.0, True), (math.inf, False)])
def test_ranks_skip_together(rank, world_size, norm_type, unscale):
    """As one process with whole tensors; the last element of each tensor lies on one rank alone."""
    params, whole = sharded(world_size)
    pairs = []
    for own in (params, whole):
        scaler = warpsmith.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        pairs.append((warpsmith.optim.AdamW(own, lr=0.1), scaler))
    for step, bad in enumerate([0, None, 1, 2, 3, None]):
        set_gradients(params, whole, step, bad)
        norms = []
        for optimizer, scaler in pairs:
            if unscale:
                scaler.unscale_(optimizer)
            if norm_type is not None:
                norms.append(scaler.clip_(optimizer, 0.5, norm_type))
            scaler.step(optimizer)
            scaler.update()
        assert len({scaler.last_skipped for _, scaler in pairs} | {bad is not None}) == 1
        if norms and bad is None:
            assert_close(*norms, rtol=1e-6, atol=0)
    assert pairs[0][1].state_dict() == pairs[1][1].state_dict()
    assert pairs[0][1].skipped_steps == 4
    for p, w in zip(params, whole, strict=True):
        assert_close(p.full_tensor(), w, rtol=1e-5, atol=1e-6)


@multirank(2, timeout_s=300)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_optimizer_clips_by_the_norm_of_all_ranks(rank, world_size, stage):
    """Beside torch's scaler with unscale_ and clip_grad_norm_ of the optimizer; the bad batch is one rank's."""
    runs = []
    for scaler in (warpsmith.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
        optimizer = warpsmith.distributed.ShardedOptimizer(
            model.parameters(), warpsmith.optim.SGD, stage=stage, lr=0.1, momentum=0.9
        )
        norms = []
        for step in range(5):
            x = torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            if step == 2 and rank == 1:
                x[0, 0] = math.inf
            scaler.scale(model(x).square().mean()).backward()
            if isinstance(scaler, warpsmith.amp.GradScaler):
                norms.append(scaler.clip_(optimizer, 0.05))
            else:
                scaler.unscale_(optimizer)
                norms.append(optimizer.clip_grad_norm_(0.05))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append((model, scaler, norms, optimizer))  # a scaler counts the steps of living optimizers
    (ours, scaler, norms, _), (theirs, other, others, _) = runs
    assert scaler.skipped_steps == 1, (scaler.skipped_steps, norms, others)
    assert scaler.state_dict() == other.state_dict(), (scaler.state_dict(), other.state_dict(), norms, others)
    good = [0, 1, 3, 4]
    assert_close([norms[i] for i in good], [others[i] for i in good], rtol=1e-5, atol=0)
    assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-5, atol=1e-6)


@multirank(2, timeout_s=300)
def test_every_way_to_clip_takes_the_order_of_the_norm(rank, world_size):
    """One rank has the only fragment. ``None``: no scaler."""
    gradient, kinds = torch.tensor([3.0, -4.0, 12.0]), (warpsmith.amp.GradScaler, warpsmith.amp.StepGuard)
    scalers = [None, *(kind("cpu", enabled=on) for kind in kinds for on in (True, False))]
    makes = [lambda p: warpsmith.distributed.ShardedOptimizer(p, warpsmith.optim.SGD, lr=1.0)]
    makes += [lambda p, kind=kind: kind(p, lr=1.0) for kind in (warpsmith.optim.SGD, torch.optim.SGD)]
    for make, scaler in itertools.product(makes, scalers):
        p = nn.Parameter(torch.zeros(3))
        optimizer = make([p])
        for order, norm in ((1, 19.0), (2, 13.0), (math.inf, 12.0)):
            before = p.detach().clone()
            loss = (p * gradient).sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                found = scaler.clip_(optimizer, 1.0, order)
                scaler.step(optimizer)
                scaler.update()
            else:
                own = getattr(optimizer, "clip_grad_norm_", None)
                found = warpsmith.optim.clip_grad_norm_([p], 1.0, order) if own is None else own(1.0, order)
                optimizer.step()
            optimizer.zero_grad()
            case = f"{type(optimizer).__name__}, {type(scaler).__name__}, {order}"
            assert_close(found, torch.tensor(norm), msg=lambda m, case=case: f"{case}: {m}")
            assert_close(p.detach(), before - gradient / norm, msg=lambda m, case=case: f"{case}: {m}")
