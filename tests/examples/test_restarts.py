"""examples/elastic.sh and slurm.sh: a rank dies, all start again, and the run ends as if nothing had been."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# examples/zero.py, whose rank 1 is killed before the first checkpoint of step 20 is written.
DYING = f"""
import os, runpy, signal, sys
from pathlib import Path
from warpsmith.train import Checkpointer
save, dead = Checkpointer.save, Path(os.environ["DEAD"])

def save_or_die(self, step, **parts):
    if step == 20 and "1" in (os.environ.get("RANK"), os.environ.get("SLURM_PROCID")) and not dead.exists():
        dead.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, step, **parts)

Checkpointer.save = save_or_die
sys.argv[0] = {str(EXAMPLES / "zero.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# What srun does, on this host: two processes; when one dies, the other is ended.
SRUN = """
import os, subprocess, sys, time
command = [sys.executable if word == "python" else word for word in sys.argv[1:] if not word.startswith("--kill-on")]
place = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
step = str(len(os.listdir(os.environ["STEPS"])))
open(os.path.join(os.environ["STEPS"], step), "w").close()
ranks = [
    subprocess.Popen(command, env=os.environ | place | {"SLURM_STEP_ID": step, "SLURM_PROCID": r, "SLURM_LOCALID": r})
    for r in "01"
]
while None in [rank.poll() for rank in ranks]:
    if any(rank.poll() for rank in ranks):
        for rank in ranks:
            rank.kill()
    time.sleep(0.1)
sys.exit(max(abs(rank.returncode) for rank in ranks))
"""


def run(script, *flags, **variables):
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in launchers and not k.startswith("SLURM_")}
    path = f"{Path(sys.executable).parent}:{environ['PATH']}"
    environ |= {"OMP_NUM_THREADS": "1", "PATH": path} | {k: str(v) for k, v in variables.items()}
    command = [str(EXAMPLES / script), "--device", "cpu", "--steps", "30", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def figures(text):
    starts = [int(step) for step in re.findall(r"2 ranks on cpu, from step (\d+)", text)]
    return starts, dict(re.findall(r"step (\d+) loss (\S+)", text))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return figures(run("elastic.sh", "--out", tmp_path_factory.mktemp("whole")))


@pytest.fixture
def dying(tmp_path):
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    return {"SCRIPT": program, "DEAD": tmp_path / "dead"}


def test_torchrun_starts_all_ranks_again(whole, dying, tmp_path):
    starts, losses = figures(run("elastic.sh", "--out", tmp_path / "run", RESTARTS=1, **dying))
    assert dying["DEAD"].exists()
    assert (whole[0], starts) == ([0], [0, 10])
    assert losses == whole[1]  # to the last digit that is printed
    assert list(losses) == ["10", "20", "30"]


@pytest.mark.slow
def test_slurm_starts_all_ranks_again(whole, dying, tmp_path):
    programs, steps = tmp_path / "bin", tmp_path / "steps"
    programs.mkdir()
    steps.mkdir()
    (programs / "srun").write_text(f"#!{sys.executable}\n{SRUN}")
    (programs / "srun").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = {"PATH": path, "STEPS": steps, "OUT": tmp_path / "run", "SLURM_JOB_ID": 77}
    text = run("slurm.sh", RESTARTS=1, **places, **dying)
    starts, losses = figures(text)
    assert "slurm.sh: restart 1" in text and len(list(steps.iterdir())) == 2
    assert starts == [0, 10]
    assert losses == whole[1]
