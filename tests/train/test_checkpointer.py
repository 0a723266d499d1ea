"""Checkpointer on one rank: exact resume, damaged checkpoints, what it refuses."""

import errno
import json
import os
import shutil
import threading
import time

import pytest
import torch
from training import OPTIMIZERS, SCHEDULERS, Run, same
from warpsmith.train import Checkpointer, CheckpointError

from tests.dispatched import Copies


def names(folder):
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock")


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(o, "cosine") for o in OPTIMIZERS] + [("torch SGD", s) for s in SCHEDULERS if s != "cosine"],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, optimizer, scheduler):
    whole = Run(optimizer, scheduler)
    whole.train(17)
    first = Run(optimizer, scheduler)
    first.train(9)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(9, **first.parts, extra={"best": (1, 2.5), 3: float("inf")})
        first.train(12)  # while it is written
    second = Run(optimizer, scheduler)
    checkpoints = Checkpointer(tmp_path)
    assert second.load(checkpoints) == 9
    assert checkpoints.extra == {"best": (1, 2.5), 3: float("inf")} and checkpoints.refused == []
    second.train(17)
    assert same(second.state(), whole.state())


def test_the_comparison_sees_every_part(tmp_path):
    """Resuming without one of the parts must not give the uninterrupted run, or the test above would show nothing."""
    whole, first = Run(), Run()
    whole.train(17)
    first.train(9)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(9, **first.parts)
    for left_out in (*first.parts, "rng"):
        second = Run()
        second.step = Checkpointer(tmp_path).load(
            **{k: v for k, v in second.parts.items() if k != left_out}, rng=left_out != "rng"
        )
        second.train(17)
        assert not same(second.state(), whole.state()), left_out


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert Checkpointer(tmp_path / "not yet").load(model=torch.nn.Linear(1, 1)) is None
    assert not (tmp_path / "not yet").exists()


def test_the_newest_stay(tmp_path):
    run = Run()
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        run.train(4, lambda r: checkpoints.save(r.step, **r.parts))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_a_step_is_saved_again_and_again(tmp_path, keep):
    with Checkpointer(tmp_path, keep=keep) as checkpoints:
        for n in range(4):
            checkpoints.save(7, extra=n)
    assert len(names(tmp_path)) == min(keep, 4)
    assert (checkpoints.load(), checkpoints.extra) == (7, 3)


def test_files_are_safetensors_and_json(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    run = Run()
    run.train(2)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, **run.parts)
    folder = tmp_path / "step-00000002"
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}
    model = run.parts["model"]
    loaded = safetensors.load_file(folder / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[k], v) for k, v in model.state_dict().items())
    assert json.loads((folder / "state.json").read_text())["step"] == 2


def test_tied_and_channels_last_tensors_come_back_so(tmp_path):
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    picture = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, model=tied, extra=[picture, picture[:, :1], torch.tensor(3), torch.zeros(0, 2)])
    loaded = Checkpointer(tmp_path)
    before = tied["a"].weight.detach().clone()
    with torch.no_grad():
        tied["a"].weight.zero_()
    assert loaded.load(model=tied) == 0
    assert torch.equal(tied["a"].weight, before) and tied["a"].weight is tied["b"].weight
    assert torch.equal(loaded.extra[0], picture) and loaded.extra[0].stride() == picture.stride()
    assert torch.equal(loaded.extra[1], picture[:, :1])
    assert loaded.extra[2] == 3 and loaded.extra[3].shape == (0, 2)


def test_what_is_saved_is_the_state_at_the_call(tmp_path, monkeypatch):
    """The thread writes copies: changes behind ``save`` do not reach the file, however late it is written."""
    real, gate = os.fsync, threading.Event()
    monkeypatch.setattr(os, "fsync", lambda handle: (gate.wait(30), real(handle)))
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    checkpoints = Checkpointer(tmp_path)
    start = time.monotonic()
    with Copies(64 * 64) as copies:
        checkpoints.save(1, model=model)
    assert copies.found == ["copy_"]
    assert time.monotonic() - start < 20, "save waited for the disk"
    with torch.no_grad():
        model.weight.zero_()
    assert not (tmp_path / "step-00000001").exists()
    gate.set()
    checkpoints.wait()
    checkpoints.load(model=model)
    assert torch.equal(model.weight, before)


def test_what_is_synced_to_disk_is_whole(tmp_path, monkeypatch):
    synced, real = {}, os.fsync

    def noted(handle):
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    saved_twice(tmp_path)
    files = [p.stat() for p in tmp_path.rglob("step-*/*")]
    assert files and {f.st_ino: f.st_size for f in files}.items() <= synced.items()


def saved_twice(folder):
    run = Run()
    with Checkpointer(folder) as checkpoints:
        run.train(2, lambda r: checkpoints.save(r.step, **r.parts, extra="some words"))
    return run


DAMAGES = {
    "first byte": lambda c: bytes([c[0] ^ 1]) + c[1:],
    "a byte in the middle": lambda c: c[: len(c) // 2] + bytes([c[len(c) // 2] ^ 0x10]) + c[len(c) // 2 + 1 :],
    "last byte": lambda c: c[:-1] + bytes([c[-1] ^ 0x80]),
    "cut": lambda c: c[: len(c) // 2],
    "empty": lambda c: b"",
    "longer": lambda c: c + b"\0",
    "gone": None,
}
FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "ranks.json", "state.json"]


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_refused_for_the_one_before(tmp_path, caplog, file):
    saved_twice(tmp_path / "good")
    assert sorted(p.name for p in (tmp_path / "good" / "step-00000002").iterdir()) == FILES
    expected = Run()
    expected.train(1)
    for name, damage in DAMAGES.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        path = folder / "step-00000002" / file
        content = path.read_bytes()
        path.unlink() if damage is None else path.write_bytes(damage(content))
        run, checkpoints = Run(), Checkpointer(folder)
        caplog.clear()
        assert run.load(checkpoints) == 1, name
        assert same(run.state(), expected.state())
        [line] = checkpoints.refused
        assert line.startswith("step-00000002: ") and file in line, line
        assert f"refused {line}; using step-00000001" in caplog.text


def test_every_byte_counts(tmp_path):
    """A flip of any byte of a small checkpoint is seen, wherever it is."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model=torch.nn.Linear(2, 1), extra="x")
    tried = 0
    for path in sorted((tmp_path / "step-00000001").iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 40)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            with pytest.raises(CheckpointError, match="no whole checkpoint .* step-00000001: "):
                Checkpointer(tmp_path).load()
            tried += 1
        path.write_bytes(content)
    assert tried > 100
    assert Checkpointer(tmp_path).load() == 1


def test_a_run_that_went_back_replaces_what_was_damaged(tmp_path):
    saved_twice(tmp_path)
    (tmp_path / "step-00000002" / "state.json").unlink()
    run, checkpoints = Run(), Checkpointer(tmp_path)
    run.load(checkpoints)
    run.train(2)
    with checkpoints:
        checkpoints.save(2, **run.parts)
    assert names(tmp_path) == ["step-00000001", "step-00000002.1"]
    assert Checkpointer(tmp_path).load() == 2


def test_a_new_run_does_not_push_out_an_old_ones_checkpoints(tmp_path):
    saved_twice(tmp_path)
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"step: expected one from step-00000002 on, .* got 1: load\(\) it first"):
        Checkpointer(tmp_path).save(1, **Run().parts)
    assert names(tmp_path) == before


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, caplog):
    run = saved_twice(tmp_path)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpointer(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        checkpoints.save(3, **run.parts)
        with pytest.raises(CheckpointError, match="step 3: .*No space left on device .there already: step-00000001"):
            checkpoints.wait()
    assert "No space left on device" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    checkpoints.save(3, **run.parts)
    checkpoints.wait()
    assert Checkpointer(tmp_path).load() == 3


def test_an_error_in_the_background_ends_the_next_save(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpointer(tmp_path / "file" / "folder")
    checkpoints.save(1, extra=0)
    with pytest.raises(CheckpointError, match="step 1: .*Not a directory"):
        checkpoints.save(2, extra=0)


def test_two_writers_in_one_folder(tmp_path, monkeypatch):
    real, inside, gate = os.fsync, threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda handle: (inside.set(), gate.wait(30), real(handle)))
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(1, extra=0)
    assert inside.wait(30)
    second.save(1, extra=0)
    with pytest.raises(CheckpointError, match="another process writes into"):
        second.wait()
    gate.set()
    first.wait()
    assert names(tmp_path) == ["step-00000001"]


def test_another_models_checkpoint_changes_nothing(tmp_path):
    run = saved_twice(tmp_path)
    parts = dict(run.parts)
    other = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 7))
    before = [p.detach().clone() for p in other.parameters()]
    random_before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"model: expected the one of step-00000002, got another: .*2.weight"):
        Checkpointer(tmp_path).load(**parts | {"model": other})
    few = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=r"optimizer: expected groups of \[4\] parameters, .* got \[1\]"):
        Checkpointer(tmp_path).load(model=other.__class__(*parts["model"]), optimizer=few)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random_before)


def test_a_part_that_was_not_saved(tmp_path):
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model=model)
    with pytest.raises(ValueError, match=r"optimizer: expected a state of it in step-00000001, got model"):
        Checkpointer(tmp_path).load(model=model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": [0, object()]}, r"save: extra: a\.1: expected tensors, numbers, .* got builtins\.object"),
        ({"a": torch.zeros(2, 2).to_sparse()}, r"save: extra: a: expected a dense tensor"),
        (torch.zeros(2, dtype=torch.complex128), r"expected a dense tensor of a dtype that safetensors has"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, extra, words):
    with pytest.raises(TypeError, match=words):
        Checkpointer(tmp_path).save(1, extra=extra)
    assert names(tmp_path) == []


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step: expected at least 0, got -1"):
        Checkpointer(tmp_path).save(-1)


def test_buffers_are_used_again(tmp_path):
    model = torch.nn.Linear(8, 8)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=model)
    checkpoints.wait()
    with torch.no_grad():
        model.weight.fill_(2)
    checkpoints.save(2, model=model)
    checkpoints.wait()
    other = torch.nn.Linear(8, 8)
    assert checkpoints.load(model=other) == 2
    assert torch.equal(other.weight, model.weight)
