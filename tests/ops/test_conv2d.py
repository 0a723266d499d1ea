"""conv2d under the law in both layouts, and what only it has: torch's arguments, and its ways."""

import functools

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from torch.testing._internal.common_methods_invocations import op_db
from warpsmith.ops import _conv2d
from warpsmith.reference.conv2d import conv2d as reference
from warpsmith.testing import BadInput, Case, OpSpec, op_tests

from tests.dispatched import Dispatched
from tests.ops.public_calls import but

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LAST = {"memory_format": torch.channels_last}


def inputs(case, rng):
    """x is (N, C, H, W) as the case's shape says; its layouts are the harness's."""
    o = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "activation": None, **case.options}
    given = {k: o[k] for k in ("stride", "padding", "dilation", "groups", "activation")}
    filters, kernel, channels = o.get("filters", 8), o.get("kernel", 3), case.shape[1] // o["groups"]
    weight = rng.normal((filters, channels, kernel, kernel), std=(channels * kernel**2) ** -0.5)
    found = {"x": rng.normal(case.shape), "weight": weight, "bias": rng.normal((filters,)), **given}
    found["bias"] = found["bias"] if o.get("bias", True) else None
    found["residual"] = None
    if o.get("residual"):  # far from 0, where ReLU's derivative is that of the last rounding
        r = rng.normal(F.conv2d(found["x"], weight, None, *list(given.values())[:4]).shape)
        found["residual"] = r + 6 * r.sign()
    return found


def plain(x, weight, bias=None, *geometry, activation=None, residual=None, **named):
    """Plain PyTorch as users have it, in one dtype."""
    y = F.conv2d(x, weight, bias, *geometry, **named)
    y = y if residual is None else y + residual
    return torch.relu(y) if activation == "relu" else F.silu(y) if activation else y


def in_channels_last(function):
    """The function of inputs in channels_last. Its result is, too: torch's convolution of meta tensors forgets it."""

    @functools.wraps(function)
    def call(x, residual=None, **others):
        x, residual = (t if t is None or t.dim() != 4 else t.contiguous(**LAST) for t in (x, residual))
        y = function(x, residual=residual, **others)
        return y.contiguous(**LAST) if y.is_meta else y

    return call


BEHIND = [{"activation": a, "residual": r} for a in (None, "relu", "silu") for r in (False, True)]
CASES = [
    *(Case((2, 6, 7, 5), dtype, options=o) for dtype in (FP32, BF16) for o in BEHIND),
    *(Case((2, 6, 7, 5), BF16, options={"bias": False, **o}) for o in BEHIND[1:]),
    *(Case((2, 4, 7, 5), dtype, options={"activation": "relu", "residual": True, **o})
      for dtype in (FP32, FP16) for o in ({"stride": (2, 1), "padding": 1}, {"padding": "same", "dilation": 2},
                                    {"groups": 2, "filters": 6}, {"kernel": 1, "padding": "valid"})),
    Case((1, 3, 4, 4), FP64, options={"activation": "silu", "residual": True}),
    Case((3, 64, 9, 9), BF16, options={"filters": 72, "activation": "relu", "padding": (1, 0)}),
    Case((3, 33, 9, 9), FP32, options={"filters": 17, "activation": "relu", "residual": True}),
]  # fmt: skip


def geometry(draw, st, case):
    """Channels that groups divide, and pixels enough for the kernel."""
    n, channels, *pixels = (case.shape + (1, 1, 1, 1))[:4]
    groups, kernel = draw(st.sampled_from((1, 2))), draw(st.integers(1, 3))
    o = {"groups": groups, "kernel": kernel, "filters": 2 * draw(st.integers(1, 9))}
    o |= {
        "dilation": draw(st.integers(1, 2)) if kernel > 1 else 1,  # torch 2.13, the measure, crashes
        "padding": draw(st.sampled_from((0, 2, (1, 0), "same", "valid"))),
    }
    o |= {"stride": 1 if o["padding"] == "same" else draw(st.sampled_from((1, 2, (1, 3))))}
    o |= {"bias": draw(st.booleans()), **draw(st.sampled_from(BEHIND))}
    least = 2 * (kernel - 1) + 1
    shape = (min(n, 4), 2 * min(channels, 20), *(max(min(p, 12), least) for p in pixels))
    return case.but(shape=shape, options=o)


def of(**changes):
    """The good arguments with another one, which is made of tensors of its own."""
    return lambda good: {**good, **{k: v(good) if callable(v) else v for k, v in changes.items()}}


BAD = [
    BadInput("matrix", but(x=lambda g: g["x"][0, 0]), r"x: expected shape \(N, C, H, W\) or \(C, H, W\), got"),
    BadInput("no filters", but(weight=lambda g: g["weight"][:0]), "weight: expected shape.*none of it 0"),
    BadInput("groups", of(groups=4), "groups: expected a divisor of 6 channels and 8 filters, got 4"),
    BadInput("padding", of(padding=-1), "padding: expected a whole number >= 0, or two, got -1"),
    BadInput("same", of(padding="same", stride=2), r"padding: expected numbers beside a stride of \(2, 2\), got same"),
    BadInput("kernel", of(dilation=4), r"x: expected at least \(9, 9\) pixels with its padding, got \(2, 6, 7, 5\)"),
    BadInput("residual", of(residual=lambda g: g["x"]), r"residual: expected shape \(2, 8, 5, 3\), got"),
]


pytestmark = pytest.mark.not_on_sim("the sim has no convolution; bias_relu and bias_silu have laws of their own there")
SPEC = OpSpec(
    name="conv2d",
    op=in_channels_last(warpsmith.conv2d),
    reference=in_channels_last(reference),
    baseline=in_channels_last(plain),
    inputs=inputs,
    cases=CASES,
    differentiable=("x", "weight", "bias", "residual"),
    double_backward=True,
    zero_sizes=False,
    one_element=False,
    edge_inputs=("bias",),
    float64_devices=("cpu", "cuda"),
    gradcheck_cases=[Case((1, 2, 3, 4), FP64, options={"filters": 2, **o}) for o in BEHIND],
    thread_counts=(),
    of_torch=True,
    redraw=geometry,
    random_cases=1000,
    autocast=lambda inputs, dtype: (dtype,),
    bad_inputs=BAD,
)
TestConv2d = op_tests(SPEC)


@pytest.mark.parametrize("last", [True, False])
def test_torchs_sample_inputs(last):
    """Alone, and with what may stand behind; nn.functional.conv2d is torch's own."""
    assert warpsmith.nn.functional.conv2d is F.conv2d
    (info,) = (i for i in op_db if i.name == "nn.functional.conv2d")
    count = 0
    for sample in info.sample_inputs("cpu", FP64, requires_grad=True):
        x = sample.input.contiguous(**LAST) if last and sample.input.dim() == 4 else sample.input
        leaves = [x, *(t for t in sample.args if t is not None)]
        residual = torch.randn_like(F.conv2d(x, *sample.args, **sample.kwargs))
        for behind in ({}, {"activation": "relu", "residual": residual}, {"activation": "silu"}):
            results = []
            for function in (warpsmith.conv2d, plain):
                y = function(x, *sample.args, **sample.kwargs, **behind)
                results.append((y, *torch.autograd.grad(y, leaves, y.detach().cos())))
            torch.testing.assert_close(*results)
            assert results[0][0].stride() == results[1][0].stride() or 1 in y.shape
        count += 1
    assert count >= 30


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The passes that a GPU takes, by the kernels of the CPU."""
    monkeypatch.setattr(_conv2d, "OWN_PASS_ON", ("cpu",))


@pytest.mark.parametrize("layout", ["NCHW", "channels_last"])
@pytest.mark.parametrize("behind", BEHIND, ids=str)
def test_bias_and_activation_are_one_pass(behind, layout, as_on_a_gpu):
    x, weight, bias = (torch.randn(shape, dtype=FP64) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,)))
    x = x if layout == "NCHW" else x.contiguous(**LAST)
    residual = torch.randn(2, 4, 3, 3, dtype=FP64) if behind["residual"] else None
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    results, passes = [], []
    for function in (warpsmith.conv2d, reference):
        with Dispatched() as ops:
            y = function(x, weight, bias, activation=behind["activation"], residual=residual)
        results.append((y, *torch.autograd.grad(y, leaves, y.detach().cos())))
        passes.append([str(op).split(".")[1] for op, _ in ops.calls])
    torch.testing.assert_close(*results)
    own = layout == "channels_last" and behind["activation"] is not None
    assert passes == [[f"bias_{behind['activation']}_forward"] * own, []]
    calls = warpsmith.plan("conv2d", dtype="float64", device="cpu", channels_last=layout != "NCHW", **behind)["calls"]
    assert ("warpsmith" in calls) == own


def test_plan_says_when_cudnn_does_all():
    given = {"dtype": "bfloat16", "activation": "relu", "gradients": False}
    assert warpsmith.plan("conv2d", **given)["calls"] == "torch.cudnn_convolution_relu"
    for other in ({"gradients": True}, {"activation": "silu"}, {"dtype": "float32"}, {"deterministic": True}):
        assert "cudnn" not in warpsmith.plan("conv2d", **given | other)["calls"], other
    assert "float64 is fused on the CPU" in warpsmith.plan("conv2d", dtype="float64", activation="relu")["why"]


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_cudnn_does_all_without_gradients(dtype, residual):
    x, weight = torch.randn(2, 16, 9, 9, device="cuda").to(dtype), torch.randn(32, 16, 3, 3, device="cuda").to(dtype)
    x, weight, bias = x.contiguous(**LAST), (weight / 12).contiguous(**LAST), torch.randn(32, device="cuda").to(dtype)
    r = torch.randn(2, 32, 9, 9, device="cuda").to(dtype).contiguous(**LAST) if residual else None
    for padding in (1, "same"):
        with torch.no_grad(), Dispatched() as ops:
            y = warpsmith.conv2d(x, weight, bias, 1, padding, activation="relu", residual=r)
        assert not ops.calls
        expected = reference(x, weight, bias, 1, padding, activation="relu", residual=r)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    weight.requires_grad_()
    with Dispatched() as ops:
        warpsmith.conv2d(x, weight, bias, 1, 1, activation="relu", residual=r).sum().backward()
    assert ops.calls


def test_a_dilated_kernel_of_one_does_not_crash():
    """It does in torch 2.13 on the CPU."""
    x, weight = (torch.randn(shape, dtype=BF16) for shape in ((4, 32, 6, 1), (4, 32, 1, 1)))
    for _ in range(10):
        y = warpsmith.conv2d(x.contiguous(**LAST), weight, None, (1, 3), 2, 2)
        torch.testing.assert_close(y, reference(x, weight, None, (1, 3), 2), rtol=2e-2, atol=2e-2)


def test_an_empty_batch():
    x = torch.randn(0, 3, 5, 5).contiguous(**LAST)
    weight, bias = torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4)
    y = warpsmith.conv2d(x, weight, bias, activation="relu")
    assert y.shape == (0, 4, 3, 3)
    y.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_mapped_and_differentiated(activation, as_on_a_gpu):
    x, weight, bias = (
        torch.randn(6, 4, 5, 5).contiguous(**LAST).unflatten(0, (3, 2)),
        torch.randn(6, 4, 3, 3),
        torch.randn(6),
    )

    def loss(w, x):
        return warpsmith.conv2d(x, w, bias, activation=activation).cos().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(weight, t) for t in x]))
