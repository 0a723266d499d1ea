"""add_rms_norm under the law, and what only it has: one gradient for both summands, a stream of its own dtype."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import warpsmith
from warpsmith.reference.add_rms_norm import add_rms_norm as reference
from warpsmith.testing import OpSpec, op_tests

from tests.ops import norm_cases as norm


def torch_add_rms_norm(x, residual, weight, eps):
    """Plain PyTorch as users have it, in the dtypes that its native op takes."""
    if residual.dtype != x.dtype or (weight is not None and weight.dtype != x.dtype):
        return reference(x, residual, weight, eps)
    s = x + residual
    return torch.nn.functional.rms_norm(s, s.shape[-1:], weight, eps), s


def arguments(good):
    return good["x"], good["residual"], good["weight"], good["eps"], 0.0


SPEC = OpSpec(
    name="add_rms_norm",
    op=warpsmith.add_rms_norm,
    reference=reference,
    baseline=torch_add_rms_norm,
    inputs=partial(norm.inputs, bias=False),
    cases=norm.CASES,
    differentiable=("x", "residual", "weight"),
    outputs=("y", "residual_out"),
    laid_out=("x", "residual"),
    batched=("x", "residual"),
    gradcheck_cases=norm.GRADCHECK_CASES,
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::add_rms_norm",
    opcheck={
        torch.ops.warpsmith.add_rms_norm.default: arguments,
        torch.ops.warpsmith.add_rms_norm_forward.default: arguments,
        torch.ops.warpsmith.add_rms_norm_inference.default: arguments,
        torch.ops.warpsmith.add_rms_norm_backward.default: partial(norm.backward_arguments, bias=False),
    },
    bad_inputs=norm.BAD_INPUTS,
    floor_bytes=norm.floor_bytes(4, 4),
)

TestAddRmsNorm = op_tests(SPEC)


@pytest.mark.parametrize("used", ["y", "residual_out"])
def test_one_output_alone_has_gradients(used):
    tensors = [torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5]
    grad = torch.randn(3, 8)

    def gradients(op):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y, s = op(*leaves, 1e-6)
        return torch.autograd.grad(y if used == "y" else s, leaves, grad, allow_unused=True)

    for ours, expected in zip(gradients(warpsmith.add_rms_norm), gradients(reference), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if expected is None else expected)


def test_both_summands_may_be_one_tensor():
    x = torch.randn(3, 8, requires_grad=True)
    y, s = warpsmith.add_rms_norm(x, x, None)
    (y.sum() + s.sum()).backward()
    twin = x.detach().clone().requires_grad_()
    sum(t.sum() for t in reference(twin, twin, None)).backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_gradients_of_both_summands_are_not_one_memory_for_the_next_step():
    """Autograd may hand one tensor to two leaves; adding to one's gradient must not change the other's."""
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    warpsmith.add_rms_norm(x, residual, None)[0].square().sum().backward()
    kept = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_y_is_the_norm_of_what_the_stream_holds(dtype):
    x, residual = torch.randn(4, 300).to(dtype), torch.randn(4, 300).to(dtype)
    y, s = warpsmith.add_rms_norm(x, residual, None, eps=1e-6)
    assert torch.equal(s, x + residual)
    torch.testing.assert_close(y, warpsmith.rms_norm(s, eps=1e-6), rtol=torch.finfo(dtype).eps, atol=0)


def test_weight_offset_is_added_to_the_weight():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    for ours, expected in zip(
        warpsmith.add_rms_norm(x, residual, weight, weight_offset=1.0),
        warpsmith.add_rms_norm(x, residual, weight + 1.0),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)
