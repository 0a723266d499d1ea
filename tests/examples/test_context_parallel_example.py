"""examples/context_parallel.py under real torchrun: two ranks train as one does, and see each other's tokens."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"
TOKENS = 32  # of the vocabulary
SAME_STEPS = 40  # before the model learns; while it does, rounding grows


def run(ranks, mode, steps):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    options = ["--device", "cpu", "--batch", "8", "--tokens", "64", "--steps", str(steps), "--mode", mode]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLE), *options], capture_output=True, text=True, timeout=240, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks, {mode}, {64 // ranks} tokens each" in done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stderr)}


@pytest.fixture(scope="module")
def losses_of_one_rank():
    losses = run(1, "all_gather", SAME_STEPS)
    assert list(losses) == [10, 20, 30, 40]
    return losses


@pytest.mark.parametrize("mode", ["all_gather", "ring"])
def test_two_ranks_train_as_one(mode, losses_of_one_rank):
    losses = run(2, mode, 120 if mode == "all_gather" else SAME_STEPS)
    assert {step: losses[step] for step in losses_of_one_rank} == pytest.approx(losses_of_one_rank, rel=1e-4)
    if mode == "all_gather":
        # Without the other rank's tokens no token can be told: the loss would stay at log(32).
        assert losses[120] < 0.75 * math.log(TOKENS)
