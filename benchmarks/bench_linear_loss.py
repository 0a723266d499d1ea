"""The linear losses, forward and backward together, beside torch, torch.compile and, where installed, Liger, QuACK and
Cut Cross-Entropy; and the memory each takes.

linear_cross_entropy: mean reduction, floor 6 MVH FLOP. linear_log_prob: the log-probability alone, with and without
saved logits, floor 8 MVH FLOP, 6 with saved logits. linear_loss_curve: time over memory of linear_cross_entropy, a
point for each number of chunks and dtype of the weight's gradient. Rows named "peak memory" have megabytes above the
inputs in place of a time.
"""

import functools

import torch
import torch.nn.functional as F
import warpsmith

from benchmarks.bench_cross_entropy import first
from benchmarks.cells import cell_of, compiled, peak_rows, timed, torch_contenders
from benchmarks.rivals import optional

GPU_SHAPES = ((4096, 4096, 128256), (32768, 768, 50304))
CPU_SHAPES = ((512, 256, 8192),)
CHUNKS = (1, 2, 4, 8, 16)
SPIN_CYCLES = 20_000_000  # torch eager launches many kernels


def plain(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight), target)


def plain_float(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def rivals(rows):
    """Installed rivals, each a function of (hidden, weight, target)."""
    found = {}
    with optional():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        found["liger"] = lambda h, w, t: LigerFusedLinearCrossEntropyFunction.apply(h, w, t)[0]
    with optional():
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
            liger_fused_linear_cross_entropy_sm90,
        )

        found["liger sm90"] = lambda h, w, t: first(liger_fused_linear_cross_entropy_sm90(h, w, t))
    with optional():
        from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
            LigerFusedScaledCrossEntropySM90Function,
        )

        found["liger sm90, scaled"] = lambda h, w, t: LigerFusedScaledCrossEntropySM90Function.apply(h, w, t).mean()
    with optional():
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        options = {"chunk_size": rows, "tuned": False, "use_scaled_exp": False}
        found["quack, one chunk"] = lambda h, w, t: first(chunked_linear_cross_entropy(h, w, t, **options))
    with optional():
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = linear_cross_entropy
    return found


def cross_entropy(shape, device, options):
    rows, _, classes = shape
    ours = warpsmith.linear_cross_entropy
    contenders = torch_contenders(ours, plain, options)
    if "torch.compile" in contenders:
        contenders["torch.compile"] = compiled(plain_float)
    if device == "cuda":
        quarter = rows // 4 * classes * 2
        contenders["warpsmith, 4 chunks"] = functools.partial(ours, max_chunk_bytes=quarter, dw_dtype=torch.bfloat16)
        contenders["warpsmith, 4 chunks, float32 sums"] = functools.partial(
            ours, max_chunk_bytes=quarter, dw_dtype=torch.float32
        )
        contenders["warpsmith, none"] = lambda h, w, t: ours(h, w, t, reduction="none").mean()
        contenders.update(rivals(rows))
    return contenders


def mean_of_first(fn):
    return lambda hidden, weight, target: fn(hidden, weight, target)[0].mean()


def plain_log_prob(hidden, weight, target):
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, target.unsqueeze(-1)).mean()


def log_prob(shape, device, options):
    contenders = torch_contenders(mean_of_first(warpsmith.linear_log_prob), plain_log_prob, options)
    saving = functools.partial(warpsmith.linear_log_prob, save_logits=True)
    contenders["warpsmith, saved logits"] = mean_of_first(saving)
    return contenders


def step_of(fn, hidden, weight, target):
    def step():
        hidden.grad = weight.grad = None
        fn(hidden, weight, target).backward()

    return step


def inputs(shape, device, dtype):
    """hidden, weight and target."""
    rows, width, classes = shape
    hidden = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, device=device) / width**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, classes, (rows,), device=device)


def time_and_memory(op, steps, tensors, device, options, **gpu):
    hidden, weight, _ = tensors
    cell = cell_of(op, (*hidden.shape, len(weight)), hidden, "forward + backward")
    found = timed(cell, steps, device, options, spin_cycles=SPIN_CYCLES, **gpu)
    return found + (peak_rows(found, steps, lambda _: (hidden, weight)) if device == "cuda" else [])


def time_all(op, contenders_of, device, options):
    rows = []
    for shape in options.shapes(device, GPU_SHAPES, CPU_SHAPES, (32, 16, 64)):
        tensors = inputs(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
        steps = {name: step_of(fn, *tensors) for name, fn in contenders_of(shape, device, options).items()}
        rows += time_and_memory(op, steps, tensors, device, options)
    return rows


def curve(device, options):
    """Rows of ten chunkings on a GPU: docs/speed_plots.py draws them."""
    rows = []
    for shape in options.shapes(device, GPU_SHAPES[:1], (), (64, 32, 256)) if device == "cuda" else ():
        tensors = inputs(shape, device, torch.bfloat16)
        steps = {}
        for dtype in (torch.bfloat16, torch.float32):
            for chunks in CHUNKS:
                given = {"max_chunk_bytes": -(-shape[0] // chunks) * shape[2] * 2, "dw_dtype": dtype}
                fn = functools.partial(warpsmith.linear_cross_entropy, **given)
                name = f"{str(dtype).removeprefix('torch.')}, {chunks}"
                steps[name] = step_of(fn, *tensors)
        rows += time_and_memory("linear_cross_entropy by chunks", steps, tensors, device, options, budget_s=3.0)
    return rows


OPS = {
    "linear_cross_entropy": functools.partial(time_all, "linear_cross_entropy", cross_entropy),
    "linear_log_prob": functools.partial(time_all, "linear_log_prob", log_prob),
    "linear_loss_curve": curve,
}
