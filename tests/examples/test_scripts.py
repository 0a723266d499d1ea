"""The short examples as a user starts them: under real torchrun, alone, with four ranks, and restarted."""

import importlib
import math
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from warpsmith.distributed.sharded.optimizer import CUT_ELEMS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENS = 32  # of context_parallel.py's vocabulary
SAME_STEPS = 40  # before its model learns; while it does, rounding grows


def run(*command, **variables):
    """What a command writes, started by no launcher."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in launchers and not k.startswith("SLURM_")}
    path = f"{Path(sys.executable).parent}:{environ['PATH']}"
    environ |= {"OMP_NUM_THREADS": "1", "PATH": path} | {k: str(v) for k, v in variables.items()}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def torchrun(name, ranks, *arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    text = run(sys.executable, *launcher, EXAMPLES / f"{name}.py", "--device", "cpu", *arguments)
    assert f"{ranks} ranks" in text
    return text


def alone(name, monkeypatch, capfd, *arguments):
    """What a script writes in this process."""
    monkeypatch.setattr(sys, "argv", [name, "--device", "cpu", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capfd.readouterr().err


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def held(text):
    return [int(n) for n in re.findall(r"holds (\d+) bytes", text)]


def test_ddp_resumed_and_with_another_number_of_ranks(tmp_path):
    def ddp(folder, steps, ranks=2):
        return losses(torchrun("ddp", ranks, "--out", tmp_path / folder, "--steps", steps))

    whole = ddp("whole", 40)
    assert list(whole) == [10, 20, 30, 40]
    assert whole[40] < 0.5 * whole[10]
    first, second = ddp("parts", 20), ddp("parts", 40)
    assert list(second) == [30, 40]
    assert first | second == whole  # to the last digit that is printed
    on_four = ddp("parts", 50, ranks=4)
    assert list(on_four) == [50] and math.isfinite(on_four[50])


def test_zero_goes_on_with_another_number_of_ranks(tmp_path, monkeypatch, capfd):
    text = torchrun("zero", 2, "--out", tmp_path, "--steps", 20)
    found = losses(text)
    assert list(found) == [10, 20] and found[20] < 0.5 * found[10]
    more = alone("zero", monkeypatch, capfd, "--out", tmp_path, "--steps", 30)
    assert "1 ranks on cpu" in more and list(losses(more)) == [30]
    assert len(held(text)) == 2 and len(held(more)) == 1 and max(held(text)) < 0.6 * held(more)[0]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_four_ranks_of_fsdp2_train_as_one(compute, monkeypatch, capfd):
    def figures(text):
        return [[float(v) for v in found] for found in re.findall(r"step \d+ loss (\S+) norm (\S+)", text)]

    arguments = ["--steps", "20", "--compute", compute]
    first, last = figures(alone("fsdp2", monkeypatch, capfd, *arguments))
    assert last[0] < 0.5 * first[0]
    if compute == "float32":
        for one, four in zip((first, last), figures(torchrun("fsdp2", 4, *arguments)), strict=True):
            assert four == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("mode", ["all_gather", "ring"])
def test_two_ranks_share_a_sequence_as_one(mode, monkeypatch, capfd):
    def context_parallel(start, ranks, steps):
        text = start("--batch", 8, "--tokens", 64, "--steps", steps, "--mode", mode)
        assert f"{ranks} ranks, {mode}, {64 // ranks} tokens each" in text
        return losses(text)

    one = context_parallel(partial(alone, "context_parallel", monkeypatch, capfd), 1, SAME_STEPS)
    assert list(one) == [10, 20, 30, 40]
    steps = 120 if mode == "all_gather" else SAME_STEPS
    found = context_parallel(partial(torchrun, "context_parallel", 2), 2, steps)
    assert {step: found[step] for step in one} == pytest.approx(one, rel=1e-4)
    if mode == "all_gather":
        # Without the other rank's tokens no token can be told: the loss would stay at log(32).
        assert found[120] < 0.75 * math.log(TOKENS)


def test_llama_learns_the_same_both_ways(capsys):
    pytest.importorskip("transformers")
    example = importlib.import_module("train_llama")
    results = example.main(["--steps", "6", "--length", "32", "--batch", "2", "--hidden", "64"])
    assert "LlamaRMSNorm: warpsmith.rms_norm (5)" in capsys.readouterr().out
    (theirs, _), (ours, _) = results["transformers"], results["warpsmith"]
    assert ours[-1] < ours[0] - 0.3
    assert ours == pytest.approx(theirs, rel=2e-3)


def test_finetuning_by_the_trainer_goes_on(tmp_path, data, capsys):
    for library in ("transformers", "accelerate", "peft"):
        pytest.importorskip(library)
    example = importlib.import_module("finetune_hf")
    tiny = [
        "--data",
        str(data),
        "--out",
        str(tmp_path),
        "--length",
        "16",
        "--hidden",
        "32",
        "--layers",
        "1",
        "--lr",
        "0.02",
    ]
    first = example.main([*tiny, "--steps", "50"])
    assert "LlamaRMSNorm: warpsmith.rms_norm (3)" in capsys.readouterr().out
    assert first["last"] < first["first"] - 0.1
    second = example.main([*tiny, "--steps", "60"])  # from the checkpoint of step 50
    assert second["last"] < first["first"] - 0.1 and (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:CapturedStep")
def test_lightning_captured_or_not_learns_the_same(tmp_path, data, capsys):
    for library in ("transformers", "lightning"):
        pytest.importorskip(library)
    example = importlib.import_module("train_lightning")
    tiny = ["--data", str(data), "--length", "16", "--hidden", "32", "--layers", "1", "--steps", "12"]
    by_lightning = example.main([*tiny, "--out", str(tmp_path / "a"), "--audit"])
    by_hand = example.main([*tiny, "--out", str(tmp_path / "b"), "--captured"])
    assert torch.equal(torch.stack(by_lightning.losses), torch.stack(by_hand.losses))
    assert by_hand.losses[-1] < by_hand.losses[0] - 0.3
    assert "in 2 steps" in capsys.readouterr().out
    assert example.main([*tiny, "--out", str(tmp_path / "a")]).losses == []  # all 12 steps were done


def test_a_resnet_learns_digits(tmp_path, capfd):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    example = importlib.import_module("train_resnet")
    short = ["--device", "cpu", "--width", "8", "--steps", "45", "--eval-every", "45", "--out"]
    ours = example.main([*short, str(tmp_path / "ours")])
    theirs = example.main([*short, str(tmp_path / "theirs"), "--modules", "torch"])
    text = capfd.readouterr().err
    assert "Bottleneck: its norms with what is behind them (3)" in text and "from step 0" in text
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-5)  # later a value may cross ReLU's kink
    for run in (ours, theirs):
        assert run["losses"][-1] < 0.6 * run["losses"][0] and run["accuracies"][-1][1] > 0.7
    assert (tmp_path / "ours" / "curves.png").stat().st_size > 10_000
    assert example.main([*short, str(tmp_path / "ours")])["losses"] == []  # all steps were done
    assert "from step 45" in capfd.readouterr().err


def test_a_unet_goes_on(tmp_path, capfd):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    example = importlib.import_module("train_unet")
    short = ["--device", "cpu", "--width", "16", "--save-every", "12", "--out"]
    first = example.main([*short, str(tmp_path), "--steps", "12"])
    second = example.main([*short, str(tmp_path), "--steps", "24"])
    whole = example.main([*short, str(tmp_path / "whole"), "--steps", "24"])
    assert "from step 12" in capfd.readouterr().err
    assert first["losses"] + second["losses"] == whole["losses"] and torch.equal(second["drawn"], whole["drawn"])
    assert whole["losses"][-1] < 0.7 * whole["losses"][0] and (tmp_path / "samples.png").stat().st_size > 10_000


def test_two_ranks_train_a_resnet(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    text = torchrun("train_resnet", 2, "--width", "8", "--steps", "4", "--eval-every", "4", "--out", tmp_path)
    found = losses(text)
    assert list(found) == [4] and math.isfinite(found[4])


def check_four(text):
    assert "4 ranks" in text
    found = losses(text)
    assert 2 in found and all(math.isfinite(loss) for loss in found.values())


def test_four_ranks_of_zero_by_the_elastic_script(tmp_path):
    flags = ["--device", "cpu", "--steps", "2", "--save-every", "1", "--out", tmp_path]
    text = run(EXAMPLES / "elastic.sh", *flags, RANKS=4)
    check_four(text)
    a_piece = CUT_ELEMS["cpu"] * 12  # a float32 master and two float32 states
    assert len(held(text)) == 4 and max(held(text)) <= sum(held(text)) / 4 + a_piece


def test_four_ranks_share_heads_as_one(monkeypatch, capfd):
    arguments = ["--mode", "ulysses", "--tokens", "64", "--batch", "8", "--steps", 2]
    text = torchrun("context_parallel", 4, *arguments)
    check_four(text)
    one = alone("context_parallel", monkeypatch, capfd, *arguments)
    assert losses(text) == pytest.approx(losses(one), rel=1e-4)


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


def thirty_steps(script, *flags, **variables):
    return run(EXAMPLES / script, "--device", "cpu", "--steps", 30, *flags, **variables)


def figures(text):
    starts = [int(step) for step in re.findall(r"2 ranks on cpu, from step (\d+)", text)]
    return starts, dict(re.findall(r"step (\d+) loss (\S+)", text))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return figures(thirty_steps("elastic.sh", "--out", tmp_path_factory.mktemp("whole")))


@pytest.fixture
def dying(tmp_path):
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    return {"SCRIPT": program, "DEAD": tmp_path / "dead"}


def test_torchrun_starts_all_ranks_again(whole, dying, tmp_path):
    starts, losses = figures(thirty_steps("elastic.sh", "--out", tmp_path / "run", RESTARTS=1, **dying))
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
    text = thirty_steps("slurm.sh", RESTARTS=1, **places, **dying)
    starts, losses = figures(text)
    assert "slurm.sh: restart 1" in text and len(list(steps.iterdir())) == 2
    assert starts == [0, 10]
    assert losses == whole[1]
