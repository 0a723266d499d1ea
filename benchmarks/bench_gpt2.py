"""A training step of examples/train_gpt.py on random tokens: with this package's modules, with these and torch's
attention ("warpsmith, SDPA"), with torch's modules, and (on a GPU) with torch's compiled. GPT-2 124M in bf16 autocast
on a GPU, the small preset on the CPU.

Several steps in a row from an idle device, waited for; the time is one step's. Rows named "peak memory" have megabytes
above the weights and optimizer states.
"""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

from warpsmith.testing import time_cpu
from warpsmith.testing.gpu_timer import Timing
from warpsmith.testing.rows import OURS, Row, make_rows

from benchmarks.bench_linear_loss import peak_mb
from benchmarks.cells import compiled, forget_compiled

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WITH_SDPA = f"{OURS}, SDPA"
IN_A_ROW = {"cuda": 10, "cpu": 2}
PRESETS = {"cuda": "gpt2-124m", "cpu": "nano"}
TINY = {"layers": 1, "heads": 2, "width": 32, "context": 16, "batch": 4}
BUDGET_S = {"cuda": 15.0, "cpu": 5.0}


def example():
    """The example as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import train_gpt

    return train_gpt


def contenders_of(gpt, recipe, device, options):
    """{name: Run}, each with a model and an optimizer of its own."""
    ranks = gpt.Ranks(device)
    kinds = {OURS: "warpsmith", WITH_SDPA: "warpsmith", "torch": "torch"} if options.samples else {}
    runs = {name: gpt.Run(recipe, kind, ranks) for name, kind in kinds.items()}
    if options.samples:  # all blocks of a model share one set of modules
        runs[WITH_SDPA].model.modules_.attention = runs["torch"].model.modules_.attention
    if options.compile and not options.quick and device == "cuda":
        forget_compiled()
        runs["torch.compile"] = gpt.Run(recipe, "torch", ranks)
        runs["torch.compile"].loss = compiled(runs["torch.compile"].model, donate=True)
    return runs


def in_a_row(run, batches):
    """Some steps, waited for."""
    losses = [run.step(tokens) for tokens in batches]
    return float(losses[-1])


def one_step(timing, steps):
    """The timing of a step from that of several."""
    if timing.ms is None:
        return timing
    return Timing(timing.ms / steps, timing.low_ms / steps, timing.high_ms / steps, timing.samples)


def run(device, options):
    gpt = example()
    rows = []
    for preset in options.shapes(device, (PRESETS["cuda"],), (PRESETS["cpu"],), PRESETS[device]):
        values = gpt.PRESETS[preset] | {"tokens": "random"} | (TINY if options.quick else {})
        recipe = SimpleNamespace(**values)
        data = gpt.Data(recipe, None, gpt.Ranks(device))
        steps = 1 if options.quick else IN_A_ROW[device]
        batches = [data.batch(i) for i in range(steps)]
        runs = contenders_of(gpt, recipe, device, options)
        calls = {name: functools.partial(in_a_row, one, batches) for name, one in runs.items()}
        timings = time_cpu(calls, rounds=options.samples, budget_s=BUDGET_S[device])
        cell = ("train_gpt", f"{preset} {recipe.batch}x{recipe.context}", recipe.dtype)
        per_step = {name: one_step(t, steps) for name, t in timings.items()}
        rows += make_rows(*cell, "step", per_step)
        if device == "cuda" and options.samples:
            for name, one in runs.items():
                if timings[name].ms is not None:
                    megabytes = peak_mb(functools.partial(one.step, batches[0]), one.model.parameters())
                    rows.append(Row(*cell, "peak memory", name, megabytes, "MB"))
    return rows
