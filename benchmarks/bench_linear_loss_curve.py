"""linear_cross_entropy's time and memory by number of chunks and dtype of the weight's gradient, on the GPU alone.

Rows "peak memory" have megabytes above the inputs in place of a time.
"""

from warpsmith.testing import Row

from benchmarks.linear_loss_curve import points

OP = "linear_cross_entropy by chunks"
SHAPE, TINY = (4096, 4096, 128256), (64, 32, 256)
BUDGET_S = 3.0


def run(device, options):
    rows = []
    for shape in options.shapes(device, (SHAPE,), (), TINY) if device == "cuda" else ():
        text = "x".join(map(str, shape))
        for dtype, chunks, ms, megabytes in points(shape, options.samples, BUDGET_S):
            for direction, value, unit in (("forward + backward", ms, "ms"), ("peak memory", megabytes, "MB")):
                rows.append(Row(OP, text, "bfloat16", direction, f"{dtype}, {chunks}", value, unit))
    return rows
