"""examples/zero.py under real torchrun: two ranks, then one that goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "zero.py"


def run(out, steps, ranks):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(EXAMPLE), "--out", str(out), "--device", "cpu", "--steps", str(steps)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks on cpu" in done.stderr
    held = [int(n) for n in re.findall(r"holds (\d+) bytes", done.stderr)]
    assert len(held) == ranks
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stderr)}, held


def test_two_ranks_and_another_number_of_ranks(tmp_path):
    losses, held = run(tmp_path, 20, 2)
    assert list(losses) == [10, 20]
    assert float(losses[20]) < 0.5 * float(losses[10])
    more, alone = run(tmp_path, 30, 1)
    assert list(more) == [30]
    assert max(held) < 0.6 * alone[0]
