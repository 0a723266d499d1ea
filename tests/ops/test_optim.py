"""One AdamW step over lists of tensors: the error law, the edge cases, what is refused."""

import itertools
import math
import statistics

import pytest
import torch
import warpsmith
from torch.testing import assert_close
from warpsmith.reference.optim import adamw as reference
from warpsmith.testing import bitwise_equal, measure

SHAPES = [(), (1,), (3,), (0,), (7, 33), (4096,), (16385,), (2, 3, 5)]
OPTIONS = [
    {},
    {"lr": 0.5, "weight_decay": 0.0},
    {"beta1": 0.0, "beta2": 0.0},
    {"beta1": 0.3, "eps": 1.0},
    {"maximize": True},
]
STATE = ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")


def make(shapes, dtype=torch.float32, amsgrad=False, step=3.0, seed=0, device="cpu"):
    """Lists of one step's arguments, with states as after some steps."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64) * scale for s in shapes]
        return [t.float().to(device, dtype) for t in tensors]  # float32 values in every dtype

    lists = {"params": normal(1.0), "grads": normal(1.0), "exp_avgs": normal(0.1)}
    lists["exp_avg_sqs"] = [t.square() for t in normal(1.0)]
    lists["max_exp_avg_sqs"] = [t.square() for t in normal(1.0)] if amsgrad else []
    lists["steps"] = [torch.full((), step, device=device) for _ in shapes]
    return lists


def copies(lists, dtype=None):
    return {
        name: [t.clone() if name == "steps" or dtype is None else t.to(dtype, copy=True) for t in tensors]
        for name, tensors in lists.items()
    }


def errors_of(lists, **options):
    ours, plain, oracle = copies(lists), copies(lists), copies(lists, torch.float64)
    warpsmith.adamw(**ours, **options)
    reference(**plain, **{"lr": 1e-3, **options})
    reference(**oracle, **{"lr": 1e-3, **options})

    def joined(tensors):
        return torch.cat([t.flatten() for t in tensors])

    names = [name for name in STATE if lists[name]]
    return [measure(name, joined(ours[name]), joined(oracle[name]), joined(plain[name])) for name in names]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    ("dtype", "step", "device"),
    [
        *itertools.product((torch.float32, torch.float64), (0.0, 1.0, 12345.0), ("cpu",)),
        pytest.param(torch.float32, 3.0, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_error_law(dtype, step, device, amsgrad, options):
    lists = make(SHAPES, dtype, amsgrad, step, device=device)
    errors = errors_of(lists, lr=options.get("lr", 1e-3), **without_lr(options))
    assert not [str(e) for e in errors if not e.ok]


def without_lr(options):
    return {name: value for name, value in options.items() if name != "lr"}


def test_median_error_is_that_of_torch():
    ratios = [
        e.ratio
        for seed in range(5)
        for options in OPTIONS
        for e in errors_of(make(SHAPES, seed=seed), lr=options.get("lr", 1e-3), **without_lr(options))
        if e.error or e.baseline
    ]
    assert statistics.median(ratios) <= 1.1


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2), torch.tensor([1e-2], dtype=torch.float64)], ids=str)
def test_lr_is_a_number_or_a_tensor(lr):
    ours, plain = make(SHAPES), make(SHAPES)
    warpsmith.adamw(**ours, lr=lr)
    warpsmith.adamw(**plain, lr=float(lr))
    assert all(bitwise_equal(a, b) for a, b in zip(ours["params"], plain["params"], strict=True))


def test_gradients_are_divided_by_the_scale_and_only_read():
    ours, plain = make(SHAPES), make(SHAPES)
    ours["grads"] = [g * 1024 for g in ours["grads"]]
    before = [g.clone() for g in ours["grads"]]
    warpsmith.adamw(**ours, lr=1e-2, grad_scale=torch.tensor(1024.0), found_inf=torch.tensor(0.0))
    warpsmith.adamw(**plain, lr=1e-2)
    for name in STATE:
        assert all(bitwise_equal(a, b) for a, b in zip(ours[name], plain[name], strict=True))
    assert all(bitwise_equal(a, b) for a, b in zip(ours["grads"], before, strict=True))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.inf, math.nan])
def test_a_skipped_step_changes_nothing(found_inf):
    lists = make(SHAPES, amsgrad=True)
    lists["grads"][0].fill_(math.nan)
    before = copies(lists)
    warpsmith.adamw(**lists, lr=1e-2, found_inf=torch.tensor(found_inf))
    for name in STATE:
        assert all(bitwise_equal(a, b) for a, b in zip(lists[name], before[name], strict=True))


@pytest.mark.parametrize("layout", [lambda t: t.t(), lambda t: t.view(3, 4, 5, 2).permute(0, 3, 1, 2)], ids=["t", "cl"])
def test_dense_tensors_of_any_order(layout):
    lists, plain = make([(12, 10)]), make([(12, 10)])
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        lists[name] = [layout(lists[name][0])]
    warpsmith.adamw(**lists, lr=1e-2)
    warpsmith.adamw(**plain, lr=1e-2)
    assert bitwise_equal(lists["params"][0], layout(plain["params"][0]))


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_special_gradients_stay_visible(special):
    lists, plain = make([(40,)], amsgrad=True), make([(40,)], amsgrad=True)
    for each in (lists, plain):
        each["grads"][0][[0, 17, 39]] = special
    warpsmith.adamw(**lists, lr=1e-2)
    reference(**plain, lr=1e-2)
    for name in STATE:
        assert_close(lists[name], plain[name], equal_nan=True)


def replaced(name, i, change):
    def apply(lists):
        lists[name][i] = change(lists[name][i])

    return apply


BAD = {
    "no tensors": (lambda lists: [t.clear() for t in lists.values()], r"params: expected at least one tensor"),
    "gaps": (replaced("params", 1, lambda t: t.repeat(1, 2)[:, ::2]), r"params\[1\]: expected elements without gaps"),
    "overlap": (replaced("params", 1, lambda t: t[:1].expand(4, 5)), r"params\[1\]: expected elements without gaps"),
    "fewer grads": (lambda lists: lists["grads"].pop(), r"grads: expected 2 tensors, got 1"),
    "grad strides": (replaced("grads", 1, lambda t: t.t().contiguous().t()), r"grads\[1\]: expected the strides"),
    "fewer maxima": (lambda lists: lists["max_exp_avg_sqs"].pop(), r"max_exp_avg_sqs: expected 2 tensors, got 1"),
}


@pytest.mark.parametrize("label", BAD)
def test_bad_lists_are_refused(label):
    change, message = BAD[label]
    lists = make([(6,), (4, 5)], amsgrad=True)
    change(lists)
    before = copies(lists)
    with pytest.raises(ValueError, match=message):
        warpsmith.adamw(**lists, lr=1e-2)
    for name in STATE:
        assert all(bitwise_equal(a, b) for a, b in zip(lists[name], before[name], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": torch.ones((), dtype=torch.float16)}, r"adamw: lr: expected float32 or float64, got"),
        ({"grad_scale": torch.ones(2)}, r"adamw: grad_scale: expected one element"),
        ({"found_inf": torch.zeros((), dtype=torch.float64)}, r"adamw: found_inf: expected float32, got float64"),
        ({"grad_scale": torch.ones((), device="meta")}, r"adamw: grad_scale: expected a tensor on cpu"),
        ({"found_inf": torch.ones((), device="meta")}, r"adamw: found_inf: expected a tensor on cpu"),
    ],
    ids=str,
)
def test_bad_numbers_are_refused(options, message):
    lists = make([(6,)])
    before = copies(lists)
    with pytest.raises(ValueError, match=message):
        warpsmith.adamw(**lists, **{"lr": 1e-2, **options})
    assert bitwise_equal(lists["params"][0], before["params"][0])


def test_compiled_and_checked_by_torch():
    def step(lists):
        warpsmith.adamw(**lists, lr=lr)
        return lists["params"][0] + 1

    lr = torch.tensor(1e-2, dtype=torch.float64)
    eager, compiled = make([(6,), (4, 5)]), make([(6,), (4, 5)])
    expected = step(eager)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert_close(got, expected, rtol=0, atol=0)
    for name in STATE:
        assert all(bitwise_equal(a, b) for a, b in zip(eager[name], compiled[name], strict=True))
    lists = make([(6,), (4, 5)])
    arguments = (*lists.values(), lr, 0.9, 0.999, 1e-8, 0.0, False, None, None)
    torch.library.opcheck(torch.ops.warpsmith.adamw.default, arguments)


def test_plan_tells_the_chunks():
    small = warpsmith.plan("adamw", total_elems=100_000)
    large = warpsmith.plan("adamw", total_elems=10**9)
    assert (small["chunk_elems"], large["chunk_elems"]) == (1024, 4096)
    assert small["why"] != large["why"]
    narrow = warpsmith.plan("adamw", total_elems=10**9, storage="bfloat16")
    assert narrow["chunk_elems"] == 16384  # about the bytes of a float32 chunk
    assert set(warpsmith.plan("adamw")["keys"]) == {"total_elems", "multiprocessors", "storage"}
    with pytest.raises(ValueError, match="^plan: adamw: storage: expected one of float32, .*, got 'int8'"):
        warpsmith.plan("adamw", total_elems=5, storage="int8")
    with pytest.raises(ValueError, match="total_elems"):
        warpsmith.plan("adamw", elements=5)
