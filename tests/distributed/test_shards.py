"""The layout of a sharded optimizer, for 1 to 4096 ranks."""

import pytest
import torch
from warpsmith.distributed.sharded.shards import plan_buckets

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
