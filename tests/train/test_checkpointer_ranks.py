"""Checkpointer on several ranks and beside readers: random states, other world sizes, errors that all ranks hear of."""

import os
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training import X
from warpsmith.distributed import ResumableSampler
from warpsmith.testing import run_ranks
from warpsmith.testing.distributed import multirank
from warpsmith.train import Checkpointer, CheckpointError, checkpoint_folder


class Ranks:
    """A run under DDP whose steps draw from each rank's own random state."""

    def __init__(self, rank, world_size):
        torch.manual_seed(rank)
        random.seed(rank)
        model = torch.nn.Linear(6, 6)
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.constant_(model.bias, 0.0)
        self.ddp = torch.nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
        self.sampler = ResumableSampler(len(X), seed=3, rank=rank, world_size=world_size)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.parts = {"model": self.ddp, "optimizer": self.optimizer, "sampler": self.sampler}
        self.seen = []

    def train(self, steps):
        draw = iter(self.sampler)
        for _ in range(steps):
            index = next(draw)
            self.seen.append(index)
            x = X[index : index + 1] + torch.rand(1, 6) * random.random()
            self.optimizer.zero_grad()
            (self.ddp(x) - x).square().sum().backward()
            self.optimizer.step()

    def weights(self):
        model = self.ddp.module if hasattr(self.ddp, "module") else self.ddp
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def save(rank, world_size, folder):
    run = Ranks(rank, world_size)
    run.train(2)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(2, **run.parts)
        run.train(2)
    return run.weights(), run.seen


def resume(rank, world_size, folder):
    run = Ranks(rank, world_size)
    torch.manual_seed(99)
    random.seed(99)
    assert Checkpointer(folder).load(**run.parts) == 2
    run.train(2)
    return run.weights(), run.seen


def loaded_before_training(rank, world_size, folder):
    run = Ranks(rank, world_size)
    Checkpointer(folder).load(**run.parts)
    return run.weights(), run.sampler.state_dict()["position"]


def torn(rank, world_size, folder):
    """What each rank hears when the newest checkpoint is damaged, when rank 0 cannot save, and when rank 1 looks into
    another folder."""
    heard = []
    checkpoints = Checkpointer(folder)
    step = checkpoints.load(model=torch.nn.Linear(6, 6))
    heard.append((step, checkpoints.refused))
    for act in (
        lambda: checkpoints.save(1, extra=0),
        lambda: checkpoints.save(9, extra=object()),
        lambda: Checkpointer(folder if rank == 0 else folder + "-elsewhere").load(),
    ):
        try:
            act()
            heard.append("nothing")
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return heard


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "run"
    return str(folder), run_ranks(save, 2, str(folder), timeout_s=120)


def test_two_ranks_go_on_bit_for_bit(saved):
    folder, results = saved
    assert results[0][0] == results[1][0] and len(set(results[0][0])) > 6
    for (weights, seen), (whole, all_seen) in zip(run_ranks(resume, 2, folder, timeout_s=120), results, strict=True):
        assert weights == whole
        assert seen == all_seen[2:]


def test_one_process_goes_on_with_the_same_data(saved, caplog):
    folder, results = saved
    weights, position = loaded_before_training(0, 1, folder)
    assert position == 4
    assert "has the random states of 2 ranks, not of 1: they stay" in caplog.text
    run = Ranks(0, 1)
    Checkpointer(folder).load(**run.parts)
    assert run.weights() == weights
    run.train(4)
    both = [index for step in zip(*(seen for _, seen in results), strict=True) for index in step]
    assert run.seen == both[4:]


def test_every_rank_hears_of_an_error(saved):
    folder, _ = saved
    with Checkpointer(folder) as checkpoints:
        checkpoints.load()
        checkpoints.save(3, model=torch.nn.Linear(6, 6))
    (Path(folder) / "step-00000003" / "model.safetensors").write_bytes(b"")
    main, other = run_ranks(torn, 2, folder, timeout_s=120)
    assert main[0] == other[0] and main[0][0] == 2 and "model.safetensors: expected" in main[0][1][0]
    assert main[1].startswith("CheckpointError: Checkpointer.save: step: expected one from step-00000002 on")
    assert other[1].startswith("CheckpointError: rank 0: Checkpointer.save: step: expected one from step-00000002 on")
    assert main[2].startswith("TypeError: Checkpointer.save: extra: ")
    assert other[2].startswith("CheckpointError: rank 0: Checkpointer.save: extra: ")
    for heard in (main[3], other[3]):
        assert "is whole for rank 0, but not for others: rank 1: manifest.json is missing: expected one folder" in heard


def test_a_checkpoint_error_is_a_runtime_error():
    assert issubclass(CheckpointError, RuntimeError)


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
