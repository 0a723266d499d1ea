"""benchmarks/results.csv: what is in it can be traced, and a run adds its rows to it."""

import re
import subprocess
from pathlib import Path

import pytest

import benchmarks.__main__
from benchmarks import recorded

ROOT = Path(__file__).resolve().parents[2]
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
