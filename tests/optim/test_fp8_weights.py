"""AdamW(fp8_weights=True): the bits of the layers' own casts, which layers read where they hold, and only there."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.amp import Fp8Recipe
from warpsmith.ops import _scaled_linear
from warpsmith.optim import EMA, AdamW
from warpsmith.testing import bitwise_equal

from tests.dispatched import Dispatched

from .adamw_runs import ON_SIM, ORDERS, assert_same_bits, in_order, moved, on_each_device, states_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [(None, BF16), (None, FP32), ("master", BF16), ("remainder", BF16)]  # of which there are kernels
# Rows of two threads, of which there are more than a block casts, of parts of a warp, of a warp and more, of a block
# and more, and longer than a chunk.
SHAPES = [(16, 16), (544, 16), (32, 48), (16, 256), (48, 272), (16, 2064), (16, 8208)]
CAST = torch.ops.warpsmith.scaled_linear_cast.default
counted = pytest.mark.skipif(not ON_SIM, reason="the sim counts bytes")


def stack(dtype=BF16, device="cpu", widths=(64, 96, 32), recipe="row"):
    torch.manual_seed(0)
    pairs = zip(widths, widths[1:], strict=False)
    model = nn.Sequential(*(nn.Linear(*pair, device=device, dtype=dtype) for pair in pairs))
    warpsmith.amp.fp8(model, recipe, emulate=True)
    return model


def adamw(params, fp8_weights=True, **options):
    return AdamW(params, lr=1e-2, fp8_weights=fp8_weights, **options)


def batch(model, number=0, rows=8):
    weight = next(model.parameters())
    drawn = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(number))
    return drawn.to(weight.device, weight.dtype)


def backward(model, number=0):
    """A forward and a backward. Returns y, and how many weights the forward has cast."""
    with Dispatched() as ran:
        y = model(batch(model, number))
    y.float().square().mean().backward()
    return y.detach(), len(ran.of(CAST))


def cast_of(weight):
    """Bytes and scales that layers would read without a cast; None where they would cast."""
    kept = _scaled_linear.kept_by_rows(weight)
    return None if kept is None else (kept.data.view(torch.uint8), kept.scale)


def assert_holds(weight):
    data, scale = cast_of(weight)
    wanted = warpsmith.quantize_fp8(weight.detach())
    assert torch.equal(data, wanted.data.view(torch.uint8)) and torch.equal(scale, wanted.scale)


@on_each_device
@pytest.mark.parametrize(("precision", "dtype"), KINDS, ids=str)
def test_bytes_and_scales_are_those_of_the_cast(precision, dtype, device):
    """Of weights of all sizes in one launch, with all that a float may hold."""
    finals = []
    for order in ORDERS:
        torch.manual_seed(1)
        layers = [nn.Linear(k, n, bias=n == 32, device=device, dtype=dtype) for n, k in SHAPES]
        model = nn.ModuleList(layers)
        warpsmith.amp.fp8(model, emulate=True)
        optimizer = adamw(model.parameters(), precision=precision, weight_decay=0)
        for layer in layers:
            w = layer.weight.data
            w *= 2.0 ** torch.arange(-8, 8, device=device, dtype=dtype).repeat(len(w) // 16)[:, None]
            w[1], w[2] = 0, -0.0
            layer(batch(layer)).float().sum().backward()
            w.grad = None
            g = layer.weight.grad
            g[:] = w * 0.37
            g[3, 5], g[4, -1] = float("nan"), float("inf")
        with in_order(order):
            optimizer.step()
        for layer in layers:
            assert_holds(layer.weight)
            assert layer.weight.isnan().sum() == 2
        finals.append([t for layer in layers for t in cast_of(layer.weight)])
        assert_same_bits(finals[-1], finals[0])


@on_each_device
@pytest.mark.parametrize(("precision", "dtype"), KINDS, ids=str)
def test_a_training_has_the_same_bits_and_casts_once(precision, dtype, device):
    finals = []
    for fp8_weights in (False, True):
        model = stack(dtype, device)
        optimizer, losses, casts = adamw(model.parameters(), fp8_weights, precision=precision), [], []
        for step in range(4):
            for micro_batch in range(2):
                y, count = backward(model, 2 * step + micro_batch)
                losses.append(y)
                casts.append(count)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 2)
        assert casts == [2, 0, *([0, 0] if fp8_weights else [2, 0]) * 3]
        finals.append([*losses, *model.parameters(), *states_of(optimizer, list(model.parameters()))])
    assert_same_bits(*finals)


@on_each_device
def test_a_skipped_step_leaves_both(device):
    model = stack(device=device)
    optimizer = adamw(model.parameters())
    for step in range(3):
        backward(model, step)
        before = copy.deepcopy([[p.detach() for p in model.parameters()], [cast_of(m.weight) for m in model]])
        optimizer.found_inf = torch.tensor(float(step != 1), device=device)
        optimizer.step()
        after = [[p.detach() for p in model.parameters()], [cast_of(m.weight) for m in model]]
        same = [bitwise_equal(a, b) for a, b in zip(before[0], after[0], strict=True)]
        assert all(same) if step != 1 else not any(same)
        for m in model:
            assert_holds(m.weight)
        if step != 1:
            assert all(map(torch.equal, sum(before[1], ()), sum(after[1], ())))
        optimizer.zero_grad()
        assert backward(model)[1] == 0


def edit(weight):
    with torch.no_grad():
        weight.mul_(0.5)


def other_memory(weight):
    weight.data = weight.detach() * 0.5


def told(weight):
    weight.data.mul_(0.5)
    torch.autograd.graph.increment_version(weight)


def averages(weight):
    ema = EMA([weight], 0.5)
    ema.averages[0].mul_(0.5)
    ema.copy_to_params()


def loaded(weight):
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    holder.load_state_dict({"weight": weight.detach() * 0.5})


@pytest.mark.parametrize("change", [edit, other_memory, told, averages, loaded], ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["behind the step", "before it"])
def test_an_edit_is_seen(change, when):
    finals = []
    for fp8_weights in (False, True):
        model = stack()
        optimizer, seen = adamw(model.parameters(), fp8_weights), []
        for step in range(3):
            y, count = backward(model, step)
            seen.append(y)
            if step == 1 and when == "before it":
                change(model[0].weight)
            optimizer.step()
            if step == 1 and when == "behind the step":
                change(model[0].weight)
            optimizer.zero_grad()
        assert count == (1 if fp8_weights else 2)
        finals.append([*seen, *model.parameters()])
    assert_same_bits(*finals)


def test_behind_a_skipped_step_an_edit_of_before_is_seen():
    model = stack()
    optimizer = adamw(model.parameters())
    backward(model)
    edit(model[0].weight)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert cast_of(model[0].weight) is None
    assert_holds(model[1].weight)


@pytest.mark.parametrize("recipes", [("row", "row"), ("row", "tensor"), ("tensor", "row")], ids="-".join)
def test_two_layers_share_a_weight(recipes):
    finals = []
    for fp8_weights in (False, True):
        first, second = (stack(widths=(32, 32), recipe=recipe) for recipe in recipes)
        second[0].weight = first[0].weight
        model = nn.Sequential(first, second)
        optimizer = adamw({id(p): p for p in model.parameters()}.values(), fp8_weights)
        seen = [backward(model, step)[0] for step in range(3) if not optimizer.step() and not optimizer.zero_grad()]
        finals.append([*seen, *model.parameters()])
    assert_same_bits(*finals)


def test_what_is_frozen_and_what_has_no_gradient():
    model = stack(widths=(32, 32, 32, 32))
    model[1].requires_grad_(False)
    optimizer, x = adamw(model.parameters()), batch(model)
    for _ in range(3):
        model[1](model[0](x)).float().sum().backward()
        model[2](x)  # has a cast, and no gradient
        frozen, idle = (_scaled_linear.kept_of(model[i].weight) for i in (1, 2))
        before = frozen.key, frozen.data
        optimizer.step()
        optimizer.zero_grad()
        assert (frozen.key, frozen.data) == before and idle.data is not None
        assert cast_of(model[2].weight) is None
        assert_holds(model[0].weight)


FALLS_BACK = {
    "amsgrad": ({"amsgrad": True}, BF16, None),
    "float16": ({}, FP16, None),
    "compensated": ({"precision": "bf16_kahan"}, BF16, None),
    "at random": ({"precision": "bf16_sr"}, BF16, None),
    "8bit": ({"precision": "8bit"}, BF16, None),
    "16-bit states": ({"precision": "bf16_states"}, FP32, None),
    "float64": ({}, torch.float64, None),
    "zeroed gradients": ({}, BF16, lambda optimizer, model: optimizer.fuse(zero_grads=True)),
    "an average": ({}, BF16, lambda optimizer, model: optimizer.fuse(ema=EMA(model.parameters()))),
}


@on_each_device
@pytest.mark.parametrize("case", [name for name in FALLS_BACK if name != "float64"])
def test_all_else_is_cast_by_the_layers(case, device):
    (options, dtype, prepare), finals = FALLS_BACK[case], []
    for fp8_weights in (False, True):
        model = stack(dtype, device)
        optimizer, seen = adamw(model.parameters(), fp8_weights, **options), []
        if prepare:
            prepare(optimizer, model)
        for step in range(3):
            y, count = backward(model, step)
            assert count == 2
            seen.append(y)
            optimizer.step()
            optimizer.zero_grad()
        finals.append([*seen, *model.parameters()])
    assert_same_bits(*finals)


@on_each_device
def test_gradients_of_another_dtype(device):
    model = stack(FP32, device)
    optimizer = adamw(model.parameters())
    for step in range(4):
        assert backward(model, step)[1] == (2 if step in (0, 2) else 0)
        if step == 1:
            weight = model[0].weight
            weight.grad_dtype = None
            weight.grad = weight.grad.to(BF16)
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.grad_dtype = FP32


@pytest.mark.parametrize("layout", ["columns first", "misaligned", "with gaps"])
def test_weights_that_lie_otherwise(layout):
    finals = []
    for fp8_weights in (False, True):
        model, w = stack(widths=(32, 32)), None
        w = model[0].weight
        made = {
            "columns first": lambda t: t.t().contiguous().t(),
            "misaligned": lambda t: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view_as(t).copy_(t),
            "with gaps": lambda t: torch.empty(len(t), 48, dtype=t.dtype)[:, :32].copy_(t),
        }[layout]
        w.data = made(w.detach())
        optimizer, seen = adamw(model.parameters(), fp8_weights), []
        for step in range(3):
            y, count = backward(model, step)
            assert count == 1
            seen.append(y)
            optimizer.step()
            optimizer.zero_grad()
        finals.append([*seen, *model.parameters()])
    assert_same_bits(*finals)


def test_a_resumed_run_goes_on_bit_for_bit():
    """The casts are no part of a state: what was saved has none, and the first forward makes them."""
    model = stack()
    optimizer = adamw(model.parameters())

    def train(model, optimizer, steps):
        for step in steps:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *states_of(optimizer, list(model.parameters()))]

    train(model, optimizer, range(2))
    assert set(optimizer.param_groups[0]) == set(AdamW(nn.Linear(2, 2).parameters()).param_groups[0])
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    expected = train(model, optimizer, range(2, 5))
    fresh = stack()
    resumed = adamw(fresh.parameters())
    fresh.load_state_dict(saved[0])
    resumed.load_state_dict(copy.deepcopy(saved[1]))
    assert_same_bits(train(fresh, resumed, range(2, 5)), expected)
    model.load_state_dict(saved[0])  # of one that has run
    optimizer.load_state_dict(saved[1])
    assert_same_bits(train(model, optimizer, range(2, 5)), expected)


def test_steps_of_another_optimizer_and_evaluations():
    """Any weight may have changed behind a step of any optimizer."""
    finals = []
    for fp8_weights in (False, True):
        model, seen = stack(), []
        both = [adamw(layer.parameters(), fp8_weights) for layer in model]
        for step in range(3):
            y, count = backward(model, step)
            assert count == 2
            seen.append(y)
            for optimizer in both:
                optimizer.step()
            assert cast_of(model[0].weight) is None and cast_of(model[1].weight) is None
            with torch.no_grad():
                seen.append(model(batch(model)))
        finals.append([*seen, *model.parameters()])
    assert_same_bits(*finals)


def test_copies_and_pickles_go_on():
    model = stack()
    for make in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        optimizer = make(adamw(model.parameters()))
        weights = [p for p in optimizer.param_groups[0]["params"] if p.dim() == 2]
        recipe = Fp8Recipe()
        for w in weights:
            warpsmith.scaled_linear(torch.randn(4, w.shape[1], dtype=BF16), w, recipe=recipe).float().sum().backward()
        optimizer.step()
        for w in weights:
            assert_holds(w)
    old = AdamW(model.parameters())
    old.__setstate__({k: v for k, v in old.__getstate__().items() if k != "_fp8_weights"})
    backward(model)
    old.step()
    assert cast_of(model[0].weight) is None


@pytest.mark.gpu
def test_a_captured_step_casts_at_each_replay():
    finals = []
    for captured in (False, True):
        model = stack(device="cuda")
        optimizer = adamw(model.parameters())

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = warpsmith.train.CapturedStep(step, state=[model, optimizer]) if captured else step
        losses = [run(batch(model, i)).clone() for i in range(6)]
        losses.append(model(batch(model)).detach())  # an eager forward behind replays
        finals.append([*losses, *model.parameters()])
    assert_same_bits(*finals)


@counted
@pytest.mark.parametrize(("precision", "dtype"), KINDS, ids=str)
def test_bytes_moved(precision, dtype):
    """A byte an element and four a row are written; the step's result is read twice, from the caches of a card."""
    found = []
    for fp8_weights in (False, True):
        model = stack(dtype, widths=(2048, 64))
        optimizer = adamw([model[0].weight], fp8_weights, precision=precision)
        for step in range(2):
            backward(model, step)
            if step == 0:
                optimizer.step()
        found.append(moved(optimizer.step))
    (read, written), (read_too, written_too) = found
    elems, rows = 64 * 2048, 64
    # chunks are rows, not 1,024 elements, so there are half as many; the table is read once more
    assert written_too - written == elems + 4 * rows
    assert 0 <= read_too - read - 2 * elems * dtype.itemsize + 64 * 100 <= 64 * 200


def test_what_the_raw_ops_refuse():
    raw = torch.ops.warpsmith
    w = torch.zeros(32, 48)

    def table(row_elems, w=w, storage=0, states=2):
        arrays = [*(torch.zeros_like(w) for _ in range(states)), torch.zeros(())]
        has = [0b1011 | (states == 3) << 2]
        return *raw.optim_table.default(0, storage, [w], arrays, has, [0], [], row_elems), arrays

    for wrong, given in (
        ([32], {}),
        ([24], {"w": torch.zeros(32, 24)}),
        ([48], {"w": torch.zeros(48, 32).t()}),
        ([48], {"w": torch.zeros(32 * 48 + 1)[1:].view(32, 48)}),
        ([48], {"w": w.half(), "storage": 3}),
        ([65552], {"w": torch.zeros(1, 65552)}),
    ):
        with pytest.raises(ValueError, match=r"^optim_table: row_elems\[0\]: expected 0, or the columns of a contig"):
            table(wrong, **given)
    with pytest.raises(ValueError, match="^optim_table: row_elems: expected 1 indices, got 2"):
        table([48, 48])
    grad = torch.zeros_like(w)

    def step(casts, states=2, **more):
        made, facts, _arrays = table([48], states=states)
        constants, pointers = torch.zeros(1, 6, dtype=torch.float64), torch.tensor([grad.data_ptr()])
        given = functools.partial(raw.optim_step.default, made, facts, pointers, [torch.tensor(0.0)], constants)
        given(None, None, casts=casts, **more)

    with pytest.raises(ValueError, match="^optim_step: casts: expected 3 words, got 2"):
        step(torch.zeros(2, dtype=torch.int64))
    for options in ({"states": 3}, {"mixed_grads": True}, {"zero_grads": True}):
        with pytest.raises(ValueError, match="^optim_step: casts: expected none with this optimizer"):
            step(torch.zeros(3, dtype=torch.int64), **options)
    step(torch.zeros(3, dtype=torch.int64))  # of no tensor
