"""softmax and log_softmax under the law, and torch's results: infinities, dtypes, its function, its samples."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith import reference
from warpsmith.testing import Case, op_tests, sim

from tests.dispatched import Dispatched
from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = ("softmax", "log_softmax")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INF, NAN = float("inf"), float("nan")

CASES = [
    *(Case((7, width), dtype)
      for width in (1, 2, 7, 8, 33, 128, 257, 1000, 1024, 1025, 2049, 4099) for dtype in (BF16, FP32)),
    *(Case((7, width), FP16) for width in (1, 8, 257, 2060)),
    *(Case((3, 4, width), FP64) for width in (1, 33, 256)),
    *(Case((3, width), dtype, options={"to": FP32}) for width in (5, 64, 300, 2056, 4097) for dtype in (BF16, FP16)),
    *(Case((5, 300), dtype, options={"std": 1e4}) for dtype in (FP32, BF16)),
    Case((5, 300), FP32, options={"mean": 1e4, "std": 1.0}),
    Case((40,), FP32),
    Case((2, 3, 5, 64), BF16),
    Case((600, 12), FP32),
    *(Case((1, width), BF16) for width in (28_009, 108_008)),  # of clusters
    Case((1, 14_001), FP32),
    Case((1, 262_144), BF16),  # read twice as code of sm_80
]  # fmt: skip


def inputs(case, rng):
    x = rng.normal(case.shape, std=case.options.get("std", 2.0), mean=case.options.get("mean", 0.0))
    return {"x": x, "dtype": case.options.get("to")}


def floor(case):
    n, read = torch.Size(case.shape).numel(), case.dtype.itemsize
    written = case.options.get("to", case.dtype).itemsize
    return {"forward": n * (read + written), "backward": n * (2 * written + read)}


def bytes_beside(case, given):
    """Rows that do not fit are read twice."""
    rows, columns = torch.Size(case.shape[:-1]).numel(), case.shape[-1]
    found = {}
    for direction, dtype, tensors in (("forward", case.dtype, 1), ("backward", case.options.get("to", case.dtype), 2)):
        problem = {"rows": rows, "columns": columns, "dtype": str(dtype).removeprefix("torch.")}
        plan = sim.plan("softmax", **problem, aligned=rows == 1 or columns * dtype.itemsize % 16 == 0)[direction]
        found[direction] = (rows * columns * dtype.itemsize * tensors * (plan["kernel"] == "looped"), 0)
    return found


def some_columns(draw, st, case):
    """Of one or two columns a gradient is all cancellation."""
    to = draw(st.sampled_from(({}, {"to": FP32}))) if case.dtype in (BF16, FP16) else {}
    return case.but(shape=(*case.shape[:-1], max(4, case.shape[-1])), options=to)


def spec(name):
    theirs = getattr(torch, name)
    return op_spec(
        name=name,
        baseline=lambda x, dtype: theirs(x, -1, dtype) if x.dim() else reference.softmax(x, dtype=dtype),
        oracle=lambda case, x, dtype: getattr(reference, name)(x),
        inputs=inputs,
        cases=CASES,
        differentiable=("x",),
        outputs=("y",),
        batched=("x",),
        gradcheck_cases=[Case((3, 5), FP64)],
        double_backward=True,
        func_transforms=True,
        edge_steps=2,  # the backward works from the rounded result
        redraw=some_columns,
        random_cases=2000,
        bad_inputs=[NO_FLOAT64_ON_CUDA],
        floor_bytes=floor,
        bytes_beside=bytes_beside,
        bytes_cases=CASES,
        sim_elements=262_144,
    )  # fmt: skip


TestSoftmax = op_tests(spec("softmax"))
TestLogSoftmax = op_tests(spec("log_softmax"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [4, 2_100])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_infinities_and_nan_are_torchs(name, dtype, columns, device):
    rows = [[-INF] * 4, [INF, 1, 2, -INF], [NAN, 1, 2, 3], [-INF, 1, 2, 3], [INF] * 4, [-INF, NAN, -INF, -INF]]
    x = torch.tensor(rows).repeat(1, columns // 4).to(dtype).to(device).requires_grad_()
    found, expected = getattr(warpsmith, name)(x), getattr(torch, name)(x, -1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    dy = torch.linspace(-1, 1, x.numel(), device=device).view_as(x).to(dtype)
    grads = (torch.autograd.grad(y, x, dy)[0] for y in (found, expected))
    torch.testing.assert_close(*grads, equal_nan=True, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [72, 2_104])
def test_a_gradient_that_lies_elsewhere_is_read_all_the_same(name, columns, device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, columns, generator=g).to(device).to(BF16).requires_grad_()
    dy = torch.randn(3, columns + 3, generator=g).to(device).to(BF16)[:, 3:]
    y = getattr(warpsmith, name)(x)
    grads = (torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for upstream in (dy, dy.contiguous()))
    assert torch.equal(*grads)


@pytest.mark.skipif(not sim.is_loaded(), reason="no simulated kernels in this process (--sim)")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_rows_longer_than_the_shared_memory(name, dtype):
    """Maxima that grow along the row: sums are rescaled."""
    x = (torch.linspace(-30, 9, 40_001).repeat(2, 1) + torch.tensor([[0.0], [100.0]])).to(dtype).requires_grad_()
    with sim.machine(shared_bytes=4 << 10):
        y = getattr(warpsmith, name)(x)
        (dx,) = torch.autograd.grad(y, x, x.detach().cos())
    exact = x.detach().double().requires_grad_()
    expected = getattr(torch, name)(exact, -1)
    (expected_dx,) = torch.autograd.grad(expected, exact, x.detach().cos().double())
    tolerance = 4 * torch.finfo(dtype).eps
    for found, right in ((y, expected), (dx, expected_dx)):
        assert ((found.double() - right).abs() <= tolerance * right.abs().amax()).all()


@pytest.mark.not_on_sim("which op torch's function calls")
@pytest.mark.parametrize("name", NAMES)
def test_torchs_function(name):
    ours, x = getattr(warpsmith.nn.functional, name), torch.randn(2, 3, 5)
    calls = [((-1,), {}, True), ((2,), {}, True), ((-1,), {"dtype": FP64}, False), ((1,), {}, False)]
    for args, options, fused in (*calls, ((), {"dim": 2, "_stacklevel": 5, "dtype": None}, True)):
        with Dispatched() as ops:
            y = ours(x, *args, **options)
        torch.testing.assert_close(y, getattr(F, name)(x, *args, **options))
        assert bool(ops.calls) == fused
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours(x)
    assert "Implicit dimension" in str(caught[0].message) and caught[0].filename == __file__
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="Dimension out of range"):
            ours(x, wrong)
