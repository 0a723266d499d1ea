"""dropout_add_rms_norm: beside torch, torch.compile, flash-attn's Triton kernel where installed.

Floor: x and residual read, y and residual_out written once forward (4 elements for each of x); residual_out and both
incoming gradients read and the gradients of x and of the residual written once backward (5). The weights, their
gradients, the row statistics and the seed are not counted.
"""

import torch.nn.functional as F
import warpsmith

from benchmarks import norms

SHAPES = {
    "cuda": ((16384, 4096), (4096, 8192)),
    "cpu": ((4096, 1024),),
}
P = 0.1


def ours(x, residual, weight):
    return warpsmith.dropout_add_rms_norm(x, residual, weight, P, norms.RMS_EPS)


def eager(x, residual, weight):
    s = residual + F.dropout(x, P)
    return norms.rms_norm(s, weight), s


def rivals():
    """Installed rivals, each a function of (x, residual, weight)."""
    return norms.flash_attn_norm(P, rms=True)


def run(device, options):
    return norms.run(
        "dropout_add_rms_norm",
        device,
        options,
        shapes=SHAPES,
        names=("x", "residual", "weight"),
        ours=ours,
        eager=eager,
        rivals=rivals,
        elements=(4, 5),
    )
