"""A training job of a few ranks, one of which kills itself at a chosen point of a chosen step.

`run_job` forks the ranks from a warm process, so that none imports torch. Each rank is a script as a user writes it:
`init`, `Checkpointer`, `watch`, DDP with `accurate_hook` or `ShardedOptimizer`. A rank tells the driver through a pipe
what it has done, one line in one write.
"""

import itertools
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import warpsmith
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import ShardedOptimizer, accurate_hook
from warpsmith.distributed.gradients import hook
from warpsmith.train import checkpointer, safetensors_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "train"))
from forked import collect, fork

SAMPLES, BATCH, SEED = 60, 3, 5
WATCH_S = 60.0  # longer than anything takes on a busy machine; a death is reported at once
LONGEST_S = 240.0  # after which a rank hangs
X = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))

POINTS = (
    "before the batch",
    "in the forward",
    "between forward and backward",
    "in the backward, before the first bucket",
    "in the backward, after the first bucket",
    "before the ranks exchange a bucket",
    "between exchange and sum",
    "before the optimizer's step",
    "after the optimizer's step",
    "in save, before the exchange",
    "while the checkpoint is written",
    "after save",
)


class Trap:
    """Kills this process at a point of a step."""

    def __init__(self, point, step):
        self._point, self._step, self.now = point, step, -1

    def at(self, point):
        if point == self._point and self.now >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, point, module, name):
        """Goes off before a call of a module's function."""
        original = getattr(module, name)

        def trapped(*args, **kwargs):
            self.at(point)
            return original(*args, **kwargs)

        setattr(module, name, trapped)


def set_traps(trap, model):
    first, last = model[0].weight, model[2].weight
    model[2].register_forward_pre_hook(lambda *_: trap.at("in the forward"))
    last.register_hook(lambda _: trap.at("in the backward, before the first bucket"))
    first.register_hook(lambda _: trap.at("in the backward, after the first bucket"))
    trap.before("before the ranks exchange a bucket", dist, "all_to_all_single")
    for module in (hook, sys.modules["warpsmith.distributed.sharded.gradient_shards"]):
        trap.before("between exchange and sum", module, "mean_in_rank_order")
    trap.before("in save, before the exchange", checkpointer, "all_gather_bytes")
    trap.before("while the checkpoint is written", safetensors_file, "write_file")


def wrapped(model, kind):
    """What runs the forward, and the optimizer."""
    if kind == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        ddp.register_comm_hook(None, accurate_hook)
        return ddp, warpsmith.optim.AdamW(model.parameters(), lr=0.01)
    return model, ShardedOptimizer(
        model.parameters(), warpsmith.optim.AdamW, stage=int(kind[-1]), bucket_cap_mb=0.001, lr=0.01
    )


def train(folder, kind, steps, trap, say):
    with (
        warpsmith.distributed.init(device="cpu", timeout_s=LONGEST_S) as ctx,
        warpsmith.train.Checkpointer(folder) as saved,
        warpsmith.distributed.watch(WATCH_S, on_report=lambda text: say("report", text.replace("\n", " | "))),
    ):
        torch.manual_seed(SEED)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))
        run, optimizer = wrapped(model, kind)
        sampler = warpsmith.distributed.ResumableSampler(SAMPLES, seed=SEED, rank=ctx.rank, world_size=ctx.world_size)
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        begin = saved.load(**parts) or 0
        say("resumed", begin, sampler.state_dict()["position"])
        set_traps(trap, model)
        for step in range(begin, begin + steps):
            trap.now = step - begin
            trap.at("before the batch")
            batch = []
            while len(batch) < BATCH:
                batch += itertools.islice(sampler, BATCH - len(batch))
            loss = (run(X[batch]) - X[batch]).square().mean()
            trap.at("between forward and backward")
            loss.backward()
            trap.at("before the optimizer's step")
            optimizer.step()
            optimizer.zero_grad()
            trap.at("after the optimizer's step")
            say("step", step + 1, *batch)
            saved.save(step + 1, **parts)  # returns when the one before is on disk
            if ctx.rank == 0:
                say("durable", step)
            trap.at("while the checkpoint is written" if ctx.rank else "")
            trap.at("after save")


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def keep_store(port, say):
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    say("listening")
    while store:
        time.sleep(3600)


def run_job(folder, kind, size, steps, victim, point, doomed):
    """Runs a job to its end. The rank `victim` (None: none) dies at a point of its `doomed`-th step."""
    port = free_port()
    keeper, listening = fork(lambda say: keep_store(port, say))  # as torchrun's agent: it outlives every rank
    try:
        assert os.read(listening, 100) == b"listening\n"

        def body(rank, say):
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
            train(folder, kind, steps, Trap(point if rank == victim else None, doomed), say)

        children = [fork(lambda say, rank=rank: body(rank, say)) for rank in range(size)]
        return collect(children, LONGEST_S)
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
        os.close(listening)
