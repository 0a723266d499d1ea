"""What a step does beside its own: the bits of the separate operations after it."""

import copy

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.optim import EMA
from warpsmith.testing import bitwise_equal

from .adamw_runs import assert_same_bits, make_params, set_grads, states_of
from .optimizers import FULL, LION, Options
from .test_gradient_dtypes import LAMB, set_gradients

LR = 1e-2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(7, 5), (), (0,), (3,), (2049,), (70, 129)]
KINDS = [(None, FP32), (None, FP64), (None, BF16), ("master", FP16), ("master", BF16), ("bf16_states", FP32)]
KINDS += [("bf16_sr", BF16), ("bf16_kahan", BF16), ("remainder", BF16)]
ADAMW = Options("AdamW", {}, "plain")
CASES = [(o, None, FP32) for o in (*FULL, LION, Options("SGD", {}, "no state"), LAMB)]
CASES += [(ADAMW, p, d) for p, d in KINDS] + [(LAMB, "master", BF16), (ADAMW, "8bit", FP32), (ADAMW, "8bit", BF16)]
CUDA_CASES = [c for c in CASES if c[2] != FP64]


def trained(options, precision, dtype, *, fused, device="cpu", given_optimizer=True, steps=5):
    """Returns parameters, states, averages, copies and gradients after a run. The average also has a frozen parameter.
    In the first step no parameter has a gradient, in others one has none, and one step is skipped."""
    params = make_params(dtype, shapes=SHAPES, device=device)
    frozen = make_params(dtype, shapes=[(300,)], device=device)
    with torch.no_grad():
        params[-1].set_(params[-1].t().contiguous().t())  # another order of dimensions
    optimizer = options.ours(params, lr=LR, **({} if precision is None else {"precision": precision}))
    ema = EMA([*params, *frozen], decay=0.75, optimizer=optimizer if given_optimizer else None)
    wide = [p for p in params if p.dtype == FP32]
    copies = {p: torch.full_like(p.detach(), 7.0, dtype=(BF16, FP16)[i % 2]) for i, p in enumerate(wide)}
    if fused:
        optimizer.fuse(ema=ema, copies=copies, zero_grads=True)
    seen = []
    for step in range(steps):
        set_grads(params, step)
        for p in params if step == 0 else params[4:5] if step in (1, 2) else ():
            p.grad = None
        if step == 3:
            optimizer.found_inf = torch.ones((), device=device)
            params[0].grad.fill_(torch.inf)
        with torch.no_grad():
            frozen[0].add_(1)
        optimizer.step()
        if not fused:
            ema.update(getattr(optimizer, "found_inf", None))
            for p, c in copies.items():
                c.copy_(p)
            optimizer.zero_grad(set_to_none=False)
        if step == 3:
            del optimizer.found_inf
        seen += [t.clone() for t in ema.averages] + [c.clone() for c in copies.values()]
        seen += [p.grad.clone() for p in params if p.grad is not None]
    return params, states_of(optimizer, params) if optimizer.state else [], seen


@pytest.mark.parametrize(
    ("device", "options", "precision", "dtype"),
    [*(("cpu", *c) for c in CASES), *(pytest.param("cuda", *c, marks=pytest.mark.gpu) for c in CUDA_CASES)],
    ids=str,
)
def test_fused_is_the_separate_operations(device, options, precision, dtype):
    fused, separate = (trained(options, precision, dtype, fused=way, device=device) for way in (True, False))
    for a, b in zip(fused, separate, strict=True):
        assert_same_bits(a, b)


def test_an_average_by_itself_is_that_of_rounded_parameters():
    with_masters = trained(ADAMW, "master", BF16, fused=True)
    for fused, separate in zip(
        trained(ADAMW, "master", BF16, fused=True, given_optimizer=False),
        trained(ADAMW, "master", BF16, fused=False, given_optimizer=False),
        strict=True,
    ):
        assert_same_bits(fused, separate)
    averages = trained(ADAMW, "master", BF16, fused=True, given_optimizer=False)[2]
    assert not all(map(torch.equal, averages, with_masters[2]))


def test_a_scaler_and_gradients_of_another_dtype_go_with_it():
    finals = []
    for fused in (False, True):
        params = make_params(BF16, shapes=[(300,), (33, 9)])
        optimizer = warpsmith.optim.AdamW(params, lr=LR, precision="master")
        ema = EMA(params, 0.5, optimizer=optimizer)
        scaler = warpsmith.amp.GradScaler("cpu", init_scale=4.0)
        if fused:
            optimizer.fuse(ema=ema, zero_grads=True)
        for step in range(4):
            set_gradients(params, [FP32], step)
            if step == 2:
                params[0].grad[7] = torch.nan
            scaler.scale(torch.tensor(1.0))
            scaler.clip_(optimizer, 0.5)
            scaler.step(optimizer)
            if not fused:
                ema.update(scaler.found_inf(optimizer))
                optimizer.zero_grad(set_to_none=False)
            scaler.update()
        assert scaler.skipped_steps == 1
        assert scaler.overflow(optimizer).bad_values == 1
        assert not any(p.grad.any() for p in params)
        finals.append([*params, *ema.averages])
    assert_same_bits(*finals)


def test_gradients_that_share_memory_are_read_before_zeroing():
    results = []
    for fused in (False, True):
        params = make_params(shapes=[(5000,), (5000,)])
        optimizer = warpsmith.optim.SGD([{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}], lr=LR)
        if fused:
            optimizer.fuse(zero_grads=True)
        params[0].grad = params[1].grad = torch.ones(5000)
        optimizer.step()
        assert fused != bool(params[0].grad.any())
        results.append(params)
    assert_same_bits(*results)


def test_gradients_of_other_strides_become_zero_themselves():
    p = nn.Parameter(torch.ones(8, 6))
    optimizer = warpsmith.optim.SGD([p], lr=LR)
    optimizer.fuse(zero_grads=True)
    p.grad = torch.ones(6, 8).t()
    optimizer.step()
    assert not p.grad.any()
    assert bitwise_equal(p.detach(), torch.full((8, 6), 1 - LR))


def test_moved_averages_are_seen_and_a_second_call_replaces():
    params = make_params(shapes=[(300,)])
    optimizer = warpsmith.optim.SGD(params, lr=LR)
    ema = EMA(params, 0.5)
    optimizer.fuse(ema=ema)
    set_grads(params, 0)
    optimizer.step()
    before = ema.averages[0]
    ema.averages[0] = before.clone()
    kept = before.clone()
    optimizer.step()
    assert bitwise_equal(before, kept)
    value = params[0].detach()
    assert bitwise_equal(ema.averages[0], value - 0.5 * (value - kept))
    optimizer.load_state_dict(optimizer.state_dict())  # changes nothing here
    optimizer.fuse()
    kept = ema.averages[0].clone()
    optimizer.step()
    assert bitwise_equal(ema.averages[0], kept)
    optimizer.fuse(ema=ema)
    again = copy.deepcopy(optimizer)  # steps on its own, without the average
    kept = ema.averages[0].clone()
    set_grads(again.param_groups[0]["params"], 1)
    again.step()
    assert bitwise_equal(ema.averages[0], kept)


def test_bad_arguments_are_refused():
    params, others = make_params(shapes=[(6, 4), (3,)]), make_params(shapes=[(6, 4)])
    narrow = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = warpsmith.optim.SGD([*params, narrow], lr=LR)
    good = torch.full((6, 4), 7.0, dtype=BF16)
    bad = [
        ({params[0]: good, others[0]: good}, r"copies\[1\]: expected a copy of a parameter of this optimizer"),
        ({params[0]: good, narrow: torch.ones(3, dtype=BF16)}, r"copies\[1\]: expected a copy of a float32 parameter"),
        ({params[0]: good, params[1]: torch.ones(3)}, r"copies\[1\]: expected float16 or bfloat16, got float32"),
        ({params[0]: good, params[1]: torch.ones(4, dtype=BF16)}, r"copies\[1\]: expected shape \(3\), got \(4\)"),
        ({params[0]: torch.ones(4, 6, dtype=BF16).t()}, r"copies\[0\]: expected the strides of its parameter"),
        ({params[0]: good.clone().requires_grad_()}, r"copies\[0\]: expected a tensor that requires no gradient"),
    ]
    for copies, text in bad:
        with pytest.raises(ValueError, match=rf"^SGD\.fuse: {text}"):
            optimizer.fuse(copies=copies)
    with pytest.raises(ValueError, match=r"^SGD\.fuse: ema: expected one of this optimizer, or of none"):
        optimizer.fuse(ema=EMA(params, optimizer=warpsmith.optim.SGD(params, lr=LR)))
    assert (good == 7).all()
    set_grads([*params, narrow], 0)
    optimizer.step()
    assert (good == 7).all()
