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
    time.sleep(600)


def test_every_rank_returns_in_order():
    assert run_ranks(total_of_ranks, 2, 10) == [21, 21]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (fail_on_one, "planted on rank 1"),
        (die, "rank 0 died: exit code 7"),
        (hang, "rank 0 hung: still running after 4"),
    ],
)
def test_failures_end_with_the_rank_named(fn, words):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=words):
        run_ranks(fn, 2, timeout_s=4 if fn is hang else 600)
    assert time.monotonic() - start < 300, "the others, or the timeout, were waited for"


def test_too_many_arguments_are_named():
    with pytest.raises(TypeError, match="run_ranks: total_of_ranks: expected at most 1 argument.s., got 2"):
        run_ranks(total_of_ranks, 2, 10, 11)


def test_what_ranks_cannot_import_is_named():
    def inner(rank, world_size):
        return rank

    for fn, got in ((lambda rank, world_size: rank, ".*<lambda>"), (inner, ".*<locals>.inner"), (3, "the int 3")):
        with pytest.raises(TypeError, match=f"^run_ranks: fn: expected a function at the top level of .*, got {got}$"):
            run_ranks(fn, 2)
    with pytest.raises(TypeError, match="^run_ranks: timeout_s: expected a number, got the str '3'"):
        run_ranks(total_of_ranks, 2, 10, timeout_s="3")
