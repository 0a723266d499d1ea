"""watch(): steps of the ranks, stragglers, and whose numbers are not finite."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warpsmith.distributed import watch
from warpsmith.distributed.watching.report import State
from warpsmith.distributed.watching.steps import Steps, stragglers, table
from warpsmith.testing.distributed import multirank

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
