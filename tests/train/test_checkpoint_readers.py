"""Readers beside a writer that keeps one checkpoint: each load finds a whole one."""

import os
import threading

import pytest
import torch
from warpsmith.testing.distributed import multirank
from warpsmith.train import Checkpointer, CheckpointError, checkpoint_folder

READERS, SAVES = 3, 30


@pytest.mark.parametrize("keep", [1, 2])
def test_readers_beside_a_writer(tmp_path, monkeypatch, keep):
    """Without a wait for the disk, so that checkpoints come and go as fast as they are read."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    parts = {"model": torch.nn.Linear(8, 8)}
    errors, loads, done = [], [0] * READERS, threading.Event()
    writer = Checkpointer(tmp_path, keep=keep)
    writer.save(0, **parts, extra=0)
    writer.wait()

    def read(number):
        before, model = 0, torch.nn.Linear(8, 8)
        while not done.is_set():
            reader = Checkpointer(tmp_path)
            try:
                step = reader.load(model=model, rng=False)
                assert step >= before and reader.extra == step and reader.refused == []
            except Exception as error:
                errors.append(error)
            else:
                before = step
                loads[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    [thread.start() for thread in threads]
    for step in range(1, SAVES + 1):
        writer.save(step, **parts, extra=step)
    done.set()
    [thread.join() for thread in threads]
    writer.wait()
    assert errors == [], f"{len(errors)} of {len(errors) + sum(loads)} loads failed"
    assert min(loads) > 0


def dropping(folder, real, times):
    """``read`` of a checkpoint that a writer drops for a newer one just before it is read, the first ``times``."""
    left = [times]

    def read(path):
        if left[0]:
            left[0] -= 1
            checkpoint_folder.write(folder, checkpoint_folder.step_of(path) + 1, real(path), keep=1)
        return real(path)

    return read


def test_a_checkpoint_dropped_while_it_is_read(tmp_path, monkeypatch):
    """After it is listed, and after its files are opened."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, extra="x")
    real, read_file = checkpoint_folder.read, checkpoint_folder.safetensors_file.read_file
    monkeypatch.setattr(checkpoint_folder, "read", dropping(tmp_path, real, 3))
    reader = Checkpointer(tmp_path)
    assert reader.load() == 1 and reader.refused == []  # the state tells its step, the copies' names another
    assert [path.name for path in checkpoint_folder.found(tmp_path)] == ["step-00000004"]

    def read_of_dropped(*arguments):
        for path in checkpoint_folder.found(tmp_path):
            path.rename(tmp_path / f".removed-{path.name}")
            for file in (tmp_path / f".removed-{path.name}").iterdir():
                file.unlink()
        return read_file(*arguments)

    monkeypatch.setattr(checkpoint_folder, "read", real)
    monkeypatch.setattr(checkpoint_folder.safetensors_file, "read_file", read_of_dropped)
    assert reader.load() == 1 and reader.extra == "x"


@multirank(2, timeout_s=200)
def test_a_checkpoint_dropped_before_another_rank_reads_it(rank, world_size, tmp_path):
    folder = tmp_path / "run"
    checkpoints = Checkpointer(folder, keep=1)
    checkpoints.save(1, extra="x")
    checkpoints.wait()
    real = checkpoint_folder.read
    if rank == 1:
        checkpoint_folder.read = dropping(folder, real, 2)
    try:
        assert Checkpointer(folder).load() == 1
        assert [path.name for path in checkpoint_folder.found(folder)] == ["step-00000003"]
    finally:
        checkpoint_folder.read = real


def test_a_damaged_checkpoint_alone_is_still_an_error(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, extra="x")
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint in .*: step-00000001: state.json is missing"):
        Checkpointer(tmp_path).load()
