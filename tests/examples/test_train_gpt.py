"""The training example: learns, agrees with itself under torchrun, and says in one line what is wrong."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import gpt_data
import pytest
import torch
import train_gpt
from gpt_runs import (
    DEVICES,
    EXAMPLES,
    SCRIPT,
    TINY,
    checkpoint_names,
    losses,
    newest_step,
    one_error_line,
    recipe,
    start,
    tiny,
    torchrun,
    wait_for,
)

# ------------------------------------------------------------------------------------------------ a run as a whole


def test_a_run_learns_and_writes_log_plot_and_checkpoints(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_gpt.main(tiny(data, tmp_path, "--steps", 60)) == 0
    shown = capsys.readouterr()
    by_step = losses(tmp_path)
    assert list(by_step) == list(range(1, 61))
    assert by_step[1] > 5 and by_step[60] < 3.3  # ln 256 = 5.5 at the start
    lines = train_gpt.read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == [20, 40, 60]
    assert all(line["tokens_per_s"] > 0 and line["lr"] > 0 for line in lines if "loss" in line)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint_names(tmp_path) == ["step-00000050", "step-00000060"]
    assert "sample:\ndef " in shown.out and "validation loss" in shown.out
    assert re.search(r"60/60 .*step/s, loss \d\.\d+, [\d,]+ tokens/s", shown.err)


def test_compare_prints_both_rates_and_losses(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main(tiny(data, tmp_path, "--compare", "--steps", 20)) == 0
    out = capsys.readouterr().out
    for kind in ("warpsmith", "torch"):
        assert re.search(rf"^{kind} +[\d,]+ +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE), out
    result = json.loads((tmp_path / "compare.json").read_text())
    assert len(result["warpsmith"]["losses"]) == len(result["torch"]["losses"]) == 20
    assert 0 < result["largest_loss_gap"] < 1e-3  # zero would mean that the same modules ran twice
    assert not (tmp_path / "checkpoints").exists()


def test_gpt2_preset_runs_with_random_tokens(tmp_path: Path) -> None:
    flags = [
        "--preset",
        "gpt2-124m",
        *TINY,
        "--vocab",
        "300",
        "--tokens",
        "random",
        "--steps",
        "3",
        "--out",
        str(tmp_path),
    ]
    assert train_gpt.main(flags) == 0
    assert all(abs(loss - 5.7) < 0.1 for loss in losses(tmp_path).values())  # ln 300: nothing to learn


def test_the_largest_seed_and_no_time_at_all(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main(tiny(data, tmp_path / "seed", "--steps", 1, "--seed", 2**43 - 1)) == 0
    assert train_gpt.main(tiny(data, tmp_path / "time", "--seconds", 1e-9)) == 0
    assert "0 steps in 0 s, 0 tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_run_has_the_losses_of_an_eager_one(data: Path, tmp_path: Path, device: str) -> None:
    flags = ["--device", device, "--steps", "12", "--dtype", "bfloat16"]
    assert train_gpt.main(tiny(data, tmp_path / "eager", *flags)) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if device == "cpu" else "error", RuntimeWarning)  # on the CPU it is eager
        assert train_gpt.main(tiny(data, tmp_path / "captured", *flags, "--captured")) == 0
    assert losses(tmp_path / "captured") == losses(tmp_path / "eager")


@pytest.mark.parametrize("kind", ["warpsmith", "torch"])
@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_a_step_clips_as_torch_does(kind: str, clip: float) -> None:
    """A step, beside one by clip_grad_norm_ and torch's optimizer. The second of two shows that the moments agree."""
    s = recipe("--preset", "gpt2-124m", "--dtype", "float32", "--vocab", "300", "--tokens", "random")
    s.clip = clip
    run = train_gpt.Run(s, kind, train_gpt.Ranks("cpu"))
    other = train_gpt.Run(s, "torch", run.ranks)
    optimizer = torch.optim.AdamW(other.optimizer.param_groups, betas=(0.9, 0.95))
    data = train_gpt.Data(s, None, run.ranks)
    for i in range(2):
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate()
        other.model(data.batch(i)).backward()
        norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), clip)
        assert (norm > clip) == (clip < 1)
        optimizer.step()
        optimizer.zero_grad()
        run.step(data.batch(i))
        assert all(p.grad is None for p in run.model.parameters())
    for (name, ours), theirs in zip(run.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_checkpoint_may_be_older_than_a_flag() -> None:
    stored = {name: value for name, value in vars(recipe()).items() if name != "stream"}
    assert recipe(stored=stored).stream == "float32"
    with pytest.raises(train_gpt.UserError, match=r"--stream: expected float32 \(the checkpoint's\), got bfloat16"):
        recipe("--stream", "bfloat16", stored=stored)


def test_deterministic_runs_do_not_fill_new_tensors() -> None:
    train_gpt.set_determinism(train_gpt.parse(["--device", "cuda"]))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    train_gpt.set_determinism(train_gpt.parse(["--device", "cuda", "--no-deterministic"]))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_nano_reaches_its_loss_within_three_minutes(tmp_path: Path) -> None:
    flags = ["--preset", "nano", "--device", "cpu", "--seconds", "180", "--out", str(tmp_path)]
    assert train_gpt.main(flags) == 0
    final = [line for line in train_gpt.read_log(tmp_path / "log.jsonl") if "validation_loss" in line][-1]
    assert final["validation_loss"] < 1.75


# ------------------------------------------------------------------------------------------------------------ data


def test_a_folder_is_split_by_file(data: Path) -> None:
    train, validation, description = gpt_data.read_data(data)
    parts = [part.split(b"\0") for part in (train, validation)]
    assert [len(part) for part in parts] == [18, 2]
    assert sorted(parts[0] + parts[1]) == sorted(path.read_bytes() for path in data.iterdir())
    assert description.startswith("20 file(s) of ")


def test_a_single_file_is_cut(data: Path) -> None:
    file = data / "file_00.txt"
    train, validation, _ = gpt_data.read_data(file)
    assert train + validation == file.read_bytes()
    assert len(train) == file.stat().st_size * 9 // 10


def test_file_names_need_not_be_utf8(data: Path, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    for i, path in enumerate(data.iterdir()):
        shutil.copy(path, os.path.join(folder, b"caf\xe9_%d.txt" % i))
    assert gpt_data.read_data(tmp_path)[2].startswith("20 file(s) of ")


def test_the_default_data_is_the_standard_library() -> None:
    train, validation, description = gpt_data.read_data(None)
    assert len(train) > 5e6 and len(validation) > 5e5
    assert "python" in description


def test_rank_batches_are_rows_of_the_global_batch(data: Path) -> None:
    args = train_gpt.parse(tiny(data, Path("unused")))
    ranks = train_gpt.Ranks("cpu")
    s = train_gpt.recipe_of(args, ranks)
    whole = train_gpt.Data(s, data, ranks).batch(5)
    ranks.world = 2
    parts = []
    for ranks.rank in range(2):
        parts.append(train_gpt.Data(s, data, ranks).batch(5))
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(train_gpt.Data(s, data, ranks).batch(6), parts[1])


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--data", "{tmp}/absent"], "--data: expected a file or a folder, got .*absent"),
        (["--data", "{tmp}/empty"], "--data: expected text, got .*empty with no file that holds any"),
        (["--data", "{tmp}/short/a_byte.txt"], "--data: expected more than --context 32 bytes to train on, got 0"),
        (["--data", "{tmp}/short"], "--data: expected more than --context 32 bytes to .* on, got"),
        (["--vocab", "100"], "--vocab: expected at least 256 for bytes, got 100"),
        (["--heads", "3"], "--heads: expected a divisor of --width 32, got 3"),
        (["--heads", "32"], "--heads: expected --width 32 / heads in steps of 8 up to 256, got 32"),
        (["--shard", "states"], "--shard: expected none where --reduce is float32, got states"),
        (
            ["--shard", "states", "--reduce", "bfloat16", "--modules", "torch"],
            "--shard: expected none where --modules is torch, got states",
        ),
        (["--stream", "bfloat16"], "--stream: expected float32 where --dtype is float32, got bfloat16"),
        (["--captured", "--modules", "torch"], "--captured: expected --modules warpsmith, got True"),
        (["--steps", "0"], "--steps: expected more than 0, got 0"),
        (["--lr", "-1"], "--lr: expected more than 0, got -1.0"),
        (["--seed", str(2**43)], "--seed: expected fewer than 44 bits, got 8796093022208"),
        (["--warmup", "-1"], "--warmup: expected 0 or more, got -1"),
        (["--save-every", "0"], "--save-every: expected more than 0, got 0"),
        (["--seconds", "0"], "--seconds: expected more than 0, got 0.0"),
        (["--out", "/dev/null/run"], "/dev/null/run.*: Not a directory"),
        (["--out", "/proc/run"], "/proc/run: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/nothing.txt").touch()
    (tmp_path / "short").mkdir()
    (tmp_path / "short/text.txt").write_text("short")
    (tmp_path / "short/a_byte.txt").write_text("a")
    out = tmp_path / "run"
    assert train_gpt.main([*tiny(data, out), *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    assert re.search(f"^train_gpt: error: {expected}", one_error_line(capsys))
    assert not out.exists()


def test_a_loss_that_is_not_finite_stops_before_the_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_gpt.main(tiny(data, tmp_path, "--steps", 100, "--lr", 1e30)) == 2
    assert re.search(r"the loss became (nan|inf) by step \d+: lower --lr \(no checkpoint yet\)", one_error_line(capsys))
    assert not (tmp_path / "checkpoints").exists()


# ----------------------------------------------------------------------------------------------------- two processes

RANKS_PROGRAM = f"""
import hashlib, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_gpt
args = train_gpt.parse(None)
train_gpt.set_determinism(args)
with train_gpt.Ranks(args.device) as ranks:
    training = train_gpt.Training(args, ranks)
    code = training.loop()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in training.run.model.parameters()))
    (training.args.out / f"rank_{{ranks.rank}}.sha256").write_text(digest.hexdigest())
sys.exit(code)
"""


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_leave_through_the_context_of_init(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """It waits for gloo's workers; without that, a rank on a busy machine aborted at its end."""
    closed: list[bool] = []
    context = SimpleNamespace(
        rank=1, world_size=2, device=torch.device("cpu"), close=lambda failed=False: closed.append(failed)
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("gpt_ranks.init", lambda device: context)
    with contextlib.suppress(ZeroDivisionError), train_gpt.Ranks("cpu") as ranks:
        assert (ranks.rank, ranks.world, ranks.first) == (1, 2, False)
        assert 1 / (not failed)
    assert closed == [failed]


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_train_as_one_and_resume_bit_for_bit(data: Path, tmp_path: Path, device: str) -> None:
    """gloo on the CPU, NCCL on GPUs."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there is {torch.cuda.device_count()}")
    steps = 300
    program = tmp_path / "program.py"
    program.write_text(RANKS_PROGRAM)
    whole, parts, single = (tmp_path / name for name in ("whole", "parts", "single"))
    flags = ["--steps", str(steps), "--save-every", "1000", "--eval-every", "150", "--device", device]
    result = subprocess.run(
        torchrun(program, tiny(data, whole, *flags)), capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("validation loss") == 1  # rank 0 alone speaks
    hashes = [(whole / f"rank_{rank}.sha256").read_text() for rank in range(2)]
    assert hashes[0] == hashes[1]

    assert train_gpt.main(tiny(data, single, *flags)) == 0
    two, one = losses(whole), losses(single)
    assert list(two) == list(one) == list(range(1, steps + 1))
    # Summation order differs, and training amplifies that: one rounding at first, 1e-3 after 50 steps.
    assert two[1] == pytest.approx(one[1], rel=1e-6)
    assert [two[step] for step in range(1, 51)] == pytest.approx([one[step] for step in range(1, 51)], rel=1e-3)

    process = start(torchrun(SCRIPT, tiny(data, parts, *flags)))
    wait_for(lambda: max(losses(parts), default=0) >= 60, process, "step 60")
    process.terminate()
    process.communicate(timeout=60)
    stopped_at = newest_step(parts)
    assert 60 <= stopped_at < steps
    result = subprocess.run(
        torchrun(SCRIPT, [*tiny(data, parts), "--device", device, "--resume"]),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert f"resumed at step {stopped_at}" in result.stdout
    assert losses(parts) == two


@pytest.mark.parametrize(("shard", "fp8"), [("none", "delayed"), ("gradients", "none")])
def test_the_hook_and_the_sharded_optimizer_resume_bit_for_bit(
    data: Path, tmp_path: Path, shard: str, fp8: str
) -> None:
    """On two ranks, whose scales of FP8 are the same ones; and a rank alone goes on from what two have saved."""
    whole, parts, alone = (tmp_path / name for name in ("whole", "parts", "alone"))

    def run(out: Path, *more: object) -> None:
        command = torchrun(SCRIPT, tiny(data, out, *more))
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert result.returncode == 0, result.stderr

    run(whole, "--steps", 40, "--reduce", "bfloat16", "--shard", shard, "--fp8", fp8)
    for out in (parts, alone):
        shutil.copytree(whole, out)
        shutil.rmtree(out / "checkpoints/step-00000040")
    run(parts, "--resume")
    assert losses(parts) == losses(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = f"checkpoints/step-00000040/{name}"
        assert (parts / last).read_bytes() == (whole / last).read_bytes()
    assert train_gpt.main([*tiny(data, alone), "--resume"]) == 0
    of_two, of_one = ([losses(out)[step] for step in range(31, 41)] for out in (whole, alone))
    assert of_one == pytest.approx(of_two, rel=1e-2)


def test_an_error_on_the_first_rank_stops_all(data: Path) -> None:
    result = subprocess.run(
        torchrun(SCRIPT, tiny(data, Path("/proc/run"))), capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode != 0
    assert result.stderr.count("train_gpt: error: /proc/run: ") == 1
    assert 'train_gpt.py", line' not in result.stderr  # no traceback of ours
