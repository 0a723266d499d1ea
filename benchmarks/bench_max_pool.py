"""max_pool2d in NHWC, forward and backward, beside torch and torch.compile: that of a ResNet, and windows of 2 x 2.

Floors: x read, y and its places (a byte each) written; dy and the places read, dx written.
"""

import torch.nn.functional as F
import warpsmith

from benchmarks.cells import leaves, time_cells, torch_contenders

# N, H, W, C, and size, stride and padding of the windows.
GPU_SHAPES = ((256, 112, 112, 64, 3, 2, 1), (256, 56, 56, 128, 2, 2, 0))
CPU_SHAPES, TINY = ((8, 112, 112, 64, 3, 2, 1), (8, 56, 56, 128, 2, 2, 0)), (2, 8, 8, 16, 3, 2, 1)


def run(device, options):
    def cell(shape):
        *pixels, size, stride, padding = shape
        (x,) = (t.detach().movedim(-1, 1).requires_grad_() for t in leaves(device, pixels))

        def ours(x):
            return warpsmith.max_pool2d(x, size, stride, padding)

        def eager(x):
            return F.max_pool2d(x, size, stride, padding)

        y = eager(x).numel() / x.numel()
        moved = 1 + y + y / x.element_size()
        return torch_contenders(ours, eager, options), (x,), {"forward": moved, "backward": moved}

    return time_cells("max_pool2d", cell, options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY), options)


OPS = {"max_pool2d": run}
