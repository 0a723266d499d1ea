"""`kill -9` of a process that writes checkpoints: whenever it comes, the last durable step is there, whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parent / "kill_driver.py"


def drive(folder, *arguments):
    command = [sys.executable, str(DRIVER), str(folder), *map(str, arguments)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.full
def test_at_every_call_that_touches_the_folder(tmp_path, figure):
    state = drive(tmp_path / "run", "at-every-call")
    assert state["kills"] > 50, state
    assert state["unfinished"] > 5 and state["removed"] > 0, f"the kills came at other times than writing: {state}"
    figure(f"checkpoints: {state['kills']} kill -9, one at each call of four saves, nothing lost")


@pytest.mark.parametrize("kills", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_at_random_times(tmp_path, kills, figure):
    state = drive(tmp_path / "run", "at-random", kills, 1)
    assert state["kills"] == kills
    assert state["unfinished"] > kills // 10 and state["steps"] > kills // 2, state
    figure(f"checkpoints: {kills} kill -9 at random times over {state['steps']} steps, nothing lost")
