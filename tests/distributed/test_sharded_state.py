"""A ShardedOptimizer's state through torch.distributed.checkpoint: each rank its part, read by any number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding import Pair, Uneven, same
from warpsmith.distributed import ShardedOptimizer, ShardedState
from warpsmith.optim import AdamW
from warpsmith.testing.distributed import multirank

# Those of `sharding.PARAMS` with states of their own kind; two are cut, one at other places on other ranks.
PARAMS = [
    (torch.float32, (50_001,), None),
    (torch.bfloat16, (20_011,), "master"),
    (torch.bfloat16, (129,), "remainder"),
    (torch.float32, (), None),
    (torch.float32, (4, 3, 5, 5), None),  # channels_last
]


def train(pair, first, last):
    for step in range(first, last):
        pair.backward(step)
        pair.clip(1.0)
        pair.step()
        pair.check(step)


def parts_of(pair):
    return {"model": pair.ours.state_dict(), "optimizer": ShardedState(pair.sharded)}


@multirank(3, timeout_s=300)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_goes_on_with_the_same_bits(rank, world_size, tmp_path, before, after):
    first, second = dist.new_group(list(range(before))), dist.new_group(list(range(after)))
    if rank < before:
        pair = Pair(rank, first, stage=2, params=PARAMS, bucket_cap_mb=0.05, lr=0.02)
        train(pair, 0, 2)
        dcp.save(parts_of(pair), checkpoint_id=tmp_path / "parts", process_group=first)
        whole = pair.check_state()
        if rank == 0:
            torch.save((whole, pair.theirs.module.state_dict()), tmp_path / "whole")
    dist.barrier()
    if rank < after:
        pair = Pair(rank, second, stage=1, params=PARAMS, bucket_cap_mb=0.2, lr=0.5)
        if after == 3:
            train(pair, 0, 1)  # states that are to be replaced; else there are none yet
        dcp.load(parts_of(pair), checkpoint_id=tmp_path / "parts", process_group=second)
        whole, weights = torch.load(tmp_path / "whole")
        pair.theirs.module.load_state_dict(weights)
        pair.plain.load_state_dict(whole)
        assert pair.sharded.param_groups[0]["lr"] == 0.02
        found = pair.check_state()
        assert rank != 0 or same(found, whole)
        pair.check(2)
        train(pair, 2, 4)
        pair.check_state()
    dist.barrier()


def sharded(params=PARAMS, **options):
    model = Uneven(params)
    return model, ShardedOptimizer(model.groups(params), AdamW, **options)


@multirank(2, timeout_s=200)
@pytest.mark.filterwarnings("ignore")
def test_each_rank_holds_its_part_and_others_are_refused(rank, world_size, tmp_path):
    _, optimizer = sharded()
    state = ShardedState(optimizer)
    saved = state.state_dict()
    assert not optimizer.state  # those of the first step were made for the checkpoint alone
    flat = saved["state"]["0"]["exp_avg"]
    assert flat.shape == (50_001,) and 0 < sum(t.numel() for t in flat.ranges.values()) < 50_001
    with pytest.raises(TypeError, match="expected a whole tensor"):
        torch.add(flat, 1)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "parts")
    for kind, params in (
        ("shape", [(torch.float32, (50_001,), None)] * 5),
        ("strides", None),
        ("count", PARAMS[:2] + PARAMS[3:]),
    ):
        if params is None:
            model = Uneven(PARAMS)
            model.weights[4] = torch.nn.Parameter(model.weights[4].detach().contiguous())
            other = ShardedOptimizer(model.groups(PARAMS), AdamW)
        else:
            _, other = sharded(params)
        error, words = {
            "shape": (dcp.CheckpointException, "Size mismatch|Missing key"),
            "strides": (ValueError, r"expected the layout shape \(4, 3, 5, 5\), strides \(75, 25, 5, 1\), got shape"),
            "count": (ValueError, r"param_groups: expected groups of \[3, 1\] parameters, got \[3, 1, 1\]"),
        }[kind]
        with pytest.raises(error, match=words):
            dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=tmp_path / "parts")
        assert not other.state
        dist.barrier()
