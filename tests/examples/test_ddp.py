"""examples/ddp.py under real torchrun: two ranks, a resumed run, another number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ddp.py"


def run(out, steps, ranks):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(EXAMPLE), "--out", str(out), "--device", "cpu", "--steps", str(steps)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks on cpu" in done.stderr
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stderr)}


def test_two_ranks_and_a_resumed_run(tmp_path):
    whole = run(tmp_path / "whole", 40, 2)
    assert list(whole) == [10, 20, 30, 40]
    assert float(whole[40]) < 0.5 * float(whole[10])
    first = run(tmp_path / "parts", 20, 2)
    second = run(tmp_path / "parts", 40, 2)
    assert list(second) == [30, 40]
    assert first | second == whole  # to the last digit that is printed
    assert list(run(tmp_path / "parts", 50, 1)) == [50]
