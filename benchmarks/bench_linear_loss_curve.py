"""linear_cross_entropy's time over its memory, one point for each number of chunks and dtype of the weight's gradient.

python benchmarks/bench_linear_loss_curve.py                              4096 x 4096 x 128256, on the GPU
python benchmarks/bench_linear_loss_curve.py --shape 32768 768 50304 --plot curve.png

The first is also the benchmark `linear_loss_curve`, whose rows `docs/speed_table.py` plots. Its rows "peak memory" have
megabytes above the inputs in place of a time.
"""

import argparse
import functools
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import warpsmith
from warpsmith.testing import GpuTimer, Row

from benchmarks.bench_linear_loss import SPIN_CYCLES, peak_mb, step_of

CHUNKS = (1, 2, 4, 8, 16)
OP = "linear_cross_entropy by chunks"
SHAPE, TINY = (4096, 4096, 128256), (64, 32, 256)
BUDGET_S = 3.0


def points(shape, rounds, budget_s):
    """(dtype of the gradient, chunks, milliseconds, megabytes) of each configuration."""
    rows, width, classes = shape
    hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(classes, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    steps = {}
    for dtype in (torch.bfloat16, torch.float32):
        for chunks in CHUNKS:
            options = {"max_chunk_bytes": -(-rows // chunks) * classes * 2, "dw_dtype": dtype}
            fn = functools.partial(warpsmith.linear_cross_entropy, **options)
            steps[str(dtype).removeprefix("torch."), chunks] = step_of(fn, hidden, weight, target)
    times = GpuTimer(rounds=rounds, budget_s=budget_s, spin_cycles=SPIN_CYCLES).time(steps)
    return [(*key, times[key].ms, peak_mb(step, (hidden, weight))) for key, step in steps.items()]


def run(device, options):
    rows = []
    for shape in options.shapes(device, (SHAPE,), (), TINY) if device == "cuda" else ():
        text = "x".join(map(str, shape))
        for dtype, chunks, ms, megabytes in points(shape, options.samples, BUDGET_S):
            for direction, value, unit in (("forward + backward", ms, "ms"), ("peak memory", megabytes, "MB")):
                rows.append(Row(OP, text, "bfloat16", direction, f"{dtype}, {chunks}", value, unit))
    return rows


def plot(found, shape, path, rivals=(), where=""):
    """found: the tuples of points(). rivals: (name, milliseconds, megabytes). where: the GPU, for the title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    for dtype in dict.fromkeys(p[0] for p in found):
        line = [p for p in found if p[0] == dtype]
        label = f"Warpsmith, weight gradient in {dtype}; figures: chunks"
        axes.plot([p[3] / 1e3 for p in line], [p[2] for p in line], marker="o", markersize=5, label=label)
        upright = max(p[3] for p in line) < 1.01 * min(p[3] for p in line)  # the points lie above each other
        for _, chunks, ms, megabytes in line:
            offset, side = ((6, -3), "left") if upright else ((3, 5), "left")
            below = upright and chunks == min(p[1] for p in line)
            at = (6, -9) if below else offset
            axes.annotate(
                str(chunks), (megabytes / 1e3, ms), textcoords="offset points", xytext=at, ha=side, fontsize=9
            )
    for (name, ms, megabytes), marker in zip(rivals, "sD^vPX", strict=False):
        at = megabytes / 1e3, ms
        axes.plot(*at, linestyle="", marker=marker, color="#5f6368", markerfacecolor="none", markersize=9)
        axes.annotate(name, at, textcoords="offset points", xytext=(0, -19), ha="center", color="#5f6368", fontsize=9)
    axes.set(xlabel="memory above the inputs, GB", ylabel="forward and backward, ms")
    axes.set_xlim(left=0, right=1.12 * max([p[3] for p in found] + [r[2] for r in rivals]) / 1e3)
    axes.set_ylim(bottom=0, top=1.3 * max([p[2] for p in found] + [r[1] for r in rivals]))
    title = f"linear_cross_entropy, {' x '.join(map(str, shape))} (tokens x width x classes), bf16"
    axes.set_title(title + (f"\n{where}" if where else ""), fontsize=10)
    axes.legend(loc="upper right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=SHAPE, metavar=("M", "H", "V"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=5.0, help="of measured work")
    parser.add_argument("--plot", help="write a picture (needs matplotlib)")
    options = parser.parse_args()
    rows, width, classes = options.shape
    found = points(options.shape, options.rounds, options.budget_s)
    flops = 6 * rows * width * classes
    print("weight gradient  chunks       ms  TFLOP/s       MB")
    for dtype, chunks, ms, megabytes in found:
        print(f"{dtype:15s}  {chunks:6d}  {ms:7.2f}  {flops / ms / 1e9:7.0f}  {megabytes:7.0f}")
    if options.plot:
        plot(found, options.shape, options.plot)


if __name__ == "__main__":
    main()
