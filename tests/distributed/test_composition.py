"""Our modules, losses and optimizers under torch's activation checkpointing, tensor parallelism and pipelines."""

import pytest
import torch
import torch.distributed as dist
import warpsmith
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from warpsmith.distributed import ShardedOptimizer
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("sharded")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = warpsmith.nn.RMSNorm(width), warpsmith.nn.GatedMLP(width, 96)
        self.drop = warpsmith.nn.DropoutAdd(0.2)

    def forward(self, x):
        return self.drop(self.mlp(self.norm(x)), x)


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_activation_checkpoints_under_a_sharded_optimizer(rank, world_size, stage):
    """The same bits with and without: the blocks run twice, but their gradients are reduced once."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(64) for _ in range(3))
        sharded = ShardedOptimizer(blocks.parameters(), warpsmith.optim.AdamW, stage=stage, bucket_cap_mb=0.05, lr=0.01)
        torch.manual_seed(rank + 1)
        for step in range(4):
            x = torch.randn(5, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            x.square().mean().backward()
            sharded.clip_grad_norm_(0.1)
            sharded.step()
            sharded.zero_grad()
        results.append([p.detach().clone() for p in blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@multirank(4, timeout_s=200)
def test_tensor_parallel_blocks_train_as_whole_ones(rank, world_size):
    """Two by two ranks: norms and blocks under tensor parallelism, gradients averaged over the data dimension. In
    float64, where the order of sums does not show."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def build():
        torch.manual_seed(0)
        parts = {
            "norm": warpsmith.nn.RMSNorm(8),
            "up": nn.Linear(8, 12),
            "down": nn.Linear(12, 8),
            "last": warpsmith.nn.LayerNorm(8),
        }
        return nn.ModuleDict(parts).double()

    def loss_of(m, x):
        return m["last"](m["down"](torch.relu(m["up"](m["norm"](x))))).sub(0.5).abs().mean()

    whole, parallel = build(), build()
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    parallelize_module(parallel, mesh["tensor"], plan)
    parallelize_module(parallel["up"], mesh["tensor"], ColwiseParallel())
    theirs = warpsmith.optim.AdamW(whole.parameters(), lr=0.05)
    ours = warpsmith.optim.AdamW(parallel.parameters(), lr=0.05)
    start = [p.detach().clone() for p in whole.parameters()]
    for step in range(5):
        batches = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        sum(loss_of(whole, x) for x in batches).div(2).backward()
        own = batches[mesh["data"].get_local_rank()].chunk(2, 1)[mesh["tensor"].get_local_rank()]
        loss_of(parallel, own).backward()
        for p in parallel.parameters():
            p.grad = p.grad.redistribute(placements=[Replicate() if q.is_partial() else q for q in p.grad.placements])
            dist.all_reduce(p.grad.to_local(), group=mesh["data"].get_group())
            p.grad.to_local().div_(2)
        norms = [warpsmith.optim.clip_grad_norm_(m.parameters(), 0.1) for m in (whole, parallel)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(parallel.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-12, msg=f"step {step}: {name}")
    assert all(not torch.equal(p, q) for p, q in zip(start, whole.parameters(), strict=True))


WIDTH, CLASSES, MICROS = 32, 20, 4


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = warpsmith.nn.RMSNorm(WIDTH), warpsmith.nn.GatedMLP(WIDTH, 48)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def stages():
    """Two stages, the same on every rank."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(CLASSES, WIDTH), Residual(), Residual())
    last = nn.Sequential(Residual(), warpsmith.nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    return [first.double(), last.double()]


def loss_of(logits, target):
    return warpsmith.cross_entropy(logits, target)


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_two_stages_train_as_one_model(rank, world_size, schedule):
    """In float64, where the order of the micro-batches' sums does not show."""
    whole, mine = nn.Sequential(*stages()), stages()[rank]
    plain = warpsmith.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    ours = warpsmith.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    stage = pipelining.PipelineStage(mine, rank, world_size, torch.device("cpu"))
    pipeline = getattr(pipelining, schedule)(stage, n_microbatches=MICROS, loss_fn=loss_of)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        ids, target = (torch.randint(CLASSES, (8, 6), generator=draw) for _ in range(2))
        expected = loss_of(whole(ids), target)
        expected.backward()
        losses = []
        if rank == 0:
            pipeline.step(ids)
        else:
            pipeline.step(target=target, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), expected.detach(), rtol=1e-12, atol=0)
        of_stage = list(whole[rank].parameters())
        for a, b in zip(mine.parameters(), of_stage, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
        for optimizer in (plain, ours):
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(mine.parameters(), of_stage, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
