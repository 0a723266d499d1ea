"""rms_norm: forward and backward, beside torch, torch.compile, Liger, QuACK, cuDNN's frontend and Apex where installed.

Floor: x read and y written once forward (2 elements for each of x); x and dy read and dx written once backward (3). The
weight, its gradient and the row statistics are not counted.
"""

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders
from benchmarks.rivals import liger_cute, optional

EPS = 1e-6
GPU_SHAPES = ((16384, 4096), (4096, 8192), (1024, 12288), (65536, 768), (131072, 128), (24576, 2560))
CPU_SHAPES = ((4096, 1024),)


def rivals():
    """Installed rivals, each a function of (x, weight)."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_rms_norm  # the Triton kernels

        found["liger"] = lambda x, w: liger_rms_norm(x, w, EPS)
    found.update(liger_cute("rms_norm", EPS))
    with optional():
        from quack.rmsnorm import rmsnorm

        found["quack"] = lambda x, w: rmsnorm(x, w, eps=EPS)
    with optional():
        from cudnn.ops.norm import rms_norm

        found["cudnn"] = lambda x, w: rms_norm(x, w, None, EPS)
    with optional():
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        found["apex"] = lambda x, w: fused_rms_norm_affine(x, w, w.shape, EPS)
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
            w = torch.randn(shape[-1], device=device).to(dtype).requires_grad_()
            contenders = torch_contenders(
                lambda x, w: warpsmith.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, w.shape, w, EPS), options
            )
            if device == "cuda":
                contenders.update(rivals())
            unit = x.numel() * x.element_size()
            floor = {"forward": 2 * unit, "backward": 3 * unit}
            rows += time_forward_backward("rms_norm", contenders, (x, w), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
