"""max_pool2d under the law in NHWC, and equal to torch's: values, ties, NaN, layouts, sizes, what torch's op takes."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.reference.max_pool import max_pool2d as reference
from warpsmith.testing import BadInput, Case, OpSpec, op_tests

from tests.dispatched import Dispatched
from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, raw_ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RESNET = {"kernel_size": 3, "stride": 2, "padding": 1}  # where a case says nothing else
WHOLE = {"kernel_size": 2, "stride": 2, "padding": 0}
CEIL = {"kernel_size": 3, "stride": 2, "padding": 0, "ceil_mode": True}
OTHERS = (
    {"kernel_size": 1, "stride": 1, "padding": 0},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": (2, 4), "stride": (3, 1), "padding": (1, 2)},
    {"kernel_size": (5, 1), "stride": (2, 3), "padding": (2, 0), "ceil_mode": True},
    {"kernel_size": 2, "stride": 5, "padding": 0},  # most pixels are in no window
)


def inputs(case, rng):
    """x is (N, H, W, C): the harness lays out rows of channels, as they lie in channels_last."""
    return {"x": rng.normal(case.shape), **(case.options or RESNET)}


def of_pixels(function):
    @functools.wraps(function)
    def call(x, **others):
        return function(x if x.dim() < 2 else x.movedim(-1, 1), **others).movedim(1, -1)

    return call


CASES = [
    *(Case((2, 9, 10, channels), dtype) for channels in (1, 8, 20, 33) for dtype in (BF16, FP32)),
    *(Case((2, 9, 10, 8), FP16, options=o) for o in (WHOLE, *OTHERS)),
    *(Case((1, 10, 9, 12), FP32, options=o) for o in (WHOLE, *OTHERS)),
    *(Case((2, 8, 11, 16), dtype, options=CEIL) for dtype in (BF16, FP32)),
    *(Case((2, 5, 7, 3), FP64, options=o) for o in (RESNET, *OTHERS)),
    *(Case((1, height, width, 8), BF16) for height, width in ((1, 1), (2, 1), (1, 3), (18, 2), (17, 3))),
    Case((1, 18, 6, 8), BF16, options={**RESNET, "padding": (0, 1)}),
    Case((1, 23, 24, 24), BF16),  # several blocks
]  # fmt: skip


def pairs(option):
    return option if isinstance(option, tuple) else (option, option)


def windows(case):
    """Of rows and of columns, the pixels of x in each window."""
    found, o = [], case.options or RESNET
    for size, k, s, p in zip(case.shape[1:3], *(pairs(o[n]) for n in RESNET), strict=True):
        count = F.max_pool1d(torch.zeros(1, size), k, s, p, ceil_mode=o.get("ceil_mode", False)).shape[1]
        found.append([range(max(0, i * s - p), min(size, i * s - p + k)) for i in range(count)])
    return found


def result_elements(case):
    rows, columns = windows(case)
    return case.shape[0] * case.shape[3] * len(rows) * len(columns)


def floor(case):
    x, y = torch.Size(case.shape).numel() * case.dtype.itemsize, result_elements(case)
    return dict.fromkeys(("forward", "backward"), x + y * case.dtype.itemsize + y)


def bytes_beside(case, given):
    """Forward a thread reads the rows of its windows, one under the other, once; columns that windows share are read
    again. Backward each pixel, or block of 2 x 2 pixels, reads every window that covers it."""
    rows, columns = windows(case)
    o, itemsize, square = case.options or RESNET, case.dtype.itemsize, 0
    if pairs(o["stride"]) == (2, 2) and o["kernel_size"] in (2, 3):
        square = o["kernel_size"]
    together = 4 if square else 1
    read_rows = sum(len(set().union(*rows[i : i + together])) for i in range(0, len(rows), together))
    each = case.shape[0] * case.shape[3]
    forward = each * read_rows * sum(map(len, columns)) * itemsize
    covering = []
    for size, of, p in zip(case.shape[1:3], (rows, columns), pairs(o["padding"]), strict=True):
        if square:
            blocks, reach = (size + p + 1) // 2, (square + 1) // 2
            covering.append(sum(0 <= a - d < len(of) for a in range(blocks) for d in range(reach)))
        else:
            covering.append(sum(map(len, of)))
    backward = each * covering[0] * covering[1] * (itemsize + 1)
    x, y = torch.Size(case.shape).numel() * itemsize, result_elements(case)
    return {
        "forward": (forward - x - y, y),
        "inference": (forward - x - y, 0),
        "backward": (backward - y * itemsize - y, 0),
    }


def images(draw, st, case):
    """Four dimensions, and sizes of windows that fit."""
    shape = (1,) * (4 - len(case.shape)) + case.shape[-4:]
    size, step = (tuple(draw(st.integers(1, n)) for _ in range(2)) for n in (5, 4))
    size = tuple(map(min, size, shape[1:3]))
    usual = st.sampled_from((RESNET, WHOLE if min(shape[1:3]) > 1 else RESNET))
    other = {
        "kernel_size": size,
        "stride": step,
        "padding": tuple(draw(st.integers(0, k // 2)) for k in size),
        "ceil_mode": draw(st.booleans()),
    }
    return case.but(shape=shape, options=draw(st.one_of(usual, st.just(other))))


SPEC = OpSpec(
    name="max_pool2d",
    op=of_pixels(warpsmith.max_pool2d),
    reference=of_pixels(reference),
    inputs=inputs,
    cases=CASES,
    differentiable=("x",),
    laid_out=("x",),
    batched=("x",),
    zero_sizes=False,  # the batch alone may be empty: test_nothing
    double_backward=True,
    traced="warpsmith::max_pool2d",
    gradcheck_cases=[Case((1, 4, 5, 2), FP64, options=o) for o in (RESNET, CEIL, OTHERS[2])],
    redraw=images,
    random_cases=2000,
    opcheck=raw_ops("max_pool2d"),
    floor_bytes=floor,
    bytes_beside=bytes_beside,
    bad_inputs=[
        BadInput("complex", but(x=lambda g: g["x"].to(torch.complex64)), "x: expected float32, float16, bfloat16 or"),
        BadInput("no kernel", but(kernel_size=lambda g: 0), "kernel_size: expected a whole number >= 1, or two, got 0"),
        BadInput("three", but(kernel_size=lambda g: (3, 3, 3)), "kernel_size: expected a whole number >= 1, or two"),
        BadInput("no stride", but(stride=lambda g: 0), "stride: expected a whole number >= 1, or two, got 0"),
        BadInput("half", but(padding=lambda g: 2), "padding: expected at most half of the kernel's size, 1, got 2"),
        BadInput("ceil", but(ceil_mode=lambda g: 1), "ceil_mode: expected True or False", TypeError),
        BadInput("no channels", but(x=lambda g: g["x"][..., :0]), r"x: expected shape \(N, C, H, W\) with C, H and W"),
        BadInput("too small", but(x=lambda g: g["x"][:, :1], padding=lambda g: 0),
                 r"x: expected at least \(3, 3\) pixels with its padding, got"),
        NO_FLOAT64_ON_CUDA,
    ],
)  # fmt: skip

TestMaxPool2d = op_tests(SPEC)


def compare(x, given, function=F.max_pool2d):
    """Values and gradients equal those of torch's CPU kernels bit for bit, zeros' signs included. (torch's CUDA kernel
    for channels_last begins each window at pixel 0 of the image: the gradient of one that is all -inf goes there.)"""
    leaves = [x.detach().requires_grad_(), x.detach().cpu().requires_grad_()]
    y, expected = (f(leaf, **given) for f, leaf in zip((warpsmith.max_pool2d, function), leaves, strict=True))
    dy = torch.randint(-3, 4, y.shape, generator=torch.Generator().manual_seed(1)).to(expected)  # sums are exact
    ours, theirs = (torch.autograd.grad(t, leaf, dy.to(t))[0] for t, leaf in zip((y, expected), leaves, strict=True))
    y, ours = y.cpu(), ours.cpu()
    assert y.shape == expected.shape and torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(*(t.nan_to_num().signbit() for t in (y, expected)))
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("given", [RESNET, WHOLE, CEIL, *OTHERS], ids=str)
def test_equal_to_torch_with_ties_infinities_and_nan(given, dtype, device):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (2, 13, 12, 16), generator=g).to(dtype)  # ties everywhere
    x[torch.rand(x.shape, generator=g) < 0.1] = -0.0
    for lowest in (x[:, 3:9, 2:7, ::3], x[:, :2, :, 1::3], x[:, :, :2, 2::3]):  # whole windows, some beside the padding
        lowest.fill_(float("-inf"))
    x[torch.rand(x.shape, generator=g) < 0.05] = float("inf")
    x[1, 2:12, :, ::2][torch.rand(10, 12, 8, generator=g) < 0.2] = float("nan")
    compare(x.to(device).movedim(-1, 1), given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 7, 8])
@pytest.mark.parametrize("layout", ["NCHW", "slice of channels", "misaligned slice", "every second row", "one image"])
def test_layouts_of_torch_give_the_same_bits(layout, channels, device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 9, 10, generator=g).to(device).to(memory_format=torch.channels_last)
    if layout == "NCHW":
        x = x.contiguous()
    elif layout == "one image":
        x = x[0]
    elif layout == "every second row":
        x = torch.randn(2, channels, 18, 10, generator=g).to(device).to(memory_format=torch.channels_last)[:, :, ::2]
    else:
        first = 16 if layout == "slice of channels" else 3
        wide = torch.zeros(2, 64, 9, 10, device=device).to(memory_format=torch.channels_last)
        wide[:, first : first + channels] = x
        x = wide[:, first : first + channels]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(x, RESNET)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing(device):
    x = torch.empty(0, 3, 8, 8, device=device, requires_grad=True)
    y = warpsmith.max_pool2d(x, 3, 2, 1)
    assert y.shape == (0, 3, 4, 4) and torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [
    {"kernel_size": 3, "dilation": 2}, {"kernel_size": 16, "stride": 1}, {"kernel_size": 2, "stride": None}
], ids=str)  # fmt: skip
def test_what_is_torchs(given, device):
    x = torch.randn(2, 3, 17, 18, device=device).to(memory_format=torch.channels_last)
    with Dispatched() as ops:
        compare(x, given)
    assert bool(ops.calls) == (given["kernel_size"] == 2)


@pytest.mark.not_on_sim("torch's op")
def test_integers_are_torchs():
    x = torch.randint(9, (1, 2, 5, 6))
    assert torch.equal(warpsmith.max_pool2d(x, 2), F.max_pool2d(x, 2))


@pytest.mark.not_on_sim("torch's samples in float64")
def test_torchs_sample_inputs():
    from torch.testing._internal.common_methods_invocations import op_db

    info, count = next(i for i in op_db if i.name == "nn.functional.max_pool2d"), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in info.sample_inputs("cpu", FP64):
            given = {k: v for k, v in sample.kwargs.items() if k != "return_indices"}
            if not sample.kwargs.get("return_indices"):
                compare(sample.input, given)
                count += 1
    assert count > 3


@pytest.mark.not_on_sim("which op torch's function calls")
@pytest.mark.parametrize("pixels", [True, False])
def test_torchs_function_takes_channels_last(pixels):
    x = torch.randn(2, 6, 5, 7)
    x = x.to(memory_format=torch.channels_last) if pixels else x
    with Dispatched() as ops:
        y = warpsmith.nn.functional.max_pool2d(x, 3, 2, padding=1)
    expected, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    assert torch.equal(y, expected) and y.stride() == expected.stride() and bool(ops.calls) == pixels
    assert torch.equal(warpsmith.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1], places)
    with pytest.raises(RuntimeError, match="pad should be at most half"):  # torch's words
        warpsmith.nn.functional.max_pool2d(x, 3, 2, 2)


def test_plan_says_what_a_thread_makes():
    size = {"height": 112, "width": 112, "out_height": 56, "out_width": 56}
    plan = warpsmith.plan("max_pool2d", samples=256, channels=64, **size)
    assert plan["vector_elems"] == 8 and plan["forward"]["pixels_a_thread"] == 4 == plan["backward"]["pixels_a_thread"]
    assert warpsmith.plan("max_pool2d", samples=1, channels=3, **size, stride=1)["backward"]["pixels_a_thread"] == 1
