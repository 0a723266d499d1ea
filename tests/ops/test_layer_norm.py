"""layer_norm under the law, and what only it has: torch's function in every form, hard rows, the plan."""

from __future__ import annotations

import pytest
import torch
import warpsmith
from warpsmith.reference.layer_norm import layer_norm as reference
from warpsmith.testing import BadInput, Case, OpSpec, measure, op_tests

from tests.ops.norm_cases import BF16, FP16, FP32, FP64, but, cases_without_residual


def inputs(case, rng):
    columns = case.shape[-1]
    affine = case.options.get("affine", "weight and bias")
    weight = rng.normal((columns,), mean=1.0, std=0.3) if "weight" in affine else None
    bias = rng.normal((columns,)) if "bias" in affine else None
    return {"x": rng.normal(case.shape, mean=0.5), "weight": weight, "bias": bias, "eps": 1e-5}


def torch_layer_norm(x, weight, bias, eps):
    """Plain PyTorch as users have it: the native op, in the dtypes that it takes."""
    affine = weight if weight is not None else bias
    if affine is not None and affine.dtype != x.dtype:
        return reference(x, weight, bias, eps)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def arguments(good):
    return good["x"], good["weight"], good["bias"], good["eps"]


CASES = cases_without_residual(
    {"weight": FP32, "bias": FP32},
    *(Case((6, 768), dtype, options={"affine": "none"}) for dtype in (BF16, FP32, FP64)),
    *(Case((6, 768), dtype, options={"affine": "weight"}) for dtype in (BF16, FP32)),
    *(Case((6, 768), dtype, options={"affine": "bias"}) for dtype in (BF16, FP32)),
)

SPEC = OpSpec(
    name="layer_norm",
    op=warpsmith.layer_norm,
    reference=reference,
    baseline=torch_layer_norm,
    inputs=inputs,
    cases=CASES,
    differentiable=("x", "weight", "bias"),
    outputs=("y",),
    laid_out=("x",),
    batched=("x",),
    gradcheck_cases=[Case((3, 5), FP64), Case((2, 4), FP64, options={"affine": "none"})],
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::layer_norm",
    opcheck={
        torch.ops.warpsmith.layer_norm.default: arguments,
        torch.ops.warpsmith.layer_norm_forward.default: arguments,
        torch.ops.warpsmith.layer_norm_inference.default: arguments,
        torch.ops.warpsmith.layer_norm_backward.default: lambda good: (
            torch.ones_like(good["x"]),
            good["x"],
            good["weight"],
            good["bias"],
            torch.zeros(good["x"].shape[:-1].numel(), device=good["x"].device),
            torch.ones(good["x"].shape[:-1].numel(), device=good["x"].device),
            True,
            True,
            True,
        ),
    },
    bad_inputs=[
        BadInput("integers", but(x=lambda g: g["x"].int()), r"x: expected float32.*got int32"),
        BadInput("scalar", but(x=lambda g: g["x"].sum()), "x: expected at least one dimension"),
        BadInput("short weight", but(weight=lambda g: g["weight"][:-1]), r"weight: expected shape \(\d+\), got"),
        BadInput("matrix bias", but(bias=lambda g: g["bias"][None]), r"bias: expected shape \(\d+\), got"),
        BadInput("weight dtype", but(weight=lambda g: g["weight"].half()),
                 "weight: expected bfloat16 or float32, got float16"),
        BadInput("bias beside a weight", but(bias=lambda g: g["bias"].float()),
                 "bias: expected bfloat16, got float32"),
        BadInput("bias alone", but(weight=lambda g: None, bias=lambda g: g["bias"].half()),
                 "bias: expected bfloat16 or float32, got float16"),
        BadInput("meta weight", but(weight=lambda g: g["weight"].to("meta")), "weight: expected a", fake=False),
        BadInput("meta bias", but(bias=lambda g: g["bias"].to("meta")), "bias: expected a", fake=False),
        BadInput("negative eps", but(eps=lambda g: -1.0), r"eps: expected a number >= 0, got -1", fake=False),
        BadInput("nan eps", but(eps=lambda g: float("nan")), r"eps: expected a number >= 0, got nan", fake=False),
        BadInput("float64", but(x=lambda g: g["x"].double(), weight=lambda g: g["weight"].double()),
                 "x: expected float32, float16 or bfloat16 on CUDA, got float64", fake=False, devices=("cuda",)),
        BadInput("string", but(x=lambda g: "x"), "", error=RuntimeError, fake=False),
    ],
    floor_bytes=lambda case: {
        "forward": 2 * case.dtype.itemsize * torch.Size(case.shape).numel(),
        "backward": 3 * case.dtype.itemsize * torch.Size(case.shape).numel(),
    },
)  # fmt: skip

TestLayerNorm = op_tests(SPEC)


def results(function, x, weight, bias, dy, eps=1e-5):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves, eps)
    return {"y": y.detach(), **dict(zip(("x", "weight", "bias"), torch.autograd.grad(y, leaves, dy), strict=True))}


HARD_ROWS = {
    "large": lambda x: 1e4 * x,
    "large mean": lambda x: x + 1e4,
    "mean that dwarfs the variance": lambda x: 1e-2 * x + 1e4,
    "one outlier": lambda x: torch.where(torch.arange(x.shape[-1], device=x.device) == 3, 1e4, 1e-3 * x),
    "almost constant": lambda x: 3 + 2**-7 * (torch.arange(x.shape[-1], device=x.device) == 1) + 0 * x,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("rows", HARD_ROWS)
def test_hard_rows_obey_the_error_law(rows, dtype, device):
    g = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(4, 1000, generator=g).to(device) for _ in range(2))
    weight, bias = (torch.randn(1000, generator=g).to(dtype).to(device) for _ in range(2))
    x, dy = HARD_ROWS[rows](x).to(dtype), dy.to(dtype)
    ours = results(warpsmith.layer_norm, x, weight, bias, dy)
    plain = results(torch_layer_norm, x, weight, bias, dy)
    exact = results(reference, *(t.cpu().double() for t in (x, weight, bias, dy)))
    errors = [measure(name, ours[name], exact[name], plain[name]) for name in exact]
    assert all(e.ok for e in errors), "; ".join(map(str, errors))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", [1, 8, 1000, 4096, 100000])
@pytest.mark.parametrize("value", [0.0, 3.0, -1024.0])
def test_a_constant_row_becomes_the_bias(value, columns, device):
    """Exactly, for numbers of few bits: their sums have no rounding error in any order, so the mean has none."""
    x = torch.full((2, columns), value, device=device)
    bias = torch.randn(columns, device=device)
    assert torch.equal(warpsmith.layer_norm(x, torch.ones_like(bias), bias), bias.expand(2, -1))


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    tensors = torch.randn(4096, 200), torch.randn(200), torch.randn(200), torch.randn(4096, 200)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results(warpsmith.layer_norm, *tensors)
        torch.set_num_threads(2)
        two = results(warpsmith.layer_norm, *tensors)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_rows_at_one_stride_are_not_copied():
    x = torch.randn(6, 5, 96)[..., 8:72]
    x.requires_grad_()
    torch.testing.assert_close(warpsmith.layer_norm(x), reference(x))
    assert warpsmith.layer_norm(x).is_contiguous()


def test_gradients_that_are_not_wanted_are_not_computed():
    x, weight, bias = torch.randn(4, 8), torch.ones(8), torch.zeros(8)
    dx, dweight, dbias = torch.ops.warpsmith.layer_norm_backward(
        x, x, weight, bias, torch.zeros(4), torch.ones(4), False, False, True
    )
    assert dx.numel() == dweight.numel() == 0
    torch.testing.assert_close(dbias, x.sum(0))
