"""add_layer_norm under the law, and what only it has: rows whose sum is hard, one output used alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import warpsmith
from warpsmith.reference.add_layer_norm import add_layer_norm as reference
from warpsmith.testing import OpSpec, measure, op_tests

from tests.ops import norm_cases as norm


def torch_add_layer_norm(x, residual, weight, bias, eps):
    """Plain PyTorch as users have it, in the dtypes that its native op takes."""
    if residual.dtype != x.dtype or (weight is not None and weight.dtype != x.dtype):
        return reference(x, residual, weight, bias, eps)
    s = x + residual
    return torch.nn.functional.layer_norm(s, s.shape[-1:], weight, bias, eps), s


def arguments(good):
    return good["x"], good["residual"], good["weight"], good["bias"], good["eps"]


SPEC = OpSpec(
    name="add_layer_norm",
    op=warpsmith.add_layer_norm,
    reference=reference,
    baseline=torch_add_layer_norm,
    inputs=partial(norm.inputs, bias=True),
    cases=norm.CASES,
    differentiable=("x", "residual", "weight", "bias"),
    outputs=("y", "residual_out"),
    laid_out=("x", "residual"),
    batched=("x", "residual"),
    gradcheck_cases=norm.GRADCHECK_CASES,
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::add_layer_norm",
    opcheck={
        torch.ops.warpsmith.add_layer_norm.default: arguments,
        torch.ops.warpsmith.add_layer_norm_forward.default: arguments,
        torch.ops.warpsmith.add_layer_norm_inference.default: arguments,
        torch.ops.warpsmith.add_layer_norm_backward.default: partial(norm.backward_arguments, bias=True),
    },
    bad_inputs=norm.BAD_INPUTS + norm.BAD_BIAS,
    floor_bytes=norm.floor_bytes(4, 4),
)

TestAddLayerNorm = op_tests(SPEC)


@pytest.mark.parametrize("used", ["y", "residual_out"])
def test_one_output_alone_has_gradients(used):
    tensors = [torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5, torch.randn(8)]
    grad = torch.randn(3, 8)

    def gradients(op):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y, s = op(*leaves, 1e-6)
        return torch.autograd.grad(y if used == "y" else s, leaves, grad, allow_unused=True)

    for ours, expected in zip(gradients(warpsmith.add_layer_norm), gradients(reference), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if expected is None else expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual", ["large", "large mean", "cancels"])
def test_hard_sums_obey_the_error_law(residual, dtype, device):
    g = torch.Generator().manual_seed(5)
    x, noise, dy, ds = (torch.randn(4, 1000, generator=g) for _ in range(4))
    stream = {"large": 1e4 * noise, "large mean": noise + 1e4, "cancels": 1e-3 * noise - x}[residual]
    weight, bias = torch.randn(1000, generator=g), torch.randn(1000, generator=g)
    tensors = [t.to(dtype).to(device) for t in (x, stream, weight, bias)]
    grads = [t.to(dtype).to(device) for t in (dy, ds)]

    def results(op, tensors, grads):
        leaves = [t.detach().requires_grad_() for t in tensors]
        outputs = op(*leaves, 1e-5)
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]

    exact = results(reference, [t.cpu().double() for t in tensors], [t.cpu().double() for t in grads])
    ours, plain = (results(op, tensors, grads) for op in (warpsmith.add_layer_norm, torch_add_layer_norm))
    names = ("y", "residual_out", "x", "residual", "weight", "bias")
    errors = [measure(*four) for four in zip(names, ours, exact, plain, strict=True)]
    assert all(e.ok for e in errors), "; ".join(map(str, errors))
