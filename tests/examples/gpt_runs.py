"""Runs of the training example that its tests share: their flags, what they leave, and processes of them."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import train_gpt

EXAMPLES = Path(train_gpt.__file__).parent
SCRIPT = EXAMPLES / "train_gpt.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TINY = [
    *("--device", "cpu", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4"),
    *("--warmup", "5", "--save-every", "10", "--eval-every", "20"),
]


def tiny(data: Path, out: Path, *flags: object) -> list[str]:
    return [*TINY, "--data", str(data), "--out", str(out), *map(str, flags)]


def losses(out: Path) -> dict[int, float]:
    """Training loss by step; each step is logged once, in order."""
    lines = [line for line in train_gpt.read_log(out / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line["loss"] for line in lines}


def checkpoint_names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def newest_step(out: Path) -> int:
    return max(int(name.split("-")[1].split(".")[0]) for name in checkpoint_names(out))


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train_gpt: error: ")]
    assert len(lines) == 1
    return lines[0]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, f"ended before {what}: {process.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {what} within 60 s"
        time.sleep(0.005)


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(program: Path, flags: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, str(program), *flags]


def recipe(*flags: str, stored: dict[str, object] | None = None) -> SimpleNamespace:
    return train_gpt.recipe_of(train_gpt.parse([*TINY, *flags]), train_gpt.Ranks("cpu"), stored)
