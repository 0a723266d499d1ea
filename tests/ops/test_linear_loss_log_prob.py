"""What linear_log_prob is beside the law: three outputs, saved logits, labels out of range, bounded memory."""

import math

import pytest
import torch
import warpsmith
from warpsmith.reference.linear_loss import linear_log_prob as reference
from warpsmith.testing import bitwise_equal

from tests.dispatched import Dispatched

from .test_linear_loss import BF16, peak_bytes
from .test_linear_loss import problem as of_both


def problem(*args, **options):
    return of_both(*args, **options, ignored=False)


def gradients(fn, hidden, weight, *args, use=(0, 1, 2), **options):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    outputs = fn(*leaves, *args, **options)
    total = sum((i + 1) * (outputs[i].square()).sum() for i in use)
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("use", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("form", ["eager", "traced"])
def test_outputs_that_nobody_used_have_no_gradient(form, use):
    traced = torch.ops.warpsmith.linear_log_prob  # what torch.compile and torch.export see
    forms = {"eager": warpsmith.linear_log_prob, "traced": lambda *tensors: traced(*tensors, None, 1.0, False, 0)}
    with Dispatched() as ops:
        gradients(forms[form], *problem(), use=use)
    (args,) = ops.of(torch.ops.warpsmith.linear_log_prob_backward.default)
    assert tuple(i for i, grad in enumerate(args[:3]) if grad is not None) == use


def test_saved_logits_give_the_bits_of_made_ones():
    hidden, weight, target = problem(BF16)
    made, kept = (
        gradients(warpsmith.linear_log_prob, hidden, weight, target, save_logits=s, max_chunk_bytes=1000)
        for s in (False, True)
    )
    assert all(bitwise_equal(a, b) for a, b in zip(made, kept, strict=True))


BOTH_BYTES = 2 * 50 * 36 * 4  # logits and their gradient of problem(): 50 rows of 33 classes, 16-byte vectors


@pytest.mark.parametrize(
    ("options", "leaf", "kept"),
    [
        ({}, True, True),
        ({"max_chunk_bytes": BOTH_BYTES}, True, True),
        ({"max_chunk_bytes": BOTH_BYTES - 1}, True, False),
        ({"save_logits": False}, True, False),
        ({"save_logits": True}, False, True),
        ({}, False, False),
    ],
)
def test_the_cpu_keeps_logits_that_fit_if_gradients_are_recorded(options, leaf, kept):
    hidden, weight, target = problem()
    with Dispatched() as ops:
        warpsmith.linear_log_prob(hidden, weight.requires_grad_(leaf), target, **options)
    assert [args[5] for args in ops.of(torch.ops.warpsmith.linear_log_prob_forward.default)] == [kept]


def test_infinite_logits():
    hidden, weight, target = problem()
    bias = torch.zeros(33)
    bias[5] = -math.inf
    target[target == 5] = 6
    outputs = warpsmith.linear_log_prob(hidden, weight, target, bias)
    torch.testing.assert_close(outputs, reference(hidden, weight, target, bias))
    assert all(t.isfinite().all() for t in outputs)
    # Elements whose exponential is 0 take no part, whichever loop the gradient comes from.
    for use in ((0,), (1,), (2,), (0, 1, 2)):
        found = gradients(lambda h, w, t: warpsmith.linear_log_prob(h, w, t, bias), hidden, weight, target, use=use)
        exact = hidden.double(), weight.double(), target
        expected = gradients(lambda h, w, t: reference(h, w, t, bias.double()), *exact, use=use)
        torch.testing.assert_close(found, [t.float() for t in expected], rtol=1e-4, atol=1e-4)
        assert not found[1][5].any()


@pytest.mark.gpu
@pytest.mark.parametrize("label", [33, -1, 2**40, -(2**40)])
def test_labels_out_of_range_are_nan_on_cuda(label):
    hidden, weight, target = problem(BF16, device="cuda")
    expected = warpsmith.linear_log_prob(hidden, weight, target)
    target[7] = label
    found = warpsmith.linear_log_prob(hidden, weight, target)
    assert found[0][7].isnan()
    keep = torch.arange(50, device="cuda") != 7
    assert all(bitwise_equal(a[keep], b[keep]) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_memory_is_bounded_by_the_chunk():
    hidden, weight, target = problem(BF16, rows=4096, width=64, classes=32768, device="cuda")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    chunk = 2**25
    step = lambda: warpsmith.linear_log_prob(*leaves, target, max_chunk_bytes=chunk)[0].sum().backward()  # noqa: E731
    used = peak_bytes(step, leaves)
    gradients_bytes = 2 * hidden.numel() + (4 + 2) * weight.numel()  # the weight's is summed in float32
    assert used <= chunk + gradients_bytes + 2**20
