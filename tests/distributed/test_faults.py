"""Planted faults and slow steps on two ranks, and what they provoke: reports of watch(), a refusal of Checkpointer."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warpsmith.distributed import watch
from warpsmith.distributed.watching.report import State
from warpsmith.distributed.watching.steps import Steps, stragglers, table
from warpsmith.testing.distributed import RankPool, fault, multirank
from warpsmith.train import Checkpointer

LIMIT_S = 200


@multirank(2, timeout_s=300)
def nan(rank, world_size, shared):
    said = []
    with watch(120, on_report=said.append) as watching, fault("nan", rank=1, nth=2):
        for _ in range(3):
            given = torch.ones(2, 2)
            total = given.clone()
            dist.all_reduce(total)
            watching.step(total=total)
    with watch(120, on_report=said.append) as watching, fault("nan", rank=1, call="all_gather"):
        given = torch.ones(2, 2)
        found = [torch.zeros(2, 2) for _ in range(world_size)]
        dist.all_gather(found, given)
        watching.step(given=given)
    assert [t.isnan().sum().item() for t in found] == [0, 1]
    Path(shared, f"said-{rank}").write_text("".join(said))


def test_a_nan_is_reported_with_rank_and_step(tmp_path):
    nan(shared=str(tmp_path))
    everybody = "warpsmith: watch: rank {} of 2: total is nan in step 2\n"
    assert (tmp_path / "said-0").read_text() == everybody.format(0)
    assert (tmp_path / "said-1").read_text() == everybody.format(1) + (
        "warpsmith: watch: rank 1 of 2: given is nan in step 1\n"
    )


@multirank(2, timeout_s=300)
def torn(rank, world_size, shared):
    model = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, 1.0)
    with Checkpointer(shared) as checkpoints:
        checkpoints.save(1, model=model)
        torch.nn.init.constant_(model.weight, 2.0)
        checkpoints.save(2, model=model)
    dist.barrier()
    with fault("torn", rank=1, path=Path(shared, "step-00000002", "model.safetensors")):
        dist.barrier()
    assert checkpoints.load(model=model) == 1
    assert torch.equal(model.weight, torch.ones(3, 3))
    (refused,) = checkpoints.refused
    assert refused.startswith("step-00000002: model.safetensors: expected ")


def test_a_torn_file_is_refused_on_all_ranks(tmp_path):
    torn(shared=str(tmp_path))


@multirank(2, timeout_s=300)
def dead_store(rank, world_size, shared):
    said = []
    with watch(120, on_report=said.append) as watching:
        dist.barrier()  # the watches of both have opened the store
        with fault("store", rank=1, call="all_reduce"):
            dist.all_reduce(torch.ones(1))
            deadline = time.monotonic() + LIMIT_S
            while not watching.reported:
                assert time.monotonic() < deadline, "no report"
                time.sleep(0.02)
            dist.barrier()  # rank 1 mends the store when both have seen it
    Path(shared, f"said-{rank}").write_text("".join(said))


def test_every_rank_reports_a_dead_store(tmp_path):
    dead_store(shared=str(tmp_path))
    for rank in range(2):
        words = (tmp_path / f"said-{rank}").read_text()
        assert words.startswith(f"warpsmith: watch: rank {rank} of 2: the store of this job is gone"), words


def mismatch(rank, world_size, shared):
    def leave():
        while not any(Path(shared).glob("*.txt")):
            time.sleep(0.02)
        os._exit(0)

    def write(text):
        Path(shared, f"report-{rank}.part").write_text(text)
        Path(shared, f"report-{rank}.part").rename(Path(shared, f"report-{rank}.txt"))

    threading.Thread(target=leave, daemon=True).start()
    dist.barrier()
    with watch(4, on_report=write), fault("mismatch", rank=1, nth=2):
        for _ in range(3):
            dist.all_reduce(torch.ones(4))


def test_a_mismatched_call_is_reported_with_both_calls(tmp_path):
    with RankPool(2) as pool:
        outcomes = pool.run(mismatch, {"shared": str(tmp_path)}, timeout_s=300)
    assert all(outcome.ending in ("died", "raised") for outcome in outcomes), outcomes
    (report,) = tmp_path.glob("*.txt")
    _, cause, of_0, of_1 = report.read_text().splitlines()
    assert "another order, or a missing collective: rank 1 calls barrier #2, at " in cause
    assert "where rank 0 calls all_reduce #2 of float32 (4,), at " in cause
    assert re.match(r"rank 0: for \d+\.\d s in all_reduce #2", of_0)
    assert re.match(r"rank 1: for \d+\.\d s in barrier #2", of_1)


SLOW_S = 0.1


@multirank(2, timeout_s=300)
def steps_of_ranks(rank, world_size, shared):
    said = []
    with watch(120, on_report=said.append) as watching:
        for step in range(6):
            if rank == 1:
                time.sleep(SLOW_S)
            dist.barrier()
            loss = torch.tensor(float("nan") if rank == 1 and step >= 2 else 1.0, requires_grad=True)
            watching.step(loss=loss, norm=2.0)
        dist.barrier()
        watching.step_times()
        dist.barrier()
        rows = [line.split() for line in watching.step_times().splitlines()[1:]]
        dist.barrier()
    Path(shared, f"said-{rank}").write_text("".join(said))
    assert [row[:2] for row in rows] == [["0", "6"], ["1", "6"]]
    (took_0, own_0), (_, own_1) = (map(float, row[2:4]) for row in rows)
    assert took_0 > 0.9 * SLOW_S * 1e3 and own_1 > 0.9 * SLOW_S * 1e3
    assert own_0 < 0.9 * took_0  # but for what it waits for rank 1


def test_steps_and_a_nan_of_one_rank(tmp_path):
    steps_of_ranks(shared=str(tmp_path))
    assert (tmp_path / "said-0").read_text() == ""
    assert (tmp_path / "said-1").read_text() == "warpsmith: watch: rank 1 of 2: loss is nan in step 3\n"


def state(rank, own_ms, steps=9):
    return State(rank, 1, steps=steps, step_ms=50.0, own_ms=own_ms)


@pytest.mark.parametrize(
    ("own_ms", "expected"),
    [
        ([40, 20], [0]),
        ([24, 20], []),
        ([20, 21, 19, 30], [3]),
        ([20, 40, 19, 30], [1, 3]),
        ([0.1, 0.9], []),  # less than a millisecond
        ([20], []),
    ],
)
def test_stragglers(own_ms, expected):
    states = {rank: state(rank, ms) for rank, ms in enumerate(own_ms)}
    assert stragglers(states) == expected
    assert [line.endswith("straggler") for line in table(states).splitlines()[1:]] == [r in expected for r in states]


def test_ranks_without_steps_are_no_measure():
    states = {0: state(0, 20), 1: state(1, 0.0, steps=1), 2: state(2, 30), 3: None}
    assert stragglers(states) == [2]
    assert table(states).splitlines()[4] == "    3 never came to watch()"


def test_a_name_is_reported_once_and_any_shape_is_read():
    steps = Steps()
    inf = torch.tensor([1.0, float("inf")], dtype=torch.bfloat16)
    steps.end(0.0, {"loss": 1.0, "gradients": torch.full((3,), 1e38)})
    assert steps.not_finite() == []
    steps.end(0.0, {"loss": torch.tensor(float("nan")), "gradients": inf})
    steps.end(0.0, {"loss": float("nan")})
    assert steps.not_finite() == ["loss is nan in step 2", "gradients is inf in step 2"]
    assert steps.not_finite() == []


def test_a_world_of_one_counts_nothing():
    with watch() as watching:
        watching.step(loss=float("nan"))
        assert watching.step_times() == ""
