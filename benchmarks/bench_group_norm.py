"""group_norm in NHWC with SiLU, forward and backward, beside torch and torch.compile.

Floors, in elements for each of x: forward 2 (x read, y written), backward 3 (dy and x read, dx written); the second
reads come from the L2 cache where they fit. Parameters and statistics are not counted.
"""

import torch
import torch.nn.functional as F
import warpsmith

from benchmarks.cells import leaves, time_cells, torch_contenders

GROUPS = 32
# N, H, W, C.
GPU_SHAPES = ((16, 64, 64, 320), (16, 32, 32, 640), (16, 16, 16, 1280), (1, 256, 256, 128))
CPU_SHAPES, TINY = ((2, 32, 32, 320),), (2, 4, 4, 64)


def run(device, options):
    def cell(shape):
        (x,) = leaves(device, shape)
        x = x.detach().movedim(-1, 1).requires_grad_()
        weight, bias = (torch.randn(shape[-1], device=device, dtype=x.dtype, requires_grad=True) for _ in range(2))

        def ours(x, weight, bias):
            return warpsmith.group_norm(x, GROUPS, weight, bias, activation="silu")

        def eager(x, weight, bias):
            return F.silu(F.group_norm(x, GROUPS, weight, bias))

        return torch_contenders(ours, eager, options), (x, weight, bias), {"forward": 2, "backward": 3}

    return time_cells("group_norm", cell, options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY), options)
