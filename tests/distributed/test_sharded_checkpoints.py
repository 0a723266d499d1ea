"""States of a ShardedOptimizer: whole tensors, loaded by another number of ranks and by the plain optimizer."""

import logging

import pytest
import torch
import torch.distributed as dist
import warpsmith
from sharding import PARAMS, Pair, Uneven, input_of, same
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("sharded")
SMALL = [(torch.float32, (40_000,), None), (torch.bfloat16, (7, 3), "master"), (torch.float32, (5,), None)]


def train(pair, first, last):
    for step in range(first, last):
        pair.backward(step)
        pair.clip(1.0)
        pair.step()
        pair.check(step)


@multirank(4, timeout_s=200)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 3), (2, 2)])
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(rank, world_size, tmp_path, before, after):
    """Four steps, a checkpoint and four steps on other ranks, beside the plain optimizer, which goes on as well."""
    logging.getLogger("warpsmith.train").setLevel(logging.ERROR)  # other ranks have other random states
    first, second = dist.new_group(list(range(before))), dist.new_group(list(range(after)))
    plain = None
    if rank < before:
        pair = Pair(rank, first, stage=2, bucket_cap_mb=0.05)
        train(pair, 0, 4)
        with warpsmith.train.Checkpointer(tmp_path, process_group=first) as checkpoints:
            checkpoints.save(4, model=pair.ours, optimizer=pair.sharded)
        plain = pair.plain.state_dict()
    dist.barrier()
    if rank >= after:
        return
    pair = Pair(rank, second, stage=1, bucket_cap_mb=0.2)
    train(pair, 0, 1)  # a state that is to be replaced
    loaded = warpsmith.train.Checkpointer(tmp_path, process_group=second)
    assert loaded.load(model=pair.ours, optimizer=pair.sharded) == 4
    assert loaded.load(model=pair.theirs, optimizer=pair.plain) == 4  # what was saved is the plain optimizer's state
    if plain is not None:
        assert same(pair.plain.state_dict(), plain)
    train(pair, 4, 8)
    pair.check_state()


@multirank(4, timeout_s=200)
def test_states_of_other_optimizers(rank, world_size):
    """The plain optimizer's and torch's state, groups in another order of keys, a state dict without any state."""
    pair = Pair(rank, None, params=[entry for entry in PARAMS if entry[2] is None], lr=0.5)
    train(pair, 0, 2)
    pair.sharded.load_state_dict(pair.plain.state_dict())
    train(pair, 2, 3)
    theirs = torch.optim.AdamW(pair.theirs.parameters(), lr=0.25, fused=True)
    pair.theirs(input_of(rank, 0)).backward()
    theirs.step()
    theirs.zero_grad()
    pair.ours.load_state_dict(pair.theirs.module.state_dict())
    for optimizer in (pair.sharded, pair.plain):
        optimizer.load_state_dict(theirs.state_dict())
    assert pair.sharded.param_groups[0]["lr"] == 0.25
    train(pair, 3, 5)
    fresh = Pair(rank, None, params=SMALL, lr=0.5)
    fresh.check_state()
    fresh.sharded.load_state_dict(fresh.plain.state_dict())
    train(fresh, 0, 2)


@multirank(4, timeout_s=200)
def test_a_state_is_refused_before_anything_is_loaded(rank, world_size, tmp_path):
    pair = Pair(rank, None, params=SMALL)
    train(pair, 0, 1)
    with pytest.raises(RuntimeError, match=rf"rank {rank} of 4: .*consolidate_state_dict\(to={rank}\)"):
        pair.sharded.state_dict()
    pair.sharded.consolidate_state_dict(to=2)
    if rank != 2:
        with pytest.raises(RuntimeError, match="expected a consolidated state"):
            pair.sharded.state_dict()
    else:
        assert same(pair.sharded.state_dict(), pair.plain.state_dict())
    train(pair, 1, 2)
    with pytest.raises(RuntimeError, match="expected a consolidated state"):  # that of before the step
        pair.sharded.state_dict()
    with pytest.raises(ValueError, match="to: expected a rank below 4, got 4"):
        pair.sharded.consolidate_state_dict(to=4)
    state = pair.plain.state_dict()
    state["state"][1] = {**state["state"][1], "exp_avg": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"exp_avg of param_groups\[0\]\['params'\]\[1\]: expected shape \(5,\)"):
        pair.sharded.load_state_dict({**state, "state": {**state["state"], 1: {"exp_avg": torch.zeros(4)}}})
    words = {
        "8bit": "whose elements do not depend on others, got 8bit",
        "fp8": "one of None, fp32",
        "bf16": "expected one that takes float32, got bf16",
    }
    for precision, expected in words.items():
        groups = [{**group, "precision": precision} for group in state["param_groups"]]
        with pytest.raises(ValueError, match=rf"precision of param_groups\[0\]: .*{expected}"):
            pair.sharded.load_state_dict({**state, "param_groups": groups})
    other = [(torch.float32, (40_000,), None), (torch.float32, (5,), None)]
    model = Uneven(other)
    with warpsmith.train.Checkpointer(tmp_path) as checkpoints:
        sharded = warpsmith.distributed.ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW)
        checkpoints.save(1, optimizer=sharded)
        checkpoints.wait()
        dist.barrier()
        with pytest.raises(ValueError, match=r"Checkpointer.load: optimizer: step-00000001: .*groups of \[2, 1\]"):
            checkpoints.load(optimizer=pair.sharded)
    train(pair, 2, 3)
