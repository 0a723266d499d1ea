"""The linear losses, forward and backward together, beside torch, torch.compile and, where installed, Liger, QuACK and
Cut Cross-Entropy; and the memory each takes.

linear_cross_entropy: mean reduction, floor 6 MVH FLOP. linear_log_prob: the log-probability alone, with and without
saved logits, floor 8 MVH FLOP, 6 with saved logits. Rows named "peak memory" have megabytes above the inputs in place
of a time.
"""

import functools

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import timer_of
from warpsmith.testing.rows import Row, make_rows

from benchmarks.bench_cross_entropy import first
from benchmarks.cells import compiled, torch_contenders
from benchmarks.rivals import optional

GPU_SHAPES = ((4096, 4096, 128256), (32768, 768, 50304))
CPU_SHAPES = ((512, 256, 8192),)
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


def peak_mb(step, leaves):
    """Megabytes that a step needs above what it finds; its gradients count."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def rows_of(op, shape, contenders, device, options):
    rows, width, classes = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, device=device) / width**0.5).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=device)
    steps = {name: step_of(fn, hidden, weight, target) for name, fn in contenders.items()}
    gpu = {"spin_cycles": SPIN_CYCLES} if device == "cuda" else {}
    timings = timer_of(device, options.samples, **gpu)(steps)
    text, dtype_text = f"{rows}x{width}x{classes}", str(dtype).removeprefix("torch.")
    found = make_rows(op, text, dtype_text, "forward + backward", timings)
    if device == "cuda":
        for name, step in steps.items():
            if timings[name].ms is not None:
                megabytes = peak_mb(step, (hidden, weight))
                found.append(Row(op, text, dtype_text, "peak memory", name, megabytes, "MB"))
    return found


def time_all(op, contenders_of, device, options):
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (32, 16, 64))
    rows = []
    for shape in shapes:
        rows += rows_of(op, shape, contenders_of(shape, device, options), device, options)
    return rows


OPS = {
    "linear_cross_entropy": functools.partial(time_all, "linear_cross_entropy", cross_entropy),
    "linear_log_prob": functools.partial(time_all, "linear_log_prob", log_prob),
}
