"""On the CPU the gradients of parameters, sums over a million rows, are as right as PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing.law import measure

ROWS, COLUMNS = 1_000_000, 8

OPS = {
    "rms_norm": (lambda x, p: warpsmith.rms_norm(x, p, 1e-6), lambda x, p: F.rms_norm(x, (COLUMNS,), p, 1e-6)),
    "bias_silu": (warpsmith.bias_silu, lambda x, p: F.silu(x + p)),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_the_gradient_of_a_parameter(op, seed):
    ours, pytorch = OPS[op]
    generator = torch.Generator().manual_seed(seed)
    x, parameter, dy = (torch.randn(*s, generator=generator) for s in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS)))

    def gradient(function, dtype):
        leaf = parameter.to(dtype).requires_grad_()
        return torch.autograd.grad(function(x.to(dtype), leaf), leaf, dy.to(dtype))[0]

    error = measure(
        f"d{op}", gradient(ours, x.dtype), gradient(pytorch, torch.float64), gradient(pytorch, torch.float32)
    )
    assert error.ok, str(error)
