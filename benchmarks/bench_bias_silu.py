"""bias_silu forward and backward, beside torch and torch.compile."""

import torch.nn.functional as F
import warpsmith

from benchmarks.biased import run_biased


def run(device, options):
    return run_biased("bias_silu", warpsmith.bias_silu, lambda x, bias: F.silu(x + bias), device, options)
