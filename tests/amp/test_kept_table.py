"""Gradients that stay where they are are checked by one table; every other one is seen."""

import sys

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import bitwise_equal

STEPS = 8
KEPT = "warpsmith.amp._kept_table"


def run(scaler, clip, put, dtype=torch.float32, sizes=((3, 5), (7,), (4096,))):
    """Parameters, norms and bad values after some steps. ``put(step, params, values)`` makes the gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    optimizer, found = warpsmith.optim.AdamW(params, lr=0.1), []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        values = [torch.randn(p.shape, generator=g).to(dtype) for p in params]
        if step in (3, 6):
            values[step % 3][..., 1:3] = torch.inf
        scaler.scale(torch.ones(()))
        put(step, params, values)
        if clip:
            found.append(scaler.clip_(optimizer, 0.5))
        scaler.step(optimizer)
        scaler.update()
        overflow = scaler.overflow(optimizer)
        found.append(torch.tensor([scaler.skipped_steps, *(overflow.tensors.values() if overflow else ())]))
    return [p.detach() for p in params] + found


def in_place(step, params, values):
    for p, v in zip(params, values, strict=True):
        if p.grad is None:
            p.grad = v
        else:
            p.grad.copy_(v)


def anew(step, params, values):
    for p, v in zip(params, values, strict=True):
        p.grad = v


def some(step, params, values):
    """In turn in place, anew, one without a gradient, one as a view with other strides."""
    (in_place if step % 2 else anew)(step, params, values)
    if step == 4:
        params[1].grad = None
    if step == 5:
        params[2].grad = values[2].repeat_interleave(2)[::2]


@pytest.fixture
def tables(monkeypatch):
    """How often a table was made."""
    made = []

    def counting(tensors):
        made.append(len(tensors))
        return original(tensors)

    original = sys.modules[KEPT].table_of_gradients
    monkeypatch.setattr(f"{KEPT}.table_of_gradients", counting)
    return made


SCALERS = {"scaler": lambda: warpsmith.amp.GradScaler("cpu", init_scale=4.0), "guard": warpsmith.amp.StepGuard}


@pytest.mark.parametrize("put", [in_place, anew, some])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", SCALERS)
def test_by_a_table_as_without_one(tables, monkeypatch, name, clip, put):
    """Bit by bit, overflows and their counts too."""
    found = run(SCALERS[name](), clip, put)
    assert tables
    monkeypatch.setattr(f"{KEPT}._places", lambda optimizer: None)
    count = len(tables)
    expected = run(SCALERS[name](), clip, put)
    assert len(tables) == count
    assert all(bitwise_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert int(found[-1][0]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_table_while_gradients_stay(tables, dtype):
    run(SCALERS["scaler"](), True, in_place, dtype)
    assert tables == [3]


def test_a_gradient_that_is_replaced_is_read(tables):
    """The gradient it replaces is still alive and finite: reading the old address would find nothing."""
    params, kept = [nn.Parameter(torch.ones(4)) for _ in range(3)], []
    optimizer, scaler = warpsmith.optim.SGD(params, lr=1.0), SCALERS["scaler"]()
    for step in range(4):
        scaler.scale(torch.ones(()))
        for p in params:
            p.grad = torch.zeros(4) if p.grad is None else p.grad
        if step == 3:
            kept.append(params[1].grad)
            params[1].grad = torch.full((4,), torch.nan)
        scaler.clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_skipped == (step == 3)
    assert tables == [3, 3] and scaler.overflow(optimizer).first == "param_groups[0]['params'][1]"


def test_a_gradient_that_is_a_zero_tensor_for_one_step():
    """A zero tensor has no memory, so its step uses no table. In the next step the old gradient is back."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer, scaler = warpsmith.optim.SGD(params, lr=1.0), SCALERS["scaler"]()
    own = [torch.zeros(4) for _ in params]
    for step in range(5):
        scaler.scale(torch.ones(()))
        for p, grad in zip(params, own, strict=True):
            p.grad = grad
        if step == 3:
            params[1].grad = torch._efficientzerotensor((4,))
        own[2][0] = torch.nan if step == 4 else 0.0
        scaler.clip_(optimizer, 1.0)
        if step == 3:
            params[1].grad = own[1]  # the optimizers take no zero tensor
        scaler.step(optimizer)
        scaler.update()
    assert scaler.overflow(optimizer).tensors == {"param_groups[0]['params'][2]": 1}
