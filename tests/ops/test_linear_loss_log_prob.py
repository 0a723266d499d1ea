"""What linear_log_prob is beside the law: three outputs, saved logits, labels out of range, bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
import warpsmith
from torch.utils._python_dispatch import TorchDispatchMode
from warpsmith.reference.linear_loss import linear_log_prob as reference
from warpsmith.testing import bitwise_equal, measure

from .test_linear_loss import BF16, FP64, peak_bytes
from .test_linear_loss import problem as of_both


def problem(*args, **options):
    return of_both(*args, **options, ignored=False)


def gradients(fn, hidden, weight, *args, use=(0, 1, 2), **options):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    outputs = fn(*leaves, *args, **options)
    total = sum((i + 1) * (outputs[i].square()).sum() for i in use)
    return torch.autograd.grad(total, leaves)


@pytest.mark.not_on_sim(reason="in float64")
@pytest.mark.parametrize("use", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_each_output_has_its_own_gradient(use):
    hidden, weight, target = (t.double() if t.is_floating_point() else t for t in problem())
    found = gradients(warpsmith.linear_log_prob, hidden, weight, target, use=use, temperature=1.3)
    torch.testing.assert_close(found, gradients(reference, hidden, weight, target, use=use, temperature=1.3))


class BackwardArguments(TorchDispatchMode):
    """Which of the gradients of (log_prob, logsumexp, entropy) the raw backward was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.warpsmith.linear_log_prob_backward.default:
            self.seen.append(tuple(i for i, grad in enumerate(args[:3]) if grad is not None))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("use", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("form", ["eager", "traced"])
def test_outputs_that_nobody_used_have_no_gradient(form, use):
    traced = torch.ops.warpsmith.linear_log_prob  # what torch.compile and torch.export see
    forms = {"eager": warpsmith.linear_log_prob, "traced": lambda *tensors: traced(*tensors, None, 1.0, False, 0)}
    with BackwardArguments() as arguments:
        gradients(forms[form], *problem(), use=use)
    assert arguments.seen == [use]


@pytest.mark.not_on_sim(reason="in float64")
@pytest.mark.parametrize("chunk", [1, 7 * 34 * 8, 64 * 34 * 8])
@pytest.mark.parametrize("save_logits", [False, True])
def test_chunks_change_nothing_but_rounding(chunk, save_logits):
    hidden, weight, target = problem(FP64)
    options = {"max_chunk_bytes": chunk, "save_logits": save_logits}
    whole = warpsmith.linear_log_prob(hidden, weight, target)
    torch.testing.assert_close(warpsmith.linear_log_prob(hidden, weight, target, **options), whole)
    found = gradients(warpsmith.linear_log_prob, hidden, weight, target, **options)
    torch.testing.assert_close(found, gradients(warpsmith.linear_log_prob, hidden, weight, target))


def test_saved_logits_give_the_bits_of_made_ones():
    hidden, weight, target = problem(BF16)
    made, kept = (
        gradients(warpsmith.linear_log_prob, hidden, weight, target, save_logits=s, max_chunk_bytes=1000)
        for s in (False, True)
    )
    assert all(bitwise_equal(a, b) for a, b in zip(made, kept, strict=True))


BOTH_BYTES = 2 * 50 * 36 * 4  # logits and their gradient of problem(): 50 rows of 33 classes, 16-byte vectors


class SaveLogitsArguments(TorchDispatchMode):
    """What the op was called with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.warpsmith.linear_log_prob_forward.default:
            self.seen.append(args[5])
        return op(*args, **(kwargs or {}))


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
    with SaveLogitsArguments() as arguments:
        warpsmith.linear_log_prob(hidden, weight.requires_grad_(leaf), target, **options)
    assert arguments.seen == [kept]


def test_many_16_bit_chunks_round_the_weights_gradient_once():
    hidden, weight, target = problem(BF16, rows=512)
    found = gradients(warpsmith.linear_log_prob, hidden, weight, target, use=(0,), max_chunk_bytes=8 * 40 * 2)[1]
    exact = gradients(reference, hidden.double(), weight.double(), target, use=(0,))[1]
    plain = gradients(reference, hidden, weight, target, use=(0,))[1]
    assert measure("grad_weight", found, exact, plain).ok


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


def test_graphs_can_be_walked_twice():
    hidden, weight, target = problem()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    total = warpsmith.linear_log_prob(*leaves, target)[0].sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    assert all(bitwise_equal(a, b) for a, b in zip(first, torch.autograd.grad(total, leaves), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_is_bounded_by_the_chunk():
    hidden, weight, target = problem(BF16, rows=4096, width=64, classes=32768, device="cuda")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    chunk = 2**25
    step = lambda: warpsmith.linear_log_prob(*leaves, target, max_chunk_bytes=chunk)[0].sum().backward()  # noqa: E731
    used = peak_bytes(step, leaves)
    gradients_bytes = 2 * hidden.numel() + (4 + 2) * weight.numel()  # the weight's is summed in float32
    assert used <= chunk + gradients_bytes + 2**20
