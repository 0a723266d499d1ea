"""batch_norm under the law in NHWC, and what only it has: running statistics, torch's layouts, dtypes and refusals."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.reference.batch_norm import batch_norm as reference
from warpsmith.testing import BadInput, Case, op_tests, sim
from warpsmith.testing.checks import kernels
from warpsmith.testing.sim import is_loaded

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = {"weight": FP32, "bias": FP32, "running_mean": FP32, "running_var": FP32}


def inputs(case, rng):
    """x is (..., C): the harness lays out rows of channels, as they lie in channels_last."""
    channels = case.shape[-1:]
    made = {"x": rng.normal(case.shape, mean=case.options.get("mean", 0.3), std=case.options.get("std", 1.0))}
    made["running_mean"], made["running_var"] = rng.normal(channels), rng.uniform(channels, 0.5, 2.0)
    affine = case.options.get("affine", "weight and bias")
    made["weight"] = rng.normal(channels, mean=1.0, std=0.3) if "weight" in affine else None
    made["bias"] = rng.normal(channels) if "bias" in affine else None
    made["training"] = case.options.get("training", True)
    made["residual"] = rng.normal(case.shape) if case.options.get("residual") else None
    made["activation"] = case.options.get("activation")
    if case.options.get("running") is False:
        made["running_mean"] = made["running_var"] = None
    return made


def of_pixels(function):
    """The function on (N, ..., C), with the running statistics as outputs: inputs must stay as they are."""

    @functools.wraps(function)
    def call(x, running_mean, running_var, residual=None, **others):
        running = [None if t is None else t.clone() for t in (running_mean, running_var)]
        x, residual = (t if t is None or t.dim() < 2 else t.movedim(-1, 1) for t in (x, residual))
        y = function(x, *running, residual=residual, **others)
        return y.movedim(1, -1), *running

    return call


def plain(x, running_mean, running_var, weight, bias, training, residual, activation):
    """Plain PyTorch as users have it, in the dtypes that it takes: sum and ReLU in the dtype of the activation. Not by
    cuDNN, which reads 16 bytes off 16 bytes; and the kernels of torch 2.11 need a weight beside a bias."""
    if 0 in x.shape[1:2] or (weight is not None and running_mean is not None and weight.dtype != running_mean.dtype):
        others = {"residual": residual, "activation": activation}
        return reference(x, running_mean, running_var, weight, bias, training, **others)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    with torch.backends.cudnn.flags(enabled=False):
        y = F.batch_norm(x, running_mean, running_var, weight, bias, training, 0.1, 1e-5)
    y = y if residual is None else y + residual
    return torch.relu(y) if activation else y


ALL = {"residual": True, "activation": "relu"}
EVERY = [{**training, **after} for training in ({}, {"training": False})
         for after in ({}, {"residual": True}, {"activation": "relu"}, ALL)]  # fmt: skip
CASES = [
    *(Case((3, 4, 5, width), dtype) for width in (1, 3, 8, 16, 33, 64, 256, 264) for dtype in (BF16, FP32)),
    *(Case((3, 4, 5, width), FP16) for width in (3, 64)),
    *(Case((2, 3, 3, width), FP64) for width in (1, 3, 16)),
    *(Case((2, 3, 7, 24), dtype, options=o) for dtype in (BF16, FP32, FP16, FP64) for o in EVERY[1:]),
    *(Case((2, 3, 7, 11), dtype, options=o) for dtype in (BF16, FP32) for o in EVERY[1:]),
    *(Case((2, 3, 7, 24), dtype, dtypes=WIDE, options=ALL) for dtype in (BF16, FP16)),
    Case((2, 3, 7, 24), BF16, dtypes={"running_mean": FP32, "running_var": FP32}),
    *(Case((2, 3, 7, 24), dtype, options={"affine": affine, **ALL})
      for dtype in (BF16, FP32) for affine in ("none", "weight", "bias")),
    Case((2, 3, 7, 24), FP32, options={"running": False}),
    Case((70, 24), BF16),
    Case((70, 24), FP32, options=ALL),
    Case((2, 2, 3, 5, 16), FP32, options=ALL),
    Case((1, 1, 2, 16), FP32),
    Case((1, 1, 1, 16), FP32, options={"training": False, **ALL}),
    Case((9, 17, 19, 40), BF16, options=ALL),  # turns and slices
    Case((5, 31, 29, 8), FP32),
    Case((3, 4, 5, 64), FP32, options={"mean": 1e3}),
    Case((3, 4, 5, 64), FP32, options={"std": 1e-3, "mean": 10.0}),
    Case((3, 2, 2, 1030), FP32, options=ALL),
]  # fmt: skip


def floor(case):
    """Forward: x once for the statistics, once to normalise, y, and a residual. Backward: dy and x twice, dx, and the
    residual's gradient behind ReLU; without training no second x, unless v is computed again."""
    o, size = case.options, case.dtype.itemsize * torch.Size(case.shape).numel()
    training, residual, relu = o.get("training", True), bool(o.get("residual")), bool(o.get("activation"))
    return {
        "forward": (2 + training + residual) * size,
        "backward": ((5 if training or relu else 4) + (training and residual and relu)) * size,
    }


def bytes_beside(case, given):
    """Every thread of a pass reads the parameters of its channels (`statistics` their first values, twice), a finish
    those of each channel once, `gradients` rstd twice. Partial sums are written, and read by the finish. The mask has a
    byte for each vector, written once and read twice."""
    rows, columns = torch.Size(case.shape[:-1]).numel(), case.shape[-1]
    plan = sim.plan("batch_norm", rows=rows, columns=columns, dtype=str(case.dtype).removeprefix("torch."))
    training, relu = given["training"], given["activation"] is not None
    residual, itemsize = given["residual"] is not None, case.dtype.itemsize
    weight, bias = (itemsize * (given[n] is not None) for n in ("weight", "bias"))
    mask = rows * columns // plan["normalize"]["vector_elems"] * (relu and residual)

    def readers(name):
        """Channels that the threads of a pass read: of each slice, as often as its turn has rows side by side."""
        return plan[name]["threads"] // plan[name]["threads_a_row"] * plan[name]["slices"] * columns

    slices = plan["statistics"]["slices"]
    running = 2 * columns * itemsize * (given["running_mean"] is not None)
    read = readers("normalize") * (8 + weight + bias) + running
    written = 8 * columns
    if training:
        read += (2 * readers("statistics") + columns) * itemsize + 8 * slices * columns
        written += 8 * slices * columns + running
    again = relu and not residual
    slices = plan["sums"]["slices"]
    read_backward = readers("sums") * (8 + weight + again * bias) + 8 * slices * columns + 8 * columns
    read_backward += readers("gradients") * (8 + weight + again * bias + 12 * training) + 2 * mask
    written_backward = 8 * slices * columns + 8 * columns + columns * (weight + bias)
    return {
        "forward": (read, written + mask),
        "inference": (read, written),
        "backward": (read_backward, written_backward),
        "x alone": (0, 8 * (slices + 1) * columns * training),
    }


def enough_values(draw, st, case):
    """Statistics of few values are all rounding. Parameters of another dtype come from the table."""
    shape = case.shape if len(case.shape) > 1 else (1, *case.shape)
    return case.but(shape=(max(8, shape[0]), *shape[1:]), options={**draw(st.sampled_from(EVERY))})


raw = torch.ops.warpsmith
SPEC = op_spec(
    name="batch_norm",
    op=of_pixels(warpsmith.batch_norm),
    reference=of_pixels(reference),
    baseline=of_pixels(plain),
    inputs=inputs,
    cases=CASES,
    differentiable=("x", "weight", "bias", "residual"),
    outputs=("y", "running_mean", "running_var"),
    laid_out=("x", "residual"),
    expanded=(),
    edges_beside_options=("x", "bias", "residual"),  # the last place of an infinite weight's sums says what is infinite
    double_backward=True,
    gradcheck_cases=[Case((2, 2, 2, 3), FP64, options=o) for o in EVERY],
    repeated_cases=[Case((9, 31, 29, 40), FP32, options=ALL)],
    redraw=enough_values,
    random_cases=2000,
    one_element=False,
    floor_bytes=floor,
    bytes_beside=bytes_beside,
    bad_inputs=[
        BadInput("one value a channel", but(x=lambda g: g["x"][:1, :1, :1]),
                 r"x: expected more than 1 value per channel when training, got input size \(1, \d+, 1, 1\)"),
        BadInput("no running_var", but(running_var=lambda g: None), "running_var: expected a tensor beside"),
        BadInput("evaluated without statistics", but(running_mean=lambda g: None, running_var=lambda g: None,
                                                     training=lambda g: False),
                 "running_mean: expected a tensor when training is False, got None"),
        NO_FLOAT64_ON_CUDA,
    ],
)  # fmt: skip

TestBatchNorm = op_tests(SPEC)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, "cumulative"])
def test_running_statistics_are_the_references_bit_for_bit(momentum, device):
    """Over 200 steps, of values whose sums are exact in any order."""
    g = torch.Generator().manual_seed(0)
    ours, theirs = ([t.to(device) for t in (torch.zeros(24), torch.ones(24))] for _ in range(2))
    for step in range(200):
        x = torch.randint(-8, 8, (4, 24, 4, 4), generator=g).to(device, BF16).to(memory_format=torch.channels_last)
        factor = 1 / (step + 1) if momentum == "cumulative" else momentum
        y = warpsmith.batch_norm(x, *ours, training=True, momentum=factor)
        reference(x, *theirs, training=True, momentum=factor)
        assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_constant_channel_becomes_the_bias(dtype, device):
    """Exactly, for numbers of few bits, whatever the number of rows."""
    bias = torch.randn(16, device=device, dtype=dtype)
    for rows in (2, 3, 7, 100, 1000):
        x = torch.full((rows, 16), -1024.0, device=device, dtype=dtype)
        y = warpsmith.batch_norm(x, None, None, None, bias, training=True)
        assert torch.equal(y, bias.expand(rows, -1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_mean_does_not_cancel(device):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(4000, 8, generator=g) + 4096.0).to(device)
    y = warpsmith.batch_norm(x, None, None, training=True, eps=0.0)
    wide = x.double()
    exact = (wide - wide.mean(0)) / wide.var(0, unbiased=False).sqrt()
    assert (y.double() - exact).abs().max() < 5e-4  # the mean itself is rounded to 2^-11 / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [16, 5])
def test_squares_beyond_float32_are_no_infinity(columns, dtype, device):
    """Right where PyTorch overflows: one value, or all of a channel, as large as the dtype has, and a weight."""
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(700, columns, generator=g).to(dtype) for _ in range(2))
    weight, bias = torch.full((columns,), 0.5, dtype=dtype), torch.randn(columns, generator=g).to(dtype)
    most = torch.finfo(dtype).max
    x[350, 0], x[0, 1], weight[3] = most, -most, most
    x[:, 2] = torch.where(x[:, 2] > 0, most, -most)

    def results(function, to):
        leaves = [t.detach().to(to).requires_grad_() for t in (x, weight, bias)]
        y = function(leaves[0], None, None, *leaves[1:], training=True, activation="relu")
        return [t.double().cpu() for t in (y, *torch.autograd.grad(y, leaves, dy.to(to)))]

    for found, exact in zip(results(warpsmith.batch_norm, device), results(reference, FP64), strict=True):
        exact = exact.to(dtype).double()  # beyond the dtype: infinite
        steps = torch.finfo(dtype).eps * exact.where(exact.isfinite(), 0).abs().amax(0, keepdim=exact.dim() > 1)
        assert torch.equal(found.isfinite(), exact.isfinite())
        assert bool(((found - exact).abs() <= 8 * steps).logical_or(~exact.isfinite()).all())


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_leave_the_running_statistics(device):
    mean, var = torch.randn(8, device=device), torch.rand(8, device=device)
    before = mean.clone(), var.clone()
    x = torch.empty(0, 8, 3, 3, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    y = warpsmith.batch_norm(x, mean, var, weight, training=True, activation="relu")
    y.sum().backward()
    assert y.shape == x.shape and torch.equal(mean, before[0]) and torch.equal(var, before[1])
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("device", DEVICES)
def test_running_statistics_that_lie_apart_are_updated(device):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=g).to(device)
    apart, whole = ([t.to(device) for t in (torch.zeros(16), torch.ones(16))] for _ in range(2))
    apart, whole = [t[::2] for t in apart], [t[:8] for t in whole]
    versions = [t._version for t in apart]
    for running in (apart, whole):
        warpsmith.batch_norm(x, *running, training=True)
    assert torch.equal(apart[0], whole[0]) and torch.equal(apart[1], whole[1]) and whole[0].abs().sum() > 0
    assert all(t._version > v for t, v in zip(apart, versions, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["channels_last", "NCHW", "slice of channels", "misaligned slice"])
def test_layouts_of_torch_give_the_same_bits(layout, device):
    """Those of channels_last, and a slice of its channels is read where it lies."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 5, 3, generator=g).to(device).to(memory_format=torch.channels_last)
    others = {"weight": torch.rand(16, device=device), "training": True, "activation": "relu"}
    expected = warpsmith.batch_norm(x, None, None, **others)
    if layout == "NCHW":
        x = x.contiguous()
    elif layout != "channels_last":
        first = 16 if layout == "slice of channels" else 3
        wide = torch.zeros(2, 64, 5, 3, device=device).to(memory_format=torch.channels_last)
        wide[:, first : first + 16] = x
        x = wide[:, first : first + 16]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(warpsmith.batch_norm(x, None, None, **others), expected)


def test_nchw_is_told_once():
    x = torch.randn(2, 8, 3, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for given in (x, x, x.to(memory_format=torch.channels_last), x[:, :4]):
            warpsmith.batch_norm(given, None, None, training=True)
    assert len(told) == 1 and "expected channels_last, got NCHW" in str(told[0].message)


@pytest.mark.not_on_sim("torch's operations")
def test_without_more_it_is_torchs_function():
    """The same arguments in the same order."""
    x = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(6), torch.randn(6)
    ours, theirs = ((torch.zeros(6), torch.ones(6)) for _ in range(2))
    for training in (True, False):
        y = warpsmith.batch_norm(x, *ours, weight, bias, training, 0.3, 1e-3)
        torch.testing.assert_close(y, F.batch_norm(x, *theirs, weight, bias, training, 0.3, 1e-3))
        torch.testing.assert_close(ours, theirs)


def test_plan_says_how_rows_are_shared():
    plan = warpsmith.plan("batch_norm", rows=256 * 56 * 56, columns=256)
    assert plan["statistics"]["threads_a_row"] == 32 and plan["statistics"]["vector_elems"] == 8
    assert 0.95 * 2 * 132 <= plan["normalize"]["blocks"] <= 2 * 132
    few = warpsmith.plan("batch_norm", rows=256 * 7 * 7, columns=512)["statistics"]  # 196 turns: two each
    assert few["slices"] == 98 and few["rows_a_turn"] == 64


@pytest.mark.skipif(not is_loaded(), reason="no simulated kernels in this process (--sim)")
@pytest.mark.parametrize("multiprocessors", [1, 2, 7])
def test_few_multiprocessors_take_many_turns(multiprocessors):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(700, 24, generator=g)
    with sim.machine(multiprocessors=multiprocessors):
        y = warpsmith.batch_norm(x, None, None, training=True, activation="relu")
    torch.testing.assert_close(y, reference(x, None, None, training=True, activation="relu"))


@pytest.mark.skipif(not is_loaded(), reason="no simulated kernels in this process (--sim)")
def test_rows_far_apart():
    """2^30 elements: offsets in 32 bits would overflow."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 64, generator=g) for _ in range(3)]

    def results(x, residual, dy):
        x, residual = (t.detach().requires_grad_() for t in (x, residual))
        y = warpsmith.batch_norm(x, None, None, training=True, residual=residual, activation="relu")
        return [y, *torch.autograd.grad(y, (x, residual), dy)]

    for found, expected in zip(results(*map(kernels.apart, tensors)), results(*tensors), strict=True):
        assert torch.equal(found, expected)
