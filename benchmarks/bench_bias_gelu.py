"""bias_gelu by tanh, forward and backward, beside torch and torch.compile."""

import torch.nn.functional as F
import warpsmith

from benchmarks.biased import run_biased


def run(device, options):
    def eager(x, bias):
        return F.gelu(x + bias, approximate="tanh")

    return run_biased("bias_gelu", warpsmith.bias_gelu, eager, device, options)
