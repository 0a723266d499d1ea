"""dropout_add_rms_norm and dropout_add_layer_norm under the law, and what only they have: the mask and its seed, p at
its borders."""

from functools import partial

import pytest
import torch
import warpsmith
from warpsmith.reference.dropout import dropout_mask
from warpsmith.reference.norm import dropout_add_layer_norm as dropout_add_layer_norm_reference
from warpsmith.reference.norm import dropout_add_rms_norm as dropout_add_rms_norm_reference
from warpsmith.testing import Case, op_tests
from warpsmith.testing.checks import kernels
from warpsmith.testing.sim import is_loaded, machine

from tests.ops import norm_cases as norm

CASES = [
    *norm.FEW_CASES,
    *(Case((6, 100), norm.BF16, options={"p": p}) for p in (0.0, 0.9, 1.0)),
    # The mask alone stands between the gradients of y and of x.
    *(Case((6, 100), dtype, wanted=("x",), unused=("residual_out",)) for dtype in (norm.BF16, norm.FP32)),
]
DROPOUT_ADD_RMS_NORM = norm.spec_of(
    "dropout_add_rms_norm",
    inputs=partial(norm.inputs, bias=False, seed=True),
    cases=CASES,
    gradcheck_cases=norm.GRADCHECK_CASES,
)
DROPOUT_ADD_LAYER_NORM = norm.spec_of(
    "dropout_add_layer_norm",
    inputs=partial(norm.inputs, bias=True, seed=True),
    cases=CASES,
    gradcheck_cases=norm.GRADCHECK_CASES,
)

TestDropoutAddRmsNorm = op_tests(DROPOUT_ADD_RMS_NORM)
TestDropoutAddLayerNorm = op_tests(DROPOUT_ADD_LAYER_NORM)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = (6, 37)  # no multiple of 8: Philox calls straddle rows


def tensors(device="cpu", shape=SHAPE, dtype=torch.float32):
    g = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=g).to(dtype).to(device).requires_grad_() for _ in range(2)]


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def dropout_tests(op, add_op, reference, affine):
    """A pytest class; ``affine(columns, device)`` makes weight, and bias where there is one."""

    def call(x, residual, p, **options):
        return op(x, residual, *affine(x.shape[-1], x.device), p, **options)

    @pytest.mark.parametrize("device", DEVICES)
    class Tests:
        @pytest.mark.skipif(not is_loaded(), reason="no simulated kernels in this process (--sim)")
        @pytest.mark.parametrize("columns", [33, 64, 1032, 4104, 16392])
        def test_rows_beyond_2_31_elements_have_their_part_of_the_mask(self, columns, device):
            before, seed = kernels.FAR // columns + 1, torch.tensor([2**40 + 5, 3])
            mask = dropout_mask(seed, (3, columns), 0.25, before * columns)
            x, *zeros = torch.ones(3, columns), torch.zeros(3, columns), torch.zeros(3, columns)
            with machine(multiprocessors=kernels.ENOUGH_MULTIPROCESSORS, last_blocks=kernels.FAR_BLOCKS):
                tensors = [kernels.far(t.bfloat16(), before).requires_grad_() for t in (x, zeros[0])]
                outputs = call(*tensors, 0.25, seed=seed)
                upstream = [kernels.far(t.bfloat16(), before) for t in (zeros[1], x)]
                dx, dresidual = torch.autograd.grad(outputs, tensors, upstream)
            assert torch.equal(outputs[1][before:] != 0, mask) and torch.equal(dx[before:] != 0, mask)
            assert (dresidual[before:] == 1).all()

        def test_the_backward_makes_the_forwards_mask_and_stores_none(self, device):
            x, residual = tensors(device)
            seed = torch.tensor([11, 0], device=device)
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                y, s = call(x, residual, 0.4, seed=seed)
            assert sum(t.numel() >= x.numel() for t in kept) == 1, "more than residual_out is kept"
            dx, dresidual = torch.autograd.grad((y.square() * y).sum() + s.square().sum(), (x, residual))
            mask = dropout_mask(seed, SHAPE, 0.4)
            assert torch.equal(dx != 0, mask)
            torch.testing.assert_close(dx, dresidual * mask / 0.6)

        def test_with_p_1_nothing_of_x_is_kept(self, device):
            x, residual = tensors(device)
            with torch.no_grad():
                x[0, 0], x[1, 1] = float("inf"), float("nan")
            y, s = call(x, residual, 1.0)
            assert torch.equal(s, residual)
            torch.testing.assert_close(y, add_op(torch.zeros_like(x), residual, *affine(SHAPE[-1], device))[0])
            dx, dresidual = torch.autograd.grad(y.square().sum() + s.sum(), (x, residual))
            assert torch.equal(dx, torch.zeros_like(x))
            assert dresidual.isfinite().all()

        def test_dropped_infinities_leave_no_nan(self, device):
            x, residual = tensors(device)
            seed = torch.tensor([5, 6], device=device)
            mask = dropout_mask(seed, SHAPE, 0.5)
            _, s = call(torch.where(mask, x, float("inf")), residual, 0.5, seed=seed)
            assert s.isfinite().all()

        def test_many_rows(self, device):
            x, residual = tensors(device, (70_000, 9))
            seed = torch.tensor([1, 2], device=device)
            mine = affine(9, device)
            ours = op(x, residual, *mine, 0.3, seed=seed)
            torch.testing.assert_close(ours, reference(x, residual, *mine, 0.3, seed=seed), rtol=2e-5, atol=2e-5)

    return Tests


def weight_alone(columns, device):
    return [torch.linspace(0.5, 2, columns, device=device)]


def weight_and_bias(columns, device):
    return [*weight_alone(columns, device), torch.linspace(-1, 1, columns, device=device)]


TestRmsNormMask = dropout_tests(
    warpsmith.dropout_add_rms_norm, warpsmith.add_rms_norm, dropout_add_rms_norm_reference, weight_alone
)
TestLayerNormMask = dropout_tests(
    warpsmith.dropout_add_layer_norm, warpsmith.add_layer_norm, dropout_add_layer_norm_reference, weight_and_bias
)
