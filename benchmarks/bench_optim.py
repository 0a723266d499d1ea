"""Optimizers: one step on a large model's tensors and on many small ones, beside torch's fused and foreach ones.

Floor: gradient, parameter and states read, parameter and states written; AdamW: 7 elements, 28 bytes a float32
parameter. The host's time is that of a step from an idle device, without waiting for it.
"""

import functools
import gc

import torch
import warpsmith
from warpsmith.testing import host_time_us, timer_of
from warpsmith.testing.gpu_timer import copy_call
from warpsmith.testing.rows import OURS, YARDSTICK, make_rows

LR = 1e-6
# {row: (class, options, states)}: what people train with.
OPTIMIZERS = {
    "adamw": ("AdamW", {}, 2),
    "adam": ("Adam", {}, 2),
    "sgd": ("SGD", {"momentum": 0.9}, 1),
    "lion": ("Lion", {}, 1),
    "adagrad": ("Adagrad", {}, 1),
    "rmsprop": ("RMSprop", {}, 1),
    "lamb": ("LAMB", {}, 2),
}
TWICE = ("lamb",)  # parameter (or master) and states are read twice: the step needs norms of whole tensors first
# A step of many small tensors keeps the host busy for milliseconds: the spin must be longer than torch's foreach takes.
SPIN_CYCLES = 60_000_000


def gpt_shapes(layers, width, vocabulary, context):
    """The parameter shapes of a GPT-2 with biases and a tied head."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer = [*matrices, (3 * width,), (4 * width,)] + [(width,)] * 6
    return [(vocabulary, width), (context, width), *layer * layers, (width,), (width,)]


def cases(device, quick):
    if quick:
        return {"tiny gpt": gpt_shapes(1, 16, 64, 8), "20 x 4096": [(4096,)] * 20}
    if device == "cuda":
        return {"1.0e9 in 292": gpt_shapes(24, 1792, 50304, 1024), "2000 x 4096": [(4096,)] * 2000}
    return {"2.0e7 in 52": gpt_shapes(4, 512, 12576, 1024), "500 x 4096": [(4096,)] * 500}


# {precision: (dtype of the parameters, bytes of a parameter, of a state, of a master, of what rounding drops)}.
PRECISIONS = {
    "fp32": (torch.float32, 4, 4, 0, 0),
    "bf16": (torch.bfloat16, 2, 2, 0, 0),
    "master": (torch.bfloat16, 2, 4, 4, 0),
    "bf16_states": (torch.float32, 4, 2, 0, 0),
    "bf16_sr": (torch.bfloat16, 2, 2, 0, 0),
    "bf16_kahan": (torch.bfloat16, 2, 2, 0, 2),
    "remainder": (torch.bfloat16, 2, 4, 0, 2),
    "8bit": (torch.bfloat16, 2, 1 + 4 / 256, 0, 0),
}


def floor_bytes(precision, states):
    """Of one parameter: the gradient, the parameter or its master and the states read; all but the gradient written."""
    _, param, state, master, dropped = PRECISIONS[precision]
    return param + (master or param) + param + master + 2 * (dropped + states * state)


def run(row, device, options):
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        for precision in PRECISIONS:
            if precision == "fp32" or (row == "adamw" and not options.quick) or precision == "master":
                rows += case_rows(row, shape, sizes, device, options, precision)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def case_rows(row, shape, sizes, device, options, precision):
    name, given, states = OPTIMIZERS[row]
    dtype = PRECISIONS[precision][0]
    params = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    # One set of parameters and gradients for all; each optimizer has moments of its own.
    steps = {OURS: getattr(warpsmith.optim, name)(params, lr=LR, precision=precision, **given).step}
    # torch stores all arrays in the parameters' dtype: the rival of those precisions.
    rival = getattr(torch.optim, name, None)
    if rival is not None and row != "rmsprop":  # torch has no fused one
        steps["torch fused"] = rival(params, lr=LR, fused=True, **given).step
    if rival is not None:
        steps["torch foreach"] = rival(params, lr=LR, foreach=True, **given).step
    each = floor_bytes(precision, states)
    if row in TWICE:
        _, param, state, master, _ = PRECISIONS[precision]
        each += (master or param) + states * state
    floor = int(each * sum(p.numel() for p in params))
    stored = "float32" if precision == "fp32" else precision
    contenders = {**steps, YARDSTICK: copy_call(floor)} if device == "cuda" else steps
    gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
    timings = timer_of(device, options.samples, **gpu)(contenders)
    rows = make_rows(row, shape, stored, "step", timings, floor_bytes=floor)
    if device == "cuda":
        host = host_time_us(steps, calls=1, rounds=options.samples)
        rows += make_rows(row, shape, stored, "host", host, unit="us")
    return rows


def run_clip(device, options):
    """The norm of float32 gradients, read once, and their scaling: 4 bytes an element, or 12 where it scales."""
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        params = [torch.zeros(s, device=device).requires_grad_() for s in sizes]
        for p in params:
            p.grad = torch.randn_like(p)
        for kind, max_norm, each in (("scales nothing", 1e30, 4), ("scales", 1e-3, 12)):
            # What was scaled once has that norm: the next call scales again, by nearly 1.
            calls = {
                OURS: functools.partial(warpsmith.optim.clip_grad_norm_, params, max_norm),
                "torch": functools.partial(torch.nn.utils.clip_grad_norm_, params, max_norm),
            }
            floor = each * sum(p.numel() for p in params)
            contenders = {**calls, YARDSTICK: copy_call(floor)} if device == "cuda" else calls
            gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
            timings = timer_of(device, options.samples, **gpu)(contenders)
            rows += make_rows("clip_grad_norm", shape, "float32", kind, timings, floor_bytes=floor)
    return rows


def run_ema(device, options):
    """An update of averages: average and weight read, average written. torch's averages have the weights' dtype."""
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        for dtype, each in ((torch.float32, 12), (torch.bfloat16, 10)):
            params = [torch.randn(s, device=device).to(dtype) for s in sizes]
            theirs = [p.clone() for p in params]
            calls = {
                OURS: warpsmith.optim.EMA(params).update,
                "torch": functools.partial(torch._foreach_lerp_, theirs, params, 1e-3),
            }
            floor = each * sum(p.numel() for p in params)
            contenders = {**calls, YARDSTICK: copy_call(floor)} if device == "cuda" else calls
            gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
            timings = timer_of(device, options.samples, **gpu)(contenders)
            stored = str(dtype).removeprefix("torch.")
            rows += make_rows("ema", shape, stored, "update", timings, floor_bytes=floor)
    return rows


def run_clipped_step(device, options):
    """A step with clipping, as training scripts take it: AdamW, SGD with momentum and Lion, beside torch's fused ones.

    On the CPU this is what two threads are asked for (`OMP_NUM_THREADS=2`)."""
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        params = [torch.randn(s, device=device).requires_grad_() for s in sizes]
        for p in params:
            p.grad = torch.randn_like(p)

        def clipped(clip, optimizer, params=params):
            def step():
                clip(params, 1e30)
                optimizer.step()

            return step

        for row in ("adamw", "sgd", "lion"):
            name, given, states = OPTIMIZERS[row]
            ours = getattr(warpsmith.optim, name)(params, lr=LR, **given)
            steps = {OURS: clipped(warpsmith.optim.clip_grad_norm_, ours)}
            if hasattr(torch.optim, name):
                theirs = getattr(torch.optim, name)(params, lr=LR, fused=True, **given)
                steps["torch fused"] = clipped(torch.nn.utils.clip_grad_norm_, theirs)
            floor = 4 * (4 + 2 * states) * sum(p.numel() for p in params)
            contenders = {**steps, YARDSTICK: copy_call(floor)} if device == "cuda" else steps
            gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
            timings = timer_of(device, options.samples, **gpu)(contenders)
            rows += make_rows("clipped_step", f"{name}, {shape}", "float32", "step", timings, floor_bytes=floor)
    return rows


OPS = {"clip_grad_norm": run_clip, "ema": run_ema, "clipped_step": run_clipped_step} | {
    row: functools.partial(run, row) for row in OPTIMIZERS
}
