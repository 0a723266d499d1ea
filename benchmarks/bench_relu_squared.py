"""relu_squared forward and backward, beside torch and torch.compile.

Floor: x read and y written forward (2 elements for each of x); dy and x read, dx written backward (3).
"""

import torch
import warpsmith
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders

GPU_SHAPES = ((16384, 4096), (65536, 768))
CPU_SHAPES = ((2048, 4096),)


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = ((64, 128),) if options.quick else GPU_SHAPES if device == "cuda" else CPU_SHAPES
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            x = torch.randn(shape, device=device).to(dtype).requires_grad_()
            unit = x.numel() * x.element_size()
            floor = {"forward": 2 * unit, "backward": 3 * unit}
            contenders = torch_contenders(warpsmith.relu_squared, lambda x: torch.relu(x).square(), options)
            rows += time_forward_backward("relu_squared", contenders, (x,), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
