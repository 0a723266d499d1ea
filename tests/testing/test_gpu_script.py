"""The stages of tools/gpu/run.sh judge rightly: what did not run, ran dirty or ran too long must not pass."""

import importlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    """The script's modules: what each stage runs, and what starts them."""
    monkeypatch.syspath_prepend(str(ROOT / "tools/gpu"))
    for name in ("command", "stages", "code_stages", "record"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("record")
    for name in ("command", "stages", "code_stages", "record"):
        sys.modules.pop(name)


@pytest.fixture
def stages(script):
    return sys.modules["stages"]


@pytest.fixture
def code_stages(script):
    return sys.modules["code_stages"]


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


LOG = """a on cuda: 2 rows in 9 s, torch.compile 3 s: 4 graphs from its cache, 1 not
b on cuda: 1 rows in 2 s, torch.compile 2 s: 0 graphs from its cache, 0 not
"""


def row(contender, value=1.0):
    return {"op": "a", "shape": "4", "dtype": "f", "direction": "forward", "contender": contender, "value": value}


@pytest.mark.parametrize(
    ("code", "left_out", "words"),
    [
        (0, [], ""),
        (124, [], ", stopped after 300 s"),
        (0, ["c on cuda", "d on cuda"], "; no time for c on cuda, d on cuda"),
    ],
)
def test_the_bench_stage_keeps_what_was_measured_and_says_what_time_cut(
    script, stages, tmp_path, monkeypatch, capsys, code, left_out, words
):
    def ends(command, path, limit_s, env=None):
        rows = [row("warpsmith"), row("torch"), row("warpsmith, 4 chunks")]
        facts = {"gpu": "Some GPU", "left_out": left_out}
        (tmp_path / "bench_rows.json").write_text(json.dumps({"environment": facts, "rows": rows}))
        return code, LOG, 300.0

    monkeypatch.setattr(stages, "run_command", ends)
    (verdict,) = stages.bench(stages.Order(tmp_path, 300.0))
    assert verdict.ok is (code == 0)
    assert verdict.cut is bool(words)
    assert verdict.detail == "3 rows, torch.compile 5 s, 1 graphs not in its cache" + words
    target = script.finish([verdict], ["bench"], tmp_path, seconds=1.0)
    assert target.name.endswith("-some-gpu.json")
    kept = json.loads(target.read_text())
    assert [r["contender"] for r in kept["rows"]] == ["warpsmith", "torch", "warpsmith, 4 chunks"]
    assert kept["stages"][0]["cut"] is bool(words)
    printed = capsys.readouterr().out
    assert "warpsmith, 4 chunks" in printed and " torch " not in printed
    assert ("; cut: bench" in printed) is bool(words)


def test_nothing_is_begun_in_a_stages_last_seconds(stages, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(stages, "run_command", lambda command, *rest: begun.append(command) or (0, "", 0.0))
    now = time.time()
    stages.bench(stages.Order(tmp_path, 200.0))
    until = float(begun[0][begun[0].index("--until") + 1])
    assert now + 100 < until < now + 190


def test_a_command_past_its_limit_is_killed_with_its_children(stages, tmp_path):
    start = time.monotonic()
    code, _, seconds = stages.run_command(["sh", "-c", "sleep 60 & sleep 60"], tmp_path / "log", 1.0)
    assert code == 124
    assert seconds < 10 > time.monotonic() - start
    assert stages.run_command(["no-such-command-here"], tmp_path / "log", 5.0)[0] == 127


def replaced(stages, monkeypatch, script, **made):
    """Stages of the names and functions given in place of all."""
    new = {name: stages.Stage(run, 9.0, *rest) for name, (run, *rest) in made.items()}
    monkeypatch.setattr(script, "STAGES", new)


def test_a_failed_or_cut_stage_does_not_stop_the_others(script, stages, tmp_path, monkeypatch, capsys):
    ran = []

    def stage(name, **ends):
        return lambda order: ran.append(name) or [stages.Verdict(name, seconds=1.0, detail="detail of " + name, **ends)]

    replaced(
        stages, monkeypatch, script,
        build=(stage("build", ok=False),), tests=(stage("tests", ok=True),), bench=(stage("bench", ok=True, cut=True),),
    )  # fmt: skip
    monkeypatch.setenv("OUT", str(tmp_path))
    assert script.main([]) == 1
    assert ran == ["build", "tests", "bench"]
    (path,) = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert [(v["stage"], v["ok"], v["cut"]) for v in written["stages"]] == [
        ("build", False, False), ("tests", True, False), ("bench", True, True)
    ]  # fmt: skip
    assert script.main(["tests"]) == 0
    assert "detail of tests" in capsys.readouterr().out
    assert script.main(["bench"]) == 1, "a recording that lacks something is not whole"
    assert "s in all; cut: bench" in capsys.readouterr().out


def test_a_stage_without_time_is_cut(script, stages, tmp_path, monkeypatch):
    replaced(stages, monkeypatch, script, build=(lambda order: [stages.Verdict("build", True, 1.0, "")],))
    monkeypatch.setattr(script, "DEADLINE_S", 2.0)
    monkeypatch.setattr(script, "planned_s", lambda chosen: 0.0)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert script.main([]) == 1
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["stages"][0]["cut"] is True


def test_the_sanitizers_workload_has_every_op_and_says_which_is_missing(monkeypatch):
    spec = importlib.util.spec_from_file_location("workload", ROOT / "tools/gpu/sanitized_workload.py")
    workload = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workload)
    names = {found.name for found in workload.specs()}
    assert {"rms_norm", "swiglu", "bias_silu", "linear_log_prob"} <= names
    monkeypatch.setattr(workload, "OPTIMIZERS", set())
    with pytest.raises(SystemExit, match="no spec found of adamw"):
        workload.specs()


def test_the_limits_of_one_command_are_under_ten_minutes(script, stages):
    """The promise holds whatever a stage does: its limit kills it."""
    default = [name for name, stage in stages.STAGES.items() if stage.default]
    assert default == ["build", "tests", "alone", "sanitize", "warm", "bench"]
    assert script.groups(default) == [["build"], ["tests"], ["alone"], ["sanitize", "warm"], ["bench"]]
    assert script.planned_s(default) <= script.DEADLINE_S <= script.PROMISE_S - 10
    assert script.groups(["warm", "bench"]) == [["warm"], ["bench"]]
    assert script.planned_s(["cpu_tests"]) < script.DEADLINE_S, "of the others one at a time as well"
    for name in ("cpu_rows", "sm80", "both", "ptx"):
        assert script.planned_s([name]) < script.DEADLINE_S
    assert script.limit_of(["build"], False, 500.0) == stages.STAGES["build"].limit_s
    assert script.limit_of(["bench"], True, 400.0) == 400.0
    assert stages.WARM_PROCESSES <= 8


def test_what_times_nothing_runs_at_the_same_time(script, stages, tmp_path, monkeypatch):
    barrier = threading.Barrier(2)

    def meeting(name):
        def run(order):
            barrier.wait(20)
            return [stages.Verdict(name, True, 1.0, "")]

        return run

    replaced(stages, monkeypatch, script, sanitize=(meeting("sanitize"),), warm=(meeting("warm"), "sanitize"))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert script.main([]) == 0


def test_a_dry_run_goes_through_the_stages_on_the_cpu(script, stages, tmp_path, monkeypatch, capfd):
    """The commands, what they print and how it is judged: all but the card."""
    monkeypatch.setenv("OUT", str(tmp_path))
    left_out = ("tests", "cpu_tests", "both", "ptx")  # which go the way of alone and of sm80
    chosen = [name for name in script.STAGES if name not in left_out]
    assert script.main(["--dry-run", *chosen]) == 0, capfd.readouterr().out
    (path,) = tmp_path.glob("*-cpu.json")
    kept = json.loads(path.read_text())
    steps = ["build", "code", "compile", "tests", "alone", "sanitize", "bench"]
    assert [v["stage"] for v in kept["stages"]] == [*chosen[:-1], *(f"sm80 {step}" for step in steps)]
    assert chosen[-1] == "sm80"
    assert kept["dry_run"] is True
    assert {(r["op"], r["direction"]) for r in kept["rows"]} >= {("adamw", "step"), ("rope", "forward")}
    assert "relu_squared" in {r["op"] for r in kept["rows"]}
    assert set(kept["environment"]["others_busy_cores"]) >= {"host on cpu", "adamw on cpu"}
    assert 0 < kept["seconds"] < script.DEADLINE_S


FACTS = {
    "library": "/package/warpsmith/libwarpsmith_ops.so",
    "kernels": {
        "cuda:0": {"runs": True, "why": "a GPU (sm_90) with code of sm_80 (PTX, compiled ...)", "code": "sm_80"}
    },
}


def gpu(**changes):
    return {"kernels": {"cuda:0": {**FACTS["kernels"]["cuda:0"], **changes}}}


@pytest.mark.parametrize(
    ("facts", "ok", "words"),
    [
        ({}, True, "with code of sm_80 (PTX"),
        ({"library": "/elsewhere/libwarpsmith_ops.so"}, False, "but the library is /elsewhere"),
        (gpu(code="sm_90a", why="machine code"), False, "expected code of sm_80"),
        (gpu(why="a GPU with code of sm_80 (machine code)"), False, "expected code of sm_80"),
        (gpu(runs=False), False, "sm_80"),
        ({"kernels": {}}, False, "exit code 0"),
        ({"kernels": {"cuda": {"runs": False, "why": "no device", "code": None}}}, False, "exit code 0"),
    ],
)
def test_only_the_build_to_test_is_tested(code_stages, tmp_path, monkeypatch, facts, ok, words):
    """Where another library would be loaded, or the driver picks other code, nothing is tested and the stage fails."""
    told = FACTS | facts
    told["library"] = (
        str(code_stages.SM80.folder) + told["library"] if "elsewhere" not in told["library"] else told["library"]
    )
    monkeypatch.setattr(code_stages, "run_command", lambda *_: (0, "a warning\n" + json.dumps(told, indent=1), 1.0))
    monkeypatch.setattr(code_stages, "NEEDED", ((code_stages.which_code, 9.0),))
    ran = []

    def tests(code, order):
        ran.append(order.env["PYTHONPATH"])
        return [code_stages.Verdict("sm80 tests", True, 1.0, "")]

    steps = (*code_stages.NEEDED, (tests, 9.0))
    order = code_stages.Order(tmp_path, 60.0)
    first, second = code_stages.steps_of(code_stages.SM80, steps, order)
    assert first.ok is ok and second.ok is ok
    assert words in first.detail
    assert len(ran) == ok and all(p.startswith(str(code_stages.SM80.folder / "package")) for p in ran)


def test_other_builds_leave_the_installed_package_alone(code_stages, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(code_stages, "run_command", lambda *command: ran.append(command) or (0, "", 1.0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    for code, architectures in (
        (code_stages.SM80, "80"), (code_stages.BOTH, "80;90"), (code_stages.PTX, "80-virtual;90-virtual")
    ):  # fmt: skip
        code_stages.install(code, code_stages.Order(tmp_path, 60.0))
        command, _, _, env = ran.pop()
        folder = ROOT / "build" / f"gpu-{code.name}"
        assert command[command.index("--target") + 1] == str(folder / "package")
        assert f"--config-settings=build-dir={folder}/objects" in command
        assert env["CMAKE_ARGS"] == f"-DCMAKE_CUDA_ARCHITECTURES={architectures}" and env["TORCH_CUDA_ARCH_LIST"] == ""
    default = (ROOT / "csrc/cmake/architectures.cmake").read_text()
    assert f'set(warpsmith_default_architectures "{code_stages.DEFAULT}")' in default


def test_ops_that_do_not_compile_are_named(code_stages, tmp_path, monkeypatch):
    def ends(command, log, limit_s, env):
        log.touch()
        assert env["CUDA_CACHE_PATH"].endswith("gpu-sm80/compiled")
        return (9, "", 1.0) if "rope" in command else (0, WORKED, 1.0)

    monkeypatch.setattr(code_stages, "run_command", ends)
    order = code_stages.Order(tmp_path, 60.0, env=code_stages.SM80.environment)
    (verdict,) = code_stages.compile_all(code_stages.SM80, order)
    assert not verdict.ok and "\n  rope: exit code 9" in verdict.detail
    assert [p.name for p in tmp_path.iterdir()] == ["sm80_compile_rope.log"]


def test_every_failing_test_is_listed(stages, tmp_path, monkeypatch):
    failed = [f"tests/ops/test_{name}.py::test_{i}" for name in ("a", "b") for i in range(9)]
    output = "".join(f"FAILED {test} - boom\n" for test in failed) + "=== 18 failed, 3 passed in 2.11s ==="
    monkeypatch.setattr(stages, "run_command", lambda *_: (1, output, 1.0))
    (verdict,) = stages.tests(stages.Order(tmp_path, 60.0, prefix="sm80_"))
    assert not verdict.ok and "in all: 9 of tests/ops/test_a.py, 9 of tests/ops/test_b.py" in verdict.detail
    assert (tmp_path / "sm80_tests_failed.txt").read_text().splitlines() == failed


def test_an_unknown_stage_is_refused_and_the_plan_is_told():
    def run(*arguments):
        command = ["tools/gpu/run.sh", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    refused = run("fly")
    assert refused.returncode == 2
    assert (
        "expected one of build, tests, alone, sanitize, warm, bench, cpu_tests, cpu_rows, sm80, both, ptx, got fly"
        in refused.stderr
    )
    plan = run("--plan", "build", "sanitize", "warm")
    assert plan.returncode == 0
    assert "sanitize, warm " in plan.stdout and "185 s in all at most" in plan.stdout
