"""On the CPU the number of threads changes no bit: the ops whose sums run over rows that threads share."""

from __future__ import annotations

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal, cpu_threads

ROWS, COLUMNS, TOKENS, HEADS, DIM = 700, 96, 300, 3, 64
TARGET = torch.arange(ROWS) % COLUMNS


def angles():
    positions = torch.outer(torch.arange(TOKENS), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    return positions.cos(), positions.sin()


def cross_entropy(x, weight):
    options = {"class_weight": weight.detach().abs(), "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0}
    loss, stats = warpsmith.cross_entropy(x, TARGET, return_stats=True, **options)
    return loss, stats.lse, stats.accuracy


def qk_norm_rope(q, k, q_weight, k_weight):
    return warpsmith.qk_norm_rope(q, k, q_weight, k_weight, *angles())


X, W, Q, D = (ROWS, COLUMNS), (COLUMNS,), (2, TOKENS, HEADS, DIM), (DIM,)
CASES = {
    "add_layer_norm": (warpsmith.add_layer_norm, X, X, W, W),
    "add_rms_norm": (warpsmith.add_rms_norm, X, X, W),
    "dropout_add_layer_norm": (lambda *a: warpsmith.dropout_add_layer_norm(*a, 0.3), X, X, W, W),
    "bias_gelu": (warpsmith.bias_gelu, (4096, 50), (50,)),
    "bias_silu": (warpsmith.bias_silu, (4096, 50), (50,)),
    "dropout_add": (lambda *a: warpsmith.dropout_add(*a, 0.3), X, X),
    "cross_entropy": (cross_entropy, X, W),
    "qk_norm_rope": (qk_norm_rope, Q, Q, D, D),
}


def results(function, tensors):
    torch.manual_seed(5)  # of the dropout
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((i + 1) * o.square().sum() for i, o in enumerate(outputs) if o.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [t.detach() for t in (*outputs, *grads) if t is not None]


@pytest.mark.parametrize("op", CASES)
def test_results_do_not_depend_on_the_number_of_threads(op):
    function, *shapes = CASES[op]
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    with cpu_threads(1):
        one = results(function, tensors)
    with cpu_threads(2):
        two = results(function, tensors)
    assert len(one) > 1
    assert all(bitwise_equal(a, b) for a, b in zip(one, two, strict=True))
