"""A small problem of linear_cross_entropy, its gradients, and on what its tests run."""

from __future__ import annotations

import pytest
import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
IGNORED = -100
ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
SMALL_CHUNK = 16 * 64  # bytes: a few rows of logits


def problem(dtype=FP32, rows=50, width=16, classes=33, device="cpu"):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=g).to(device, dtype)
    weight = torch.randn(classes, width, generator=g).to(device, dtype)
    target = torch.randint(0, classes, (rows,), generator=g).to(device)
    target[::5] = IGNORED
    return hidden, weight, target


def gradients(fn, hidden, weight, *args, up=1.0, **options):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    return torch.autograd.grad((fn(*leaves, *args, **options) * up).sum(), leaves)
