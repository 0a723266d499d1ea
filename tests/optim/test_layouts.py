"""Parameters, gradients and states in any layout, with the negative bit or without, give the values of plain ones."""

import math
import random

import pytest
import torch
import warpsmith

from tests.optim.optimizers import EACH_STORAGE, FULL, LION, dtype_of


def _into(place, values):
    with torch.no_grad():
        return place.copy_(values)


def _negated(values):
    return torch._neg_view(-values)


def _conjugate(values):
    """The imaginary part of a conjugate: every second word of memory, with the negative bit."""
    if values.dtype not in (torch.float32, torch.float64):
        return _negated(values)
    return torch.complex(torch.zeros_like(values), -values).conj().imag


def _with_gaps(values):
    place = values.new_zeros((*values.shape, 3))[..., 1]
    return _into(place, values)


def _transposed(values):
    order = tuple(reversed(range(values.dim())))
    return _into(values.new_zeros([values.shape[d] for d in order]).permute(order), values)


def _misaligned(values):
    return _into(values.new_zeros(values.numel() + 1)[1:].view(values.shape), values)


LAYOUTS = {
    "plain": torch.clone,
    "negated": _negated,
    "conjugate": _conjugate,
    "gaps": _with_gaps,
    "transposed": _transposed,
    "misaligned": _misaligned,
    "negated gaps": lambda values: torch._neg_view(_with_gaps(-values)),
    "transposed conjugate": lambda values: _conjugate(_transposed(values)),
}


def drawn(random, values, ordered=False):
    """Equal values in a layout that a ``random.Random`` chooses; ``ordered``: of one with the order of plain memory."""
    names = [name for name in LAYOUTS if not (ordered and "transposed" in name)]
    found = LAYOUTS[random.choice(names)](values)
    assert torch.equal(found, values)
    return found


SHAPES = ((1,), (), (5,), (3, 4), (1, 1), (2, 3, 4), (0, 3))
ALL = [o for o in EACH_STORAGE if o.text != "bf16_sr"]  # whose random bits follow the order of memory


def pair(seed, dtype=torch.float32, shapes=SHAPES, ordered=False):
    """Parameters in drawn layouts, and plain ones of equal values."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    return (
        choose,
        [torch.nn.Parameter(drawn(choose, v, ordered)) for v in values],
        [torch.nn.Parameter(v) for v in values],
    )


def give_gradients(choose, odd, plain):
    for p, q in zip(odd, plain, strict=True):
        if choose.random() < 0.15:
            p.grad = q.grad = None
            continue
        q.grad = torch.randn(q.shape).to(q.dtype)
        p.grad = drawn(choose, q.grad)


def same(odd, plain, **tolerance):
    for p, q in zip(odd, plain, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e5])
@pytest.mark.parametrize("order", [1, 2, math.inf], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_gives_the_values_of_plain_tensors(layout, order, max_norm):
    """One gradient alone lies in the layout. A norm below the bound changes no bit."""
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in SHAPES]
    for index, v in enumerate(values):
        odd, plain = ([torch.nn.Parameter(torch.zeros_like(g)) for g in values] for _ in range(2))
        for i, (p, q, g) in enumerate(zip(odd, plain, values, strict=True)):
            p.grad, q.grad = LAYOUTS[layout if i == index else "plain"](g), g.clone()
        norms = [warpsmith.optim.clip_grad_norm_(params, max_norm, order) for params in (odd, plain)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        tolerance = {"rtol": 0 if max_norm > norms[1] else 1e-6, "atol": 0}
        same([p.grad for p in odd], [p.grad for p in plain], **tolerance)
        assert max_norm < norms[1] or torch.equal(odd[index].grad, v)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", ALL, ids=str)
def test_steps_have_the_bits_of_plain_tensors(options, seed):
    """Between steps states and memory of parameters move to other layouts."""
    ordered = options.text == "8bit"  # blocks of codes follow the order of memory
    choose, odd, plain = pair(seed, dtype_of(options), (*SHAPES, (64, 80)), ordered)
    a, b = options.ours(odd), options.ours(plain)
    # LAMB's norms are sums in the order of memory.
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if options.name == "LAMB" else {}
    for _ in range(5):
        give_gradients(choose, odd, plain)
        a.step()
        b.step()
        same(odd, plain, **tolerance)
        for p in odd:
            if choose.random() < 0.3:
                p.data = drawn(choose, p.detach(), ordered)
            for name, value in a.state[p].items():
                if name != "scales" and value.dtype.is_floating_point and choose.random() < 0.3:
                    a.state[p][name] = drawn(choose, value)
        assert all(p.grad is None or torch.equal(p.grad, q.grad) for p, q in zip(odd, plain, strict=True))


@pytest.mark.parametrize("options", [*FULL, LION], ids=str)
def test_what_is_fused_has_the_bits_of_plain_tensors(options):
    for seed in range(4):
        choose, odd, plain = pair(seed)
        a, b = options.ours(odd), options.ours(plain)
        averages, copies = [], []
        for optimizer, params in ((a, odd), (b, plain)):
            averages.append(warpsmith.optim.EMA(params, 0.5))
            copies.append([torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False) for p in params])
            fits = {p: c for p, c in zip(params, copies[-1], strict=True) if c.stride() == p.stride()}
            optimizer.fuse(ema=averages[-1], copies=fits, zero_grads=True)
            copies[-1] = fits
        for _ in range(3):
            give_gradients(choose, odd, plain)
            a.step()
            b.step()
            same(odd, plain)
            same(averages[0].averages, averages[1].averages)
            assert all(torch.equal(copy, p.to(torch.bfloat16)) for p, copy in copies[0].items())
            assert not any(p.grad.any() for p in odd if p.grad is not None)


@pytest.mark.parametrize("seed", range(8))
def test_averages_and_clipping_of_any_layout(seed):
    choose, odd, plain = pair(seed)
    averages = [warpsmith.optim.EMA(params, 0.25) for params in (odd, plain)]
    for _ in range(3):
        give_gradients(choose, odd, plain)
        before = warpsmith.optim.grad_norm(odd)
        norms = [warpsmith.optim.clip_grad_norm_(params, 0.5) for params in (odd, plain)]
        torch.testing.assert_close(norms[0], norms[1])
        assert torch.equal(before, norms[0])
        for p, q in zip(odd, plain, strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad.resolve_neg(), q.grad)
            with torch.no_grad():
                q.add_(1.5)
                p.add_(1.5)
        for ema in averages:
            ema.update()
        same(averages[0].averages, averages[1].averages)
    with averages[0].applied():
        same(odd, averages[1].averages)
    same(odd, plain)


SCALERS = {
    "GradScaler": lambda: warpsmith.amp.GradScaler("cpu", init_scale=4.0),
    "StepGuard": warpsmith.amp.StepGuard,
}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", SCALERS)
def test_scalers_judge_and_clip_any_layout(name, unscales, clips):
    """With an infinite gradient in the second step, which is skipped."""
    for seed in range(6):
        choose, odd, plain = pair(seed)
        sides = [(SCALERS[name](), warpsmith.optim.AdamW(params, lr=0.1), params) for params in (odd, plain)]
        for step in range(4):
            give_gradients(choose, odd, plain)
            if step == 1:
                plain[3].grad = torch.full((3, 4), torch.inf)
                odd[3].grad = drawn(choose, plain[3].grad)
            results = []
            for scaler, optimizer, _ in sides:
                scaler.scale(torch.zeros(()))
                if unscales:
                    scaler.unscale_(optimizer)
                if clips:
                    results.append(scaler.clip_(optimizer, 1.0))
                scaler.step(optimizer)
                scaler.update()
            if clips:
                torch.testing.assert_close(*results)
            same(odd, plain, rtol=1e-6, atol=1e-7)
        assert [scaler.skipped_steps for scaler, *_ in sides] == [1, 1]


def test_a_state_or_address_that_gets_the_bit_is_seen():
    p, q = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    a, b = (warpsmith.optim.SGD([t], lr=0.5, momentum=0.5) for t in (p, q))
    memory = torch.complex(torch.zeros(1), torch.ones(1))
    p.data = memory.imag
    for step in range(4):
        for t, optimizer in ((p, a), (q, b)):
            t.grad = torch.full((1,), float(step + 1))
            optimizer.step()
        same([p], [q])
        with torch.no_grad():  # the same word of memory, then with the bit
            p.data = (memory if step % 2 else memory.conj()).imag
            p.copy_(q)


def test_overlapping_and_unreal_parameters_are_refused():
    for bad in (torch.zeros(1).expand(4), torch.zeros(8).as_strided((3, 3), (2, 1)), torch._efficientzerotensor(3)):
        p = torch.nn.Parameter(torch.zeros(1))
        optimizer = warpsmith.optim.SGD([p])
        p.data, p.grad = bad, torch.ones(bad.shape)
        with pytest.raises(ValueError, match=r"^SGD: param_groups\[0\]\['params'\]\[0\]: expected "):
            optimizer.step()
