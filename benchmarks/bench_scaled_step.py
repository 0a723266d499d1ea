"""What follows the backward pass of a mixed-precision step: unscale, check, clip, update, adapt the scale. AdamW with
GradScaler, and with StepGuard for bfloat16, beside torch's scaler, clip_grad_norm_ and fused AdamW.

Floor: a step's bytes (bench_optim.py) and one more read of the gradients, since the norm must be known before the first
update. The rows "host" have the time until the host has launched all of it, "launches" the kernels, copies and fills of
a step, and "captured, host" the host's time of the same step as one CUDA graph.
"""

import functools
import gc
import warnings

import torch
import warpsmith
from torch.profiler import ProfilerActivity, profile
from warpsmith.testing import host_time_us, timer_of
from warpsmith.testing.gpu_timer import copy_call
from warpsmith.testing.rows import OURS, YARDSTICK, Row, make_rows
from warpsmith.train import CapturedStep

from benchmarks.bench_optim import LR, PRECISIONS, SPIN_CYCLES, cases, floor_bytes

MAX_NORM = 1e30  # nothing is scaled, so that the gradients stay as they are; torch multiplies by 1 all the same
WITH_GUARD = ("master", "remainder", "bf16_sr", "8bit")
FIRST_STEPS = 5  # until a captured step is replayed


def llama_shapes(layers=16, width=2048, heads_width=512, inner=8192, vocabulary=128256):
    """The parameter shapes of Llama 3.2 1B, whose head is tied."""
    attention = [(width, width), (heads_width, width), (heads_width, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *layer * layers, (width,)]


def parameters(sizes, dtype, device):
    params = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


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


def timed(cell, direction, steps, floor, device, options):
    contenders = {**steps, YARDSTICK: copy_call(floor)} if device == "cuda" else steps
    gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
    timings = timer_of(device, options.samples, **gpu)(contenders)
    return make_rows("scaled_step", *cell, direction, timings, floor_bytes=floor)


def launches(step):
    """Kernels, copies and fills of one call on the GPU."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith("Optimizer.") for name in on_gpu)  # torch marks the step on the device as well


def free(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


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
    rows = timed(cell, "step", steps, 32 * sum(p.numel() for p in params), device, options)
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
    floor = int(each * sum(p.numel() for p in params))
    return timed((f"AdamW, {shape}", precision), "step", steps, floor, device, options)


def llama(device, options):
    """All in bfloat16, the step alone: what torch's fused AdamW does to a model that was loaded so."""
    sizes = llama_shapes(1, 64, 32, 128, 256) if options.quick else llama_shapes()
    params = parameters(sizes, torch.bfloat16, device)
    steps = {
        OURS: warpsmith.optim.AdamW(params, lr=LR).step,
        "torch fused": torch.optim.AdamW(params, lr=LR, fused=True).step,
    }
    count = sum(p.numel() for p in params)
    return timed((f"AdamW, {count:.3g} of a Llama", "bf16"), "without clip", steps, 14 * count, device, options)


def checked(shape, sizes, device, options):
    """The norm and the check of float32 gradients, which read them once."""
    params = parameters(sizes, torch.float32, device)
    guard, optimizer = warpsmith.amp.StepGuard(), warpsmith.optim.SGD(params, lr=LR)

    def ours():
        guard.clip_(optimizer, MAX_NORM)
        guard.update()

    steps = {OURS: ours, "torch": functools.partial(torch.nn.utils.get_total_norm, [p.grad for p in params])}
    floor = 4 * sum(p.numel() for p in params)
    return timed((shape, "float32"), "norm and check", steps, floor, device, options)


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
    floor = 36 * sum(p.numel() for p in params)
    return timed((f"AdamW + EMA, {shape}", "float32"), "step", steps, floor, device, options)


def wide_gradients(shape, sizes, device, options):
    """Gradients in float32 beside parameters in bfloat16 with masters."""
    params = parameters(sizes, torch.bfloat16, device)
    for p in params:
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = torch.randn(p.shape, device=device)
    steps = {OURS: warpsmith.optim.AdamW(params, lr=LR, precision="master").step}
    floor = 32 * sum(p.numel() for p in params)
    return timed((f"AdamW, float32 gradients, {shape}", "master"), "step", steps, floor, device, options)


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


def run(device, options):
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
