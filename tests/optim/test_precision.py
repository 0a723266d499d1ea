"""16-bit parameters and states: beside torch's 16-bit optimizers, masters, what is loaded and refused."""

import copy

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import bitwise_equal

from .adamw_runs import (
    ON_SIM,
    STEPS,
    assert_one_result,
    assert_same_bits,
    make_params,
    run,
    set_grads,
    states_of,
)
from .optimizers import EVERY, FULL, LAMB, LION, Options

ALL = [*(o for o in EVERY if o is not LAMB), Options("SGD", {"momentum": 0.9, "nesterov": True}, "nesterov")]
LR = 1e-2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STATES = {"master": FP32, "bf16_states": BF16, "remainder": FP32}
NEAREST = [(None, BF16), (None, FP16), ("bf16", BF16), ("master", BF16), ("master", FP16), ("bf16_states", FP32)]
KINDS = [*NEAREST, ("bf16_sr", BF16), ("bf16_kahan", BF16), ("remainder", BF16)]
EXTRAS = {"master": FP32, "compensation": BF16, "remainder": torch.int16}


def first_steps(options, params, steps, seed=0, **more):
    optimizer = options.ours(params, lr=LR, **more)
    run(optimizer, params, steps, first=seed)
    return optimizer


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [o for o in FULL if o.name.startswith("Adam")], ids=str)
def test_adam_in_16_bits_is_within_a_rounding_of_torchs(options, dtype):
    """The default precision. Both take every step from equal states; values differ by at most one rounding."""
    shapes = [(64, 16), (1024,), (77,), ()]
    ours, theirs = make_params(dtype, shapes=shapes), make_params(dtype, shapes=shapes)
    a, b = options.ours(ours, lr=LR), options.theirs(theirs, lr=LR)
    for i in range(10):
        for params, optimizer in ((ours, a), (theirs, b)):
            set_grads(params, i)
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            assert a.state[p].keys() == b.state[q].keys()
            assert_close(p, q, rtol=torch.finfo(dtype).eps, atol=1e-7)
            for name, value in a.state[p].items():
                other = b.state[q][name]
                assert value.dtype == other.dtype
                assert_close(value, other, rtol=torch.finfo(dtype).eps, atol=1e-7)
                value.copy_(other)
            p.data.copy_(q)


@pytest.mark.parametrize(("precision", "dtype"), NEAREST, ids=str)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_step_is_float32_arithmetic_rounded_once(options, precision, dtype):
    """From states as after five steps: what is stored is what a float32 optimizer on the same values gives, rounded."""
    narrow = make_params(dtype)
    optimizer = first_steps(options, narrow, 5, precision=precision)
    wide = [nn.Parameter(optimizer.state[p].get("master", p).detach().float().clone()) for p in narrow]
    plain = options.ours(wide, lr=LR)
    for p, w in zip(narrow, wide, strict=True):
        if optimizer.state.get(p):
            state = {k: v.float().clone() for k, v in optimizer.state[p].items() if k != "master"}
            plain.state[w] = state
    set_grads(narrow, 7)
    for p, w in zip(narrow, wide, strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    plain.step()
    for p, w in zip(narrow, wide, strict=True):
        assert bitwise_equal(p.detach(), w.detach().to(dtype))
        for name, value in optimizer.state.get(p, {}).items():
            exact = w.detach() if name == "master" else plain.state[w][name]
            assert bitwise_equal(value, exact.to(value.dtype))


@pytest.mark.parametrize(("precision", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_states_have_their_dtypes(options, precision, dtype):
    params = make_params(dtype)
    optimizer = first_steps(options, params, 1, precision=precision)
    for state in optimizer.state.values():
        extra = {"master": {"master"}, "bf16_kahan": {"compensation"}, "remainder": {"remainder"}}.get(precision, set())
        assert set(state) & set(EXTRAS) == extra
        for name, value in state.items():
            expected = FP32 if name == "step" else EXTRAS.get(name, STATES.get(precision, dtype))
            assert value.dtype == expected, name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [*FULL, LION], ids=str)
def test_masters_follow_float32_where_16_bits_stand_still(options, dtype):
    """Steps far below a unit in the last place add up in the master; the parameter is the master, rounded."""
    params = [nn.Parameter(torch.ones(100, dtype=dtype))]
    exact = [nn.Parameter(torch.ones(100))]
    a, b = options.ours(params, lr=1e-5, precision="master"), options.ours(exact, lr=1e-5)
    for _ in range(STEPS):
        for p in (*params, *exact):
            p.grad = torch.full_like(p, 0.5)
        a.step()
        b.step()
    master = a.state[params[0]]["master"]
    assert bitwise_equal(master, exact[0].detach())
    assert bitwise_equal(params[0].detach(), master.to(dtype))
    assert not torch.equal(master, torch.ones(100))


@pytest.mark.parametrize(("precision", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("options", [*FULL, LION], ids=str)
def test_same_bits_resumed_in_pieces_and_in_any_order(options, precision, dtype):
    lengths = [1, 63, 65, 500, 5_000 if ON_SIM else 20_000, 7]  # on the sim test_optimizers has the longer one
    assert_one_result(lambda params, lr: options.ours(params, lr=lr, precision=precision), lengths, dtype)


def test_a_float32_state_of_torch_is_taken_as_masters_are():
    """A torch optimizer's 16-bit states become float32 ones; the master begins as the parameter."""
    theirs = make_params(BF16)
    b = torch.optim.AdamW(theirs, lr=LR, fused=True)
    run(b, theirs, 3)
    ours = copy.deepcopy(theirs)
    a = warpsmith.optim.AdamW(ours, lr=0.5, precision="master")
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    run(a, ours, 1, first=3)
    assert all(s["exp_avg"].dtype == s["master"].dtype == FP32 for s in states_of(a, ours))
    assert all(s["step"] == 4 for s in states_of(a, ours))
    back = copy.deepcopy(ours)
    c = torch.optim.AdamW(back, lr=LR, fused=True)
    c.load_state_dict(copy.deepcopy(a.state_dict()))
    run(c, back, 1, first=4)
    run(a, ours, 1, first=4)
    assert_close(ours, back, rtol=2 * torch.finfo(BF16).eps, atol=1e-3)


def test_precision_is_an_option_of_a_group_and_dtypes_mix():
    params = [nn.Parameter(torch.randn(50).to(dtype)) for dtype in (BF16, BF16, FP32, FP16, FP32)]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "precision": "master"},
        {"params": params[2:4]},
        {"params": params[4:], "precision": "bf16_states"},
    ]
    optimizer = warpsmith.optim.AdamW(groups, lr=LR)
    run(optimizer, params, 3)
    assert [optimizer.state[p]["exp_avg"].dtype for p in params] == [BF16, FP32, FP32, FP16, BF16]
    assert ["master" in optimizer.state[p] for p in params] == [False, True, False, False, False]
    assert all(torch.isfinite(p).all() for p in params)


BAD = [
    ("fp32", BF16, "expected float32 or float64 for precision fp32, got bfloat16"),
    ("bf16", FP32, "expected bfloat16 or float16 for precision bf16, got float32"),
    ("bf16_states", FP16, "expected float32 or bfloat16 for precision bf16_states, got float16"),
    ("master", torch.float64, "for precision master, got float64"),
]


@pytest.mark.parametrize(("precision", "dtype", "message"), BAD, ids=str)
def test_parameters_that_a_precision_does_not_take_are_refused(precision, dtype, message):
    params = make_params(dtype)
    optimizer = warpsmith.optim.AdamW(params, precision=precision)
    set_grads(params, 0)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match=rf"^AdamW: param_groups\[0\]\['params'\]\[0\]: .*{message}"):
        optimizer.step()
    assert_same_bits(params, before)
    assert not optimizer.state


def test_a_state_of_another_dtype_is_refused_by_name():
    params = make_params(BF16)
    optimizer = warpsmith.optim.AdamW(params)
    run(optimizer, params, 1)
    optimizer.state[params[3]]["exp_avg"] = optimizer.state[params[3]]["exp_avg"].float()
    set_grads(params, 1)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match=r"^AdamW: .*\['params'\]\[3\]: exp_avg: expected bfloat16, got float32"):
        optimizer.step()
    assert_same_bits(params, before)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("options", [*FULL, LION], ids=str)
def test_cuda_follows_the_cpu(options, precision, dtype):
    here, there = make_params(dtype), make_params(dtype, device="cuda")
    a, b = (options.ours(params, lr=LR, precision=precision) for params in (here, there))
    run(a, here, 3)
    run(b, there, 3)
    step = 4 * torch.finfo(BF16 if precision == "bf16_states" else dtype).eps
    assert_close([p.cpu() for p in there], here, rtol=step, atol=step * LR)
