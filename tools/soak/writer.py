"""Kills training processes while they write checkpoints, and checks after each that nothing is lost.

Either at random times, by turns of the clock and of the calls that touch the folder (a fast disk leaves the clock few
kills amid a write), or at the first, second, ... such call. Processes are forked, so that a kill
costs milliseconds. A child resumes, trains on and says which step is durable. When it is dead, the newest checkpoint
must be at least the step that it said last, and hold, bit for bit, the state of an uninterrupted run at that step.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy
import torch
from victim import collect, fork
from warpsmith.train import Checkpointer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "train"))
from training import Run, same

KEEP = 2
STEPS = 4  # of a child
CALLS = 80  # of a child that touch the folder
LONGEST_S = 600.0


def child(folder, say, arm):
    run, checkpoints = Run(), Checkpointer(folder, keep=KEEP)
    run.load(checkpoints)
    say("resumed")
    arm()

    def after(run):
        checkpoints.save(run.step, **run.parts)  # returns when the one before is on disk
        say("durable", run.step - 1)

    run.train(run.step + STEPS, after)
    checkpoints.wait()
    say("durable", run.step)


def kill_one(folder, arm, wait_s):
    """Forks a child and kills it that long after it has resumed (None: it does so itself). Whether it was killed."""
    pid, pipe = fork(lambda say: child(folder, say, arm))
    first = os.read(pipe, len(b"resumed\n"))
    assert first == b"resumed\n", f"the child could not resume: {first}"
    if wait_s is not None:
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
    (ended,) = collect([(pid, pipe)], LONGEST_S)
    assert ended.killed or ended.code == 0, ended
    return ended.killed, max((int(step) for (step,) in ended.said("durable")), default=0)


class Reference:
    """An uninterrupted run, as far as the children have come; the loaded runs share its process, not its numbers."""

    def __init__(self):
        self.run = Run()
        self.random = self.generators()

    @staticmethod
    def generators():
        return torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    def state(self, step):
        of_torch, of_python, of_numpy = self.random
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        self.run.train(step)
        self.random = self.generators()
        return self.run.state()


def check(folder, durable, reached, reference):
    run, checkpoints = Run(), Checkpointer(folder, keep=KEEP)
    step = run.load(checkpoints)
    assert checkpoints.refused == [], checkpoints.refused
    assert step >= max(durable, reached), f"step {durable} was durable and {reached} was there, found {step}"
    loaded = run.state()
    assert same(loaded, reference.state(step)), f"step {step} is not that of an uninterrupted run"
    return step


def die_at(number, folder):
    """Kills this process at its ``number``-th call that names something in the folder."""
    left = number

    def hook(event, arguments):
        nonlocal left
        if event in (
            "open",
            "os.mkdir",
            "os.rename",
            "os.rmdir",
            "os.remove",
            "os.listdir",
            "os.scandir",
            "fcntl.flock",
        ):
            named = event == "fcntl.flock" or any(str(a).startswith(folder) for a in arguments[:2])
            left -= named
            if named and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


def drive(folder, how, kills=0, seed=0):
    """What was found: {kills, of which while something was unfinished or removed, steps}."""
    numbers = random.Random(seed)
    state = {"kills": 0, "unfinished": 0, "removed": 0, "steps": 0}
    step, reference = -1, Reference()
    start = time.monotonic()
    if how == "at-random":
        assert not kill_one(folder, lambda: None, None)[0]
    whole_s = time.monotonic() - start
    while state["kills"] < kills if how == "at-random" else True:
        if how == "at-random" and state["kills"] % 2:
            killed, durable = kill_one(folder, lambda: None, numbers.uniform(0, whole_s))
        else:
            number = numbers.randint(1, CALLS) if how == "at-random" else state["kills"] + 1
            killed, durable = kill_one(folder, die_at(number, folder), None)
        if how != "at-random" and not killed:
            break  # the child has fewer calls than that: 82 on 2026-11-28
        state["kills"] += 1
        names = [path.name for path in Path(folder).iterdir()] if Path(folder).exists() else []
        for word in ("unfinished", "removed"):
            state[word] += any(name.startswith(f".{word}-") for name in names)
        if any(name.startswith("step-") for name in names):
            step = check(folder, durable, step, reference)
        else:
            assert step < 0 and durable == 0, "all checkpoints are gone"
    state["steps"] = step
    return state
