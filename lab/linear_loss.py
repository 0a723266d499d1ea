"""Question: where are the milliseconds of the linear losses? The ops, and each product by rows and library.

    python lab/linear_loss.py                                 on the GPU: 32768 x 768 x 50304, 15 s
    python lab/linear_loss.py --shape 4096 4096 128256
    python lab/linear_loss.py --device cpu --shape 96 32 160  runs all once, and times nothing

What schedules in two streams gave is in docs/design/2026-11-22-rope-and-heads.md.
"""

import argparse
import functools
import operator
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import GpuTimer

LIBRARIES = ("cublas", "cublaslt")


def inputs_of(shape, device):
    rows, width, classes = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(classes, width, device=device) / width**0.5).to(dtype)
    return hidden, weight, torch.randint(0, classes, (rows,), device=device)


def products(shape, chunk_rows, device):
    """{name: step} of each product by itself, by rows and library. Of zeros they would be faster: less power."""
    hidden, weight, _ = inputs_of(shape, device)
    steps = {}
    for rows in chunk_rows:
        part, logits = hidden[:rows], hidden.new_empty(rows, weight.shape[0]).normal_()
        outs = torch.empty_like(part), torch.empty_like(weight)
        forms = {
            "logits": lambda p=part, z=logits: torch.mm(p, weight.t(), out=z),
            "for hidden": lambda z=logits, o=outs[0]: torch.mm(z, weight, out=o),
            "for weight": lambda p=part, z=logits, o=outs[1]: torch.mm(z.t(), p, out=o),
        }
        for library in LIBRARIES if device == "cuda" else LIBRARIES[:1]:
            for name, form in forms.items():
                steps[f"{name}, {rows} rows, {library}"] = functools.partial(with_library, library, form)
    return steps


def with_library(library, form):
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    form()
    torch.backends.cuda.preferred_blas_library(before)


def whole_ops(shape, device):
    hidden, weight, target = inputs_of(shape, device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def step(fn, of=lambda y: y, **options):
        torch.autograd.grad(of(fn(*leaves, target, **options)).mean(), leaves)

    cross_entropy = functools.partial(step, warpsmith.linear_cross_entropy)
    log_prob = functools.partial(step, warpsmith.linear_log_prob, of=operator.itemgetter(0))
    steps = {
        "linear_cross_entropy": cross_entropy,
        "linear_cross_entropy, none": functools.partial(cross_entropy, reduction="none"),
        "linear_log_prob": log_prob,
        "linear_log_prob, saved logits": functools.partial(log_prob, save_logits=True),
        "linear_log_prob, also of the entropy": functools.partial(log_prob, of=lambda y: y[0] + 0.01 * y[2]),
        "torch, float32 loss": lambda: step(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t)),
    }
    for gib in (2, 4):
        for name, fn in (("linear_cross_entropy", cross_entropy), ("linear_log_prob", log_prob)):
            steps[f"{name}, chunks of {gib} GiB"] = functools.partial(fn, max_chunk_bytes=gib << 30)
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(32768, 768, 50304), metavar=("M", "H", "V"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    rows, width, classes = options.shape
    chunk_rows = [*(rows // n for n in (1, 2, 4, 8)), min(rows, 512)]
    parts = {
        "whole ops": lambda: whole_ops(options.shape, options.device),
        "products": lambda: products(options.shape, chunk_rows, options.device),
    }
    for title, make in parts.items():
        steps = make()
        if options.device == "cpu":
            for name, step in steps.items():
                step()
                print(f"{title:10s} runs  {name}")
            continue
        for name, timing in GpuTimer(rounds=7, budget_s=3.0, spin_cycles=10_000_000).time(steps).items():
            time = timing.error if timing.ms is None else f"{timing.ms:8.3f} ms"
            print(f"{title:10s} {time}  {name}")
        del steps
        torch.cuda.empty_cache()
    print(f"6 MVH: {6e-9 * rows * width * classes / 783:.2f} ms at 783 TFLOP/s")


if __name__ == "__main__":
    main()
