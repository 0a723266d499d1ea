"""A main_grad on several ranks: reduced by what says so, else refused."""

import gc

import pytest
import torch
import torch.distributed as dist
import warpsmith
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import ShardedOptimizer, accurate_hook
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("main_grad")
IN, OUT, CLASSES, MICRO_BATCHES = 4, 8, 5, 3


class Model(nn.Module):
    """Small whole numbers, of which every sum and mean is exact in 16 bits."""

    def __init__(self, fused, transposed=False):
        super().__init__()
        self.layer = warpsmith.nn.Linear(IN, OUT, dtype=torch.bfloat16, fuse_main_grad=fused)
        with torch.no_grad():
            weight = (torch.arange(OUT * IN, dtype=torch.float32) % 3 - 1).view(OUT, IN).bfloat16()
            self.layer.weight.copy_(weight)
            self.layer.bias.zero_()
        if fused:
            lies = torch.zeros(IN, OUT).t() if transposed else torch.zeros(OUT, IN)
            self.layer.weight.main_grad = lies

    def forward(self, x):
        return self.layer(x)


def batches(rank):
    g = torch.Generator().manual_seed(7 + rank)
    return [torch.randint(-2, 3, (6, IN), generator=g).bfloat16() for _ in range(MICRO_BATCHES)]


def step(model, rank, no_sync):
    """The gradients of a step of some micro-batches."""
    *first, last = batches(rank)
    with no_sync():
        for x in first:
            model(x).sum().backward()
    model(last).sum().backward()


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep_norm", [False, True])
def test_accurate_hook_averages_main_grad(rank, world_size, keep_norm, transposed):
    ddp = DistributedDataParallel(Model(True, transposed))
    ddp.register_comm_hook(None, accurate_hook(keep_norm=True) if keep_norm else accurate_hook)
    weight = ddp.module.layer.weight
    for _ in range(2):
        step(ddp, rank, ddp.no_sync)
        of_ranks = torch.stack([sum(x.float().sum(0) for x in batches(r)) for r in range(world_size)])
        assert torch.equal(weight.main_grad, of_ranks.mean(0).expand(OUT, IN).bfloat16().float())
        assert not weight.grad.any() and ddp.module.layer.bias.grad.any()
        weight.main_grad.zero_()


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_sharded_optimizer_steps_by_main_grad(rank, world_size, stage, transposed):
    fused, plain = Model(True, transposed), Model(False)
    found, expected = (
        ShardedOptimizer(m.parameters(), warpsmith.optim.SGD, stage=stage, lr=0.5) for m in (fused, plain)
    )
    for _ in range(2):
        for model, optimizer in ((fused, found), (plain, expected)):
            step(model, rank, optimizer.no_sync)
            optimizer.step()
            optimizer.zero_grad()
        assert not fused.layer.weight.main_grad.any()
        for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)


@multirank(2, timeout_s=120)
def test_a_gradient_beside_main_grad_is_added(rank, world_size):
    """A tied weight whose other use is no fused one."""
    weight = nn.Parameter(torch.ones(OUT, IN))
    weight.main_grad = torch.zeros(OUT, IN)
    optimizer = ShardedOptimizer([weight], warpsmith.optim.SGD, lr=1.0)
    x = torch.full((2, IN), 1.0 + rank)
    (warpsmith.linear(x, weight, main_grad=weight.main_grad).sum() + 3 * weight.sum()).backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((OUT, IN), 1.0 - (2 + 4) / 2 - 3))


def uses(weight):
    """{op: a call that adds the gradient of a weight [OUT, IN] to a tensor}"""
    x, target = torch.ones(2, IN), torch.zeros(2, dtype=torch.int64)
    other = torch.ones(OUT, IN, requires_grad=True)
    return {
        "linear": lambda to: warpsmith.linear(x, weight, main_grad=to),
        "linear, transposed": lambda to: warpsmith.linear(
            torch.ones(2, OUT), weight.t(), main_grad=None if to is None else to.t()
        ),
        "gated_linear": lambda to: warpsmith.gated_linear(x, other, weight, main_grads=(torch.zeros(OUT, IN), to)),
        "linear_cross_entropy": lambda to: warpsmith.linear_cross_entropy(x, weight, target, main_grad=to),
    }


class Calls(nn.Module):
    """Runs a call on its weight within its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(OUT, IN))

    def forward(self, call=None):
        return self.weight.sum() if call is None else call(self.weight)


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("within", [True, False], ids=["in the forward", "outside"])
def test_what_nothing_reduces_is_refused(rank, world_size, within):
    place = torch.zeros(OUT, IN)
    for name in uses(torch.ones(OUT, IN)):

        def call(weight, name=name, to=place):
            return uses(weight)[name](to)

        plain, hooked, single = (DistributedDataParallel(Calls()) for _ in range(3))
        hooked.register_comm_hook(None, accurate_hook)
        single = DistributedDataParallel(Calls(), process_group=dist.new_group([rank], use_local_synchronization=True))

        def run(ddp, call=call):
            return ddp(call) if within else call(ddp.module.weight)

        with pytest.raises(
            ValueError, match=r"main_grads?(\[1\])?: expected None under DistributedDataParallel, or a hook"
        ):
            run(plain)
        with pytest.raises(ValueError, match="expected weight.main_grad, which accurate_hook reduces over ranks, got "):
            run(hooked)
        hooked.module.weight.main_grad = place
        run(hooked)
        run(single)
        sharded = Calls()
        optimizer = ShardedOptimizer(sharded.parameters(), warpsmith.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="expected weight.main_grad, which ShardedOptimizer reduces"):
            call(sharded.weight)
        sharded.weight.main_grad = place
        call(sharded.weight)
        call(torch.ones(OUT, IN, requires_grad=True))  # a weight that nobody shares
        call(hooked.module.weight.detach())
        del optimizer
    assert not place.any()


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("name", uses(torch.ones(OUT, IN)))
def test_what_was_found_does_not_outlive_a_change(rank, world_size, name):
    """What reduces a main_grad is searched once, and again when parameter, main_grad or module are others."""
    ddp, place = DistributedDataParallel(Calls()), torch.zeros(OUT, IN)
    ddp.register_comm_hook(None, accurate_hook)
    weight = ddp.module.weight

    def call(weight):
        return uses(weight)[name](place)

    weight.main_grad = place
    for _ in range(2):
        ddp(call).sum().backward()
        call(weight)
    assert not weight.grad.any()
    weight.main_grad = torch.zeros(OUT, IN)
    with pytest.raises(ValueError, match="expected weight.main_grad, which accurate_hook reduces over ranks"):
        call(weight)
    weight.main_grad = place
    call(weight)
    around = DistributedDataParallel(ddp.module)
    for again in (lambda: around(call), lambda: call(weight)):
        with pytest.raises(ValueError, match="expected None under DistributedDataParallel, or a hook"):
            again()
    sharded = Calls()
    sharded.weight.main_grad = place
    optimizer = ShardedOptimizer(sharded.parameters(), warpsmith.optim.SGD, lr=0.1)
    with optimizer.no_sync():
        call(sharded.weight).sum().backward()
    assert sharded.weight.grad is None
    del optimizer
    gc.collect()
    call(sharded.weight).sum().backward()
    assert not sharded.weight.grad.any()  # zeros, since nobody else gives it a gradient


@multirank(2, timeout_s=120)
def test_under_fully_shard_grad_dtype_is_the_way(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    models = [Calls(), Calls()]
    for model in models:
        fully_shard(model)
    place = torch.zeros(OUT, IN)
    for model in models:  # the second is not gathered while the first one is
        for name in uses(torch.ones(OUT, IN)):
            with pytest.raises(ValueError, match=r"expected None under fully_shard.*grad_dtype"):
                model(lambda weight, name=name: uses(weight)[name](place))


def test_one_process_refuses_nothing():
    weight = torch.ones(OUT, IN, requires_grad=True)
    for call in uses(weight).values():
        call(torch.zeros(OUT, IN))
