"""The scripts of the benchmark learn without a wait of the host, and captured steps have rows beside eager ones."""

import pytest
import torch
from warpsmith.train import sync_audit

from benchmarks import bench_step
from benchmarks.cells import Options
from benchmarks.step_scripts import SCRIPTS, match


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_steps_without_a_wait(name):
    torch.manual_seed(0)
    script = SCRIPTS[name]("cpu", tiny=True)
    before = [p.detach().clone() for p in script.state[0].parameters()]
    with sync_audit("cpu") as audit:
        losses = [script.step(*script.batch).detach() for _ in range(20)]
    assert audit.total == 0 and audit.steps == 20, str(audit)
    assert torch.stack(losses).isfinite().all()
    assert (
        sum(not torch.equal(p, b) for p, b in zip(script.state[0].parameters(), before, strict=True)) > len(before) / 2
    )
    if name == "detector":
        assert losses[-1] < 0.9 * losses[0]


def test_matching_gives_each_target_the_cheapest_query_that_is_left():
    cost = torch.tensor([[[1.0, 0.0], [2.0, 5.0], [3.0, 1.0]], [[4.0, 0.0], [2.0, 1.0], [3.0, 0.5]]])
    kept = cost.clone()
    assert match(cost).tolist() == [[0, 2], [1, 0]] and torch.equal(cost, kept)


def test_the_benchmark_has_both_ways():
    rows = bench_step.run("cpu", Options(rounds=3, quick=True))
    assert {(r.direction, r.contender) for r in rows} == {
        (direction, who) for direction in ("step", "host") for who in ("warpsmith", "eager")
    }
    assert all(r.value is not None for r in rows)
