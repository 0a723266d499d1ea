"""dropout_add forward and backward, beside torch and torch.compile.

Floor: x and residual read, y written forward (3 elements for each of x); dy read, dx written backward (2). torch also
writes and reads a mask of one byte an element.
"""

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders

P = 0.1
GPU_SHAPES = ((16384, 4096), (65536, 768))
CPU_SHAPES = ((2048, 4096),)


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (64, 128))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            x, residual = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
            unit = x.numel() * x.element_size()
            floor = {"forward": 3 * unit, "backward": 2 * unit}
            contenders = torch_contenders(
                lambda x, residual: warpsmith.dropout_add(x, residual, P),
                lambda x, residual: F.dropout(x, P) + residual,
                options,
            )
            rows += time_forward_backward("dropout_add", contenders, (x, residual), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
