"""Where linear_cross_entropy's milliseconds are, and what other schedules of its parts would take.

    python tools/gpu/sweep/linear_loss.py                                 on the GPU: 32768 x 768 x 50304, 25 s
    python tools/gpu/sweep/linear_loss.py --shape 4096 4096 128256
    python tools/gpu/sweep/linear_loss.py --device cpu --shape 96 32 160  checks, and times nothing

The schedules call the products and the loss kernel as the op does, from Python: in one stream, or with the loss of one
chunk beside the product of the next in a second stream, with events between them and two buffers of logits. Both are
compared with the op's gradients before they are timed; the second is also captured in a graph and replayed. What the
card can at most gain by two streams is in docs/design/2026-11-22-rope-and-heads.md.
"""

import argparse
import contextlib
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import GpuTimer

_loss_and_gradient = torch.ops.warpsmith.cross_entropy_with_gradient_.default
SUM = 2  # of the raw op's reductions
LIBRARIES = ("cublas", "cublaslt")


class Streams:
    """Work on the caller's stream, and in another beside it if wanted."""

    def __init__(self, beside):
        self.side = torch.cuda.Stream() if beside else None

    def on_side(self):
        return torch.cuda.stream(self.side) if self.side else contextlib.nullcontext()

    def side_after_main(self):
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())

    def main_after(self, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def mark(self):
        return self.side.record_event() if self.side else None


def chunked_step(hidden, weight, target, chunk_rows, ahead, streams):
    """The gradients of the sum of losses. `ahead`: the product of the next chunk runs beside the loss of this one."""
    rows, classes = hidden.shape[0], weight.shape[0]
    buffers = [hidden.new_empty(min(chunk_rows, rows), classes) for _ in range(2 if ahead else 1)]
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    chunks = [slice(i, min(i + chunk_rows, rows)) for i in range(0, rows, chunk_rows)]

    def logits_of(i):
        logits = buffers[i % len(buffers)][: chunks[i].stop - chunks[i].start]
        torch.mm(hidden[chunks[i]], weight.t(), out=logits)
        return logits

    def loss_of(i, logits):
        streams.side_after_main()
        with streams.on_side():
            _loss_and_gradient(logits, target[chunks[i]], None, -100, SUM, 0.0, 0.0, 0.0, False)
            return streams.mark()

    def gradients_of(i, logits):
        torch.mm(logits, weight, out=grad_hidden[chunks[i]])
        if i == 0:
            torch.mm(logits.t(), hidden[chunks[i]], out=grad_weight)
        else:
            grad_weight.addmm_(logits.t(), hidden[chunks[i]])

    logits = logits_of(0)
    for i in range(len(chunks)):
        event = loss_of(i, logits)
        following = logits_of(i + 1) if ahead and i + 1 < len(chunks) else None
        streams.main_after(event)
        gradients_of(i, logits)
        logits = following if ahead or i + 1 == len(chunks) else logits_of(i + 1)
    return grad_hidden, grad_weight


def op_gradients(hidden, weight, target, **options):
    leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
    return torch.autograd.grad(warpsmith.linear_cross_entropy(*leaves, target, reduction="sum", **options), leaves)


def check(found, wanted, name):
    for of, ours, theirs in zip(("hidden", "weight"), found, wanted, strict=True):
        wrong = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        bound = 1e-5 if ours.dtype == torch.float32 else 2e-2
        assert wrong <= bound, (
            f"{name}: gradient of {of}: {wrong:.1e} of its largest element, at most {bound:.1e} allowed"
        )


def captured(step):
    """A replay of the step, on a graph's memory."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def inputs_of(shape, device):
    rows, width, classes = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(classes, width, device=device) / width**0.5).to(dtype)
    return hidden, weight, torch.randint(0, classes, (rows,), device=device)


def schedules(shape, chunk_rows, device):
    """{name: step}, each checked against the op."""
    tensors = inputs_of(shape, device)
    wanted = op_gradients(*tensors)
    steps = {}
    for rows in chunk_rows:
        for ahead in (False, True):
            name = f"{rows} rows, " + ("two streams" if ahead else "one stream")
            steps[name] = lambda r=rows, a=ahead: chunked_step(*tensors, r, a, Streams(a and device == "cuda"))
            check(steps[name](), wanted, name)
            if ahead and device == "cuda":
                replay, results = captured(steps[name])
                replay()
                check(results, wanted, name + ", graph")
                steps[name + ", graph"] = replay
    return steps


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

    def step(fn, **options):
        y = fn(*leaves, target, **options)
        torch.autograd.grad(y[0].mean() if isinstance(y, tuple) else y.mean(), leaves)

    cross_entropy, log_prob = warpsmith.linear_cross_entropy, warpsmith.linear_log_prob
    steps = {
        "linear_cross_entropy": functools.partial(step, cross_entropy),
        "linear_cross_entropy, none": functools.partial(step, cross_entropy, reduction="none"),
        "linear_log_prob": functools.partial(step, log_prob),
        "linear_log_prob, saved logits": functools.partial(step, log_prob, save_logits=True),
        "torch, float32 loss": lambda: step(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t)),
    }
    for gib in (2, 4):
        for name, fn in (("linear_cross_entropy", cross_entropy), ("linear_log_prob", log_prob)):
            steps[f"{name}, chunks of {gib} GiB"] = functools.partial(step, fn, max_chunk_bytes=gib << 30)
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(32768, 768, 50304), metavar=("M", "H", "V"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    rows, width, classes = options.shape
    chunk_rows = [rows // n for n in (2, 4, 8)]
    parts = {
        "whole ops": lambda: whole_ops(options.shape, options.device),
        "schedules": lambda: schedules(options.shape, chunk_rows, options.device),
        "products": lambda: products(options.shape, [rows, *chunk_rows, min(rows, 512)], options.device),
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
