"""The state of a ShardedOptimizer: its layout, whole tensors, and each rank's part in torch.distributed.checkpoint."""

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import warpsmith
from sharding import PARAMS, Pair, Uneven, input_of, same
from warpsmith.distributed import ShardedOptimizer, ShardedState
from warpsmith.distributed.sharded.shards import plan_buckets
from warpsmith.optim import AdamW
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


# Those of `sharding.PARAMS` with states of their own kind; two are cut, one at other places on other ranks.
KINDS = [
    (torch.float32, (50_001,), None),
    (torch.bfloat16, (20_011,), "master"),
    (torch.bfloat16, (129,), "remainder"),
    (torch.float32, (), None),
    (torch.float32, (4, 3, 5, 5), None),  # channels_last
]


def parts_of(pair):
    return {"model": pair.ours.state_dict(), "optimizer": ShardedState(pair.sharded)}


@multirank(3, timeout_s=300)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_goes_on_with_the_same_bits(rank, world_size, tmp_path, before, after):
    first, second = dist.new_group(list(range(before))), dist.new_group(list(range(after)))
    if rank < before:
        pair = Pair(rank, first, stage=2, params=KINDS, bucket_cap_mb=0.05, lr=0.02)
        train(pair, 0, 2)
        dcp.save(parts_of(pair), checkpoint_id=tmp_path / "parts", process_group=first)
        whole = pair.check_state()
        if rank == 0:
            torch.save((whole, pair.theirs.module.state_dict()), tmp_path / "whole")
    dist.barrier()
    if rank < after:
        pair = Pair(rank, second, stage=1, params=KINDS, bucket_cap_mb=0.2, lr=0.5)
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


def sharded(params=KINDS, **options):
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
        ("count", KINDS[:2] + KINDS[3:]),
    ):
        if params is None:
            model = Uneven(KINDS)
            model.weights[4] = torch.nn.Parameter(model.weights[4].detach().contiguous())
            other = ShardedOptimizer(model.groups(KINDS), AdamW)
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


CUT = 16


def random_sizes(seed):
    draw = torch.Generator().manual_seed(seed)
    longest = [8, 100, 3000][seed % 3]
    return torch.randint(0, longest, (40,), generator=draw).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64, 1000, 4096])
def test_every_element_has_one_owner(world_size):
    for seed in range(6):
        sizes = random_sizes(seed)
        kinds = ["abc"[(i * seed) % 3] for i in range(len(sizes))]
        buckets = plan_buckets(sizes, [4] * 40, kinds, world_size=world_size, bucket_bytes=2000, cut_elems=CUT)
        owned = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        assert sorted(p for b in buckets for p in b.params) == list(range(40))
        for bucket in buckets:
            assert len({kinds[p] for p in bucket.params}) == 1
            assert len(bucket.params) == 1 or sum(4 * sizes[p] for p in bucket.params) <= 2000
            assert len(bucket.parts) == world_size
            end = 0
            for f in bucket.fragments:  # without gaps but for padding, rank by rank, and aligned
                assert f.offset == end
                end += f.padded
                assert f.offset % 8 == 0
                assert bucket.first_of(f.rank) <= f.offset
                assert f.offset + f.count <= bucket.first_of(f.rank) + bucket.parts[f.rank]
                assert f.start % CUT == 0
                assert f.param in bucket.params
                owned[f.param][f.start : f.start + f.count] += 1
            assert end == bucket.numel
        assert all((o == 1).all() for o in owned)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_the_ranks_own_about_as_much(world_size):
    """Of long parameters in each bucket, of short ones over all buckets."""
    sizes = [40_000] * 10
    long = plan_buckets(sizes, [2] * 10, "a" * 10, world_size=world_size, bucket_bytes=160_000, cut_elems=CUT)
    for bucket in long:
        assert max(bucket.parts) <= min(bucket.parts) + 2 * CUT
    short = plan_buckets([8] * 640, [4] * 640, "a" * 640, world_size=world_size, bucket_bytes=32, cut_elems=CUT)
    owned = [sum(b.parts[r] for b in short) for r in range(world_size)]
    assert max(owned) <= min(owned) + 8


def test_buckets_come_in_the_order_of_completion():
    """A bucket of the few parameters of another kind must not hold up all others until the last of them."""
    kinds = ["norm" if i % 10 == 0 else "linear" for i in range(40)]
    buckets = plan_buckets([10] * 40, [4] * 40, kinds, world_size=2, bucket_bytes=160, cut_elems=CUT)
    assert buckets[-1].params == (30, 20, 10, 0)
    lowest = [min(b.params) for b in buckets]
    assert lowest == sorted(lowest, reverse=True)
