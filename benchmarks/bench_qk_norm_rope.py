"""qk_norm_rope: forward and backward, beside rms_norm and rope one after the other, torch and torch.compile.

Floor: q and k read and written once forward (2 elements for each of theirs); they and their incoming gradients read and
their gradients written once backward (3). Weights, their gradients, cos and sin are not counted.
"""

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import time_forward_backward

from benchmarks.bench_rope import eager as eager_rope
from benchmarks.cells import CPU_THREADS, torch_contenders

EPS = 1e-6
# batch, tokens, heads of q and k, head dimension
GPU_SHAPES = ((4, 4096, 32, 8, 128), (1, 8192, 64, 8, 128), (8, 2048, 16, 16, 64))
CPU_SHAPES = ((1, 1024, 16, 4, 64),)


def ours(cos, sin):
    return lambda q, k, q_weight, k_weight: warpsmith.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=EPS)


def unfused(cos, sin):
    """Our own two ops."""

    def call(q, k, q_weight, k_weight):
        return warpsmith.rope(warpsmith.rms_norm(q, q_weight, EPS), warpsmith.rms_norm(k, k_weight, EPS), cos, sin)

    return call


def eager(cos, sin):
    rotate = eager_rope(cos, sin)

    def call(q, k, q_weight, k_weight):
        return rotate(F.rms_norm(q, q_weight.shape, q_weight, EPS), F.rms_norm(k, k_weight.shape, k_weight, EPS))

    return call


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (1, 16, 4, 2, 32))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for batch, tokens, q_heads, k_heads, dim in shapes:
            inputs = [
                torch.randn(shape, device=device).to(dtype).requires_grad_()
                for shape in ((batch, tokens, q_heads, dim), (batch, tokens, k_heads, dim), (dim,), (dim,))
            ]
            angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, dim, 2) / dim)).to(device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            contenders = torch_contenders(ours(cos, sin), eager(cos, sin), options)
            contenders["rms_norm, rope"] = unfused(cos, sin)
            moved = (inputs[0].numel() + inputs[1].numel()) * inputs[0].element_size()
            floor = {"forward": 2 * moved, "backward": 3 * moved}
            rows += time_forward_backward("qk_norm_rope", contenders, inputs, floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
