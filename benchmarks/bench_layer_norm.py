"""layer_norm: beside torch, torch.compile, Liger, QuACK, cuDNN's frontend and Apex where installed.

Floor: x read and y written once forward (2 elements for each of x); x and dy read and dx written once backward (3).
The weights, their gradients and the row statistics are not counted.
"""

import torch
import warpsmith

from benchmarks import norms
from benchmarks.rivals import liger_cute, optional

EPS = norms.LAYER_EPS
SHAPES = {
    "cuda": ((16384, 4096), (4096, 8192), (1024, 12288), (65536, 768), (24576, 2560)),
    "cpu": ((4096, 1024),),
}


def ours(x, weight, bias):
    return warpsmith.layer_norm(x, weight, bias, EPS)


def rivals():
    """Installed rivals, each a function of (x, weight, bias)."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_layer_norm  # the Triton kernels

        found["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, EPS)
    with optional():
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        wide = {}

        class Quack(torch.autograd.Function):
            """QuACK's two kernels. They take weights in float32 alone, so it has its own, and the gradients of those
            are returned as the upper halves of float32, which are bfloat16: no cast is timed."""

            @staticmethod
            def forward(ctx, x, w, b):
                if wide.get("of") != w.data_ptr():
                    wide.update(of=w.data_ptr(), tensors=(w.detach().float(), b.detach().float()))
                w, b = wide["tensors"]
                y, rstd, mean = layernorm_fwd(x, w, b, eps=EPS, return_rstd=True, return_mean=True)
                ctx.save_for_backward(x, w, rstd, mean)
                return y

            @staticmethod
            def backward(ctx, dy):
                x, w, rstd, mean = ctx.saved_tensors
                dx, dw, db = layernorm_bwd(x, w, dy, rstd, mean, has_bias=True)
                return dx, dw.view(torch.bfloat16)[1::2], db.view(torch.bfloat16)[1::2]

        found["quack"] = Quack.apply
    found.update(liger_cute("layer_norm", EPS))
    with optional():
        from cudnn.ops.norm import layer_norm

        found["cudnn"] = lambda x, w, b: layer_norm(x, tuple(w.shape), w, b, EPS)
    with optional():
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        found["apex"] = lambda x, w, b: fused_layer_norm_affine(x, w, b, w.shape, EPS)
    return found


def run(device, options):
    return norms.run(
        "layer_norm",
        device,
        options,
        shapes=SHAPES,
        names=("x", "weight", "bias"),
        ours=ours,
        eager=norms.layer_norm,
        rivals=rivals,
        elements=(2, 3),
    )
