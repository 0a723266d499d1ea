"""Runs a function on several ranks of this machine, for tests of distributed code: no hang, every rank's error
reported."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

_POLL_S = 0.02


def run_ranks(
    fn: Callable[..., Any], world_size: int = 2, *args: Any, backend: str = "gloo", timeout_s: float = 60.0
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in ``world_size`` processes that share a process group.

    The ranks meet through a file and talk over the loopback interface, so nothing listens elsewhere. Each rank
    computes with one thread.

    Args:
        fn: a function that can be imported (defined at the top level of a module): ranks are fresh processes.
        args: passed on; they and the results must survive multiprocessing.
        backend: of torch.distributed.
        timeout_s: for the whole run. A collective that waits for a dead rank gives up after the same time.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: one or more ranks raised, died or were still running at the timeout; the message has every
            rank's traceback. All processes are gone when it is raised.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="warpsmith-ranks-") as folder:
        store = str(Path(folder) / "store")
        arguments = (fn, world_size, store, backend, timeout_s, results, args)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(world_size)]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, results, timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(ranks: Sequence[BaseProcess], results: Any, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(values) + len(errors) < len(ranks):
        if not results.empty():
            rank, good, value = results.get()
            (values if good else errors)[rank] = value
            if not good:  # the others may wait for this rank in a collective: give them a moment to fail by themselves
                deadline = min(deadline, time.monotonic() + 2.0)
            continue
        for rank, process in enumerate(ranks):
            if rank not in values and rank not in errors and process.exitcode is not None and results.empty():
                errors[rank] = f"died with exit code {process.exitcode}"
                deadline = min(deadline, time.monotonic() + 2.0)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for rank in range(len(ranks)):
        if rank not in values and rank not in errors:
            errors[rank] = f"was still running {'after another rank failed' if errors else f'after {timeout_s:g} s'}"
    if errors:
        raise RuntimeError("run_ranks:\n" + "\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
    return [values[rank] for rank in range(len(ranks))]


def _rank(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    store: str,
    backend: str,
    timeout_s: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        value = fn(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
