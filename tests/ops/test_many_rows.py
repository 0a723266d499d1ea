"""Gradients of weights and biases on the CPU, which are sums over all rows, obey the error law for many of them too."""

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.reference.norm import rms_norm as rms_norm_reference
from warpsmith.reference.rope import qk_norm_rope as qk_norm_rope_reference
from warpsmith.testing import measure


def layer_norm_definition(x, weight):
    return F.layer_norm(x, x.shape[1:]) * weight + weight  # of both gradients the sum


def rotated(function, of_k=False):
    """Without heads of k, or of q."""

    def call(x, weight):
        rows, columns = x.shape
        angles = torch.outer(torch.arange(rows), torch.arange(1, columns // 2 + 1) / 100).to(x.dtype)
        heads, weights = [x[:, None], x[:, None][:, :0]], [weight, weight.detach()]
        order = slice(None, None, -1 if of_k else 1)
        return function(*heads[order], *weights[order], angles.cos(), angles.sin(), eps=1e-5)[of_k][:, 0]

    return call


OPS = {
    "rms_norm": (lambda x, w: warpsmith.rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5)),
    "add_rms_norm": (
        lambda x, w: warpsmith.add_rms_norm(x, torch.zeros_like(x), w, 1e-5)[0],
        lambda x, w: rms_norm_reference(x, w, 1e-5),
    ),
    "add_layer_norm": (
        lambda x, w: warpsmith.add_layer_norm(x, torch.zeros_like(x), w, w, 1e-5)[0],
        layer_norm_definition,
    ),
    "qk_norm_rope": (rotated(warpsmith.qk_norm_rope), rotated(qk_norm_rope_reference)),
    "qk_norm_rope, k": (rotated(warpsmith.qk_norm_rope, True), rotated(qk_norm_rope_reference, True)),
    "bias_gelu": (warpsmith.bias_gelu, lambda x, bias: F.gelu(x + bias)),
    "bias_silu": (warpsmith.bias_silu, lambda x, bias: F.silu(x + bias)),
}


@pytest.mark.parametrize(
    ("op", "rows", "columns", "seed"),
    [
        *((op, 65536, 64, 0) for op in OPS),
        *((op, 1_000_000, 8, seed) for op in ("rms_norm", "bias_silu") for seed in (1, 2)),
    ],
)
def test_the_gradient_of_a_parameter(op, rows, columns, seed):
    g = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(*shape, generator=g) for shape in ((rows, columns), (columns,), (rows, columns)))

    def gradient(function, dtype):
        leaf = weight.to(dtype).requires_grad_()
        return torch.autograd.grad(function(x.to(dtype), leaf), leaf, dy.to(dtype))[0]

    ours, plain = OPS[op]
    error = measure(
        "grad_weight",
        gradient(ours, torch.float32),
        gradient(plain, torch.float64),
        gradient(plain, torch.float32),
    )
    assert error.ok, error
