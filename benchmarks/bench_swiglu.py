"""swiglu: forward and backward, beside torch, torch.compile and Liger where it is installed."""

import torch.nn.functional as F
import warpsmith

from benchmarks.gated import liger, run_gated


def run(device, options):
    rivals = liger("swiglu") if device == "cuda" else {}
    return run_gated("swiglu", warpsmith.swiglu, lambda gate, up: F.silu(gate) * up, rivals, device, options)
