"""group_norm under the law in NHWC, and what only it has: torch's layouts and refusals, long groups, sets of blocks."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.reference.group_norm import group_norm as reference
from warpsmith.testing import Case, op_tests, sim
from warpsmith.testing.law import measure
from warpsmith.testing.sim import is_loaded

from tests.dispatched import Dispatched
from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = {"weight": FP32, "bias": FP32}


def inputs(case, rng):
    """x is (N, ..., C): the harness lays out rows of channels, as they lie in channels_last."""
    channels, o = case.shape[-1:], case.options
    affine = o.get("affine", "weight and bias")
    return {
        "x": rng.normal(case.shape, mean=o.get("mean", 0.3), std=o.get("std", 1.0)),
        "num_groups": o.get("groups", 1),
        "weight": rng.normal(channels, mean=1.0, std=0.3) if "weight" in affine else None,
        "bias": rng.normal(channels) if "bias" in affine else None,
        "activation": o.get("activation"),
    }


def of_pixels(function):
    @functools.wraps(function)
    def call(x, **others):
        return function(x if x.dim() < 2 else x.movedim(-1, 1), **others).movedim(1, -1)

    return call


def plain(x, num_groups, weight, bias, activation):
    """Plain PyTorch as users have it, in one dtype; what it refuses is the reference's, and gradients of parameters
    alone: on the CPU torch 2.13 crashes there where channels are the last in memory."""
    learned = any(t is not None and t.requires_grad for t in (weight, bias))
    if (
        0 in x.shape
        or (learned and not x.requires_grad)
        or any(t is not None and t.dtype != x.dtype for t in (weight, bias))
    ):
        return reference(x, num_groups, weight, bias, activation=activation)
    if weight is None and bias is not None:  # whose gradient torch then refuses
        weight = torch.ones_like(bias)
    y = F.group_norm(x, num_groups, weight, bias)
    return F.silu(y) if activation else y


SILU = {"activation": "silu"}
CASES = [
    *(Case((3, 4, 5, channels), dtype, options={"groups": groups, **o})
      for channels, groups in ((8, 2), (16, 16), (33, 3), (64, 1), (40, 4), (320, 32)) for dtype in (BF16, FP32)
      for o in ({}, SILU)),
    *(Case((3, 4, 5, 24), FP16, options={"groups": 3, **o}) for o in ({}, SILU)),
    *(Case((2, 3, 3, 12), FP64, options={"groups": groups, **o}) for groups in (1, 4) for o in ({}, SILU)),
    *(Case((2, 3, 7, 24), dtype, dtypes=WIDE, options={"groups": 2, **SILU}) for dtype in (BF16, FP16)),
    *(Case((2, 3, 7, 24), dtype, options={"groups": 2, "affine": affine, **SILU})
      for dtype in (BF16, FP32) for affine in ("none", "weight", "bias")),
    Case((70, 24), FP32, options={"groups": 2}),
    Case((2, 2, 3, 5, 16), FP32, options={"groups": 4, **SILU}),
    Case((2, 31, 29, 40), BF16, options={"groups": 4, **SILU}),  # turns
    Case((2, 9, 40, 16), FP32, options={"groups": 2}),
    Case((3, 4, 5, 64), FP32, options={"groups": 8, "mean": 1e3}),
    Case((3, 4, 5, 64), FP32, options={"groups": 8, "std": 1e-3, "mean": 10.0}),
    Case((2, 3, 2, 2056), FP32, options={"groups": 1, **SILU}),  # more vectors than threads
    Case((2, 2, 2, 2310), BF16, options={"groups": 2}),
    Case((2, 3, 2, 1000), BF16, options={"groups": 8}),  # groups of 125: a vector lies in two of them
    Case((2, 3, 2, 264), BF16, options={"groups": 8, **SILU}),
]  # fmt: skip


def floor(case):
    """Each tensor once."""
    size = case.dtype.itemsize * torch.Size(case.shape).numel()
    return {"forward": 2 * size, "backward": 3 * size}


def bytes_beside(case, given):
    """Both directions read what they read twice, and two sums of each group, which each block of the first pass writes
    and each of the second reads of all blocks of its range. Each thread reads its channels' parameters once, backward
    with the statistics and in both passes. A block writes two sums of each channel, which are read once."""
    samples, channels, itemsize = case.shape[0], case.shape[-1], case.dtype.itemsize
    pixels, groups = torch.Size(case.shape[1:-1]).numel(), given["num_groups"]
    kinds = {"samples": samples, "pixels": pixels, "channels": channels, "groups": groups}
    plan = sim.plan("group_norm", **kinds, dtype=str(case.dtype).removeprefix("torch."))
    size = itemsize * samples * pixels * channels

    def met(kind):
        blocks = plan[kind]["set"] * plan[kind]["tiles"]
        written = 16 * samples * groups * blocks
        return written * blocks, written

    def of_threads(kind, bytes_of_channel, all_threads):
        of, blocks = plan[kind], samples * plan[kind]["set"]
        side = of["threads"] // of["threads_a_pixel"]
        threads = of["blocks"] * of["threads"] * of["vector_elems"] if all_threads else blocks * side * channels
        return bytes_of_channel * threads

    weight, bias = (itemsize * (given[n] is not None) for n in ("weight", "bias"))
    of_channel = 8 + weight + bias * (given["activation"] is not None)
    sums = 8 * ((given["weight"] is not None) + (given["bias"] is not None))
    partials = samples * plan["backward"]["set"] * channels
    (read, written), (read_back, written_back) = met("forward"), met("backward")
    read_back += of_threads("backward", of_channel, False) + of_threads("backward", of_channel, True)
    return {
        "forward": (
            size + read + of_threads("forward", weight + bias, True),
            8 * samples * groups + written,
        ),
        "backward": (
            2 * size + sums * partials + read_back,
            16 * partials * (sums > 0) + channels * (weight + bias) + written_back,
        ),
        "x alone": (0, written_back),
    }


def enough_values(draw, st, case):
    """Statistics of few values are all rounding; groups divide the channels that were drawn."""
    shape = case.shape if len(case.shape) > 1 else (1, *case.shape)
    divisors = [d for d in range(1, shape[-1] + 1) if shape[-1] % d == 0 and shape[-1] // d > 1] or [1]
    options = {"groups": draw(st.sampled_from(divisors)), **draw(st.sampled_from(({}, SILU)))}
    return case.but(shape=(shape[0], 8, *shape[1:]), options=options)


raw = torch.ops.warpsmith
SPEC = op_spec(
    name="group_norm",
    op=of_pixels(warpsmith.group_norm),
    reference=of_pixels(reference),
    baseline=of_pixels(plain),
    inputs=inputs,
    cases=CASES,
    differentiable=("x", "weight", "bias"),
    laid_out=("x",),
    expanded=(),
    double_backward=True,
    gradcheck_cases=[Case((2, 2, 2, 4), FP64, options={"groups": 2, **o}) for o in ({}, SILU)],
    redraw=enough_values,
    random_cases=2000,
    one_element=False,
    edge_steps=2,  # the backward works from the rounded mean and rstd
    floor_bytes=floor,
    bytes_beside=bytes_beside,
    bad_inputs=[NO_FLOAT64_ON_CUDA],
)  # fmt: skip

TestGroupNorm = op_tests(SPEC)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_squares_beyond_float32_are_no_infinity(dtype, device):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 16, 700, generator=g).to(dtype), torch.rand(16, generator=g).to(dtype)
    x[0, 3, 350] = torch.finfo(dtype).max
    y = warpsmith.group_norm(x.to(device), 4, weight.to(device)).double().cpu()
    exact = reference(x.double(), 4, weight.double())
    assert ((y - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs().amax()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("apart", [1, 7])  # channels: neighbours are alike, or not at all
def test_silu_far_below_zero_keeps_its_digits(apart, dtype, device):
    weight = (1 + 80 * torch.arange(96).mul(apart).remainder(96) / 96).to(dtype)
    x = torch.tensor([[-1.0], [1.0]]).repeat(1, 1, 96).to(dtype).movedim(-1, 1)
    y = warpsmith.group_norm(x.to(device), 1, weight.to(device), eps=0.0, activation="silu").double().cpu()
    exact = reference(x.double(), 1, weight.double(), eps=0.0, activation="silu")
    torch.testing.assert_close(y, exact, rtol=2 * torch.finfo(dtype).eps * (60 if dtype == FP32 else 1), atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_samples_that_cancel_are_added_in_double(device):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(device)
    weight, bias = (torch.ones(8, device=device, requires_grad=True) for _ in range(2))
    dy = torch.tensor([1e8, -1e8, 3.0, 4.0], device=device)[:, None].expand(4, 8)
    y = warpsmith.group_norm(x, 2, weight, bias)
    assert torch.equal(*torch.autograd.grad(y, bias, dy), torch.full((8,), 7.0, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NCHW", "slice of channels", "misaligned slice"])
def test_layouts_of_torch_give_the_same_bits(layout, device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 5, 3, generator=g).to(device).to(memory_format=torch.channels_last)
    expected = warpsmith.group_norm(x, 4, activation="silu")
    assert expected.is_contiguous(memory_format=torch.channels_last)
    if layout == "NCHW":
        x = x.contiguous()
    else:
        first = 16 if layout == "slice of channels" else 3
        wide = torch.zeros(2, 64, 5, 3, device=device).to(memory_format=torch.channels_last)
        wide[:, first : first + 16] = x
        x = wide[:, first : first + 16]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(warpsmith.group_norm(x, 4, activation="silu"), expected)


@pytest.mark.not_on_sim("torch's samples in float64")
def test_torchs_sample_inputs():
    from torch.testing._internal.common_methods_invocations import op_db

    info, count = next(i for i in op_db if i.name == "nn.functional.group_norm"), 0
    for sample in info.sample_inputs("cpu", FP64, requires_grad=True):
        if sample.kwargs.get("eps", 0) < 0:  # refused
            continue
        given = [sample.input, *sample.args]
        y, expected = (f(*given, **sample.kwargs) for f in (warpsmith.group_norm, F.group_norm))
        torch.testing.assert_close(y, expected)
        learned = [sample.input, *(t for t in sample.kwargs.values() if isinstance(t, torch.Tensor))]
        torch.testing.assert_close(*(torch.autograd.grad(t, learned, t.detach().cos()) for t in (y, expected)))
        count += 1
    assert count > 3


@pytest.mark.not_on_sim("which op torch's function calls")
@pytest.mark.parametrize("pixels", [True, False])
def test_torchs_function_takes_channels_last(pixels):
    x, weight = torch.randn(2, 6, 5, 3), torch.randn(6)
    x = x.to(memory_format=torch.channels_last) if pixels else x
    with Dispatched() as ops:
        y = warpsmith.nn.functional.group_norm(x, 3, weight, eps=1e-3)
    torch.testing.assert_close(y, F.group_norm(x, 3, weight, eps=1e-3))
    assert y.stride() == x.stride() and bool(ops.calls) == pixels


def test_plan_says_how_a_sample_is_shared():
    plan = warpsmith.plan("group_norm", samples=16, pixels=64 * 64, channels=320, groups=32)
    assert plan["forward"]["range_channels"] % 40 == 0 and plan["forward"]["blocks"] >= 0.9 * 2 * 132
    small = warpsmith.plan("group_norm", samples=16, pixels=16 * 16, channels=1280, groups=32)
    assert all(small[kind]["blocks"] >= 0.9 * 2 * 132 for kind in ("forward", "backward"))
    one = warpsmith.plan("group_norm", samples=1, pixels=256 * 256, channels=128, groups=32)["forward"]
    assert one["ranges"] > 1 and one["set"] * one["range_channels"] // 4 <= 1024  # groups whose sums a block reads


SETS = {  # samples, pixels, channels, groups, dtype, multiprocessors: blocks that share a range
    "one_block": (1, 100, 24, 3, FP32, 1, 1),
    "one_range": (1, 9000, 24, 3, FP32, 64, 53),
    "more_blocks_than_parts_of_a_group": (1, 9000, 16, 16, FP32, 64, 35),
    "groups_that_no_vector_divides": (2, 5000, 40, 4, BF16, 16, 16),
    "several_ranges": (1, 4000, 64, 32, FP32, 64, 15),
    "tiles_of_a_group": (2, 300, 1032, 1, FP32, 16, 5),
    "several_waves": (6, 6000, 24, 3, FP32, 8, 5),
}


@pytest.mark.skipif(not is_loaded(), reason="no simulated kernels in this process (--sim)")
@pytest.mark.parametrize("want_x", [True, False])
@pytest.mark.parametrize("sets", [pytest.param(SETS[name], id=f"sim-{name}") for name in SETS])
def test_error_law_of_blocks_of_a_set(sets, want_x):
    samples, pixels, channels, groups, dtype, multiprocessors, blocks = sets
    problem = {"samples": samples, "pixels": pixels, "channels": channels, "groups": groups}
    with sim.machine(multiprocessors=multiprocessors):
        plan = sim.plan("group_norm", **problem, dtype=str(dtype).removeprefix("torch."))
    assert plan["forward"]["set"] == blocks
    g = torch.Generator().manual_seed(0)
    x = torch.randn(samples, pixels, channels, generator=g).to(dtype).movedim(-1, 1)
    weight = torch.rand(channels, generator=g).to(dtype)
    dy = torch.randn(x.shape, generator=g).to(dtype)

    def results(function, dtype=dtype):
        leaves = [t.detach().to(dtype).requires_grad_(w) for t, w in ((x, want_x), (weight, True))]
        y = function(leaves[0], groups, leaves[1], activation="silu")
        return [y, *torch.autograd.grad(y, leaves[not want_x :], dy.to(dtype))]

    exact, plain, first = results(reference, FP64), results(reference), None
    for seed in range(min(sim.SCHEDULES, 4)):
        with sim.machine(multiprocessors=multiprocessors, seed=seed):
            result = results(warpsmith.group_norm)
        first = first or result
        assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True))
    names = ("y", "dx", "dweight") if want_x else ("y", "dweight")
    errors = [measure(*of) for of in zip(names, first, exact, plain, strict=True)]
    assert all(e.ok for e in errors), [str(e) for e in errors]
