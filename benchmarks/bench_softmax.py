"""softmax and log_softmax, forward and backward, beside torch and torch.compile.

Floors, in elements for each of x: forward 2 (x read, y written), backward 3 (dy and y read, dx written).
"""

import functools

import torch
import warpsmith

from benchmarks.cells import leaves, time_cells, torch_contenders
from tools.families import rows

GPU_SHAPES, CPU_SHAPES, TINY = ((16384, 8192), (8192, 131072), (65536, 1024)), ((4096, 1024),), (4, 64)


def run(op, device, options):
    def cell(shape):
        (x,) = leaves(device, shape)
        eager = functools.partial(getattr(torch, op), dim=-1)
        return torch_contenders(getattr(warpsmith, op), eager, options), (x,), {"forward": 2, "backward": 3}

    return time_cells(op, cell, options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY), options)


OPS = {row.name: functools.partial(run, row.name) for row in rows("SOFTMAX")}
