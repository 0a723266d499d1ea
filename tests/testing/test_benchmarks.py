"""The benchmarks run; table, JSON and results.csv hold every contender. Figures of such tiny sizes mean nothing."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import benchmarks.__main__
from benchmarks import bench_hook, recorded
from tools import families

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "rows.json"
    ops = ("rms_norm", "adamw", "host", "cross_entropy", "scaled_step", "gpt2")
    arguments = ["--quick", "--device", "cpu", "--json", str(out), *(word for op in ops for word in ("--op", op))]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    read = json.loads(out.read_text())
    cells = {(r["op"], r["direction"], r["contender"]) for r in read["rows"]}
    for direction in ("forward", "backward", "host forward, no grad", "host forward, grad", "host forward + backward"):
        assert ("rms_norm", direction, "warpsmith") in cells
    assert ("adamw", "step", "torch fused") in cells
    failed = [r for r in read["rows"] if r["value"] is None or r["device"] != "cpu"]
    assert not failed
    assert read["environment"]["failed"] == []
    table = run.stdout.splitlines()[-len(read["rows"]) :]
    assert all(row["contender"] in line for row, line in zip(read["rows"], table, strict=True))


def test_every_part_of_many_ranks_runs(tmp_path):
    out = tmp_path / "rows.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "benchmarks.bench_hook", "--device", "cpu", "--quick", "--json", str(out)]
    done = subprocess.run([*launcher, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {row["part"] for row in json.loads(out.read_text())["rows"]} == set(bench_hook.PARTS)


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """Where rows go: not into the repository's tables."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def toy_benchmarks(monkeypatch):
    """Two benchmarks in place of the ops': one breaks."""
    from warpsmith.testing import Row

    import benchmarks

    def good(device, options):
        return [Row("good", "1", "float32", "forward", "warpsmith", float(options.samples))]

    def bad(device, options):
        raise RuntimeError("boom")

    import benchmarks.__main__

    monkeypatch.setattr(benchmarks.__main__, "available", lambda: ["bad", "good"])
    monkeypatch.setattr(benchmarks.__main__, "runners", lambda: {"bad": bad, "good": good})
    return benchmarks


def test_a_benchmark_that_breaks_does_not_stop_the_others(toy_benchmarks, tmp_path, results, capsys):
    out = tmp_path / "rows.json"
    assert toy_benchmarks.__main__.main(["--device", "cpu", "--json", str(out), "--rounds", "7"]) == 1
    assert "RuntimeError: boom" in capsys.readouterr().err
    read = json.loads(out.read_text())
    assert [r["value"] for r in read["rows"]] == [7.0]
    assert read["environment"]["failed"] == ["bad on cpu"]
    more = ["--device", "cpu", "--json", str(out), "--skip", "1"]
    assert toy_benchmarks.__main__.main(more) == 1, "what failed before the rows were kept still counts"
    read = json.loads(out.read_text())
    assert len(read["rows"]) == 2
    table = {run.name: run for run in toy_benchmarks.recorded.load(results)}
    assert len(table) == len(toy_benchmarks.recorded.load()) + 1, (
        "the second run went on with the first one's recording"
    )
    assert len(table[read["environment"]["recording"]].rows) == 2


def test_rows_go_where_they_should_and_of_a_quick_run_nowhere(toy_benchmarks, tmp_path, results):
    arguments = ["--device", "cpu", "--op", "good"]
    assert toy_benchmarks.__main__.main([*arguments, "--quick"]) == 0 and not results.exists()
    assert toy_benchmarks.__main__.main([*arguments, "--results", str(tmp_path / "mine")]) == 0 and not results.exists()
    assert "\ngood,cpu,1,float32,forward,warpsmith," in (tmp_path / "mine/results.csv").read_text()
    assert toy_benchmarks.__main__.main(arguments) == 0
    assert sorted(path.name for path in results.iterdir()) == ["recordings.csv", "results.csv"]


def test_a_cell_without_our_time_fails_the_run_and_keeps_its_row(toy_benchmarks, tmp_path, monkeypatch, capsys):
    from warpsmith.testing import Row

    def rows(device, options):
        cell = ("good", "big", "float32", "forward")
        return [Row(*cell, "warpsmith", None, note="no room"), Row(*cell, "torch", None, note="no room either")]

    monkeypatch.setattr(toy_benchmarks.__main__, "runners", lambda: {"good": rows})
    out = tmp_path / "rows.json"
    assert toy_benchmarks.__main__.main(["--device", "cpu", "--json", str(out), "--op", "good"]) == 1
    read = json.loads(out.read_text())
    assert len(read["rows"]) == 2 and read["environment"]["failed"] == ["good on cpu: big: no room"]
    assert "no room" in capsys.readouterr().out.splitlines()[-2]


def test_a_lost_gpu_costs_one_benchmark(toy_benchmarks, tmp_path, monkeypatch):
    """The process is replaced by one that has the other ops still to do."""
    started = []
    monkeypatch.setattr(toy_benchmarks.__main__, "context_is_lost", lambda: True)
    monkeypatch.setattr(toy_benchmarks.__main__.os, "execv", lambda path, arguments: started.append(arguments))
    arguments = ["--device", "cpu", "--json", str(tmp_path / "rows.json"), "--op", "bad", "--op", "good", "--op", "bad"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    toy_benchmarks.__main__.main(sys.argv[1:])
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments, "--skip", "1"])
    toy_benchmarks.__main__.main(sys.argv[1:])
    command = [sys.executable, "-m", "benchmarks", *arguments, "--skip"]
    assert started == [[*command, "1"], [*command, "2"], [*command, "2"]]


def test_the_timing_process_finds_what_was_compiled_before_it(tmp_path):
    """relu_squared's is the smallest of the graphs; the caches are fresh ones."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    base = [sys.executable, "-m", "benchmarks", "--device", "cpu", "--op", "relu_squared"]

    def run(*more):
        return subprocess.run(
            [*base, *more], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True
        )

    assert "compiled: 2 calls, 0 failed" in run("--warm-compile", "1").stdout
    assert "2 graphs from its cache, 0 not" in run("--rounds", "1").stderr


def test_the_hosts_times_come_first_and_then_the_longest():
    from benchmarks import __main__ as run

    names = run.available()
    assert names[:4] == ["host", "linear_host", "adamw", "gpt2"]
    assert sorted(names) == sorted(run.runners())
    assert {row.name for row in families.rows()} <= set(names)


def test_what_there_is_no_time_for_is_named(toy_benchmarks, tmp_path, capsys):
    out = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--json", str(out), "--op", "good", "--op", "bad"]
    assert toy_benchmarks.__main__.main([*arguments, "--until", "1"]) == 0
    assert json.loads(out.read_text())["environment"]["left_out"] == ["good on cpu", "bad on cpu"]
    assert toy_benchmarks.__main__.main([*arguments, "--until", str(time.time() + 1000)]) == 1
    assert json.loads(out.read_text())["environment"]["left_out"] == []
    capsys.readouterr()
    toy_benchmarks.__main__.main(["--device", "cpu", "--op", "good", "--warm-compile", "1", "--until", "1"])
    assert "compiled: 0 calls, 0 failed" in (printed := capsys.readouterr().out)
    assert printed.endswith("no time for all of good on cpu: left out\n")


def test_other_work_on_the_host_is_seen():
    from benchmarks import __main__ as run

    if not run.busy_seconds():
        pytest.skip("this system does not say how busy its cores are")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = run.HostLoad()
        time.sleep(1)
        assert load.others_busy_cores() > 0.3
    finally:
        busy.kill()
        busy.wait()


def test_an_unknown_op_is_refused(capsys):
    from benchmarks import __main__ as run

    with pytest.raises(SystemExit, match="2"):
        run.main(["--op", "absent"])
    assert "invalid choice: 'absent'" in capsys.readouterr().err


def test_what_liger_patches_is_in_no_other_contenders_step(monkeypatch):
    transformers = pytest.importorskip("transformers")
    import types

    import torch

    from benchmarks import bench_train
    from benchmarks.cells import Options

    modeling = sys.modules[transformers.LlamaForCausalLM.__module__]
    plain, calls = modeling.apply_rotary_pos_emb, []

    def rotated(*arguments):
        calls.append(1)
        return plain(*arguments)

    def apply(fused_linear_cross_entropy, model):
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotated)

    liger = types.ModuleType("liger_kernel.transformers")
    liger.apply_liger_kernel_to_llama = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    options = Options(quick=True)
    runs = [make(bench_train.model_of("llama", "cpu", options)) for make in (bench_train.LigerRun, bench_train.Run)]
    counts = []
    for run in (*runs, runs[0]):
        run.step(torch.zeros(1, 4, dtype=torch.int64))
        counts.append(len(calls))
    layers = bench_train.SMALL["num_hidden_layers"]
    assert counts == [layers, layers, 2 * layers] and modeling.apply_rotary_pos_emb is plain


MACHINE = {
    "date": "2026-01-01 10:00:00 UTC",
    "torch": "2.11.0",
    "python": "3.12",
    "command": "benchmarks",
    "rivals": {},
}


def row(op="rope", contender="warpsmith", device="cuda", value=1.0, **more):
    names = {"op": op, "device": device, "shape": "4x4", "dtype": "bfloat16", "direction": "step", "unit": "ms"}
    return {
        **names,
        "contender": contender,
        "value": value,
        "spread": 0.1,
        "tb_s": None,
        "of_yardstick": None,
        **more,
    } | {"note": more.get("note", "")}


def recording(name, *rows, gpu="Card"):
    return recorded.Recording(recorded.facts_of(name, MACHINE | {"date": name, "gpu": gpu}), list(rows))


def values(found):
    return {run.name: [row["value"] for row in run.rows] for run in found}


def test_every_row_names_a_recording_that_can_be_traced():
    found = recorded.load()
    assert sum(len(run.rows) for run in found) > 1000
    for run in found:
        assert run.facts["date"] and run.facts["torch"] and run.facts["command"], run.name
        assert re.fullmatch(r"[0-9a-f]{7,40}", run.facts["commit"]), f"{run.name}: a commit without changes beside it"
        if run.rows and run.facts["gpu"]:
            assert run.facts["driver"] and run.facts["cuda"] and run.facts["rivals"], run.name


def test_the_files_of_recordings_are_in_gits_history():
    command = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("needs a clone with its whole history")
    files = {run.name: f"{run.facts['commit']}:{run.facts['file']}" for run in recorded.load() if run.facts["file"]}
    assert len(files) == 27
    asked = subprocess.run(
        ["git", "cat-file", "--batch-check"], cwd=ROOT, input="\n".join(files.values()), capture_output=True, text=True
    )
    assert [name for name, said in zip(files, asked.stdout.splitlines(), strict=True) if " blob " not in said] == []


def test_recordings_that_pages_name_are_in_the_table():
    names = {run.name for run in recorded.load()}
    pattern = r"recordings? `?(20\d\d-[0-9a-z-]+)|`(20\d\d-\d\d-\d\d-[0-9a-z-]+-(?:h200|cpu))`"
    for path in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "python").rglob("*.py")):
        named = {first or second for first, second in re.findall(pattern, path.read_text(encoding="utf-8"))}
        assert named <= names, path


def test_the_tables_stay_as_they_are_when_they_are_written_again(tmp_path):
    recorded.write(recorded.load(), tmp_path)
    for name in ("results.csv", "recordings.csv"):
        assert (tmp_path / name).read_bytes() == (recorded.FOLDER / name).read_bytes()


def test_newer_rows_replace_those_of_their_gpu_device_and_op(tmp_path):
    old = recording("1", row(), row("adamw", value=2.0), row("train_gpt", value=3.0), row(device="cpu", value=4.0))
    other = recording("2", row(value=5.0), gpu="Other card")
    new = recording("3", row(value=6.0, shape="2x2"), row("train_gpt", value=7.0))
    recorded.write([new, old, other], tmp_path)
    found = recorded.load(tmp_path)
    assert values(found) == {"3": [6.0, 7.0], "2": [5.0], "1": [2.0, 4.0, 3.0]}, "the history of train_gpt stays"
    assert values(recorded.newest(found)) == {"3": [6.0, 7.0], "2": [5.0], "1": [2.0, 4.0]}


def test_a_loss_and_its_curve_come_from_one_run(tmp_path):
    curve = "linear_cross_entropy by chunks"
    recorded.write([recording("1", row(curve), row("rope")), recording("2", row("linear_cross_entropy"))], tmp_path)
    assert values(recorded.load(tmp_path)) == {"2": [1.0], "1": [1.0]}
    assert curve not in (tmp_path / "results.csv").read_text()


def test_a_run_joins_the_repositorys_rows_and_replaces_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPSMITH_COMMIT", "abc1234")
    before = values(recorded.load())
    rows = [
        row("new op", "copy_"),
        row("new op", value=1.23456789),
        row("new op", "rival", value=None, note="\x1b[1mno"),
    ]
    for _ in range(2):
        recorded.add(
            "mine", rows, MACHINE | {"gpu": "Card", "rivals": {"liger-kernel": "0.8.5", "apex": "absent"}}, tmp_path
        )
    after = {found.name: found for found in recorded.load(tmp_path)}
    mine = after.pop("mine")
    assert values(after.values()) == before
    assert mine.facts["rivals"] == "liger-kernel 0.8.5, apex absent" and mine.facts["commit"] == "abc1234"
    assert [(r["contender"], r["value"], r["note"]) for r in mine.rows] == [
        ("warpsmith", 1.23457, ""),
        ("rival", None, "no"),
    ]


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        ({"code": "sm_90a", "why": "(machine code)"}, "Card"),
        ({"code": "sm_80", "why": "(PTX, compiled ...)"}, "Card, sm_80 code"),
        ({"code": "sm_90", "why": "(PTX, compiled ...)"}, "Card, sm_90 code"),
        ({"code": None, "why": "no kernels"}, "Card"),
        ({}, "Card"),
    ],
)
def test_the_gpus_name_says_whose_code_runs(kernels, name):
    assert benchmarks.__main__.named_by_code("Card", kernels, (9, 0)) == name
