"""Whole training steps as one CUDA graph (CapturedStep) beside the same steps run eagerly: three scripts that wait for
their host (step_scripts.py), and GPT-2 124M of examples/train_gpt.py in bf16 autocast. On the CPU both are eager.

Several steps in a row from an idle device, waited for; the time is one step's. The rows "host" have the time until the
host has launched a step, without waiting for the device.
"""

import functools
import time
import traceback
import warnings
from types import SimpleNamespace

import torch
from warpsmith.testing import time_cpu
from warpsmith.testing.gpu_timer import Timing, first_line
from warpsmith.testing.rows import OURS, Row, make_rows
from warpsmith.train import CapturedStep

from benchmarks.bench_gpt2 import TINY, example, one_step
from benchmarks.step_scripts import SCRIPTS, Script

IN_A_ROW = {"cuda": 10, "cpu": 1}
BUDGET_S = {"cuda": 4.0, "cpu": 3.0}
FIRST_STEPS = 5  # until a captured step is replayed


def gpt2(device, tiny=False):
    """The step of examples/train_gpt.py."""
    gpt = example()
    preset = "gpt2-124m" if device == "cuda" and not tiny else "nano"
    recipe = SimpleNamespace(**(gpt.PRESETS[preset] | {"tokens": "random"} | (TINY if tiny else {})))
    ranks = gpt.Ranks(device)
    run = gpt.Run(recipe, "warpsmith", ranks)
    return Script(run.update_once, [run.model, run.optimizer, run.scaler], (gpt.Data(recipe, None, ranks).batch(0),))


def in_a_row(step, batch, steps):
    """Some steps, waited for."""
    losses = [step(*batch) for _ in range(steps)]
    return losses[-1].item()


def host_ms(step, batch, device, steps):
    """Milliseconds in which the host launches a step, the median of several."""
    taken = []
    for _ in range(steps):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step(*batch)
        taken.append(1e3 * (time.perf_counter() - began))
    return Timing(sorted(taken)[steps // 2], min(taken), max(taken), steps)


def contenders_of(make, device, tiny):
    """{name: (step, batch)}: equal models, one captured; and why that one is not, where it is not."""
    torch.manual_seed(0)
    eager, graphed = make(device, tiny), make(device, tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason goes into a note
        captured = CapturedStep(graphed.step, state=graphed.state)
        for _ in range(FIRST_STEPS):
            captured(*graphed.batch)
            eager.step(*eager.batch)
    return {OURS: (captured, graphed.batch), "eager": (eager.step, eager.batch)}, captured


def rows_of(name, make, device, options):
    """The rows of one script. Where its step cannot be captured, ours have the reason in place of a time."""
    tiny = options.quick or device == "cpu"
    steps = 1 if options.quick else IN_A_ROW[device]
    contenders, captured = contenders_of(make, device, tiny)
    why = captured.fallback_reason if device == "cuda" else None
    if why is not None:
        del contenders[OURS]
    refused = {} if why is None else {OURS: Timing(None, error=why)}
    calls = {who: functools.partial(in_a_row, *what, steps) for who, what in contenders.items()}
    timings = time_cpu(calls, rounds=options.samples, budget_s=BUDGET_S[device])
    cell = ("captured_step", name, "mixed")
    rows = make_rows(*cell, "step", refused | {who: one_step(t, steps) for who, t in timings.items()})
    if options.samples:
        host = {who: host_ms(*what, device, 2 * steps + 1) for who, what in contenders.items()}
        rows += make_rows(*cell, "host", refused | host)
    return rows


def run(device, options):
    rows = []
    makers = {**SCRIPTS, "gpt2": gpt2}
    for name in options.shapes(device, tuple(makers), ("policy gradient",), "policy gradient"):
        try:
            rows += rows_of(name, makers[name], device, options)
        except Exception as error:  # the other scripts keep their rows
            traceback.print_exc()
            rows.append(Row("captured_step", name, "mixed", "step", OURS, None, note=first_line(error)))
    return rows
