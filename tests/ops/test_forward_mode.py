"""Forward-mode derivatives: jvp, jacfwd and dual tensors of norms, activations and rope; the others refuse them."""

import pytest
import torch
import warpsmith
from torch.autograd import forward_ad

from tests.ops.row_ops import row_ops
from tools import families

FP64 = torch.float64
SEED = torch.tensor([3, 5])


def tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=FP64) for shape in shapes]


X, R, W, B, HEADS = tensors((4, 6), (4, 6), (6,), (6,), (4, 6))
Q, K = tensors((2, 5, 3, 8), (2, 5, 1, 8))
IMAGE, FILTER = tensors((2, 3, 4, 4), (2, 3, 3, 3))
HEAD = torch.rand(8, dtype=FP64) + 0.5
ANGLES = torch.arange(9, dtype=FP64)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=FP64)
TABLES = ANGLES.cos(), ANGLES.sin()
PER_TOKEN = tuple(torch.cat([t[:5], t[:5]], -1)[None] for t in TABLES)
TARGET = torch.tensor([0, 1, 2, 3])
CU, OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1, 3])


def batch_norm_in_training(x, weight, **others):
    return warpsmith.batch_norm(x, B.clone(), W.square(), weight, training=True, **others)


ROW_OPS = row_ops(p=0.4, seed=SEED)
CASES = {
    **{name: (op.call, *(X, R)[: op.rows], *(W, B)[: op.parameters]) for name, op in ROW_OPS.items()},
    "rms_norm, offset": (lambda x, w: warpsmith.rms_norm(x, w, weight_offset=1.0), X, W),
    "rms_norm, no weight": (warpsmith.rms_norm, X),
    "rope": (lambda q, k: warpsmith.rope(q, k, *TABLES), Q, K),
    "rope, q alone": (lambda q: warpsmith.rope(q, None, *TABLES)[0], Q),
    "rope, interleaved": (lambda q, k: warpsmith.rope(q, k, *TABLES, interleaved=True, position_offset=2), Q, K),
    "rope, per token": (lambda q, k: warpsmith.rope(q, k, *PER_TOKEN), Q, K),
    "rope, offsets": (lambda q, k: warpsmith.rope(q, k, *TABLES, position_offset=OFFSETS), Q, K),
    "rope, packed": (lambda q: warpsmith.rope(q, None, *TABLES, cu_seqlens=CU, position_offset=OFFSETS)[0], Q[0]),
    "qk_norm_rope": (lambda *t: warpsmith.qk_norm_rope(*t, *TABLES), Q, K, HEAD, HEAD + 1),
    "batch_norm": (lambda x, w, b: warpsmith.batch_norm(x, B, W.square(), w, b), X, W, B),
    "batch_norm, training": (lambda x, w, r: batch_norm_in_training(x, w, residual=r, activation="relu"), X, W, R),
    "group_norm": (lambda x, w, b: warpsmith.group_norm(x, 2, w, b, activation="silu"), X, W, B),
    "conv2d": (lambda x, w, b: warpsmith.conv2d(x, w, b, activation="silu"), IMAGE, FILTER, B[:2]),
    "max_pool2d": (lambda x: warpsmith.max_pool2d(x, 3, 2, 1), IMAGE),
    "linear": (lambda x, w, b: warpsmith.linear(x, w, b, "silu"), X, HEADS, TARGET.double()),
    "linear, residual": (lambda x, w, r: warpsmith.linear(x, w, None, "gelu", residual=r), X, HEADS, X[:, :4] + 1),
    "mlp": (lambda x, w1, w2: warpsmith.mlp(x, w1, None, w2, None), X, HEADS, HEADS[:, :4] + 0.5),
    "matmul_symmetric": (warpsmith.matmul_symmetric, X),
    "gated_linear": (warpsmith.gated_linear, X, HEADS, HEADS + 0.5),
}


REFUSED = {
    "attention": (lambda q: warpsmith.attention(q, q, q), Q),
    "attention_varlen": (lambda q: warpsmith.attention_varlen(q, q, q, CU, CU, 3, 3), Q[0]),
    "cross_entropy": (lambda x: warpsmith.cross_entropy(x, TARGET), X),
    "linear_cross_entropy": (lambda x: warpsmith.linear_cross_entropy(x, HEADS, TARGET), X),
    "scaled_linear": (lambda x: warpsmith.scaled_linear(x.float(), torch.ones(16, x.shape[-1])), torch.ones(2, 16)),
    "linear_log_prob": (lambda x: warpsmith.linear_log_prob(x, HEADS, TARGET), X),
}


def test_every_op_has_forward_mode_or_refuses_it():
    known = {name.split(",")[0] for name in CASES} | REFUSED.keys()
    without_gradients = {row.name for row in families.rows() if row.family in ("optim", "quantize", "image")}
    assert known == {row.name for row in families.rows()} - without_gradients


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_agrees_with_differences_and_reverse_mode(name):
    op, *inputs = CASES[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(op, leaves, check_forward_ad=True, check_batched_grad=False)


@pytest.mark.parametrize("name", CASES)
def test_values_under_forward_mode_are_those_of_the_op(name):
    op, *inputs = CASES[name]
    tangents = [torch.ones_like(t) for t in inputs]
    found, _ = torch.func.jvp(op, tuple(inputs), tuple(tangents))
    torch.testing.assert_close(found, op(*inputs))


def dual(function):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(X, X + 1))


@pytest.mark.parametrize("way", [dual, lambda f: f(X.clone().requires_grad_())], ids=["forward mode", "graph"])
def test_running_statistics_move_in_every_mode_alike(way):
    """torch.func's transforms refuse what writes to a captured tensor."""
    moved = []
    for call in (way, lambda f: f(X)):
        moved.append([torch.full((6,), 0.5, dtype=FP64) for _ in range(2)])
        call(lambda x: warpsmith.batch_norm(x, *moved[-1], W, B, training=True, momentum=0.3))
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "dropout_add_rms_norm", "swiglu", "bias_gelu"])
def test_jacobians_and_hessians(name):
    op, *inputs = CASES[name]

    def first(x):
        y = op(x, *inputs[1:])
        return (y[0] if isinstance(y, tuple) else y)[0]

    x = inputs[0][:1]
    inputs = [t[:1] if t.shape == inputs[0].shape else t for t in inputs]
    torch.testing.assert_close(torch.func.jacfwd(first)(x), torch.func.jacrev(first)(x))
    hessian = torch.func.hessian(lambda t: first(t).square().sum())(x)  # forward over reverse
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda t: first(t).square().sum(), x))


def test_bad_inputs_are_refused_in_forward_mode_too():
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"rms_norm: weight: expected shape \(6\), got \(5\)"):
        warpsmith.rms_norm(forward_ad.make_dual(X, X), W[:5])


@pytest.mark.parametrize("name", REFUSED)
def test_attention_and_losses_refuse_forward_mode_by_name(name):
    op, x = REFUSED[name]
    words = f"^{name.removesuffix('_varlen')}: expected derivatives in backward mode, got forward mode"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=words):
        op(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(op, (x,), (x,))
