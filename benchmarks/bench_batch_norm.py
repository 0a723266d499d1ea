"""batch_norm in NHWC and training, forward and backward, beside torch and torch.compile.

With a residual and ReLU behind it, and with ReLU alone. Floors, in elements for each of x: forward 3 (x read for the
statistics and to be normalised, y written), 4 with a residual; backward 5 (x and dy read twice, dx written), 6 with a
residual, whose gradient is written too. Parameters, statistics and ReLU's mask are not counted.
"""

import torch
import torch.nn.functional as F
import warpsmith

from benchmarks.cells import leaves, time_cells, torch_contenders

# N, H, W, C, and whether a residual is added.
GPU_SHAPES = ((256, 56, 56, 256, True), (256, 112, 112, 64, False), (256, 14, 14, 1024, True), (256, 7, 7, 512, False))
CPU_SHAPES, TINY = ((8, 28, 28, 128, True), (8, 28, 28, 128, False)), (2, 4, 4, 16, True)


def run(device, options):
    def cell(shape):
        *pixels, channels, added = shape
        tensors = leaves(device, *((*pixels, channels),) * (2 if added else 1))
        x, *residual = (t.detach().movedim(-1, 1).requires_grad_() for t in tensors)
        weight, bias = (torch.randn(channels, device=device, requires_grad=True) for _ in range(2))
        running = torch.zeros(channels, device=device), torch.ones(channels, device=device)

        def ours(x, weight, bias, residual=None):
            statistics = *running, weight, bias, True
            return warpsmith.batch_norm(x, *statistics, residual=residual, activation="relu")

        def eager(x, weight, bias, residual=None):
            # torch keeps the statistics for its backward, and refuses that after another update.
            y = F.batch_norm(x, *(t.clone() for t in running), weight, bias, True)
            return F.relu(y if residual is None else y + residual)

        floor = {"forward": 3 + added, "backward": 5 + added}
        return torch_contenders(ours, eager, options), (x, weight, bias, *residual), floor

    return time_cells("batch_norm", cell, options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY), options)
