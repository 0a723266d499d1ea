"""Ranks that do not multiply the same layers in 8-bit floats: an error that names rank and layer."""

import time

import pytest
import torch
import torch.distributed as dist
import warpsmith
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warpsmith.amp import Fp8Recipe, fp8, fp8_state
from warpsmith.distributed import ShardedOptimizer, accurate_hook
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("fp8_ranks")
ROW, TENSOR = "scaling='row'", "scaling='tensor'"


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def not_first(name, module):
    return name != "0"


# What rank 1 does where rank 0 converts all layers by rows; the layer that is named, what is expected and what came.
UNLIKE = {
    "another recipe": (lambda model, **group: fp8(model, "tensor", **group), "0", ROW, TENSOR),
    "a layer less": (lambda model, **group: fp8(model, filter=not_first, **group), "0", ROW, "no FP8"),
}


def convert(rank, model, unlike, **group):
    return fp8(model, **group) if rank == 0 else UNLIKE[unlike][0](model, **group)


def refused(unlike):
    _, layer, expected, got = UNLIKE[unlike]
    return rf"rank 1 of 2: .*{layer}.*expected .*{expected}.*as on rank 0, got .*{got}"


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("unlike", UNLIKE)
def test_at_the_conversion_over_a_group(rank, world_size, unlike):
    model = small()
    with pytest.raises(ValueError, match=refused(unlike)):
        convert(rank, model, unlike, group=dist.group.WORLD)
    assert all(not isinstance(m, nn.Linear) or "forward" not in m.__dict__ for m in model)
    assert list(fp8(model, group=dist.group.WORLD).replaced) == ["0", "2"]


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("hook", [None, accurate_hook])
@pytest.mark.parametrize("unlike", UNLIKE)
def test_in_the_first_forward_under_ddp(rank, world_size, unlike, hook):
    ddp = DistributedDataParallel(small())
    if hook:
        ddp.register_comm_hook(None, hook)
    convert(rank, ddp.module, unlike)
    with torch.no_grad():
        ddp.module(torch.ones(2, 16))  # an evaluation by some ranks compares nothing
    with pytest.raises(ValueError, match=refused(unlike)):
        ddp(torch.ones(2, 16))


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("unlike", [*UNLIKE, "none"])
def test_in_the_first_reduction_of_a_sharded_optimizer(rank, world_size, unlike):
    model = small()
    optimizer = ShardedOptimizer(model.named_parameters(), warpsmith.optim.SGD, lr=0.1)
    if rank == 0 or unlike != "none":
        convert(rank, model, unlike)
    words = refused("a layer less" if unlike == "none" else unlike)
    with pytest.raises(ValueError, match=words):
        model(torch.ones(2, 16)).square().sum().backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=words):  # and again: nothing was reduced
        model(torch.ones(2, 16)).square().sum().backward()


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("place", ["group", "ddp"])
def test_a_rank_that_converts_nothing_is_not_awaited_forever(rank, world_size, place):
    from warpsmith.amp import fp8_ranks

    model, began = small(), time.monotonic()
    ddp = DistributedDataParallel(model)
    dist.barrier()
    if rank == 0:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(fp8_ranks, "LIMIT_S", 1.0)
            group = {"group": dist.group.WORLD} if place == "group" else {}
            with pytest.raises(ValueError, match="rank 1 of 2: layer 0: expected .* as on rank 0, got no layer in FP8"):
                fp8(model, **group)
                ddp(torch.ones(2, 16))
        assert time.monotonic() - began < 60
    dist.barrier()


@multirank(2, timeout_s=120)
def test_like_ranks_and_groups_of_their_own_are_not_refused(rank, world_size):
    ddp = DistributedDataParallel(small())
    fp8(ddp.module, Fp8Recipe("tensor", amax="delayed"), group=dist.group.WORLD)
    for _ in range(2):
        ddp(torch.ones(2, 16)).sum().backward()
    alone = dist.new_group([rank], use_local_synchronization=True)
    model = DistributedDataParallel(small(), process_group=alone)
    fp8(model.module, ("row", "tensor")[rank])  # stages of a pipeline
    model(torch.ones(2, 16)).sum().backward()


def delayed_scales(rank, device):
    """Histories of six captured steps by each rank's own values, of which one overflows on the last rank alone."""
    model = small().to(device)
    done = fp8(model, Fp8Recipe("tensor", amax="delayed", history=3), group=dist.group.WORLD)
    optimizer = warpsmith.optim.SGD(model.parameters(), lr=0.01)
    scaler = warpsmith.amp.GradScaler(device.type, init_scale=64.0)

    def update(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        scaler.step(optimizer)
        done.update(scaler.found_inf(optimizer))
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    step = warpsmith.train.CapturedStep(update, state=[model, optimizer, scaler, done])
    found = []
    for i in range(6):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) * (rank + 1)
        x[0, 0] = torch.inf if i == OVERFLOWS and rank == 1 else x[0, 0]
        step(x.to(device))
        state = fp8_state(model)
        found.append(torch.cat([state["history"].flatten(), state["scales"].flatten()]).to(device))
    return found


OVERFLOWS = 4


def check_delayed_scales(rank, device):
    found = delayed_scales(rank, device)
    for i, mine in enumerate(found):
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both), i
        assert torch.equal(mine, found[i - 1]) == (i == OVERFLOWS), i  # a skipped step advances none


@multirank(2, timeout_s=120)
def test_delayed_scales_are_those_of_all_ranks(rank, world_size):
    check_delayed_scales(rank, torch.device("cpu"))


@pytest.mark.gpu
@multirank(2, backend="nccl", timeout_s=200)
def test_delayed_scales_of_a_captured_step_on_nccl(rank, world_size):
    check_delayed_scales(rank, torch.device("cuda", torch.cuda.current_device()))
