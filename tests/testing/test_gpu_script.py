"""tools/gpu/run.py judges rightly: what did not run, ran dirty or ran too long must not pass."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def module(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / f"tools/gpu/{name}.py")
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


script = module("run")
WORKED = "workload: 12 op calls of 3 ops\n"
MEMCHECK = "========= ERROR SUMMARY: {} errors\n"
RACECHECK = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"


def info(code, form, library="/a/b.so", runs=True):
    kernel = {"runs": runs, "code": code, "why": f"NVIDIA H200 (sm_90) with code of {code} ({form})"}
    return "a warning\n" + json.dumps({"library": library, "kernels": {"cuda:0": kernel}}, indent=1)


def runs_on(code):
    return script.runs_on_card(Path("/a"), script.CODES[code][1])


OF_CARD = runs_on("card"), runs_on("sm80"), runs_on("both"), runs_on("ptx")
JUDGED = [
    (script.sanitized, 0, WORKED + MEMCHECK.format(0), True),
    (script.sanitized, 0, WORKED + RACECHECK.format(0), True),
    (script.sanitized, 0, WORKED, False),
    (script.sanitized, 0, MEMCHECK.format(0), False),
    (script.sanitized, 0, WORKED.replace("12", "0") + MEMCHECK.format(0), False),
    (script.sanitized, 9, WORKED + MEMCHECK.format(0), False),
    (script.sanitized, 0, WORKED + MEMCHECK.format(10), False),
    (script.sanitized, 0, WORKED + RACECHECK.format(1), False),
    (script.sanitized, 127, "compute-sanitizer: not found\n", False),
    (script.tested, 0, "a.py::b PASSED [ 50%]\n===== 1 passed, 1 skipped in 2.11s =====", True),
    (script.tested, 1, "a.py::b PASSED [ 50%]\nFAILED a.py::c - x\n=== 1 failed, 1 passed in 2.11s ===", False),
    (script.tested, 5, "=== no tests ran in 0.1s ===", False),
    (script.tested, 0, "===== 9 skipped in 2.11s =====", False),
    (script.measured, 0, "a on cuda: 2 rows in 9 s\nfailed: []\nleft_out: []\n", True),
    (script.measured, 0, "a on cuda: 2 rows in 9 s\nfailed: []\nleft_out: ['b on cuda']\n", False),
    (script.measured, 1, "a on cuda: 2 rows in 9 s\nfailed: ['b on cuda']\nleft_out: []\n", False),
    (script.measured, 0, "failed: []\nleft_out: []\n", False),
    (OF_CARD[0], 0, info("sm_90a", "machine code"), True),
    (OF_CARD[0], 0, info("sm_80", "PTX, compiled by the driver"), False),
    (OF_CARD[1], 0, info("sm_80", "PTX, compiled by the driver"), True),
    (OF_CARD[1], 0, info("sm_80", "PTX, compiled by the driver", library="/b/c.so"), False),
    (OF_CARD[1], 0, info("sm_80", "PTX, compiled by the driver", runs=False), False),
    (OF_CARD[1], 0, info("sm_90a", "machine code"), False),
    (OF_CARD[2], 0, info("sm_90", "machine code"), True),
    (OF_CARD[2], 0, info("sm_90", "PTX, compiled by the driver"), False),
    (OF_CARD[3], 0, info("sm_90", "PTX, compiled by the driver"), True),
    (OF_CARD[3], 0, info("sm_90", "machine code"), False),
    (OF_CARD[0], 0, '{"kernels": {}, "library": null}', False),
    (OF_CARD[0], 1, "no module named warpsmith", False),
]


@pytest.mark.parametrize(("judge", "status", "output", "ok"), JUDGED)
def test_a_stage_passes_only_by_what_it_printed(judge, status, output, ok):
    assert judge(status, output)[0] is ok


def test_tests_that_failed_before_a_cut_are_named():
    output = "[gw1] [ 10%] PASSED a.py::b \n[gw0] [ 20%] FAILED a.py::c \nd.py::e ERROR\n"
    ok, detail = script.tested(script.CUT, output)
    assert not ok and "1 passed, 1 failed" in detail and "a.py::c" in detail and "in all 1 of a.py" in detail


def test_every_stage_has_commands_and_a_missing_card_fails():
    for code, (_, _, stages) in script.CODES.items():
        for stage in stages.split():
            jobs = script.jobs_of(stage, code, [], 80 << 30, 100.0)
            assert jobs and all(job.command for job in jobs), (code, stage)
            assert stage == "conformance" or code == "card" or all(job.env for job in jobs)
    default = (ROOT / "csrc/cmake/architectures.cmake").read_text()
    assert f'set(warpsmith_default_architectures "{script.CODES["both"][0]}")' in default
    env = {**script.os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "tools/gpu/run.py", "tests"], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 1


def test_processes_follow_memory_and_cores(monkeypatch):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    found = [script.spread(gib << 30, cores)[1] for gib, cores in ((79, 16), (139, 16), (139, 4), (8, 16))]
    assert found == ["7", "8", "2", "1"]


def test_a_command_past_its_limit_is_killed_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "log_of", lambda name: tmp_path / name)
    start = time.monotonic()
    verdict = script.run_job(script.Job("slow", ["sh", "-c", "sleep 60 & sleep 60"], script.tested), start + 1)
    assert verdict.cut and not verdict.ok and time.monotonic() - start < 10
    missing = script.run_job(script.Job("missing", ["no-such-command-here"], script.tested), start + 60)
    assert not missing.ok and not missing.cut and "exit status 127" in missing.detail


def planned(monkeypatch, tmp_path, fails):
    """main() with every stage's command replaced: the exit status, and the stages' verdicts in stages.json."""

    def jobs_of(stage, *_):
        return [script.Job(stage, ["false" if stage == fails else "true"], lambda status, _: (status == 0, "told"))]

    monkeypatch.setattr(script, "jobs_of", jobs_of)
    monkeypatch.setattr(script, "OUT", tmp_path)
    monkeypatch.setattr(script, "log_of", lambda name: tmp_path / "logs" / f"{name}.log")
    monkeypatch.setattr(script, "CARD", "print('Some GPU; 1000')")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    status = script.main()
    return status, {v["stage"]: v["ok"] for v in json.loads((tmp_path / "stages.json").read_text())["stages"]}


@pytest.mark.parametrize(
    ("fails", "others"), [("none", set()), ("tests", set()), ("code", {"tests", "alone", "sanitize", "bench"})]
)
def test_a_failed_stage_stops_only_tests_of_another_build(monkeypatch, tmp_path, fails, others):
    status, found = planned(monkeypatch, tmp_path, fails)
    assert list(found) == script.CODES["card"][2].split()
    assert {stage for stage, ok in found.items() if not ok} == others | ({fails} & found.keys())
    assert status == (fails != "none")
    assert "==== tests" in (tmp_path / "logs.txt").read_text()


def test_the_workload_has_every_op_and_names_a_missing_one(monkeypatch):
    workload = module("sanitized_workload")
    assert {"rms_norm", "swiglu", "bias_silu", "linear_log_prob"} <= {found.name for found in workload.specs()}
    monkeypatch.setattr(workload, "OPTIMIZERS", set())
    with pytest.raises(SystemExit, match="no spec found of adamw"):
        workload.specs()


def test_all_tests_are_collected_without_expecttest(tmp_path):
    """A GPU machine without a network may lack what torch's module of sample inputs imports."""
    (tmp_path / "hidden.py").write_text("import sys\nsys.modules['expecttest'] = None\n")
    files = [
        str(p)
        for p in (ROOT / "tests").rglob("test_*.py")
        if "optimizers import" in (t := p.read_text()) or "op_db" in t
    ]
    assert len(files) > 5
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hidden", "-p", "no:cacheprovider", "--collect-only", *files]
    env = {**script.os.environ, "PYTHONPATH": script.os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
