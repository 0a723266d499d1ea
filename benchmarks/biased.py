"""What the benchmarks of the biased activations share.

Floor: x read and y written forward (2 elements for each of x); dy and x read, dx written backward (3). The bias, its
gradient and the partial sums are not counted.
"""

import torch
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders

GPU_SHAPES = ((16384, 4096), (65536, 768), (4096, 8192), (1024, 12288))
CPU_SHAPES = ((2048, 4096),)


def run_biased(name, ours, eager, device, options):
    """Rows of one biased activation: functions of (x, bias)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (64, 128))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            x = torch.randn(shape, device=device).to(dtype).requires_grad_()
            bias = torch.randn(shape[-1], device=device).to(dtype).requires_grad_()
            unit = x.numel() * x.element_size()
            floor = {"forward": 2 * unit, "backward": 3 * unit}
            contenders = torch_contenders(ours, eager, options)
            rows += time_forward_backward(name, contenders, (x, bias), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
