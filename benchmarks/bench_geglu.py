"""geglu, exact and by tanh: forward and backward, beside torch, torch.compile and Liger (tanh)."""

import functools

import torch.nn.functional as F
import warpsmith

from benchmarks.gated import liger, run_gated


def run(device, options):
    rows = []
    for approximate in ("none", "tanh"):
        ours = functools.partial(warpsmith.geglu, approximate=approximate)
        gelu = functools.partial(F.gelu, approximate=approximate)
        rivals = liger("geglu") if approximate == "tanh" and device == "cuda" else {}
        name = "geglu" if approximate == "none" else "geglu tanh"
        rows += run_gated(name, ours, lambda gate, up, gelu=gelu: gelu(gate) * up, rivals, device, options)
    return rows
