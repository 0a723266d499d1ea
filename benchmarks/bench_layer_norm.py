"""layer_norm: beside torch, torch.compile, Liger, QuACK, cuDNN's frontend and Apex where installed.

Floor: x read and y written once forward (2 elements for each of x); x and dy read and dx written once backward (3).
The weights, their gradients and the row statistics are not counted.
"""

import torch
import warpsmith

from benchmarks import norms

EPS = norms.LAYER_EPS
SHAPES = {
    "cuda": ((16384, 4096), (4096, 8192), (1024, 12288), (65536, 768)),
    "cpu": ((4096, 1024),),
}


def ours(x, weight, bias):
    return warpsmith.layer_norm(x, weight, bias, EPS)


def rivals():
    """Installed rivals, each a function of (x, weight, bias)."""
    found = {}
    try:
        from liger_kernel.transformers.functional import liger_layer_norm  # the Triton kernels

        found["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, EPS)
    except ImportError:
        pass
    try:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        class Quack(torch.autograd.Function):
            """QuACK's two kernels, which take weights in float32 alone."""

            @staticmethod
            def forward(ctx, x, w, b):
                w = w.float()
                y, rstd, mean = layernorm_fwd(x, w, b.float(), eps=EPS, return_rstd=True, return_mean=True)
                ctx.save_for_backward(x, w, rstd, mean)
                return y

            @staticmethod
            def backward(ctx, dy):
                x, w, rstd, mean = ctx.saved_tensors
                return layernorm_bwd(x, w, dy, rstd, mean, has_bias=True)

        found["quack"] = Quack.apply
    except ImportError:
        pass
    try:
        from cudnn.ops.norm import layer_norm

        found["cudnn"] = lambda x, w, b: layer_norm(x, tuple(w.shape), w, b, EPS)
    except ImportError:
        pass
    try:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        found["apex"] = lambda x, w, b: fused_layer_norm_affine(x, w, b, w.shape, EPS)
    except ImportError:
        pass
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
