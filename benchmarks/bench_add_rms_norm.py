"""add_rms_norm: beside torch, torch.compile, Liger, QuACK and flash-attn's Triton kernel where installed.

Floor: x and residual read, y and residual_out written once forward (4 elements for each of x); residual_out and both
incoming gradients read and one gradient for both summands written once backward (4). The weights, their gradients and
the row statistics are not counted.
"""

import warpsmith

from benchmarks import norms
from benchmarks.rivals import liger_cute, optional

SHAPES = {
    "cuda": ((16384, 4096), (4096, 8192), (1024, 12288), (65536, 768), (24576, 2560)),
    "cpu": ((4096, 1024),),
}


def ours(x, residual, weight):
    return warpsmith.add_rms_norm(x, residual, weight, norms.RMS_EPS)


def eager(x, residual, weight):
    s = residual + x
    return norms.rms_norm(s, weight), s


def rivals():
    """Installed rivals, each a function of (x, residual, weight)."""
    found = norms.flash_attn_norm(0.0, rms=True)
    with optional():
        from liger_kernel.transformers.functional import liger_fused_add_rms_norm

        found["liger"] = lambda x, r, w: liger_fused_add_rms_norm(x, r, w, norms.RMS_EPS)
    found.update(liger_cute("fused_add_rms_norm", norms.RMS_EPS))
    with optional():
        from quack.rmsnorm import rmsnorm

        found["quack"] = lambda x, r, w: rmsnorm(x, w, residual=r, eps=norms.RMS_EPS, prenorm=True)
    return found


def run(device, options):
    return norms.run(
        "add_rms_norm",
        device,
        options,
        shapes=SHAPES,
        names=("x", "residual", "weight"),
        ours=ours,
        eager=eager,
        rivals=rivals,
        elements=(4, 4),
    )
