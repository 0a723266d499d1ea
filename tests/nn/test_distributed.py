"""Modules under data parallelism: DDP and FSDP2 train a net of them alike, and every rank draws masks of its own."""

import warnings

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import run_ranks

VOCABULARY, WIDTH, STEPS = 11, 8, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = warpsmith.nn.RMSNorm(WIDTH)
        self.mlp = warpsmith.nn.GatedMLP(WIDTH, 16)
        self.dropout = warpsmith.nn.DropoutAddRMSNorm(WIDTH, 0.25)
        self.loss = warpsmith.nn.LinearCrossEntropyHead(WIDTH, VOCABULARY)

    def forward(self, tokens):
        h = self.embedding(tokens)
        return self.loss(self.dropout(self.mlp(self.norm(h)), h)[0], tokens)


def train(rank, wrap):
    torch.manual_seed(0)
    net = wrap(Net())
    optimizer = warpsmith.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (3, 5))
        loss = net(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both(rank, world_size):
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    # Without a mesh FSDP2 moves the net to the GPU of a machine that has one, whose generator draws other masks.
    mesh = init_device_mesh("cpu", (world_size,))

    def shard(net):
        fully_shard(net.mlp, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    torch.manual_seed(rank)
    x, zeros = torch.ones(4, 64), torch.zeros(4, 64)
    kept = (warpsmith.dropout_add(x, zeros, 0.5) != 0).tolist()
    return train(rank, DistributedDataParallel), train(rank, shard), kept


@pytest.fixture(scope="module")
def results():
    return run_ranks(both, 2, timeout_s=120)


def test_ddp_and_fsdp2_train_alike(results):
    for ddp, fsdp, _ in results:
        assert ddp == pytest.approx(fsdp, rel=1e-5)
        assert ddp[-1] < ddp[0]


def test_ranks_with_seeds_of_their_own_draw_other_masks(results):
    first, second = (kept for _, _, kept in results)
    assert first != second
