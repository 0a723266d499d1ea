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


def info(code, form, library="build/gpu-{}/package/b.so", runs="runs", asked="sm80"):
    folder = library.format(asked)
    card = f"cuda:0     {runs}: NVIDIA H200 (sm_90) with code of {code} ({form})"
    return f"library    {ROOT}/{folder}\n{card}\nops        x\n"


PTX = "PTX, compiled by the driver at first use"
PICKED = "machine code), by its architectures; the driver picked code of sm_80 (nothing"
PASSES = "a.py::b PASSED [ 50%]\n===== 1 passed, 1 skipped in 2.11s ====="
JUDGED = [  # a stage, the code that is asked for, an exit status, an output, and whether all is well
    ("sanitize", "card", 0, WORKED + MEMCHECK.format(0), True),
    ("sanitize", "card", 0, WORKED + RACECHECK.format(0), True),
    ("sanitize", "card", 0, WORKED, False),
    ("sanitize", "card", 0, MEMCHECK.format(0), False),
    ("sanitize", "card", 0, WORKED.replace("12", "0") + MEMCHECK.format(0), False),
    ("sanitize", "card", 9, WORKED + MEMCHECK.format(0), False),
    ("sanitize", "card", 0, WORKED + MEMCHECK.format(10) + MEMCHECK.format(0), False),
    ("sanitize", "card", 0, WORKED + RACECHECK.format(1), False),
    ("sanitize", "card", 127, "compute-sanitizer: not found\n", False),
    ("conformance", "card", 0, "12 vectors checked on NVIDIA H200 (sm_90), 0 differ\n", True),
    ("conformance", "card", 0, "12 vectors checked on host, 0 differ\n", False),
    ("tests", "card", 0, PASSES, True),
    ("tests", "card", 0, f"a.py::c FAILED\n[gw0] [ 20%] FAILED a.py::c \n{PASSES}", False),
    ("tests", "card", 1, "=== 1 failed, 1 passed in 2.11s ===", False),
    ("tests", "card", 5, "=== no tests ran in 0.1s ===", False),
    ("alone", "card", 0, "===== 9 skipped in 2.11s =====", False),
    ("bench", "card", 0, "a on cuda: 2 rows in 9 s\nfailed: []\nleft_out: []\n", True),
    ("bench", "card", 0, "a on cuda: 2 rows in 9 s\nfailed: []\nleft_out: ['b on cuda']\n", False),
    ("bench", "card", 0, "a on cuda: 2 rows in 9 s\nfailed: ['b on cuda']\nleft_out: []\n", False),
    ("bench", "card", 0, "a on cuda: 0 rows in 9 s\nfailed: []\n", False),
    ("code", "card", 0, info("sm_90a", "machine code"), True),
    ("code", "card", 1, info("sm_90a", "machine code"), False),
    ("code", "card", 0, info("sm_80", PTX), False),
    ("code", "card", 0, info("sm_90a", PICKED), False),
    ("code", "card", 0, "library    /a/b.so\n", False),
    ("code", "sm80", 0, info("sm_80", PTX), True),
    ("code", "sm80", 0, info("sm_80", PTX, library="python/b.so"), False),
    ("code", "sm80", 0, info("sm_80", PTX, runs="does not run"), False),
    ("code", "sm80", 0, info("sm_90a", "machine code"), False),
    ("code", "both", 0, info("sm_90", "machine code", asked="both"), True),
    ("code", "both", 0, info("sm_90", PTX, asked="both"), False),
    ("code", "ptx", 0, info("sm_90", PTX, asked="ptx"), True),
    ("code", "ptx", 0, info("sm_90", "machine code", asked="ptx"), False),
]


@pytest.mark.parametrize(("stage", "code", "status", "output", "ok"), JUDGED, ids=range(len(JUDGED)))
def test_a_stage_passes_only_by_what_it_printed(stage, code, status, output, ok):
    _, _, prints = script.jobs_of(stage, code, [], 80 << 30, 100.0)[0]
    assert script.judge(status, output, prints)[0] == ("ok" if ok else "FAILED")


def test_tests_that_failed_before_a_cut_are_named():
    output = "[gw1] [ 10%] PASSED a.py::b \n[gw0] [ 20%] FAILED a.py::c \n"
    word, detail = script.judge(-9, output, [script.PASSED])
    assert word == "CUT" and "FAILED a.py::c" in detail


def test_every_stage_has_commands_and_a_missing_card_fails():
    for code, (_, _, stages) in script.CODES.items():
        for stage in stages.split():
            jobs = script.jobs_of(stage, code, [], 80 << 30, 100.0)
            assert jobs and len({name for name, _, _ in jobs}) == len(jobs) and all(prints for _, _, prints in jobs)
            for _, command, _ in jobs:
                subprocess.run(["sh", "-nc", command], check=True)
    default = (ROOT / "csrc/cmake/architectures.cmake").read_text()
    assert f'set(warpsmith_default_architectures "{script.CODES["both"][0]}")' in default
    env = {**script.os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "tools/gpu/run.py", "tests"], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 1


def test_processes_follow_memory_and_cores(monkeypatch):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name)
    found = []
    for gib, cores in ((79, 16), (139, 16), (139, 4), (8, 16)):
        monkeypatch.setattr(script, "CORES", cores)
        found.append(script.processes(gib << 30))
    assert found == ["-n 7", "-n 8", "-n 2", "-n 1"]


def test_a_command_past_its_limit_is_killed_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "OUT", tmp_path)
    start = time.monotonic()
    child = "(sleep 3; touch child.ran) & sleep 60"
    verdict = script.run(("slow", f"cd {tmp_path}; {child}", [script.PASSED]), start + 1)
    assert verdict["word"] == "CUT" and time.monotonic() - start < 3
    missing = script.run(("missing", "no-such-command-here", [script.PASSED]), start + 60)
    assert missing["word"] == "FAILED" and "exit status 127" in missing["detail"]
    time.sleep(max(0.0, start + 4 - time.monotonic()))
    assert not (tmp_path / "child.ran").exists()


def planned(monkeypatch, tmp_path, fails):
    """main() with every stage's command replaced: the exit status, and the stages' verdicts in stages.json."""
    monkeypatch.setattr(
        script, "jobs_of", lambda stage, *_: [(stage, "false" if stage == fails else "echo yes", ["yes"])]
    )
    monkeypatch.setattr(script, "OUT", tmp_path)
    monkeypatch.setattr(script, "CARD", "print('Some GPU; 1000')")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    status = script.main()
    return status, {v["stage"]: v["word"] for v in json.loads((tmp_path / "stages.json").read_text())["stages"]}


@pytest.mark.parametrize(
    ("fails", "others"), [("none", set()), ("tests", set()), ("code", {"tests", "alone", "sanitize", "bench"})]
)
def test_a_failed_stage_stops_only_tests_of_another_build(monkeypatch, tmp_path, fails, others):
    status, found = planned(monkeypatch, tmp_path, fails)
    assert list(found) == script.CODES["card"][2].split()
    assert {stage for stage, word in found.items() if word != "ok"} == others | ({fails} & found.keys())
    assert status == (fails != "none")
    assert ("==== tests" in (tmp_path / "logs.txt").read_text()) == ("tests" not in others)


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
