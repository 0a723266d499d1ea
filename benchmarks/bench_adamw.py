"""AdamW: one step on a large model's tensors and on many small ones, beside torch's fused and foreach optimizers.

Floor: parameter, gradient and both moments read, parameter and moments written: 7 elements, 28 bytes a float32
parameter. The host's time is that of a step from an idle device, without waiting for it.
"""

import gc

import torch
import warpsmith
from warpsmith.testing import host_time_us, timer_of
from warpsmith.testing.gpu_timer import copy_call
from warpsmith.testing.rows import OURS, YARDSTICK, make_rows

from benchmarks.cells import CPU_THREADS

LR = 1e-6
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


def run(device, options):
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape, sizes in cases(device, options.quick).items():
            rows += case_rows(shape, sizes, device, options)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    finally:
        torch.set_num_threads(threads)
    return rows


def case_rows(shape, sizes, device, options):
    params = [torch.randn(s, device=device).requires_grad_() for s in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    # One set of parameters and gradients for all; each optimizer has moments of its own.
    steps = {
        OURS: warpsmith.optim.AdamW(params, lr=LR).step,
        "torch fused": torch.optim.AdamW(params, lr=LR, fused=True).step,
        "torch foreach": torch.optim.AdamW(params, lr=LR, foreach=True).step,
    }
    floor = 28 * sum(p.numel() for p in params)
    contenders = {**steps, YARDSTICK: copy_call(floor)} if device == "cuda" else steps
    gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
    timings = timer_of(device, options.samples, **gpu)(contenders)
    rows = make_rows("adamw", shape, "float32", "step", timings, floor_bytes=floor)
    if device == "cuda":
        host = host_time_us(steps, calls=1, rounds=options.samples)
        rows += make_rows("adamw", shape, "float32", "host", host, unit="us")
    return rows
