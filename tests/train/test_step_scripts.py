"""The scripts of the benchmark learn without a wait of the host, and captured steps have rows beside eager ones."""

from types import SimpleNamespace

import pytest
import torch
from warpsmith.train import sync_audit

from benchmarks import bench_train
from benchmarks.cells import Options
from benchmarks.step_scripts import SCRIPTS, match


@pytest.mark.parametrize("name", [*SCRIPTS, "gpt2"])
def test_a_script_steps_without_a_wait(name):
    """The backward does not wait either; some of torch's formulas, such as prod's, read a number from the device."""
    torch.manual_seed(0)
    script = {**SCRIPTS, "gpt2": bench_train.gpt2_script}[name]("cpu", tiny=True)
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


def test_matching_gives_each_target_the_cheapest_query_left():
    cost = torch.tensor([[[1.0, 0.0], [2.0, 5.0], [3.0, 1.0]], [[4.0, 0.0], [2.0, 1.0], [3.0, 0.5]]])
    kept = cost.clone()
    assert match(cost).tolist() == [[0, 2], [1, 0]] and torch.equal(cost, kept)


def test_the_benchmark_has_both_ways():
    rows = bench_train.run_step("cpu", Options(rounds=3, quick=True))
    assert {(r.direction, r.contender) for r in rows} == {
        (direction, who) for direction in ("step", "host") for who in ("warpsmith", "eager")
    }
    assert all(r.value is not None for r in rows)


def test_a_script_that_cannot_be_captured_has_its_reason(monkeypatch):
    """And one that breaks leaves the rows of the others."""

    def stand_in(make, device, tiny):
        if make is bench_train.gpt2_script:
            raise RuntimeError("boom")
        calls = {who: (lambda: torch.ones(()), ()) for who in ("warpsmith", "eager")}
        return calls, SimpleNamespace(fallback_reason="a.py:1: x.item(): the host waits for the device")

    monkeypatch.setattr(bench_train, "eager_and_captured", stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_train, "STEP_BUDGET_S", {"cuda": 0.01})
    rows = bench_train.run_step("cuda", Options(rounds=3))
    ours = {(r.shape, r.direction): r for r in rows if r.contender == "warpsmith"}
    assert {shape for shape, _ in ours} == {*SCRIPTS, "gpt2"} and all(r.value is None for r in ours.values())
    assert (
        ours["detector", "step"].note
        == ours["detector", "host"].note
        == "a.py:1: x.item(): the host waits for the device"
    )
    assert ours["gpt2", "step"].note == "RuntimeError: boom"
    eager = [r for r in rows if r.contender == "eager"]
    assert len(eager) == 2 * len(SCRIPTS) and all(r.value is not None for r in eager)
