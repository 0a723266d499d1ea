"""The benchmarks run, and their table and JSON hold every contender; the figures of such tiny sizes mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [["-m", "benchmarks"], ["benchmarks/run.py"]], ids=["module", "script"])
def test_a_quick_run_prints_a_table_and_writes_json(tmp_path, command):
    out = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--op", "rms_norm", "--op", "adamw", "--op", "host", "--json", str(out)]
    run = subprocess.run(
        [sys.executable, *command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    read = json.loads(out.read_text())
    cells = {(r["op"], r["direction"], r["contender"]) for r in read["rows"]}
    for direction in ("forward", "backward", "host forward, no grad", "host forward, grad", "host forward + backward"):
        assert ("rms_norm", direction, "warpsmith") in cells
    assert ("adamw", "step", "torch fused") in cells
    failed = [r for r in read["rows"] if r["value"] is None]
    assert not failed
    table = run.stdout.splitlines()[-len(read["rows"]) :]
    assert all(row["contender"] in line for row, line in zip(read["rows"], table, strict=True))


def test_an_unknown_op_is_refused():
    command = [sys.executable, "-m", "benchmarks", "--op", "absent"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert "invalid choice: 'absent'" in run.stderr
