"""Our modules, losses and optimizers under torch's pipeline schedules."""

import pytest
import torch
import warpsmith
from torch import nn
from torch.distributed import pipelining
from warpsmith.testing.distributed import multirank

WIDTH, CLASSES, MICROS = 32, 20, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = warpsmith.nn.RMSNorm(WIDTH), warpsmith.nn.SwiGLUMLP(WIDTH, 48)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def stages():
    """Two stages, the same on every rank."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(CLASSES, WIDTH), Block(), Block())
    last = nn.Sequential(Block(), warpsmith.nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
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
