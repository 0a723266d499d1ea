"""The examples under real torchrun with four ranks: a few steps."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warpsmith.distributed.sharded.optimizer import CUT_ELEMS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 4


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def run(*command, **variables):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path} | variables
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stderr


def torchrun(name, *arguments, ranks=RANKS):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    return run(sys.executable, *launcher, EXAMPLES / f"{name}.py", "--device", "cpu", *arguments)


def check(text):
    assert f"{RANKS} ranks" in text
    found = losses(text)
    assert 2 in found and all(math.isfinite(loss) for loss in found.values())


@pytest.mark.parametrize("name", ["ddp", "zero"])
def test_four_ranks(name, tmp_path):
    text = torchrun(name, "--steps", "2", "--save-every", "1", "--out", tmp_path)
    check(text)
    if name == "zero":
        held = [int(n) for n in re.findall(r"holds (\d+) bytes", text)]
        a_piece = CUT_ELEMS["cpu"] * 12  # a float32 master and two float32 states
        assert len(held) == RANKS and max(held) <= sum(held) / RANKS + a_piece


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fsdp2", ["--compute", "float32"]),
        ("context_parallel", ["--mode", "ulysses", "--tokens", "64", "--batch", "8"]),
    ],
)
def test_four_ranks_train_as_one(name, arguments):
    text = torchrun(name, "--steps", "2", *arguments)
    check(text)
    assert losses(text) == pytest.approx(losses(torchrun(name, "--steps", "2", *arguments, ranks=1)), rel=1e-4)


def test_four_ranks_of_the_elastic_script(tmp_path):
    flags = ["--device", "cpu", "--steps", "2", "--save-every", "1", "--out", tmp_path]
    check(run(EXAMPLES / "elastic.sh", *flags, RANKS=str(RANKS)))
