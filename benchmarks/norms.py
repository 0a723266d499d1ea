"""What the benchmarks of the norm family share: the loop over shapes, and rivals in one form."""

import torch
import torch.nn.functional as F
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders
from benchmarks.rivals import optional

LAYER_EPS, RMS_EPS = 1e-5, 1e-6


def inputs(shape, device, names):
    """x, residual, weight, bias: those named, as leaves in the dtype of the device's figures."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = {"x": shape, "residual": shape, "weight": shape[-1:], "bias": shape[-1:]}
    return tuple(torch.randn(shapes[n], device=device).to(dtype).requires_grad_() for n in names)


def run(op, device, options, *, shapes, names, ours, eager, rivals, elements):
    """Rows of one op. ``elements``: (forward, backward) elements moved for each of x."""
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in options.shapes(device, shapes["cuda"], shapes["cpu"], (64, 128)):
            tensors = inputs(shape, device, names)
            contenders = torch_contenders(ours, eager, options)
            if device == "cuda":
                contenders.update(rivals())
            unit = tensors[0].numel() * tensors[0].element_size()
            floor = {"forward": elements[0] * unit, "backward": elements[1] * unit}
            rows += time_forward_backward(op, contenders, tensors, floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows


def layer_norm(s, weight, bias):
    return F.layer_norm(s, weight.shape, weight, bias, LAYER_EPS)


def rms_norm(s, weight):
    return F.rms_norm(s, weight.shape, weight, RMS_EPS)


def flash_attn_norm(dropout, rms):
    """The Triton norm with residual and dropout of flash-attn, where it is installed: {name: function}."""
    found = {}
    with optional():
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        def call(x, residual, weight, bias=None):
            eps = RMS_EPS if rms else LAYER_EPS
            return layer_norm_fn(
                x, weight, bias, residual=residual, eps=eps, dropout_p=dropout, prenorm=True, is_rms_norm=rms
            )

        found["flash-attn"] = call
    return found
