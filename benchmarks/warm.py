"""Compiles what the benchmarks time, by many processes at a time, into the caches on disk (torch.compile's, Triton's,
QuACK's): the timing process then loads instead of compiling.

Every contender of every cell is called once and none is timed, so this also shows which of them fail. A process takes
shape after shape, so that its imports and its context on the card are paid for once.
"""

import contextlib
import gc
import multiprocessing
import time

import torch

from benchmarks.cells import Options, runners

NOTHING_TO_COMPILE = ("adamw", "host", "linear_host", "linear_loss_curve")
MOST_SHAPES = 8  # of one op on one device; a benchmark with fewer has nothing to do for the others


def units(ops, devices):
    """(op, device, number of the shape): what one process does at a time. The slowest come first: C++, and among the
    ops those that are given first."""
    ops = [op for op in ops if op not in NOTHING_TO_COMPILE]
    return [(op, device, shape) for device in sorted(devices) for op in ops for shape in range(MOST_SHAPES)]


def compile_unit(task):
    """(unit, seconds, contenders called, {(shape, direction, contender): why it failed}) of (unit, until); the number
    of calls is None if the time had ended before."""
    unit, until = task
    op, device, shape = unit
    start = time.monotonic()
    if until and time.time() > until:
        return unit, 0.0, None, {}
    try:
        rows = runners()[op](device, Options(rounds=0, only_shape=shape))
    except Exception as error:
        return unit, time.monotonic() - start, 1, {("", "", op): f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if device == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
    failed = {(r.shape, r.direction, r.contender): r.note for r in rows if r.note not in ("", "not timed")}
    return unit, time.monotonic() - start, len(rows), failed


def warm_compile(ops, devices, processes, until=None):
    """Compiles everything, but begins nothing after the Unix time ``until``; prints a line for each op and for each
    failure, and returns the number of failures."""
    start = time.monotonic()
    seconds, failures, called, left_out = {}, 0, 0, {}
    tasks = [(unit, until) for unit in units(ops, devices)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for (op, device, _), took, count, failed in pool.imap_unordered(compile_unit, tasks):
            if count is None:
                left_out[op, device] = True
                continue
            seconds[op, device] = seconds.get((op, device), 0.0) + took
            called += count
            for (shape, direction, contender), why in failed.items():
                failures += 1
                print(f"failed: {op} on {device} {shape} {direction}, {contender}: {why}", flush=True)
        pool.close()
        pool.join()
    for (op, device), took in sorted(seconds.items()):
        print(f"{op} on {device}: {took:.0f} s of one process")
    ending = (
        f", no time for all of {', '.join(f'{o} on {d}' for o, d in sorted(left_out))}: left out" if left_out else ""
    )
    took = time.monotonic() - start
    print(f"compiled: {called} calls, {failures} failed, {took:.0f} s by {processes} processes{ending}")
    return failures
