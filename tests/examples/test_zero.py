"""examples/zero.py under real torchrun: two ranks, then one that goes on."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "zero.py"


def figures(text, ranks):
    assert f"{ranks} ranks on cpu" in text
    held = [int(n) for n in re.findall(r"holds (\d+) bytes", text)]
    assert len(held) == ranks
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}, held


def test_two_ranks_and_another_number_of_ranks(tmp_path, monkeypatch, capfd):
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--steps"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, str(EXAMPLE), *arguments, "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    losses, held = figures(done.stderr, 2)
    assert list(losses) == [10, 20]
    assert losses[20] < 0.5 * losses[10]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments, "30"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    more, alone = figures(capfd.readouterr().err, 1)
    assert list(more) == [30]
    assert max(held) < 0.6 * alone[0]
