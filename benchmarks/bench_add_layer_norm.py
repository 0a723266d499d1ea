"""add_layer_norm: forward and backward, beside torch, torch.compile, flash-attn's Triton kernel where installed.

Floor: x and residual read, y and residual_out written once forward (4 elements for each of x); residual_out and both
incoming gradients read and one gradient for both summands written once backward (4). The weights, their gradients and
the row statistics are not counted.
"""

import warpsmith

from benchmarks import norms

SHAPES = {
    "cuda": ((16384, 4096), (4096, 8192), (1024, 12288), (65536, 768)),
    "cpu": ((4096, 1024),),
}


def ours(x, residual, weight, bias):
    return warpsmith.add_layer_norm(x, residual, weight, bias, norms.LAYER_EPS)


def eager(x, residual, weight, bias):
    s = residual + x
    return norms.layer_norm(s, weight, bias), s


def rivals():
    """Installed rivals, each a function of (x, residual, weight, bias)."""
    return norms.flash_attn_norm(0.0, rms=False)


def run(device, options):
    return norms.run(
        "add_layer_norm",
        device,
        options,
        shapes=SHAPES,
        names=("x", "residual", "weight", "bias"),
        ours=ours,
        eager=eager,
        rivals=rivals,
        elements=(4, 4),
    )
