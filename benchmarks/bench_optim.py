"""Optimizers: one step on a large model's tensors and on many small ones, beside torch's fused and foreach ones.

Floor: gradient, parameter and states read, parameter and states written; AdamW: 7 elements, 28 bytes a float32
parameter. The host's time is that of a step from an idle device, without waiting for it.

scaled_step is what follows the backward pass of a mixed-precision step: unscale, check, clip, update, adapt the scale.
AdamW with GradScaler, and with StepGuard for bfloat16, beside torch's scaler, clip_grad_norm_ and fused AdamW. Floor: a
step's bytes and one more read of the gradients, since the norm must be known before the first update. Its rows "host"
have the time until the host has launched all of it, "launches" the kernels, copies and fills of a step, and "captured,
host" the host's time of the same step as one CUDA graph.
"""

import functools
import gc
import warnings

import torch
import warpsmith
from torch.profiler import ProfilerActivity, profile
from warpsmith.testing import host_time_us
from warpsmith.testing.rows import OURS, Row, make_rows
from warpsmith.train import CapturedStep

from benchmarks.cells import timed

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


def step_rows(cell, steps, device, options, params=(), each=0):
    """Rows of steps that move so many bytes of each element of the parameters at least."""
    floor = int(each * sum(p.numel() for p in params))
    return timed(cell, steps, device, options, floor or None, spin_cycles=SPIN_CYCLES)


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


def parameters(sizes, dtype, device):
    params = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def free(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run(row, device, options):
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        for precision in PRECISIONS:
            if precision == "fp32" or (row == "adamw" and not options.quick) or precision == "master":
                rows += case_rows(row, shape, sizes, device, options, precision)
        free(device)
    return rows


def case_rows(row, shape, sizes, device, options, precision):
    name, given, states = OPTIMIZERS[row]
    dtype = PRECISIONS[precision][0]
    params = parameters(sizes, dtype, device)
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
    stored = "float32" if precision == "fp32" else precision
    rows = step_rows((row, shape, stored, "step"), steps, device, options, params, each)
    if device == "cuda":
        host = host_time_us(steps, calls=1, rounds=options.samples)
        rows += make_rows(row, shape, stored, "host", host, unit="us")
    return rows


def run_clip(device, options):
    """The norm of float32 gradients, read once, and their scaling: 4 bytes an element, or 12 where it scales."""
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        params = parameters(sizes, torch.float32, device)
        for kind, max_norm, each in (("scales nothing", 1e30, 4), ("scales", 1e-3, 12)):
            # What was scaled once has that norm: the next call scales again, by nearly 1.
            calls = {
                OURS: functools.partial(warpsmith.optim.clip_grad_norm_, params, max_norm),
                "torch": functools.partial(torch.nn.utils.clip_grad_norm_, params, max_norm),
            }
            rows += step_rows(("clip_grad_norm", shape, "float32", kind), calls, device, options, params, each)
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
            stored = str(dtype).removeprefix("torch.")
            rows += step_rows(("ema", shape, stored, "update"), calls, device, options, params, each)
    return rows


def run_clipped_step(device, options):
    """A step with clipping, as training scripts take it: AdamW, SGD with momentum and Lion, beside torch's fused ones.

    On the CPU this is what two threads are asked for (`OMP_NUM_THREADS=2`)."""
    rows = []
    for shape, sizes in cases(device, options.quick).items():
        params = parameters(sizes, torch.float32, device)

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
            cell = ("clipped_step", f"{name}, {shape}", "float32", "step")
            rows += step_rows(cell, steps, device, options, params, 4 * (4 + 2 * states))
    return rows


def run_muon(device, options):
    """The matrices of Llama 3.2 1B, but for the embedding. No floor: products bind it."""
    rows, sizes = [], llama_shapes(1, 64, 32, 128, 256) if options.quick or device == "cpu" else llama_shapes()
    sizes = [s for s in sizes if len(s) == 2][1:]
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(sizes, dtype, device)
        steps = {
            OURS: warpsmith.optim.Muon(params, lr=LR).step,
            f"{OURS}, gram": warpsmith.optim.Muon(params, lr=LR, newton_schulz="gram").step,
            "torch": torch.optim.Muon(params, lr=LR).step,
        }
        cell = ("muon", f"{sum(p.numel() for p in params):.3g} of a Llama", str(dtype).removeprefix("torch."), "step")
        rows += step_rows(cell, steps, device, options)
        del params, steps
        free(device)
    return rows


# ------------------------------------------------------------------------------- what follows the backward pass

MAX_NORM = 1e30  # nothing is scaled, so that the gradients stay as they are; torch multiplies by 1 all the same
WITH_GUARD = ("master", "remainder", "bf16_sr", "8bit")
FIRST_STEPS = 5  # until a captured step is replayed


def llama_shapes(layers=16, width=2048, heads_width=512, inner=8192, vocabulary=128256):
    """The parameter shapes of Llama 3.2 1B, whose head is tied."""
    attention = [(width, width), (heads_width, width), (heads_width, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *layer * layers, (width,)]


def update_of(scaler, optimizer, params, device):
    """What follows backward(). Our scaler clips in the optimizer's kernel; with torch's it is as torch's docs say."""
    scaler.scale(torch.ones((), device=device))  # the loss's part: the scale exists

    def update():
        if isinstance(scaler, warpsmith.amp.GradScaler):
            scaler.clip_(optimizer, MAX_NORM)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return update


def plain_update(optimizer, params):
    """torch's clipped step of gradients that its scaler does not take."""

    def update():
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return update


def launches(step):
    """Kernels, copies and fills of one call on the GPU."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith("Optimizer.") for name in on_gpu)  # torch marks the step on the device as well


def scaled(shape, sizes, device, options):
    """float32, GradScaler."""
    params = parameters(sizes, torch.float32, device)
    ours = warpsmith.optim.AdamW(params, lr=LR)
    theirs = torch.optim.AdamW(params, lr=LR, fused=True)
    steps = {
        OURS: update_of(warpsmith.amp.GradScaler(device, init_scale=1.0), ours, params, device),
        "torch fused": update_of(torch.amp.GradScaler(device, init_scale=1.0), theirs, params, device),
    }
    cell = (f"AdamW, {shape}", "float32")
    rows = step_rows(("scaled_step", *cell, "step"), steps, device, options, params, 32)
    if device == "cuda" and options.samples:
        host = host_time_us(steps, calls=1, rounds=options.samples)
        rows += make_rows("scaled_step", *cell, "host", host, unit="us")
        counts = {who: launches(step) for who, step in steps.items()}
        rows += [Row("scaled_step", *cell, "launches", who, n, "launches") for who, n in counts.items()]
    return rows


def guarded(shape, sizes, device, options, precision):
    """A precision of bfloat16 parameters with StepGuard; torch's arrays all are bfloat16."""
    params = parameters(sizes, torch.bfloat16, device)
    ours = warpsmith.optim.AdamW(params, lr=LR, precision=precision)
    theirs = torch.optim.AdamW(params, lr=LR, fused=True)
    steps = {
        OURS: update_of(warpsmith.amp.StepGuard(), ours, params, device),
        "torch fused": plain_update(theirs, params),
    }
    each = PRECISIONS[precision][1] + floor_bytes(precision, 2)
    return step_rows(("scaled_step", f"AdamW, {shape}", precision, "step"), steps, device, options, params, each)


def llama(device, options):
    """All in bfloat16, the step alone: what torch's fused AdamW does to a model that was loaded so."""
    sizes = llama_shapes(1, 64, 32, 128, 256) if options.quick else llama_shapes()
    params = parameters(sizes, torch.bfloat16, device)
    steps = {
        OURS: warpsmith.optim.AdamW(params, lr=LR).step,
        "torch fused": torch.optim.AdamW(params, lr=LR, fused=True).step,
    }
    count = sum(p.numel() for p in params)
    cell = ("scaled_step", f"AdamW, {count:.3g} of a Llama", "bf16", "without clip")
    return step_rows(cell, steps, device, options, params, 14)


def checked(shape, sizes, device, options):
    """The norm and the check of float32 gradients, which read them once."""
    params = parameters(sizes, torch.float32, device)
    guard, optimizer = warpsmith.amp.StepGuard(), warpsmith.optim.SGD(params, lr=LR)

    def ours():
        guard.clip_(optimizer, MAX_NORM)
        guard.update()

    steps = {OURS: ours, "torch": functools.partial(torch.nn.utils.get_total_norm, [p.grad for p in params])}
    return step_rows(("scaled_step", shape, "float32", "norm and check"), steps, device, options, params, 4)


def graph_of(sizes, device, **options):
    """The scaled step and the same as one CUDA graph. It gets gradients as a backward pass would leave them."""
    params = parameters(sizes, torch.float32, device)
    grads = [p.grad for p in params]
    optimizer, scaler = warpsmith.optim.AdamW(params, lr=LR), warpsmith.amp.GradScaler(device, init_scale=1.0)
    update = update_of(scaler, optimizer, params, device)

    def step():
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        update()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the CPU it is eager
        graphed = CapturedStep(step, state=[params, grads, optimizer, scaler], **options)
        for _ in range(FIRST_STEPS):
            graphed()
    return step, graphed


def averaged(shape, sizes, device, options):
    """AdamW and a moving average of the weights, in one launch and in two."""
    steps = {}
    for name in (OURS, f"{OURS}, two launches"):
        params = parameters(sizes, torch.float32, device)
        optimizer = warpsmith.optim.AdamW(params, lr=LR)
        ema = warpsmith.optim.EMA(params, decay=0.999, optimizer=optimizer)
        if name == OURS:
            optimizer.fuse(ema=ema)
            steps[name] = optimizer.step
        else:
            steps[name] = lambda optimizer=optimizer, ema=ema: (optimizer.step(), ema.update())
    return step_rows(("scaled_step", f"AdamW + EMA, {shape}", "float32", "step"), steps, device, options, params, 36)


def wide_gradients(shape, sizes, device, options):
    """Gradients in float32 beside parameters in bfloat16 with masters."""
    params = parameters(sizes, torch.bfloat16, device)
    for p in params:
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = torch.randn(p.shape, device=device)
    steps = {OURS: warpsmith.optim.AdamW(params, lr=LR, precision="master").step}
    cell = ("scaled_step", f"AdamW, float32 gradients, {shape}", "master", "step")
    return step_rows(cell, steps, device, options, params, 32)


def captured(shape, sizes, device, options):
    """The host's time of the scaled step, eager and as a graph: with a look at what a capture fixes, and without."""
    step, graphed = graph_of(sizes, device)
    _, unwatched = graph_of(sizes, device, watch=False)
    cell = (f"AdamW, {shape}", "float32", "captured, host")
    if graphed.fallback_reason is not None and device == "cuda":
        return [Row("scaled_step", *cell, OURS, None, "us", note=graphed.fallback_reason)]
    if not options.samples:
        return []
    calls = {OURS: graphed, f"{OURS}, watch=False": unwatched, "eager": step}
    timings = host_time_us(calls, calls=1, rounds=options.samples)
    return make_rows("scaled_step", *cell, timings, unit="us")


def run_scaled_step(device, options):
    shapes = cases(device, options.quick)
    large, small = shapes.items()  # a big model's tensors, and many small ones
    rows = []
    for shape in (large, small):
        rows += scaled(*shape, device, options)
        free(device)
    for precision in WITH_GUARD:
        rows += guarded(*large, device, options, precision)
        free(device)
    for rows_of in (averaged, wide_gradients):
        rows += rows_of(*large, device, options)
        free(device)
    rows += llama(device, options)
    free(device)
    rows += checked(*large, device, options)
    free(device)
    return rows + captured(*small, device, options)


OPS = {
    "clip_grad_norm": run_clip,
    "ema": run_ema,
    "clipped_step": run_clipped_step,
    "muon": run_muon,
    "scaled_step": run_scaled_step,
} | {row: functools.partial(run, row) for row in OPTIMIZERS}
