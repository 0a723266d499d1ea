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


def peak_bytes(step, leaves):
    """What a step takes on the GPU above what it finds, its gradients included. It runs once before: each thread that
    calls cuBLAS for the first time leaves a workspace of 32 MiB behind, which is torch's."""
    from benchmarks.bench_linear_cross_entropy import peak_mb

    step()
    return round(peak_mb(step, leaves) * 1e6)
