"""The end of a job waits for gloo's worker threads, which may hold tensors that need the interpreter."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warpsmith
from warpsmith.distributed.launch import context
from warpsmith.distributed.launch.gloo_threads import wait_until_idle


@pytest.fixture
def tasks(tmp_path):
    def thread(number, state, name):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        (folder / "part").write_text(f"{number} ({name}) {state} 1 2 3\n")
        (folder / "part").rename(folder / "stat")

    thread(1, "R", "python")
    thread(2, "R", "a ) S (name")
    thread(3, "S", "pt_gloo_runloop")
    (tmp_path / "4").mkdir()  # a thread that has ended
    return str(tmp_path), thread


def test_only_workers_that_run_are_waited_for(tasks):
    folder, thread = tasks
    assert wait_until_idle(60, folder)
    thread(5, "R", "pt_gloo_runloop")
    assert not wait_until_idle(0.05, folder)
    later = threading.Timer(0.2, thread, (5, "S", "pt_gloo_runloop"))
    later.start()
    began = time.monotonic()
    assert wait_until_idle(120, folder)
    assert time.monotonic() - began > 0.1
    assert wait_until_idle(0.05, f"{folder}/nowhere")


def test_the_end_of_a_job_waits(monkeypatch):
    seen = []
    monkeypatch.setattr(context, "wait_until_idle", lambda: seen.append(dist.is_initialized()))
    with warpsmith.distributed.init(device="cpu"):
        dist.all_reduce(torch.ones(3))
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert "pt_gloo_runloop" in names  # by this name the threads are found
        assert seen == []
    assert seen == [False]  # once, when torch has let go of the group
