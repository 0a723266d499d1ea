"""The stages of tools/gpu/run.sh judge rightly: what did not run, ran dirty or ran too long must not pass."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stages():
    spec = importlib.util.spec_from_file_location("stages", ROOT / "tools/gpu/stages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["stages"] = module
    spec.loader.exec_module(module)
    return module


WORKED = "workload: 12 op calls of 3 ops\n"
MEMCHECK_CLEAN = "========= ERROR SUMMARY: 0 errors\n"
RACECHECK_CLEAN = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("code", "output", "ok"),
    [
        (0, WORKED + MEMCHECK_CLEAN, True),
        (0, WORKED + RACECHECK_CLEAN, True),
        (0, WORKED, False),
        (0, MEMCHECK_CLEAN, False),
        (0, "workload: 0 op calls\n" + MEMCHECK_CLEAN, False),
        (9, WORKED + MEMCHECK_CLEAN, False),
        (0, WORKED + "========= ERROR SUMMARY: 3 errors\n", False),
        (0, WORKED + "========= ERROR SUMMARY: 10 errors\n", False),
        (0, WORKED + "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", False),
        (127, "compute-sanitizer: not found\n", False),
    ],
)
def test_a_sanitizer_passes_only_with_its_own_clean_summary(stages, code, output, ok):
    assert stages.sanitizer_verdict("memcheck", code, output, 1.0, 100.0).ok is ok


@pytest.mark.parametrize(
    ("code", "output", "ok", "words"),
    [
        (0, "===== 3 passed, 1 skipped in 2.11s =====", True, "3 passed, 1 skipped"),
        (0, "3 passed in 2.11s", True, "3 passed"),
        (1, "FAILED tests/a.py::test_b - boom\n=== 1 failed, 3 passed in 2.11s ===", False, "tests/a.py::test_b"),
        (5, "no tests ran in 0.1s", False, "exit code 5"),
        (0, "===== 9 skipped in 2.11s =====", False, "9 skipped"),
        (124, "...", False, "stopped after 100 s"),
    ],
)
def test_pytest_passes_only_if_something_passed(stages, code, output, ok, words):
    verdict = stages.pytest_verdict("test gpu", code, output, 1.0, 100.0)
    assert verdict.ok is ok
    assert words in verdict.detail


def test_the_bench_stage_tells_what_was_compiled_and_keeps_what_a_stopped_run_measured(stages, tmp_path, monkeypatch):
    log = "a on cuda: 2 rows in 9 s, torch.compile 3 s: 4 graphs from its cache, 1 not\nb on cuda: 1 rows in 2 s, "
    log += "torch.compile 2 s: 0 graphs from its cache, 0 not\n"

    def stopped(command, path, limit_s, env=None):
        (tmp_path / "bench_rows.json").write_text('{"environment": {}, "rows": [1, 2, 3]}')
        path.write_text(log)
        return 124, log, 300.0

    monkeypatch.setattr(stages, "run_command", stopped)
    (verdict,) = stages.bench(tmp_path, 300.0)
    assert not verdict.ok
    assert verdict.detail == "3 rows, torch.compile 5 s, 1 graphs not in its cache, stopped after 300 s"
    stages.finish([verdict], tmp_path, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").glob("*.json")
    assert json.loads(kept.read_text())["rows"] == [1, 2, 3]
    assert kept.read_text().endswith("[\n  1,\n  2,\n  3\n ]\n}\n")


def test_only_the_packages_own_rows_are_printed(stages):
    log = "x\nop  contender  time\n------\na  warpsmith  1 ms\na  torch  2 ms\na  warpsmith, 4 chunks  3 ms\n"
    assert stages.own_rows(log) == "op  contender  time\n------\na  warpsmith  1 ms"


def test_a_command_past_its_limit_is_killed_with_its_children(stages, tmp_path):
    start = time.monotonic()
    code, _, seconds = stages.run_command(["sh", "-c", "sleep 60 & sleep 60"], tmp_path / "log", 1.0)
    assert code == 124
    assert seconds < 10 > time.monotonic() - start
    assert stages.run_command(["no-such-command-here"], tmp_path / "log", 5.0)[0] == 127


def test_a_failed_stage_does_not_stop_the_others(stages, tmp_path, monkeypatch, capsys):
    ran = []

    def stage(name, ok):
        return lambda logs, limit: ran.append(name) or [stages.Verdict(name, ok, 1.0, "detail of " + name)]

    monkeypatch.setattr(stages, "STAGES", {"build": (stage("build", False), 9), "test": (stage("test", True), 9)})
    monkeypatch.setenv("OUT", str(tmp_path))
    assert stages.main([]) == 1
    assert ran == ["build", "test"]
    assert stages.main(["test"]) == 0
    assert "detail of test" in capsys.readouterr().out
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert written
    assert {v["stage"] for w in written for v in w["stages"]} <= {"build", "test"}


def test_the_sanitizers_workload_has_every_op_and_says_which_is_missing(monkeypatch):
    spec = importlib.util.spec_from_file_location("workload", ROOT / "tools/gpu/sanitized_workload.py")
    workload = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workload)
    names = {found.name for found in workload.specs()}
    assert {"rms_norm", "swiglu", "bias_silu", "linear_log_prob"} <= names
    monkeypatch.setattr(workload, "OPTIMIZERS", set())
    with pytest.raises(SystemExit, match="no spec found of adamw"):
        workload.specs()


def test_what_times_nothing_runs_at_the_same_time(stages, tmp_path, monkeypatch):
    together = ["cpu", "sanitize", "warm"]
    assert stages.groups(list(stages.STAGES)) == [["build"], ["ops"], ["test"], together, ["bench"]]
    assert stages.groups(["warm", "bench"]) == [["warm"], ["bench"]]
    barrier = threading.Barrier(2)

    def meeting(name):
        def stage(logs, limit):
            barrier.wait(20)
            return [stages.Verdict(name, True, 1.0, "")]

        return stage

    monkeypatch.setattr(stages, "STAGES", {"cpu": (meeting("cpu"), 9), "warm": (meeting("warm"), 9)})
    monkeypatch.setenv("OUT", str(tmp_path))
    assert stages.main([]) == 0


def test_an_unknown_stage_is_refused():
    command = ["tools/gpu/run.sh", "fly"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "expected one of build, ops, test, cpu, sanitize, warm, bench, got fly" in run.stderr
