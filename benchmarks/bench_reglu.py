"""reglu: forward and backward, beside torch and torch.compile."""

import torch.nn.functional as F
import warpsmith

from benchmarks.gated import run_gated


def run(device, options):
    return run_gated("reglu", warpsmith.reglu, lambda gate, up: F.relu(gate) * up, {}, device, options)
