"""softmax and log_softmax, forward and backward, beside torch and torch.compile.

Floors, in elements for each of x: forward 2 (x read, y written), backward 3 (dy and y read, dx written).
"""

import functools

import torch
import warpsmith

from benchmarks.cells import time_shapes
from tools.families import rows

GPU_SHAPES, CPU_SHAPES, TINY = ((16384, 8192), (8192, 131072), (65536, 1024)), ((4096, 1024),), (4, 64)


def run(op, device, options):
    ours, eager = getattr(warpsmith, op), functools.partial(getattr(torch, op), dim=-1)
    floor = {"forward": 2, "backward": 3}
    shapes = GPU_SHAPES, CPU_SHAPES, TINY
    return time_shapes(op, ours, eager, dict, lambda shape: (shape,), floor, shapes, device, options)


OPS = {row.name: functools.partial(run, row.name) for row in rows("SOFTMAX")}
