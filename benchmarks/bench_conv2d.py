"""conv2d in NHWC without gradients, with bias and ReLU behind it, and a residual, beside torch and torch.compile.

ResNet's shapes. "warpsmith, deterministic": where cuDNN must be, and its one kernel of all is not asked. No floor: the
convolution is torch's, and most of the time.
"""

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing.rows import OURS

from benchmarks.cells import cell_of, leaves, timed, torch_contenders

# N, H, W, C, filters, kernel, and whether a residual is added.
GPU_SHAPES = (
    (256, 56, 56, 64, 64, 3, False),
    (256, 56, 56, 64, 256, 1, True),
    (256, 14, 14, 256, 256, 3, False),
    (256, 14, 14, 256, 1024, 1, True),
)
CPU_SHAPES, TINY = ((8, 28, 28, 64, 64, 3, True),), (2, 4, 4, 16, 16, 3, True)


def without_gradients(function, **flags):
    def call():
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True, **flags):
            return function()

    return call


def run(device, options):
    rows = []
    for shape in options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY):
        n, h, w, channels, filters, kernel, added = shape
        shapes = (n, h, w, channels), (filters, kernel, kernel, channels), (n, h, w, filters)
        x, weight, residual = (t.detach().movedim(-1, 1) for t in leaves(device, *shapes))
        weight, bias = weight / (channels * kernel**2) ** 0.5, leaves(device, (filters,))[0].detach()
        given = x, weight, bias, 1, kernel // 2

        def ours(given=given, r=residual if added else None):
            return warpsmith.conv2d(*given, activation="relu", residual=r)

        def eager(given=given, r=residual if added else None):
            y = F.conv2d(*given)
            return F.relu(y if r is None else y + r)

        calls = {name: without_gradients(f) for name, f in torch_contenders(ours, eager, options).items()}
        if options.samples and device == "cuda":
            calls[f"{OURS}, deterministic"] = without_gradients(ours, deterministic=True)
        rows += timed(cell_of("conv2d", shape, x, "forward"), calls, device, options)
    return rows
