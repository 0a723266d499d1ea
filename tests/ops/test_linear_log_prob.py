"""linear_log_prob under the law, and what only it has: chunks, saved logits, labels out of range, bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
import warpsmith
from torch.utils._python_dispatch import TorchDispatchMode
from warpsmith.reference.linear_log_prob import linear_log_prob as reference
from warpsmith.testing import BadInput, Case, OpSpec, bitwise_equal, measure, op_tests

from .linear_losses import BF16, FP16, FP32, FP64, ON_CUDA, peak_bytes


def inputs(case, rng):
    width, classes = case.shape[-1], case.options.get("classes", 37)
    return {
        "hidden": rng.normal(case.shape),
        "weight": rng.normal((classes, width), std=1.5 / max(width, 1) ** 0.5),
        "target": rng.integers(case.shape[:-1], 0, classes),
        "bias": rng.normal((classes,)) if case.options.get("bias", True) else None,
        "temperature": case.options.get("temperature", 1.0),
        "save_logits": case.options.get("save_logits", False),
        "max_chunk_bytes": case.options.get("max_chunk_bytes"),
    }


def but(**changes):
    return lambda good: {**good, **{k: change(good) for k, change in changes.items()}}


def saved(good):
    shape = good["target"].shape
    return torch.zeros(shape, device=good["hidden"].device)


def backward_arguments(good):
    rows = saved(good)
    return (
        *(rows + 1, rows, None, good["hidden"], good["weight"], good["target"], good["bias"], rows, rows + 1, rows),
        *(good["hidden"].new_empty(0, 8 * math.ceil(good["weight"].shape[0] / 8)), 1.0, 0, True, True, True),
    )


SMALL_CHUNK = 16 * 64  # bytes: a few rows of logits
CASES = [
    *(Case((6, 24), dtype) for dtype in (BF16, FP32, FP16, FP64)),
    *(Case((3, 5, 24), dtype, options={"classes": classes}) for dtype in (BF16, FP32) for classes in (1, 2, 8, 257)),
    *(Case((9, 32), dtype, options={"classes": 1025, "bias": False}) for dtype in (BF16, FP32, FP16)),
    *(Case((90, 32), dtype, options={"temperature": 0.7}) for dtype in (BF16, FP32, FP16, FP64)),
    *(Case((90, 32), dtype, options={"temperature": 3.0, "bias": False}) for dtype in (BF16, FP32)),
    *(Case((23, 32), dtype, options={"max_chunk_bytes": SMALL_CHUNK}) for dtype in (BF16, FP32, FP16)),
    *(Case((23, 32), dtype, options={"save_logits": True, "max_chunk_bytes": SMALL_CHUNK}) for dtype in (BF16, FP32)),
    *(Case((40, 64), dtype, options={"save_logits": True, "classes": 300}) for dtype in (BF16, FP32)),
    Case((24,), FP32),
    Case((300, 16), FP32, options={"classes": 50}),
]

SPEC = OpSpec(
    name="linear_log_prob",
    op=warpsmith.linear_log_prob,
    reference=reference,
    inputs=inputs,
    cases=CASES,
    differentiable=("hidden", "weight", "bias"),
    outputs=("log_prob", "logsumexp", "entropy"),
    laid_out=("hidden", "weight"),
    # Not the weight: all of its rows alike make gradients zero but for rounding; see test_an_expanded_weight.
    expanded=("hidden",),
    gradcheck_cases=[
        Case((3, 4), FP64, options={"classes": 5}),
        Case((4, 3), FP64, options={"classes": 7, "temperature": 0.6, "max_chunk_bytes": 128}),
        Case((2, 4), FP64, options={"classes": 5, "bias": False, "save_logits": True}),
    ],
    traced="warpsmith::linear_log_prob",
    autocast=lambda good, dtype: (torch.float32,) * 3,
    opcheck={
        op: lambda good: (*(good[n] for n in ("hidden", "weight", "target", "bias")), 1.0, False, 0)
        for op in (torch.ops.warpsmith.linear_log_prob.default, torch.ops.warpsmith.linear_log_prob_forward.default)
    }
    | {torch.ops.warpsmith.linear_log_prob_backward.default: backward_arguments},
    bad_inputs=[
        BadInput("integers", but(hidden=lambda g: g["hidden"].int()), "hidden: expected float32.*got int32"),
        BadInput("scalar", but(hidden=lambda g: g["hidden"].sum()), "hidden: expected at least one dimension"),
        BadInput("weight dtype", but(weight=lambda g: g["weight"].half()), "weight: expected bfloat16, got float16"),
        BadInput("weight width", but(weight=lambda g: g["weight"][:, 1:]), r"weight: expected shape \(V, 24\)"),
        BadInput("weight of one dimension", but(weight=lambda g: g["weight"][0]), r"weight: expected shape \(V, 24\)"),
        BadInput("no classes", but(weight=lambda g: g["weight"][:0]), "weight: expected shape.*with V >= 1, got"),
        BadInput("meta weight", but(weight=lambda g: g["weight"].to("meta")), "weight: expected a", fake=False),
        BadInput("target dtype", but(target=lambda g: g["target"].int()), "target: expected int64, got int32"),
        BadInput("target shape", but(target=lambda g: g["target"][1:]), r"target: expected shape \(6\), got \(5\)"),
        BadInput("meta target", but(target=lambda g: g["target"].to("meta")), "target: expected a", fake=False),
        BadInput("bias shape", but(bias=lambda g: g["bias"][1:]), r"bias: expected shape \(37\), got \(36\)"),
        BadInput("bias dtype", but(bias=lambda g: g["bias"].half()), "bias: expected bfloat16, got float16"),
        BadInput("label", but(target=lambda g: g["target"].clone().fill_(37)),
                 r"target: expected classes in \[0, 37\), got 37 at position 0", fake=False, devices=("cpu",)),
        BadInput("negative label", but(target=lambda g: g["target"].clone().index_fill_(0, torch.tensor([2]), -1)),
                 "target: expected classes.*got -1 at position 2", fake=False, devices=("cpu",)),
        *(BadInput(f"temperature {t}", but(temperature=lambda g, t=t: t), "temperature: expected a finite number > 0",
                   fake=False) for t in (0.0, -1.0, math.nan, math.inf)),
        BadInput("chunk", but(max_chunk_bytes=lambda g: 0), "max_chunk_bytes: expected an integer >= 1, got 0"),
        BadInput("float64", lambda g: {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
                                       for k, v in g.items()},
                 "hidden: expected float32, float16 or bfloat16 on CUDA", fake=False, devices=("cuda",)),
    ],
    floor_bytes=lambda case: dict.fromkeys(("forward", "backward"), 2 * torch.Size(case.shape).numel()),
)  # fmt: skip

TestLinearLogProb = op_tests(SPEC)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("expanded", ["weight", "both"])
def test_an_expanded_weight(device, dtype, expanded):
    g = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(shape, generator=g).to(device, dtype) for shape in ((6, 24), (37, 24)))
    target = torch.randint(0, 37, (6,), generator=g).to(device)
    results = []
    for lay_out in (lambda t: t[:1].expand_as(t), lambda t: t[:1].expand_as(t).contiguous()):
        h = lay_out(hidden) if expanded != "weight" else hidden
        leaves = [t.detach().requires_grad_() for t in (h, lay_out(weight))]
        outputs = warpsmith.linear_log_prob(*leaves, target)
        results.append([*(y.detach() for y in outputs), *torch.autograd.grad(sum(y.sum() for y in outputs), leaves)])
    torch.testing.assert_close(*results)  # a product may take another path for such strides


def problem(dtype=FP32, rows=50, width=16, classes=33, device="cpu"):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=g).to(device, dtype)
    weight = torch.randn(classes, width, generator=g).to(device, dtype)
    return hidden, weight, torch.randint(0, classes, (rows,), generator=g).to(device)


def gradients(fn, hidden, weight, *args, use=(0, 1, 2), **options):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    outputs = fn(*leaves, *args, **options)
    total = sum((i + 1) * (outputs[i].square()).sum() for i in use)
    return torch.autograd.grad(total, leaves)


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
def test_the_cpu_keeps_logits_that_fit_where_gradients_are_recorded(options, leaf, kept):
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


@pytest.mark.parametrize("bias", [torch.arange(66.0)[::2] / 30, torch.ones(1).expand(33), torch.arange(34.0)[1:]])
def test_strided_biases(bias):
    hidden, weight, target = problem()
    found = warpsmith.linear_log_prob(hidden, weight, target, bias)
    expected = warpsmith.linear_log_prob(hidden, weight, target, bias.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


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
