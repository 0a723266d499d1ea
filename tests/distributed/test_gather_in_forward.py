"""Parameters that travel behind the next forward: the same bits, and nobody reads one before it is there."""

import pytest
import torch
import warpsmith
from warpsmith.distributed import ShardedOptimizer
from warpsmith.testing import run_ranks


class Blocks(torch.nn.Module):
    """An embedding that is the head too, blocks of which some steps leave one out, and a list in a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(50, 24)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 24)) for _ in range(4)
        ]
        self.trunk = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)})
        self.norm = warpsmith.nn.RMSNorm(24)
        self.inner = Inner()

    def forward(self, ids, leave_out=None):
        x = self.embedding(ids)
        for i, block in enumerate(self.trunk["blocks"]):
            if i != leave_out:
                x = x + block(x)
        return (self.norm(self.inner(x)) @ self.embedding.weight.T).logsumexp(-1).mean()


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(24))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.scale)
        return x


def trained(rank, in_forward, look):
    """Losses and parameters over some steps. look: called between a step and the next forward."""
    model = Blocks()
    optimizer = ShardedOptimizer(
        model.parameters(), warpsmith.optim.AdamW, lr=0.05, bucket_cap_mb=0.005, find_unused_parameters=True
    )
    assert len(optimizer._shards.buckets) > 4
    if in_forward:
        optimizer.gather_in_forward(model)
    found = []
    for step in range(7):
        draw = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randint(50, (3, 5), generator=draw), leave_out=2 if step in (2, 3) else None)
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *look(model, optimizer)]
    optimizer.wait_for_parameters()
    return found + [p.detach().clone() for p in model.parameters()]


def on_ranks(rank, world_size):
    def nothing(model, optimizer):
        return []

    def state(model, optimizer):
        return [value.clone() for value in model.state_dict().values()]

    def loaded(model, optimizer):
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        return []

    def evaluated(model, optimizer):
        with torch.no_grad():
            return [model(torch.arange(5)[None])]

    for look in (nothing, state, loaded, evaluated):
        ours, plain = trained(rank, True, look), trained(rank, False, look)
        assert len(ours) == len(plain) > 7
        for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert torch.equal(a, b), (look.__name__, i)

    model = Blocks()
    optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW, lr=0.05, bucket_cap_mb=0.005)
    optimizer.gather_in_forward(model)
    model(torch.arange(5)[None]).backward()
    optimizer.step()
    early = [p.detach().clone() for p in model.parameters()]
    optimizer.wait_for_parameters()
    changed = [not torch.equal(a, p) for a, p in zip(early, model.parameters(), strict=True)]
    with pytest.raises(ValueError, match=r"gather_in_forward: model: expected one that holds .*, got Linear"):
        optimizer.gather_in_forward(torch.nn.Linear(2, 2))
    return sum(changed)


@pytest.mark.parametrize("world_size", [2])
def test_the_bits_are_those_of_gathering_in_the_step(world_size):
    changed = run_ranks(on_ranks, world_size, timeout_s=200)
    assert min(changed) > 0  # on each rank parameters were still under way after the step
