"""warpsmith.amp.GradScaler beside torch.amp.GradScaler, with our optimizers and with torch's."""

import copy
import math
import pickle

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import bitwise_equal

from tests.amp.runs import (
    OPTIMIZERS,
    backward,
    by_scaler,
    by_torch,
    make_model,
    ours,
    torchs_scaler,
    train,
)

GROWTH = {"growth_interval": 3}
KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def same(a, b, **tolerance):
    assert_close([*a.parameters()], [*b.parameters()], **tolerance or {"rtol": 1e-6, "atol": 1e-7})


def pair(name, **theirs):
    models = make_model(), make_model()
    a = getattr(warpsmith.optim, name)(models[0].parameters(), **OPTIMIZERS[name])
    b = getattr(torch.optim, name)(models[1].parameters(), **OPTIMIZERS[name], **theirs)
    return models, (a, b)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scales_steps_and_skips_as_torchs(name, unscale):
    """Parameters, states and all scales, with overflows in the first step, two in a row, and the last."""
    models, optimizers = pair(name)
    bad, scaler, theirs = {0, 5, 6, 13}, ours(**GROWTH), torchs_scaler(**GROWTH)
    scales = train(models[0], optimizers[0], scaler, 14, bad, unscale=unscale)
    assert scales == train(models[1], optimizers[1], theirs, 14, bad)
    assert {512.0, 1024.0} < set(scales)
    same(*models)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        a, b = optimizers[0].state[p], optimizers[1].state[q]
        assert all(float(a[k]) == float(b[k]) if k == "step" else torch.allclose(a[k], b[k], atol=1e-6) for k in a)
    assert scaler.skipped_steps == len(bad) and scaler.last_skipped
    assert scaler.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("k", range(0, 50, 5))
def test_an_overflow_in_each_step_of_fifty(k):
    """Five runs, each with one overflow, in step k to k + 4. Only that step is skipped."""
    for bad in range(k, k + 5):
        models, optimizers = pair("AdamW")
        scales = train(models[0], optimizers[0], ours(**GROWTH), 50, {bad})
        assert scales == train(models[1], optimizers[1], torchs_scaler(**GROWTH), 50, {bad})
        same(*models, rtol=1e-4, atol=1e-6)
        assert {float(s["step"]) for s in optimizers[0].state.values()} == {49.0}


@pytest.mark.parametrize("max_norm", [0.0, 0.01, 1e6])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_is_unscale_and_clip_grad_norm_in_one(name, max_norm):
    models, optimizers = pair(name)
    train(models[0], optimizers[0], ours(), 6, {0, 3}, by_scaler(max_norm))
    train(models[1], optimizers[1], torchs_scaler(), 6, {0, 3}, by_torch(max_norm))
    same(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_clip_returns_the_norm_of_unscaled_gradients_unchanged(p):
    """Beside float64; with two dtypes and a scale that is no power of two."""
    params = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((1000, torch.float32), (333, torch.bfloat16))]
    optimizer, scaler = warpsmith.optim.SGD(params, lr=1.0), ours(init_scale=1000.0)
    scaler.scale(torch.ones(()))
    for i, q in enumerate(params):
        q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(i)).to(q.dtype) * 1000
    before = [q.grad.clone() for q in params]
    exact = torch.cat([g.double() for g in before]) / 1000
    expected = torch.linalg.vector_norm(exact, p)
    norm = scaler.clip_(optimizer, 0.5, p)
    assert norm.dtype == torch.float32
    assert_close(norm.double(), expected, rtol=3e-7, atol=0)
    scaler.step(optimizer)
    assert all(bitwise_equal(q.grad, b) for q, b in zip(params, before, strict=True))
    found = torch.cat([q.detach().double() for q in params])
    wanted = -exact * float(0.5 / (expected + 1e-6))
    assert_close(found[:1000], wanted[:1000], rtol=1e-6, atol=0)
    assert_close(found[1000:], wanted[1000:], rtol=2.0**-8, atol=0)


def test_a_step_within_the_limit_has_the_bits_without_clipping():
    models = make_model(), make_model()
    optimizers = [warpsmith.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    train(models[0], optimizers[0], ours(init_scale=3000.0), 5, clip=by_scaler(1e9))
    train(models[1], optimizers[1], ours(init_scale=3000.0), 5)
    assert all(bitwise_equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("kind", ["plain", "fused", "foreach"])
@pytest.mark.parametrize("clip", [False, True])
def test_torchs_optimizers_follow_torchs_contract(kind, clip):
    """Those that take ``grad_scale`` and those that do not, also with clip_."""
    options = {} if kind == "plain" else {kind: True}
    models = make_model(), make_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, **options) for m in models]
    scaler = ours()
    train(models[0], optimizers[0], scaler, 8, {0, 4}, by_scaler(0.1) if clip else None)
    train(models[1], optimizers[1], torchs_scaler(), 8, {0, 4}, by_torch(0.1) if clip else None)
    same(*models, rtol=1e-5, atol=1e-6)
    assert scaler.skipped_steps == 2 and scaler.overflow(optimizers[0]).bad_values == 1


@pytest.mark.parametrize("way", ["unscale, clip_grad_norm_", "unscale, clip_", "torch's clip_grad_norm_ of ours"])
def test_nothing_is_divided_twice(way):
    """SGD with lr 1 from zero: the parameter is the gradient that the step saw."""
    p = nn.Parameter(torch.zeros(4))
    optimizer, scaler = warpsmith.optim.SGD([p], lr=1.0), ours(init_scale=256.0)
    scaler.scale((p * torch.tensor([3.0, 0.0, 0.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert_close(p.grad, torch.tensor([3.0, 0.0, 0.0, 4.0]))
    if way == "unscale, clip_":
        assert_close(scaler.clip_(optimizer, 1.0), torch.tensor(5.0))
    elif way == "unscale, clip_grad_norm_":
        warpsmith.optim.clip_grad_norm_([p], 1.0)
    else:
        nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    assert_close(p.detach(), torch.tensor([-0.6, 0.0, 0.0, -0.8]), rtol=1e-6, atol=0)


def test_a_divisor_of_the_user_is_kept():
    p = nn.Parameter(torch.zeros(1))
    optimizer, scaler = warpsmith.optim.SGD([p], lr=1.0), ours(init_scale=256.0)
    scaler.scale(p.sum() * 8).backward()
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(optimizer)
    assert p.item() == -2.0
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_unscale_rounds_once(dtype):
    """bfloat16 too, which torch's refuses on CUDA; any strides, an empty tensor, one with the negative bit."""
    generator, scale = torch.Generator().manual_seed(0), 3000.0
    shapes = [(7, 5), (0,), (), (40_001,), (6, 10)]
    params = [nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(dtype)
    params[-1].grad = params[-1].grad.t().contiguous().t()
    gaps = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    gaps.grad = torch.randn(3, 4, generator=generator).to(dtype)[:, ::2]
    negative = nn.Parameter(torch.zeros(5, dtype=dtype))
    negative.grad = torch._neg_view(torch.randn(5, generator=generator).to(dtype))
    params += [gaps, negative]
    expected = [(p.grad.double() * (torch.tensor(1.0) / scale).double()).to(dtype) for p in params]
    optimizer, scaler = torch.optim.SGD(params), ours(init_scale=scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    one_step = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-7  # the scale's inverse is float32
    for p, e in zip(params, expected, strict=True):
        assert_close(p.grad, e, rtol=one_step / 2, atol=0)


def test_float16_gradients_are_unscaled_by_the_step_alone():
    """Where they would underflow when they are unscaled in place, which is therefore refused."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer, scaler = warpsmith.optim.SGD([p], lr=2.0**20), ours(init_scale=2.0**16)
    scaler.scale((p * 2.0**-30).sum()).backward()
    p.grad = torch.full((3,), 2.0**-14, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients.*param_groups\[0\]\['params'\]\[0\]"):
        scaler.unscale_(optimizer)
    scaler.clip_(optimizer, 1.0)
    scaler.step(optimizer)
    assert_close(p.detach(), torch.full((3,), -(2.0**-10), dtype=torch.float16))


def test_sparse_gradients():
    models = [nn.Embedding(10, 4, sparse=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, scaler in zip(models, (ours(), torchs_scaler()), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            out = model(torch.tensor([1, 1, 3]))
            scaler.scale(out.sum() * (torch.inf if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_close(models[0].weight, models[1].weight)


def test_a_sparse_gradient_with_an_infinite_sum_is_bad():
    model, scaler = nn.Embedding(4, 1, sparse=True), ours(init_scale=1.0)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
    scaler.scale(model(torch.tensor([1, 1])).sum() * 3e38).backward()
    scaler.step(optimizer)
    assert bitwise_equal(model.weight.detach(), before) and scaler.overflow(optimizer).bad_values == 1


def test_constructor_and_states_are_torchs_both_ways():
    scaler, theirs = warpsmith.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.state_dict() == theirs.state_dict() and set(scaler.state_dict()) == KEYS
    for a, b in ((ours(**GROWTH), torchs_scaler()), (torchs_scaler(**GROWTH), ours())):
        model = make_model()
        train(model, warpsmith.optim.AdamW(model.parameters()), a, 5, {2})
        b.load_state_dict(a.state_dict())
        assert b.state_dict() == a.state_dict()
        assert b._growth_tracker is None and b._init_growth_tracker == 2  # as torch: before the first scale()
        model = make_model()
        assert train(model, warpsmith.optim.AdamW(model.parameters()), b, 1) == [1024.0]


def test_states_that_are_refused():
    scaler = ours()
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        scaler.load_state_dict({})
    with pytest.raises(KeyError, match="expected scale.*without growth_interval"):
        scaler.load_state_dict({"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5})
    assert scaler.get_scale() == 1024.0
    disabled = ours(enabled=False)
    assert disabled.state_dict() == {}
    disabled.load_state_dict({})


def test_a_scaler_that_is_not_enabled_does_nothing():
    model = make_model()
    optimizer, scaler = warpsmith.optim.SGD(model.parameters(), lr=1.0), ours(enabled=False)
    backward(model, scaler, 0, weight=100.0)
    scaler.unscale_(optimizer)
    assert float(scaler.clip_(optimizer, 0.5)) > 0.5
    assert_close(warpsmith.optim.grad_norm(model.parameters()), torch.tensor(0.5))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0 and scaler.skipped_steps == 0 and not scaler.last_skipped
    assert scaler.overflow(optimizer) is None


def test_saving_between_backward_and_step():
    """Until the step ends, the state is the old one, and pickling is refused. After it, a copy goes on alike."""
    model = make_model()
    optimizer, scaler = warpsmith.optim.AdamW(model.parameters(), lr=1e-2), ours(**GROWTH, hysteresis=2)
    train(model, optimizer, scaler, 4, {1, 2})
    before = scaler.state_dict()
    backward(model, scaler, 4)
    scaler.clip_(optimizer, 1.0)
    assert scaler.state_dict() == before
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    scaler.update()
    twin = copy.deepcopy(model)
    twins_optimizer = warpsmith.optim.AdamW(twin.parameters(), lr=1e-2)
    twins_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = pickle.loads(pickle.dumps(scaler))
    assert other.state_dict() == scaler.state_dict()
    bad = {0, 1, 4}
    assert train(model, optimizer, scaler, 8, bad) == train(twin, twins_optimizer, other, 8, bad)
    assert all(bitwise_equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
