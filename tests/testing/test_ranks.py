import os
import time

import pytest
import torch
import torch.distributed as dist
from warpsmith.testing import run_ranks


def total_of_ranks(rank, world_size, start):
    t = torch.tensor([start + rank])
    dist.all_reduce(t)
    return int(t)


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("planted on rank 1")
    dist.barrier()


def die(rank, world_size):
    if rank == 0:
        os._exit(7)
    dist.barrier()


def hang(rank, world_size):
    time.sleep(60)


def test_every_rank_returns_in_order():
    assert run_ranks(total_of_ranks, 2, 10) == [21, 21]


@pytest.mark.parametrize(
    ("fn", "words", "limit_s"),
    [
        (fail_on_one, "planted on rank 1", 20),
        (die, "rank 0: died with exit code 7", 20),
        (hang, "still running after 4 s", 12),
    ],
)
def test_failures_end_with_the_rank_named(fn, words, limit_s):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=words):
        run_ranks(fn, 2, timeout_s=4 if fn is hang else 60)
    assert time.monotonic() - start < limit_s
