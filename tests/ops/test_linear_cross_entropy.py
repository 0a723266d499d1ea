"""linear_cross_entropy under the law, and what its losses are: ignored rows, labels, biases, stats."""

from __future__ import annotations

import math

import pytest
import torch
import warpsmith
from warpsmith.reference.linear_cross_entropy import linear_cross_entropy as reference
from warpsmith.testing import BadInput, Case, OpSpec, bitwise_equal, op_tests

from .linear_losses import BF16, DTYPES, FP16, FP32, FP64, IGNORED, SMALL_CHUNK, gradients, on_both, problem

# Not the weight: all of its rows alike make the gradient of hidden zero but for rounding, so that the law would compare
# two draws of noise. test_an_expanded_weight has what it must be instead: as good as its copy.
EXPANDED = ("hidden",)


def inputs(case, rng):
    width, classes = case.shape[-1], case.options.get("classes", 37)
    rows = torch.Size(case.shape[:-1]).numel()
    target = rng.integers((rows,), 0, classes)
    target[torch.arange(rows) % 4 == 3] = IGNORED
    options = {k: v for k, v in case.options.items() if k not in ("classes", "bias", "class_weight")}
    weighted = case.options.get("class_weight")
    return {
        "hidden": rng.normal(case.shape),
        "weight": rng.normal((classes, width), std=1.5 / max(width, 1) ** 0.5),
        "target": target.view(case.shape[:-1]),
        "bias": rng.normal((classes,)) if case.options.get("bias", True) else None,
        "class_weight": rng.uniform((classes,), 0.2, 2.0) if weighted else None,
        **options,
    }


def but(**changes):
    return lambda good: {**good, **{k: change(good) for k, change in changes.items()}}


EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "class_weight": True}
REDUCED_CASES = [
    *(Case((6, 24), dtype) for dtype in DTYPES),
    *(Case((3, 5, 24), dtype, options={"classes": c}) for dtype in (BF16, FP32) for c in (1, 2, 8, 257)),
    *(Case((50, 32), dtype, options={"classes": 1025, "bias": False}) for dtype in (BF16, FP32, FP16)),
    *(Case((50, 32), dtype, options=EVERYTHING) for dtype in DTYPES),
    *(Case((50, 32), dtype, options={"reduction": "sum"}) for dtype in DTYPES),
    *(Case((50, 32), dtype, options={"max_chunk_bytes": SMALL_CHUNK}) for dtype in DTYPES),
    *(Case((50, 32), dtype, options={"max_chunk_bytes": SMALL_CHUNK, **EVERYTHING}) for dtype in (BF16, FP32)),
    *(Case((50, 32), dtype, options={"dw_dtype": FP32}) for dtype in (BF16, FP16)),
    *(Case((50, 32), dtype, options={"dw_dtype": dtype}) for dtype in (BF16, FP16)),
    *(Case((50, 32), FP32, options={key: EVERYTHING[key]}) for key in EVERYTHING),
    Case((24,), FP32),
    Case((300, 16), FP32, options={"classes": 50}),
]
ROWS_CASES = [
    case.but(options={**case.options, "reduction": "none"})
    for case in REDUCED_CASES
    if case.options.get("reduction") is None and "dw_dtype" not in case.options
]


def forward_arguments(good):
    first = (good[n] for n in ("hidden", "weight", "target", "bias", "class_weight"))
    options = (IGNORED, good.get("reduction", "mean"), 0.0, 0.0, 0.0, False, True, 0, None, None)
    return *first, *options, True, True, True


def rows_backward_arguments(good):
    rows = torch.ones(good["target"].shape, device=good["hidden"].device)
    first = (good[n] for n in ("hidden", "weight", "target", "bias", "class_weight"))
    return rows, *first, IGNORED, 0.0, 0.0, 0.0, 0, None, True, True, True


def main_grad_arguments(good):
    *first, _, _, _, _ = rows_backward_arguments(good)
    return *first[:6], torch.zeros(good["weight"].shape, device=rows_device(good)), *first[6:], True, True


def rows_device(good):
    return good["hidden"].device


def factor(good):
    return torch.full((), 2.0, device=rows_device(good))


OPS = torch.ops.warpsmith
BAD = [
    BadInput("integers", but(hidden=lambda g: g["hidden"].int()), "hidden: expected float32.*got int32"),
    BadInput("scalar", but(hidden=lambda g: g["hidden"].sum()), "hidden: expected at least one dimension"),
    BadInput("weight dtype", but(weight=lambda g: g["weight"].half()), "weight: expected bfloat16, got float16"),
    BadInput("weight width", but(weight=lambda g: g["weight"][:, 1:]), r"weight: expected shape \(V, 24\)"),
    BadInput("no classes", but(weight=lambda g: g["weight"][:0]), "weight: expected shape.*with V >= 1, got"),
    BadInput("meta weight", but(weight=lambda g: g["weight"].to("meta")), "weight: expected a", fake=False),
    BadInput("target dtype", but(target=lambda g: g["target"].int()), "target: expected int64, got int32"),
    BadInput("target shape", but(target=lambda g: g["target"][1:]), r"target: expected shape \(6\), got \(5\)"),
    BadInput("bias shape", but(bias=lambda g: g["bias"][1:]), r"bias: expected shape \(37\), got \(36\)"),
    BadInput("bias dtype", but(bias=lambda g: g["bias"].float()), "bias: expected bfloat16, got float32"),
    BadInput("class weight shape", but(class_weight=lambda g: g["weight"][:5, 0].float()),
             r"class_weight: expected shape \(37\), got \(5\)"),
    BadInput("class weight dtype", but(class_weight=lambda g: g["weight"][:, 0].int()),
             "class_weight: expected float32.*got int32"),
    BadInput("half class weight", but(class_weight=lambda g: g["weight"][:, 0].half()),
             "class_weight: expected bfloat16 or float32, got float16"),
    BadInput("learned class weight", but(class_weight=lambda g: torch.nn.Parameter(g["weight"][:, 0].float())),
             "class_weight: expected a tensor without gradient", fake=False),
    BadInput("label", but(target=lambda g: g["target"].clone().fill_(37)),
             r"target: expected classes in \[0, 37\) or ignore_index -100, got 37 at position 0", fake=False,
             devices=("cpu",)),
    BadInput("checked label", but(target=lambda g: g["target"].clone().fill_(-7), check_labels=lambda g: True),
             "target: expected classes.*got -7 at position 0", fake=False),
    BadInput("reduction", but(reduction=lambda g: "avg"), "reduction: expected none, mean or sum, got avg"),
    *(BadInput(f"label smoothing {v}", but(label_smoothing=lambda g, v=v: v),
               "label_smoothing: expected a number from 0 to 1") for v in (-0.1, 1.1, math.nan)),
    *(BadInput(f"{name} {v}", but(**{name: lambda g, v=v: v}), f"{name}: expected a finite number >= 0, got {v}")
      for name in ("z_loss", "softcap") for v in (-1.0, math.nan, math.inf)),
    BadInput("chunk", but(max_chunk_bytes=lambda g: 0), "max_chunk_bytes: expected an integer >= 1, got 0"),
    BadInput("dw dtype", but(dw_dtype=lambda g: FP16), "dw_dtype: expected bfloat16 or float32, got float16"),
    BadInput("main grad dtype", but(main_grad=lambda g: g["weight"].detach().clone()),
             "main_grad: expected float32, got bfloat16"),
    BadInput("main grad shape", but(main_grad=lambda g: g["weight"].detach()[1:].float()),
             r"main_grad: expected shape \(37, 24\), got \(36, 24\)"),
    BadInput("main grad strides", but(main_grad=lambda g: g["weight"].detach().float().t().contiguous().t()),
             "main_grad: expected a contiguous tensor"),
    BadInput("main grad device", but(main_grad=lambda g: g["weight"].float().to("meta")), "main_grad: expected a",
             fake=False),
]  # fmt: skip

SPEC = OpSpec(
    name="linear_cross_entropy",
    op=warpsmith.linear_cross_entropy,
    reference=reference,
    inputs=inputs,
    cases=REDUCED_CASES,
    differentiable=("hidden", "weight", "bias"),
    outputs=("loss",),
    laid_out=("hidden", "weight"),
    expanded=EXPANDED,
    gradcheck_cases=[
        Case((5, 4), FP64, options={"classes": 5}),
        Case((5, 3), FP64, options={"classes": 7, "max_chunk_bytes": 128, **EVERYTHING}),
        Case((5, 4), FP64, options={"classes": 5, "bias": False, "reduction": "sum"}),
    ],
    traced="warpsmith::linear_cross_entropy",
    autocast=lambda good, dtype: (torch.float32,),
    opcheck={
        OPS.linear_cross_entropy.default: forward_arguments,
        OPS.linear_cross_entropy_forward.default: forward_arguments,
        OPS.linear_cross_entropy_scaled.default: lambda good: (good["weight"].float(), factor(good), None, BF16),
        OPS.linear_cross_entropy_scale_.default: lambda good: (good["weight"].clone(), factor(good), factor(good)),
        OPS.linear_cross_entropy_add_.default: lambda good: (
            *(torch.ones(good["weight"].shape, device=rows_device(good)), good["weight"].clone()),
            *(factor(good), None),
        ),
    },
    bad_inputs=BAD,
    floor_bytes=lambda case: dict.fromkeys(("forward", "backward"), 2 * torch.Size(case.shape).numel()),
)
ROWS_SPEC = OpSpec(
    name="linear_cross_entropy",
    op=lambda **kw: warpsmith.linear_cross_entropy(**{"reduction": "none", **kw}),
    reference=lambda **kw: reference(**{"reduction": "none", **kw}),
    inputs=inputs,
    cases=ROWS_CASES,
    differentiable=("hidden", "weight", "bias"),
    outputs=("loss",),
    laid_out=("hidden", "weight"),
    expanded=EXPANDED,
    gradcheck_cases=[
        Case((5, 4), FP64, options={"classes": 5}),
        Case((5, 3), FP64, options={"classes": 7, "max_chunk_bytes": 128, **EVERYTHING}),
    ],
    traced="warpsmith::linear_cross_entropy_rows",
    autocast=lambda good, dtype: (torch.float32,),
    opcheck={
        OPS.linear_cross_entropy_rows.default: lambda good: forward_arguments({**good, "reduction": "none"}),
        OPS.linear_cross_entropy_rows_backward.default: rows_backward_arguments,
        OPS.linear_cross_entropy_rows_backward_main_grad.default: main_grad_arguments,
    },
)

TestReduced = op_tests(SPEC)
TestRows = op_tests(ROWS_SPEC)


@on_both
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("expanded", ["weight", "both"])
def test_an_expanded_weight(device, dtype, reduction, expanded):
    hidden, weight, target = problem(dtype, rows=6, width=24, classes=37, device=device)
    results = []
    for lay_out in (lambda t: t[:1].expand_as(t), lambda t: t[:1].expand_as(t).contiguous()):
        h = lay_out(hidden) if expanded != "weight" else hidden
        leaves = [t.detach().requires_grad_() for t in (h, lay_out(weight))]
        loss = warpsmith.linear_cross_entropy(*leaves, target, reduction=reduction)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
    torch.testing.assert_close(*results)  # a product may take another path for such strides


@on_both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_ignored_rows_have_gradients_of_exact_zeros(dtype, reduction, device):
    hidden, weight, target = problem(dtype, device=device)
    found, _ = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction, z_loss=0.1)
    assert not found[target == IGNORED].any()
    assert found[target != IGNORED].any(-1).all()


@on_both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_all_rows_ignored_is_as_in_torch(dtype, reduction, device):
    hidden, weight, target = problem(dtype, device=device)
    target.fill_(IGNORED)
    plain = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), target, reduction=reduction)
    loss = warpsmith.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    torch.testing.assert_close(loss, plain, equal_nan=True)
    found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction)
    assert not any(g.any() for g in found)


@pytest.mark.parametrize("bias", [torch.arange(66.0)[::2] / 30, torch.ones(1).expand(33), torch.arange(34.0)[1:]])
def test_strided_biases(bias):
    hidden, weight, target = problem()
    found = warpsmith.linear_cross_entropy(hidden, weight, target, bias)
    expected = warpsmith.linear_cross_entropy(hidden, weight, target, bias.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction, device):
    hidden, weight, target = problem(rows=0, device=device)
    plain = torch.nn.functional.cross_entropy(hidden @ weight.t(), target, reduction=reduction)
    loss = warpsmith.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    torch.testing.assert_close(loss, plain, equal_nan=True)
    found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction)
    assert found[0].shape == (0, 16)
    assert bitwise_equal(found[1], torch.zeros(33, 16, device=device))


@on_both
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_stats(reduction, device):
    hidden, weight, target = problem(device=device)
    leaf = weight.clone().requires_grad_()
    options = {"reduction": reduction, "max_chunk_bytes": 2000}
    loss, stats = warpsmith.linear_cross_entropy(hidden, leaf, target, return_stats=True, **options)
    expected = reference(hidden, weight, target, reduction=reduction, return_stats=True)
    torch.testing.assert_close((loss.detach(), *stats), expected)
    assert loss.requires_grad
    assert not any(t.requires_grad for t in stats)
    plain = warpsmith.linear_cross_entropy(hidden, leaf, target, **options)
    assert bitwise_equal(loss.detach(), plain.detach())


def test_under_autocast_gradients_reach_float32_parameters():
    hidden, weight, target = problem()
    with torch.autocast("cpu", BF16):
        found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target)
    by_hand = gradients(warpsmith.linear_cross_entropy, hidden.bfloat16(), weight.bfloat16(), target)
    assert all(bitwise_equal(a, b.float()) for a, b in zip(found, by_hand, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("label", [33, -1, 2**40, -(2**40)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_out_of_range_are_nan_on_cuda(label, reduction):
    hidden, weight, target = problem(BF16, device="cuda")
    target[7] = label
    loss = warpsmith.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    assert (loss if reduction == "mean" else loss[7]).isnan()
