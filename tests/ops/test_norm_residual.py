"""add_rms_norm and add_layer_norm under the law, and what only they have: one gradient for both summands, a stream of
its own dtype, rows whose sum is hard, one output used alone."""

from functools import partial

import pytest
import torch
import warpsmith
from warpsmith.reference.norm import add_layer_norm as add_layer_norm_reference
from warpsmith.reference.norm import add_rms_norm as add_rms_norm_reference
from warpsmith.testing import measure, op_tests

from tests.ops import norm_cases as norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def torch_add_rms_norm(x, residual, weight, eps):
    """Plain PyTorch as users have it, in the dtypes that its native op takes."""
    if residual.dtype != x.dtype or (weight is not None and weight.dtype != x.dtype):
        return add_rms_norm_reference(x, residual, weight, eps)
    s = x + residual
    return torch.nn.functional.rms_norm(s, s.shape[-1:], weight, eps), s


def torch_add_layer_norm(x, residual, weight, bias, eps):
    """Plain PyTorch as users have it, in the dtypes that its native op takes."""
    if residual.dtype != x.dtype or (weight is not None and weight.dtype != x.dtype):
        return add_layer_norm_reference(x, residual, weight, bias, eps)
    s = x + residual
    return torch.nn.functional.layer_norm(s, s.shape[-1:], weight, bias, eps), s


ADD_RMS_NORM = norm.spec_of(
    "add_rms_norm",
    baseline=torch_add_rms_norm,
    inputs=partial(norm.inputs, bias=False),
    cases=norm.CASES,
    gradcheck_cases=norm.GRADCHECK_CASES,
)
ADD_LAYER_NORM = norm.spec_of(
    "add_layer_norm",
    baseline=torch_add_layer_norm,
    inputs=partial(norm.inputs, bias=True),
    cases=norm.CASES,
    gradcheck_cases=norm.GRADCHECK_CASES,
)

TestAddRmsNorm = op_tests(ADD_RMS_NORM)
TestAddLayerNorm = op_tests(ADD_LAYER_NORM)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [8, 1032, 1033])
@pytest.mark.parametrize("used", ["y", "residual_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("op", "reference", "weights"),
    [
        (warpsmith.add_rms_norm, add_rms_norm_reference, 1),
        (warpsmith.add_layer_norm, add_layer_norm_reference, 2),
    ],
)
def test_one_output_alone_has_gradients(op, reference, weights, dtype, used, columns, device):
    """Also where x and the weights are 16-bit beside a float32 residual."""
    torch.manual_seed(0)
    x, residual, grad = (torch.randn(3, columns, device=device) for _ in range(3))
    affine = torch.rand(columns, device=device) + 0.5, torch.randn(columns, device=device)
    tensors = [x.to(dtype), residual, *(t.to(dtype) for t in affine[:weights])]

    def gradients(op):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y, s = op(*leaves, 1e-6)
        output = y if used == "y" else s
        return torch.autograd.grad(output, leaves, grad.to(output.dtype), allow_unused=True)

    near = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}

    for ours, expected in zip(gradients(op), gradients(reference), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if expected is None else expected, **near)


@pytest.mark.parametrize("device", DEVICES)
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

    exact = results(add_layer_norm_reference, [t.cpu().double() for t in tensors], [t.cpu().double() for t in grads])
    ours, plain = (results(op, tensors, grads) for op in (warpsmith.add_layer_norm, torch_add_layer_norm))
    names = ("y", "residual_out", "x", "residual", "weight", "bias")
    errors = [measure(*four) for four in zip(names, ours, exact, plain, strict=True)]
    assert all(e.ok for e in errors), "; ".join(map(str, errors))


def test_both_summands_may_be_one_tensor():
    x = torch.randn(3, 8, requires_grad=True)
    y, s = warpsmith.add_rms_norm(x, x, None)
    (y.sum() + s.sum()).backward()
    twin = x.detach().clone().requires_grad_()
    sum(t.sum() for t in add_rms_norm_reference(twin, twin, None)).backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_gradients_of_both_summands_do_not_share_memory_later():
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
