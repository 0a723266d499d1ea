"""relu_squared forward and backward, beside torch and torch.compile.

Floor: x read and y written forward (2 elements for each of x); dy and x read, dx written backward (3).
"""

import torch
import warpsmith
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders
from benchmarks.rivals import optional

GPU_SHAPES = ((16384, 4096), (65536, 768))
CPU_SHAPES = ((2048, 4096),)


def rivals():
    """Installed rivals, each a function of x."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_relu_squared

        found["liger"] = liger_relu_squared
    return found


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (64, 128))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            x = torch.randn(shape, device=device).to(dtype).requires_grad_()
            unit = x.numel() * x.element_size()
            floor = {"forward": 2 * unit, "backward": 3 * unit}
            contenders = torch_contenders(warpsmith.relu_squared, lambda x: torch.relu(x).square(), options)
            if device == "cuda":
                contenders.update(rivals())
            rows += time_forward_backward("relu_squared", contenders, (x,), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
