"""The linear losses under the law, on every layout of their inputs; what else each is has a file of its own."""

from dataclasses import replace

import pytest
import torch
import warpsmith
from warpsmith.reference.linear_loss import linear_cross_entropy as reference
from warpsmith.testing import BadInput, Case, op_tests

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, in_call, op_spec, raw_ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
IGNORED = -100
ON_CUDA = pytest.mark.gpu
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
SMALL_CHUNK = 16 * 64  # bytes: a few rows of logits


def problem(dtype=FP32, rows=50, width=16, classes=33, device="cpu", ignored=True):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=g).to(device, dtype)
    weight = torch.randn(classes, width, generator=g).to(device, dtype)
    target = torch.randint(0, classes, (rows,), generator=g).to(device)
    if ignored:
        target[::5] = IGNORED
    return hidden, weight, target


def gradients(fn, hidden, weight, *args, up=1.0, **options):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    return torch.autograd.grad((fn(*leaves, *args, **options) * up).sum(), leaves)


def peak_bytes(step, leaves):
    """What a step takes on the GPU above what it finds, its gradients included. It runs once before: each thread that
    calls cuBLAS for the first time leaves a workspace of 32 MiB behind, which is torch's."""
    from benchmarks.cells import peak_mb

    step()
    return round(peak_mb(step, leaves) * 1e6)


# Not the weight: all of its rows alike make the gradient of hidden zero but for rounding, so that the law would compare
# two draws of noise. test_an_expanded_weight has what it must be instead: as good as its copy.
EXPANDED = ("hidden",)


def cross_entropy_inputs(case, rng):
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


def log_prob_inputs(case, rng):
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


MANY_CHUNKS = {"classes": 33, "max_chunk_bytes": 8 * 40 * 2}
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "class_weight": True}
REDUCED_CASES = [
    *(Case((6, 24), dtype) for dtype in DTYPES),
    *(Case((3, 5, 24), dtype, options={"classes": c}) for dtype in (BF16, FP32) for c in (1, 2, 8, 257)),
    *(Case((50, 32), dtype, options={"classes": 1025, "bias": False}) for dtype in (BF16, FP32, FP16)),
    *(Case((50, 32), dtype, options=EVERYTHING) for dtype in DTYPES),
    *(Case((50, 32), dtype, options={"reduction": "sum"}) for dtype in DTYPES),
    *(Case((50, 32), dtype, options={"max_chunk_bytes": c}) for c in (1, SMALL_CHUNK) for dtype in DTYPES),
    *(Case((512, 16), dtype, options=MANY_CHUNKS) for dtype in (BF16, FP16)),  # which round a weight's gradient once
    *(Case((50, 32), dtype, options={"max_chunk_bytes": SMALL_CHUNK, **EVERYTHING}) for dtype in (BF16, FP32)),
    *(Case((50, 32), dtype, options={"dw_dtype": FP32}) for dtype in (BF16, FP16)),
    *(Case((50, 32), dtype, options={"dw_dtype": dtype}) for dtype in (BF16, FP16)),
    *(Case((50, 32), FP32, options={key: EVERYTHING[key]}) for key in EVERYTHING),
    Case((24,), FP32),
    Case((300, 16), FP32, options={"classes": 50}),
    Case(
        (300, 16), FP32, options={"classes": 50, "max_chunk_bytes": 150 * 52 * 4}
    ),  # a column's sum of a chunk in slices
]
ROWS_CASES = [
    case.but(options={**case.options, "reduction": "none"})
    for case in REDUCED_CASES
    if case.options.get("reduction") is None and "dw_dtype" not in case.options
]


LOG_PROB_CASES = [
    *(Case((6, 24), dtype) for dtype in (BF16, FP32, FP16, FP64)),
    *(Case((3, 5, 24), dtype, options={"classes": classes}) for dtype in (BF16, FP32) for classes in (1, 2, 8, 257)),
    *(Case((9, 32), dtype, options={"classes": 1025, "bias": False}) for dtype in (BF16, FP32, FP16)),
    *(Case((90, 32), dtype, options={"temperature": 0.7}) for dtype in (BF16, FP32, FP16, FP64)),
    *(Case((90, 32), dtype, options={"temperature": 3.0, "bias": False}) for dtype in (BF16, FP32)),
    *(Case((23, 32), dtype, options={"max_chunk_bytes": SMALL_CHUNK}) for dtype in (BF16, FP32, FP16, FP64)),
    *(Case((23, 32), FP64, options={"max_chunk_bytes": 1, "save_logits": save}) for save in (False, True)),
    Case((512, 16), BF16, options=MANY_CHUNKS),
    *(Case((23, 32), dtype, options={"save_logits": True, "max_chunk_bytes": SMALL_CHUNK}) for dtype in (BF16, FP32)),
    *(Case((40, 64), dtype, options={"save_logits": True, "classes": 300}) for dtype in (BF16, FP32)),
    Case((24,), FP32),
    Case((300, 16), FP32, options={"classes": 50}),
]


NUMBERS = {"none": 0, "mean": 1, "sum": 2}  # of the raw ops


def with_main_grad(**good):
    main_grad = torch.zeros(good["weight"].shape, device=good["hidden"].device)
    return warpsmith.linear_cross_entropy(**good, main_grad=main_grad)


OPS = torch.ops.warpsmith
SHARED_BAD = [
    BadInput("no classes", but(weight=lambda g: g["weight"][:0]), "weight: expected shape.*with V >= 1, got"),
]  # fmt: skip
CROSS_ENTROPY_BAD = [
    BadInput("learned class weight", but(class_weight=lambda g: torch.nn.Parameter(g["weight"][:, 0].float())),
             "class_weight: expected a tensor without gradient", fake=False),
    BadInput("label", but(target=lambda g: g["target"].clone().fill_(37)),
             r"target: expected classes in \[0, 37\) or ignore_index -100, got 37 at position 0", fake=False,
             devices=("cpu",)),
    BadInput("checked label", but(target=lambda g: g["target"].clone().fill_(-7), check_labels=lambda g: True),
             "target: expected classes.*got -7 at position 0", fake=False),
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


def other_classes(draw, st, case):
    classes = draw(st.integers(4, 2 * case.options.get("classes", 37) + 2))
    return case.but(options={**case.options, "classes": classes})


SPEC = op_spec(
    name="linear_cross_entropy",
    draws=4,  # of gradients of the bias, sums of few rows
    inputs=cross_entropy_inputs,
    edges_beside_options=(),  # ignored rows
    cases=REDUCED_CASES,
    differentiable=("hidden", "weight", "bias"),
    outputs=("loss",),
    laid_out=("hidden", "weight"),
    expanded=EXPANDED,
    redraw=other_classes,
    random_cases=700,
    gradcheck_cases=[
        Case((5, 4), FP64, options={"classes": 5}),
        Case((5, 3), FP64, options={"classes": 7, "max_chunk_bytes": 128, **EVERYTHING}),
        Case((5, 4), FP64, options={"classes": 5, "bias": False, "reduction": "sum"}),
    ],
    autocast=lambda good, dtype: (torch.float32,),
    opcheck=raw_ops("linear_cross_entropy", "_scaled", "_scale_")
    | in_call(with_main_grad, OPS.linear_cross_entropy_add_),
    bad_inputs=[*SHARED_BAD, *CROSS_ENTROPY_BAD],
)
ROWS_SPEC = replace(
    SPEC,
    op=lambda **kw: warpsmith.linear_cross_entropy(**{"reduction": "none", **kw}),
    reference=lambda **kw: reference(**{"reduction": "none", **kw}),
    cases=ROWS_CASES,
    gradcheck_cases=SPEC.gradcheck_cases[:2],
    traced="warpsmith::linear_cross_entropy_rows",
    opcheck=raw_ops("linear_cross_entropy_rows")
    | in_call(with_main_grad, OPS.linear_cross_entropy_rows_backward_main_grad),
    bad_inputs=[],
    floor_bytes=None,
)

LOG_PROB_SPEC = op_spec(
    name="linear_log_prob",
    draws=4,  # of gradients of the bias, sums of few rows
    inputs=log_prob_inputs,
    cases=LOG_PROB_CASES,
    differentiable=("hidden", "weight", "bias"),
    outputs=("log_prob", "logsumexp", "entropy"),
    laid_out=("hidden", "weight"),
    expanded=EXPANDED,
    redraw=other_classes,
    random_cases=700,
    gradcheck_cases=[
        Case((3, 4), FP64, options={"classes": 5}),
        Case((4, 3), FP64, options={"classes": 7, "temperature": 0.6, "max_chunk_bytes": 128}),
        Case((2, 4), FP64, options={"classes": 5, "bias": False, "save_logits": True}),
    ],
    autocast=lambda good, dtype: (torch.float32,) * 3,
    bad_inputs=[
        *SHARED_BAD,
        BadInput("label", but(target=lambda g: g["target"].clone().fill_(37)),
                 r"target: expected classes in \[0, 37\), got 37 at position 0", fake=False, devices=("cpu",)),
        BadInput("negative label", but(target=lambda g: g["target"].clone().index_fill_(0, torch.tensor([2]), -1)),
                 "target: expected classes.*got -1 at position 2", fake=False, devices=("cpu",)),
        NO_FLOAT64_ON_CUDA,
    ],
)  # fmt: skip


TestReduced = op_tests(SPEC)
TestRows = op_tests(ROWS_SPEC)
TestLinearLogProb = op_tests(LOG_PROB_SPEC)


@on_both
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("expanded", ["weight", "both"])
@pytest.mark.parametrize("op", ["mean", "none", "log_prob"])
def test_an_expanded_weight(device, dtype, op, expanded):
    hidden, weight, target = problem(dtype, rows=6, width=24, classes=37, device=device, ignored=op != "log_prob")
    results = []
    for lay_out in (lambda t: t[:1].expand_as(t), lambda t: t[:1].expand_as(t).contiguous()):
        h = lay_out(hidden) if expanded != "weight" else hidden
        leaves = [t.detach().requires_grad_() for t in (h, lay_out(weight))]
        if op == "log_prob":
            outputs = warpsmith.linear_log_prob(*leaves, target)
        else:
            outputs = (warpsmith.linear_cross_entropy(*leaves, target, reduction=op),)
        results.append([*(y.detach() for y in outputs), *torch.autograd.grad(sum(y.sum() for y in outputs), leaves)])
    torch.testing.assert_close(*results)  # a product may take another path for such strides
