"""A main_grad on several ranks that nothing reduces is refused. How it is reduced: test_main_grad_reduction.py."""

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
IN, OUT = 4, 8


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
