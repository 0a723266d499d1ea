"""examples/fsdp2.py: two ranks under real torchrun train as one process does."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp2.py"
ARGUMENTS = ["--device", "cpu", "--steps", "20", "--compute"]


def figures(text):
    return [[float(v) for v in found] for found in re.findall(r"step \d+ loss (\S+) norm (\S+)", text)]


def alone(compute, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *ARGUMENTS, compute])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, last = figures(capfd.readouterr().err)
    assert last[0] < 0.5 * first[0]
    return [first, last]


def test_two_ranks_train_as_one(monkeypatch, capfd):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, str(EXAMPLE), *ARGUMENTS, "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on cpu" in done.stderr
    for one, two in zip(alone("float32", monkeypatch, capfd), figures(done.stderr), strict=True):
        assert two == pytest.approx(one, rel=1e-4)


def test_in_bfloat16(monkeypatch, capfd):
    alone("bfloat16", monkeypatch, capfd)
