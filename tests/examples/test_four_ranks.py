"""The examples of data parallelism under real torchrun with four ranks: two steps."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warpsmith.distributed.sharded_optimizer import CUT_ELEMS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 4


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


@pytest.mark.parametrize("name", ["ddp", "zero"])
def test_four_ranks(name, tmp_path):
    arguments = [str(EXAMPLES / f"{name}.py"), "--device", "cpu", "--steps", "2", "--save-every", "1"]
    arguments += ["--out", str(tmp_path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=400, env=environ)
    assert done.returncode == 0, done.stderr
    assert f"{RANKS} ranks" in done.stderr
    found = losses(done.stderr)
    assert 2 in found and all(math.isfinite(loss) for loss in found.values())
    if name == "zero":
        held = [int(n) for n in re.findall(r"holds (\d+) bytes", done.stderr)]
        a_piece = CUT_ELEMS["cpu"] * 12  # a float32 master and two float32 states
        assert len(held) == RANKS and max(held) <= sum(held) / RANKS + a_piece
