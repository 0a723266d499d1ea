"""The training example resumes bit for bit, and loses nothing: kills, corrupt checkpoints, full disks."""

import json
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import train_gpt
from gpt_runs import (
    DEVICES,
    EXAMPLES,
    SCRIPT,
    checkpoint_names,
    losses,
    newest_step,
    one_error_line,
    start,
    tiny,
    wait_for,
)

# -------------------------------------------------------------------------------------------------------- resuming


def test_float16_trains_like_float32_and_resumes_with_its_scale(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    common = ["--steps", 20, "--log-every", 1]
    assert train_gpt.main(tiny(data, out, *common, "--dtype", "float16")) == 0
    assert train_gpt.main(tiny(data, tmp_path / "single", *common)) == 0
    whole, single = losses(out), losses(tmp_path / "single")
    assert max(abs(whole[step] - single[step]) for step in whole) < 0.02
    state = json.loads((out / "checkpoints" / "step-00000020" / "state.json").read_text())["parts"]["scaler"]
    assert "_growth_tracker" in json.dumps(state)
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    assert train_gpt.main(tiny(data, out, *common, "--resume")) == 0
    assert losses(out) == whole
    assert json.loads((out / "checkpoints" / "step-00000020" / "state.json").read_text())["parts"]["scaler"] == state


@pytest.mark.parametrize("scales", ["row", "delayed"])
@pytest.mark.parametrize("device", DEVICES)
def test_eight_bit_products_train_and_resume_with_their_scales(
    data: Path, tmp_path: Path, device: str, scales: str
) -> None:
    out = tmp_path / "fp8"
    flags = ["--steps", 20, "--log-every", 1, "--device", device, "--dtype", "bfloat16"]
    assert train_gpt.main(tiny(data, out, *flags, "--fp8", scales)) == 0
    assert train_gpt.main(tiny(data, tmp_path / "plain", *flags)) == 0
    whole, plain = losses(out), losses(tmp_path / "plain")
    assert 0 < max(abs(whole[step] - plain[step]) for step in whole) < 0.05
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    assert train_gpt.main(tiny(data, out, *flags, "--fp8", scales, "--resume")) == 0
    assert losses(out) == whole


@pytest.mark.parametrize("device", DEVICES)
def test_killed_at_random_points_it_resumes_bit_for_bit(data: Path, tmp_path: Path, device: str) -> None:
    steps = 300
    common = ["--steps", steps, "--device", device, "--log-every", 1]
    assert train_gpt.main(tiny(data, tmp_path / "whole", *common)) == 0
    whole = losses(tmp_path / "whole")

    seed = random.SystemRandom().randrange(2**32)
    print("seed of the kills:", seed)
    choice = random.Random(seed)
    out = tmp_path / "killed"
    ways = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    choice.shuffle(ways)
    flags = tiny(data, out, *common, "--save-every", 7)
    resume: list[str] = []
    for part, way in enumerate(ways):
        process = start([sys.executable, str(SCRIPT), *flags, *resume])
        target = choice.randrange(10 + 90 * part, 90 + 90 * part)
        wait_for(lambda at=target: max(losses(out), default=0) >= at, process, f"step {target}")  # type: ignore[misc]
        time.sleep(choice.uniform(0, 0.02))
        process.send_signal(way)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == (-way if way == signal.SIGKILL else 128 + way), output
        if way != signal.SIGKILL:
            step = max(losses(out))
            assert f"stopped by {way.name} at step {step}" in output
            assert newest_step(out) == step
        assert losses(out).items() <= whole.items()
        resume = ["--resume"]
    assert train_gpt.main([*flags, "--resume"]) == 0
    assert losses(out) == whole
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = f"checkpoints/step-{steps:08d}/{name}"
        assert (out / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_a_time_limit_leaves_a_checkpoint(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main(tiny(data, tmp_path, "--steps", 100_000, "--seconds", 0.3)) == 0
    step = max(losses(tmp_path))
    assert f"stopped by --seconds at step {step}" in capsys.readouterr().out
    assert checkpoint_names(tmp_path)[-1] == f"step-{step:08d}"
    assert train_gpt.main([*tiny(data, tmp_path, "--seconds", 0.2), "--resume"]) == 0
    assert f"resumed at step {step}" in capsys.readouterr().out
    assert max(losses(tmp_path)) > step


def test_a_resume_changes_neither_recipe_nor_data(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, copy)
    assert train_gpt.main(tiny(copy, out, "--steps", 10)) == 0
    before = (out / "log.jsonl").read_bytes()
    capsys.readouterr()
    assert train_gpt.main([*tiny(copy, out, "--preset", "gpt2-124m"), "--resume"]) == 2
    assert one_error_line(capsys).endswith("--preset: expected nano (the checkpoint's), got gpt2-124m")
    assert train_gpt.main([*tiny(copy, out, "--lr", 1.0), "--resume"]) == 2
    assert one_error_line(capsys).endswith("--lr: expected 0.004 (the checkpoint's), got 1.0")
    with open(copy / "file_00.txt", "a") as file:
        file.write("more")
    assert train_gpt.main([*tiny(copy, out), "--resume"]) == 2
    assert "--data: expected the data that" in one_error_line(capsys)
    assert train_gpt.main(tiny(copy, out)) == 2
    assert "holds checkpoints: add --resume" in one_error_line(capsys)
    assert (out / "log.jsonl").read_bytes() == before


def test_a_run_may_write_into_its_data(data: Path, tmp_path: Path) -> None:
    copy, apart = tmp_path / "data", tmp_path / "apart"
    shutil.copytree(data, copy)
    out = copy / "runs/nano"
    assert train_gpt.main(tiny(copy, out, "--steps", 20, "--seconds", 1e-9)) == 0
    assert train_gpt.main([*tiny(copy, out), "--resume"]) == 0
    assert train_gpt.main(tiny(data, apart, "--steps", 20)) == 0
    assert losses(out) == losses(apart)


def test_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [train_gpt.default_out("nano", resume).as_posix() for resume in (False, True)]
    assert names == ["runs/nano", "runs/nano"]
    (tmp_path / "runs/nano").mkdir(parents=True)
    (tmp_path / "runs/nano-2").mkdir()
    names = [train_gpt.default_out("nano", resume).as_posix() for resume in (False, True)]
    assert names == ["runs/nano-3", "runs/nano-2"]


# ----------------------------------------------------------------------------------------------------- checkpoints


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps, with the checkpoints of steps 20 and 30."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    out = tmp_path_factory.mktemp("finished")
    assert train_gpt.main(tiny(data, out, "--steps", 30)) == 0
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(number, handler)
    return out


def test_from_an_older_checkpoint_the_run_is_the_same(
    data: Path, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    newest = out / "checkpoints/step-00000030/model.safetensors"
    flip_a_bit(newest)
    with open(out / "log.jsonl", "a") as log:
        log.write('{"step": 31, "los')  # cut short by a kill
    assert train_gpt.main([*tiny(data, out), "--resume"]) == 0
    assert "refused step-00000030: model.safetensors: " in caplog.text and "using step-00000020" in caplog.text
    assert losses(out) == losses(finished)
    assert checkpoint_names(out) == ["step-00000020", "step-00000030.1"]  # the damaged one is gone
    again = out / "checkpoints/step-00000030.1/model.safetensors"
    assert again.read_bytes() == (finished / "checkpoints/step-00000030/model.safetensors").read_bytes()


def test_no_checkpoint_to_resume(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*tiny(data, tmp_path / "none"), "--resume"]) == 2
    assert "--resume: no checkpoint in" in one_error_line(capsys)
    assert not (tmp_path / "none").exists()


def test_tied_weights_are_saved_once(finished: Path) -> None:
    weights = safetensors.torch.load_file(finished / "checkpoints/step-00000030/model.safetensors")
    shapes = [tuple(w.shape) for w in weights.values()]
    assert shapes.count((256, 32)) == 1  # embedding and head


@pytest.mark.parametrize(("limit", "expected"), [(50_000, r"step 10: .* \(there already: none\)"), (500, "")])
def test_on_a_full_disk_a_run_ends_with_one_line_and_can_go_on(
    data: Path, finished: Path, tmp_path: Path, limit: int, expected: str
) -> None:
    """A limit on the size of files makes the kernel refuse a write to the checkpoint (or, at 500 bytes, to the log)."""
    out = tmp_path / "run"
    flags = tiny(data, out, "--steps", 30)
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    message = result.stderr.splitlines()[-1]
    assert message.startswith("train_gpt: error: ") and "File too large" in message
    assert re.search(expected, message)
    assert not list((out / "checkpoints").glob("step-*"))
    assert losses(out).items() <= losses(finished).items()
    assert train_gpt.main(flags) == 0
    assert losses(out) == losses(finished)


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def cannot_mount() -> str:
    """Why this machine cannot give a test a file system of its own, or nothing."""
    if shutil.which("unshare") is None:
        return "unshare (util-linux) is not installed"
    tried = subprocess.run(
        [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return f"mounting in a namespace of one's own: {tried.stderr.strip()}" if tried.returncode else ""


def test_on_a_full_file_system_nothing_is_lost(data: Path, finished: Path, tmp_path: Path) -> None:
    """A real file system of 600 KB with room for one checkpoint; made larger, the run goes on with the same losses."""
    if reason := cannot_mount():
        pytest.skip(reason)
    disk = tmp_path / "disk"
    disk.mkdir()
    train = shlex.join([sys.executable, str(SCRIPT), *tiny(data, disk / "run", "--steps", 30)])
    script = f"""
        set -e
        mount -t tmpfs -o size=600k none {disk}
        head -c 200K /dev/zero > {disk}/filler
        code=0; {train} 2> {tmp_path}/errors || code=$?
        ls {disk}/run/checkpoints > {tmp_path}/kept
        mount -o remount,size=64m {disk}
        {train} --resume
        cp -r {disk}/run {tmp_path}/run
        exit $code
    """
    result = subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True, text=True, check=False)
    errors = (tmp_path / "errors").read_text()
    assert result.returncode == 2, result.stdout + result.stderr + errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("train_gpt: error: ") and "No space left on device" in errors
    kept = (tmp_path / "kept").read_text().split()
    assert kept, "the full disk came before the first checkpoint: the test shows nothing"
    assert f"there already: {', '.join(kept)}" in errors
    assert losses(tmp_path / "run") == losses(finished)


def test_nothing_is_pickled() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert not re.search(r"import pickle|torch\.(load|save)\(|_object_list", path.read_text())
