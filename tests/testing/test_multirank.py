"""Ranks for tests: outcomes named for the right rank, in bounded time, processes kept between tests, planted faults."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from warpsmith.testing import run_ranks
from warpsmith.testing.distributed import InjectedFault, RankPool, close_pools, fault, multirank
from warpsmith.testing.ranks import nccl_environment


@multirank(2)
def test_ranks_talk(rank, world_size):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total == 3 and world_size == 2


@pytest.mark.parametrize("words", ["a", "b"])
@multirank(2)
def test_parameters_and_fixtures_reach_the_ranks(rank, world_size, words, tmp_path):
    (tmp_path / f"{words}-{rank}").write_text("")
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


@multirank(2, ends={1: "died", 0: "raised"}, timeout_s=30)
def test_a_killed_rank(rank, world_size):
    with fault("kill", rank=1, call="all_reduce", nth=2):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))


@multirank(2, ends={1: "raised", 0: "raised"}, timeout_s=30)
def test_an_exception_on_one_rank(rank, world_size):
    with fault("exception", rank=1):
        dist.barrier()


@pytest.mark.parametrize("kind", ["stop", "slow"])
@multirank(2, timeout_s=30)
def test_a_rank_that_pauses_holds_the_others_up(rank, world_size, kind):
    dist.barrier()
    start = time.monotonic()
    with fault(kind, rank=1, call="all_reduce", seconds=1.5):
        dist.all_reduce(torch.ones(1))
    assert time.monotonic() - start > 1.4


def who(rank, world_size):
    return os.getpid()


def hang(rank, world_size):
    if rank == 0:
        time.sleep(100)


def fail(rank, world_size):
    if rank == 1:
        raise KeyError("planted")
    time.sleep(100)


def test_processes_are_kept_until_one_fails():
    with RankPool(2) as pool:
        first = [o.value for o in pool.run(who)]
        assert [o.value for o in pool.run(who)] == first and len(set(first)) == 2
        start = time.monotonic()
        outcomes = pool.run(fail, timeout_s=60)
        assert time.monotonic() - start < 55  # of 60
        assert [o.ending for o in outcomes] == ["hung", "raised"] and "KeyError: 'planted'" in outcomes[1].text
        second = [o.value for o in pool.run(who)]
        assert not set(first) & set(second)
        assert [o.ending for o in pool.run(hang, timeout_s=3)][0] == "hung"
    for pid in first + second:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def connect_late(rank, world_size):
    """From the next call on, rank 0 is connected half a second after rank 1."""
    if rank == 0:
        original = dist.init_process_group

        def late(*args, **kwargs):
            original(*args, **kwargs)
            time.sleep(0.5)
            connect_late.at = time.monotonic()

        dist.init_process_group = late


def begin(rank, world_size):
    return time.monotonic(), getattr(connect_late, "at", None)


def test_no_rank_begins_before_all_are_connected():
    with RankPool(2) as pool:
        pool.run(connect_late)
        (_, connected), (began, _) = (outcome.value for outcome in pool.run(begin))
    assert began >= connected


def planted_exception(rank, world_size):
    with fault("exception", rank=1):
        dist.barrier()


def test_the_text_names_the_fault():
    with RankPool(2) as pool:
        outcomes = pool.run(planted_exception, timeout_s=60)
    assert [o.ending for o in outcomes] == ["raised", "raised"]
    assert f"{InjectedFault.__name__}: planted before barrier on rank 1" in outcomes[1].text
    assert "InjectedFault" not in outcomes[0].text  # a closed connection


WRONG = """
import pytest
from warpsmith.testing.distributed import multirank

pytest_plugins = ["warpsmith.testing.distributed"]

@multirank(2)
def test_fails_on_one(rank, world_size):
    assert rank == 0, "words of rank 1"

@multirank(2, ends={1: "died"})
def test_should_die(rank, world_size):
    pass
"""


def test_a_failing_rank_fails_the_test(tmp_path):
    (tmp_path / "test_wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 1 and "2 failed" in done.stdout, done.stdout + done.stderr
    assert "words of rank 1" in done.stdout
    assert "rank 1 returned, expected died" in done.stdout


def test_bad_arguments():
    with pytest.raises(
        ValueError, match="kind: expected one of kill, stop, slow, exception, mismatch, nan, torn, store, got nap"
    ):
        fault("nap", rank=0).__enter__()
    with pytest.raises(ValueError, match="call: expected a function of torch.distributed, got nothing"):
        fault("kill", rank=0, call="nothing").__enter__()
    with pytest.raises(ValueError, match="nth: expected at least 1, got 0"):
        fault("kill", rank=0, nth=0).__enter__()
    with pytest.raises(ValueError, match="path: expected a file, got None"):
        fault("torn", rank=0).__enter__()
    with pytest.raises(ValueError, match="path: expected none for kill, got state.json"):
        fault("kill", rank=0, path="state.json").__enter__()
    with pytest.raises(ValueError, match="call: expected another function than barrier for mismatch, got barrier"):
        fault("mismatch", rank=0, call="barrier").__enter__()
    with fault("nan", rank=0, call="barrier"), pytest.raises(ValueError, match="in barrier, got no tensor"):
        dist.barrier()
    with fault("nan", rank=0), pytest.raises(ValueError, match="in all_reduce, got 2 of torch.int64"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="ends: expected returned, raised, died, hung, got left"):
        multirank(2, ends={0: "left"})
    with pytest.raises(ValueError, match="expected parameters rank, world_size first, got"):
        multirank(2)(lambda x: None)
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        RankPool(0)
    with pytest.raises(ValueError, match="multirank: ends: expected ranks from 0 to 1, got 5"):
        multirank(2, ends={5: "died"})
    for call, words in (
        (lambda: multirank(test_bad_arguments), r"multirank: world_size: expected an int, got a function: write @mult"),
        (lambda: multirank("2"), "multirank: world_size: expected an int, got the str '2'"),
        (lambda: RankPool("2"), "RankPool: world_size: expected an int, got the str '2'"),
        (lambda: fault("kill", rank="1").__enter__(), "fault: rank: expected an int, got the str '1'"),
        (lambda: fault("kill", rank=1, nth=1.0).__enter__(), "fault: nth: expected an int, got the float 1.0"),
        (lambda: fault("slow", rank=1, seconds="1").__enter__(), "fault: seconds: expected a number, got the str '1'"),
    ):
        with pytest.raises(TypeError, match=f"^{words}"):
            call()


def test_pools_end():
    close_pools()
    close_pools()


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


def sleep(rank, world_size):
    time.sleep(600)


def test_every_rank_returns_in_order():
    assert run_ranks(total_of_ranks, 2, 10) == [21, 21]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (fail_on_one, "planted on rank 1"),
        (die, "rank 0 died: exit code 7"),
        (sleep, "rank 0 hung: still running after 4"),
    ],
)
def test_failures_end_with_the_rank_named(fn, words):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=words):
        run_ranks(fn, 2, timeout_s=4 if fn is sleep else 600)
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


def test_ranks_that_share_gpus_are_hosts_of_their_own():
    shared = [nccl_environment(rank, 3, gpus=2) for rank in range(3)]
    assert len({one["NCCL_HOSTID"] for one in shared}) == 3
    assert all(one["NCCL_SOCKET_IFNAME"] == "lo" for one in shared)
    assert nccl_environment(0, 2, gpus=2) == nccl_environment(0, 2, gpus=8) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 1 << 20])
@multirank(3, backend="nccl", timeout_s=200)
def test_three_ranks_of_any_number_of_gpus(rank, world_size, size):
    assert torch.cuda.current_device() == rank % torch.cuda.device_count()
    total = torch.full((size,), float(rank + 1), device="cuda")
    dist.all_reduce(total)
    assert (total == 6).all()
    parts = torch.empty(3 * size, device="cuda")
    dist.all_gather_into_tensor(parts, torch.full((size,), float(rank), device="cuda"))
    assert parts.view(3, size).mean(1).tolist() == [0, 1, 2]
