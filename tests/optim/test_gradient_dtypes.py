"""Gradients in another dtype than their parameters: every precision, beside the same optimizer in float32."""

import copy

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import bitwise_equal

from .adamw_runs import STEPS, assert_same_bits, make_params, states_of
from .optimizers import EVERY, FULL, LAMB, LION, Options

LR = 1e-2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(7, 5), (), (0,), (3,), (2049,), (70, 129)]  # of the last the states are 8-bit codes
KINDS = [("fp32", FP32), ("bf16", BF16), ("bf16", FP16), ("master", BF16), ("master", FP16), ("bf16_states", FP32)]
KINDS += [("bf16_sr", BF16), ("bf16_kahan", BF16), ("remainder", BF16)]
EIGHT = [("8bit", FP32), ("8bit", BF16), ("8bit", FP16)]


def set_gradients(params, dtypes, seed):
    """Of dtypes in turn."""
    draw = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        p.grad_dtype = None  # any
        p.grad = torch.randn(p.shape, generator=draw).to(p.device, dtypes[i % len(dtypes)])


def cases():
    for options in EVERY:
        kinds = [k for k in KINDS if k[0] in ("fp32", "master")] if options is LAMB else KINDS
        eight = options in (LION,) or options.name == "SGD" and options.given
        for precision, dtype in (*kinds, *(EIGHT if eight else ())):
            yield pytest.param(options, precision, dtype, id=f"{options}-{precision}-{dtype}")
    for precision, dtype in EIGHT:
        yield pytest.param(Options("AdamW", {}, "8bit"), precision, dtype, id=f"AdamW-{precision}-{dtype}")


@pytest.mark.parametrize(("options", "precision", "dtype"), [*cases()])
def test_a_step_takes_the_values_of_gradients_of_any_dtype(options, precision, dtype):
    """Values that all three dtypes hold: no bit depends on which of them a gradient is stored in."""
    others, own = make_params(dtype, shapes=SHAPES), make_params(dtype, shapes=SHAPES)
    a, b = (options.ours(params, lr=LR, precision=precision) for params in (others, own))
    for step, dtypes in enumerate([[FP32], [FP16], [BF16], [FP32, BF16, FP16, FP32]]):
        set_gradients(others, dtypes, step)
        for p, q in zip(others, own, strict=True):
            p.grad = (p.grad.float() * 32).round().clamp(-127, 127).div(32).to(p.grad.dtype)
            q.grad = p.grad.to(dtype)
        a.step()
        b.step()
    assert_same_bits(others, own)
    if b.state:
        assert_same_bits(states_of(a, others), states_of(b, own))


@pytest.mark.parametrize("options", [*FULL, LION, LAMB], ids=str)
def test_float32_gradients_of_16_bit_parameters_are_not_rounded(options):
    """With float32 gradients, ``master`` has the bits of a float32 optimizer. With rounded gradients it has others."""
    params = make_params(BF16, shapes=[(300,), (33, 9)])
    exact, rounded = ([nn.Parameter(p.detach().float()) for p in params] for _ in range(2))
    ours = options.ours(params, lr=LR, precision="master")
    plain, other = options.ours(exact, lr=LR), options.ours(rounded, lr=LR)
    for step in range(STEPS):
        set_gradients(params, [FP32], step)
        for p, w, r in zip(params, exact, rounded, strict=True):
            w.grad, r.grad = p.grad, p.grad.bfloat16().float()
        for optimizer in (ours, plain, other):
            optimizer.step()
    for p, w in zip(params, exact, strict=True):
        assert bitwise_equal(ours.state[p]["master"], w.detach())
        assert bitwise_equal(p.detach(), w.detach().to(BF16))
    # On the sim, rounding changes only one sign in Lion's 20 steps.
    assert not all(torch.equal(w, r) for w, r in zip(exact, rounded, strict=True))


def test_torchs_grad_dtype_is_the_way_in():
    """Autograd adds in float32 what three backwards give; the step reads that."""
    params = [nn.Parameter(torch.full((40,), 0.5, dtype=BF16)) for _ in range(2)]
    params[0].grad_dtype = FP32
    optimizer = warpsmith.optim.SGD(params, lr=1.0, precision="master")
    for p in params:
        for part in (1.0, 2.0**-9, 2.0**-9):  # bfloat16 loses the small ones
            (p.float() * part).sum().backward()
    optimizer.step()
    masters = [optimizer.state[p]["master"][0].item() for p in params]
    assert params[0].grad.dtype == FP32
    assert masters == [0.5 - 1 - 2.0**-8, 0.5 - 1]


@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_unscales_clips_and_skips_them(clip):
    scaler = warpsmith.amp.GradScaler("cpu", init_scale=1024.0)
    params, exact = make_params(BF16, shapes=[(300,), (9,)]), make_params(BF16, shapes=[(300,), (9,)])
    exact = [nn.Parameter(p.detach().float()) for p in exact]
    ours, plain = (
        warpsmith.optim.AdamW(params, lr=LR, precision="master"),
        warpsmith.optim.AdamW(exact, lr=LR),
    )
    for step in range(4):
        set_gradients(params, [FP32], step)
        for p, w in zip(params, exact, strict=True):
            w.grad = p.grad.clone()
            p.grad *= 1024.0
        scaler.scale(torch.tensor(1.0))
        if clip:
            norm = scaler.clip_(ours, 0.5)
            assert_close(norm, warpsmith.optim.clip_grad_norm_(exact, 0.5))
        scaler.step(ours)
        scaler.update()
        plain.step()
    for p, w in zip(params, exact, strict=True):
        assert_close(ours.state[p]["master"], w.detach(), rtol=1e-5, atol=1e-6)
    before = copy.deepcopy((params, states_of(ours, params)))
    params[1].grad[3] = torch.inf
    scaler.scale(torch.tensor(1.0))
    scaler.step(ours)
    scaler.update()
    assert scaler.last_skipped
    assert scaler.overflow(ours).first.startswith("param_groups[0]['params'][1]")
    assert_same_bits(params, before[0])
    assert_same_bits(states_of(ours, params), before[1])


def test_dtypes_and_strides_change_from_step_to_step():
    """The watch sees a gradient that moves to another dtype at the same address, and copies one of other strides."""
    p, w = nn.Parameter(torch.ones(8, 6, dtype=BF16)), nn.Parameter(torch.ones(8, 6))
    p.grad_dtype = None
    ours, plain = warpsmith.optim.AdamW([p], lr=LR, precision="master"), warpsmith.optim.AdamW([w], lr=LR)
    memory = torch.empty(48)
    for step in range(6):
        values = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        if step % 3 == 0:
            p.grad = memory.view(8, 6).copy_(values)
        elif step % 3 == 1:
            p.grad = memory.view(BF16)[:48].view(8, 6).copy_(values)
        else:
            p.grad = values.float().t().contiguous().t()
        w.grad = values.float()
        ours.step()
        plain.step()
        assert bitwise_equal(ours.state[p]["master"], w.detach())


@pytest.mark.parametrize(("param", "grad"), [(torch.float64, FP32), (FP32, torch.float64), (BF16, torch.int32)])
def test_other_pairs_are_refused(param, grad):
    params = make_params(param, shapes=[(5,), (6,)])
    optimizer = warpsmith.optim.SGD(params, lr=LR, momentum=0.9)
    set_gradients(params, [param], 0)
    before = copy.deepcopy(params)
    params[1].grad_dtype = None
    params[1].grad = torch.ones(6, dtype=grad)
    with pytest.raises(ValueError, match=r"^SGD: param_groups\[0\]\['params'\]\[1\]\.grad: expected "):
        optimizer.step()
    assert_same_bits(params, before)
    assert not optimizer.state


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "precision", "dtype"), [*cases()])
def test_cuda_follows_the_cpu(options, precision, dtype):
    here, there = make_params(dtype, shapes=SHAPES), make_params(dtype, shapes=SHAPES, device="cuda")
    a, b = (options.ours(params, lr=LR, precision=precision) for params in (here, there))
    for step in range(3):
        set_gradients(here, [FP32, BF16, FP16], step)
        for p, q in zip(here, there, strict=True):
            q.grad_dtype = None
            q.grad = p.grad.cuda()
        a.step()
        b.step()
    unit = 4 * torch.finfo(BF16 if precision == "bf16_states" else dtype).eps
    begun = make_params(dtype, shapes=SHAPES)
    for p, q, first in zip(there, here, begun, strict=True):
        moved = (
            (q - first).abs().amax() if q.numel() else 0.0
        )  # an update is rounded in its own size, not in the result's
        assert_close(p.cpu(), q, rtol=unit, atol=float(unit * max(moved, LR)))
