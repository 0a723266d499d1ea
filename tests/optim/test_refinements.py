"""bfloat16 parameters that keep more than rounding to nearest: rounded at random, compensated, with a remainder."""

import copy

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.reference.dropout import philox
from warpsmith.testing import bitwise_equal

from .adamw_runs import STEPS, assert_same_bits, make_params, run, set_grads, states_of
from .optimizers import EVERY, FULL, LAMB, LION, OF_TORCH

ALL = [o for o in EVERY if o is not LAMB]
LR = 1e-2
BF16 = torch.bfloat16
SHAPES = [(7, 5), (), (3,), (2049,), (33, 129)]
REFINED = ["bf16_sr", "bf16_kahan", "remainder"]


def rounding_words(seed, step, first, count):
    """Four 16-bit random numbers an element, [4, count]. A pair of elements shares a draw of four 32-bit words."""
    element = torch.arange(first, first + count)
    pair = element // 2
    counter = [pair & 0xFFFFFFFF, pair >> 32, torch.full_like(pair, step), torch.full_like(pair, 0x6F707469)]
    key = [torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)]
    words = torch.stack(philox(counter, key, rounds=7))
    numbers = torch.stack([words & 0xFFFF, words >> 16], dim=1).flatten(0, 1)  # eight of each pair
    return torch.where(element % 2 == 0, numbers[:4], numbers[4:])


def rounded_at_random(x, words):
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    upper = ((bits + words.view(x.shape)) >> 16).to(torch.int32)
    return (upper << 16).view(torch.float32).to(BF16)


def value_of(param, state):
    """What a parameter stands for, in float32."""
    wide = param.detach().float()
    if "remainder" in state:
        return (wide.view(torch.int32) + state["remainder"].to(torch.int32)).view(torch.float32)
    return wide + state["compensation"].float() if "compensation" in state else wide.clone()


@pytest.mark.parametrize("precision", REFINED)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_step_is_float32_arithmetic_and_the_stated_rounding(options, precision):
    """From states as after five steps, bit by bit: a float32 optimizer on the same values, then rounded."""
    seed = 2**40 + 7
    narrow = make_params(BF16)
    optimizer = options.ours(narrow, lr=LR, precision=precision, seed=seed)
    run(optimizer, narrow, 5)
    wide = [nn.Parameter(value_of(p, optimizer.state[p])) for p in narrow]
    plain = options.ours(wide, lr=LR)
    for p, w in zip(narrow, wide, strict=True):
        names = [n for n in optimizer.state[p] if n not in ("compensation", "remainder")]
        plain.state[w] = {n: optimizer.state[p][n].float().clone() for n in names}
    set_grads(narrow, 7)
    for p, w in zip(narrow, wide, strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    plain.step()
    first = 0
    for p, w in zip(narrow, wide, strict=True):
        exact, state = w.detach(), optimizer.state[p]
        names = [n for n in plain.state[w] if n != "step"]
        if precision == "bf16_sr":
            words = rounding_words(seed, 6, first, p.numel())
            order = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
            order = {"RMSprop": ["square_avg", "momentum_buffer", "grad_avg"]}.get(options.name, order)
            assert bitwise_equal(p.detach(), rounded_at_random(exact, words[0]))
            for name in names:
                word = order.index(name) if name in order else 0
                assert bitwise_equal(state[name], rounded_at_random(plain.state[w][name], words[1 + word])), name
        elif precision == "bf16_kahan":
            assert bitwise_equal(p.detach(), exact.to(BF16))
            assert bitwise_equal(state["compensation"], (exact - exact.to(BF16).float()).to(BF16))
            assert all(bitwise_equal(state[n], plain.state[w][n].to(BF16)) for n in names)
        else:
            assert bitwise_equal(value_of(p, state), exact)
            tie = exact.view(torch.int32) & 0xFFFF == 0x8000
            assert bitwise_equal(p.detach()[~tie], exact.to(BF16)[~tie])
            assert all(bitwise_equal(state[n], plain.state[w][n]) for n in names)
        assert state.get("step", torch.tensor(6.0)) == 6
        first += p.numel() + p.numel() % 2


@pytest.mark.parametrize("options", [*FULL, LION], ids=str)
def test_a_remainder_has_the_bits_of_masters_and_of_float32(options):
    """200 steps with equal gradients."""
    ours, masters = make_params(BF16, shapes=SHAPES), make_params(BF16, shapes=SHAPES)
    exact = [nn.Parameter(p.detach().float()) for p in ours]
    a, b = options.ours(ours, lr=LR, precision="remainder"), options.ours(masters, lr=LR, precision="master")
    c = options.ours(exact, lr=LR)
    for i in range(STEPS):
        set_grads(ours, i)
        for p, q, w in zip(ours, masters, exact, strict=True):
            q.grad, w.grad = p.grad, p.grad.float()
        for optimizer in (a, b, c):
            optimizer.step()
    for p, q, w in zip(ours, masters, exact, strict=True):
        assert bitwise_equal(value_of(p, a.state[p]), w.detach())
        assert bitwise_equal(b.state[q]["master"], w.detach())
        names = set(c.state[w])
        assert all(bitwise_equal(a.state[p][n], c.state[w][n]) for n in names)
        tie = w.detach().view(torch.int32) & 0xFFFF == 0x8000
        assert bitwise_equal(p.detach()[~tie], q.detach()[~tie])


@pytest.mark.not_on_sim(reason="the oracle is a step in float64")
@pytest.mark.parametrize("precision", ["bf16_sr", "bf16_kahan"])
@pytest.mark.parametrize("options", [o for o in OF_TORCH if o in FULL or not o.given] + FULL + [LION], ids=str)
def test_small_steps_add_up_over_200_steps(options, precision):
    """Five shapes, beside the same optimizer in float64, where bfloat16 rounded to nearest stands still or drifts."""
    lr = 1e-3 if "lr_decay" in options.given else 1e-4  # lr_decay divides it in later steps
    starts = [(1 + torch.arange(torch.Size(shape).numel()) % 128 / 128).to(BF16).view(shape) for shape in SHAPES]
    runs = {}
    for name, dtype, given in (
        ("ours", BF16, {"precision": precision}),
        ("nearest", BF16, {}),
        ("exact", torch.float64, {}),
    ):
        params = [nn.Parameter(start.to(dtype, copy=True)) for start in starts]
        optimizer = options.ours(params, lr=lr, **given)
        for i in range(200):
            generator = torch.Generator().manual_seed(i)
            for p in params:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.grad = (0.5 + 0.1 * noise).to(BF16).to(dtype)
            optimizer.step()
        ends = [value_of(p, optimizer.state[p]).double() if dtype == BF16 else p.detach() for p in params]
        runs[name] = [end - start.double() for end, start in zip(ends, starts, strict=True)]
    for i, shape in enumerate(SHAPES):
        way = float(runs["exact"][i].mean())
        error = {name: float((runs[name][i] - runs["exact"][i]).mean()) / way for name in ("ours", "nearest")}
        # Rounded at random an element moves by 2^-7 (from 1 to 2) or not, which adds up as a random walk.
        walk = (2.0**-7 / abs(way) / max(1, runs["exact"][i].numel())) ** 0.5 if precision == "bf16_sr" else 0.0
        assert abs(error["ours"]) < 0.1 + 4 * walk, (shape, error)
        if runs["exact"][i].numel() > 1000:
            assert abs(error["ours"]) < 0.25 * abs(error["nearest"]), (shape, error)


def test_random_rounding_is_right_in_the_mean():
    """A step of 1/32 of a unit in the last place, from 1: one element in 32 moves by a whole unit."""
    p = nn.Parameter(torch.ones(1 << 16, dtype=BF16))
    optimizer = warpsmith.optim.SGD([p], lr=2.0**-12, precision="bf16_sr")
    p.grad = -torch.ones_like(p)
    optimizer.step()
    assert set(p.detach().tolist()) == {1.0, 1 + 2.0**-7}
    moved = float((p.detach() > 1).double().mean())
    deviation = (1 / 32 * 31 / 32 / p.numel()) ** 0.5
    assert abs(moved - 1 / 32) < 5 * deviation


def test_each_of_many_groups_has_its_seed():
    """Of more groups than a launch takes."""

    def trained(seeds):
        params = make_params(BF16, shapes=[(64,)] * len(seeds))
        groups = [{"params": [p], "seed": seed} for p, seed in zip(params, seeds, strict=True)]
        run(warpsmith.optim.AdamW(groups, lr=LR, precision="bf16_sr"), params, 3)
        return [p.detach() for p in params]

    seeds = [i % 3 for i in range(70)]
    expected = [trained([seed] * len(seeds)) for seed in range(3)]
    for i, (found, seed) in enumerate(zip(trained(seeds), seeds, strict=True)):
        assert bitwise_equal(found, expected[seed][i]), i
        assert not torch.equal(found, expected[seed - 1][i])


def test_random_rounding_depends_on_seed_step_and_element_alone():
    def trained(seed, steps=3, groups=1):
        params = make_params(BF16, shapes=[(500,), (300,)])
        kinds = [{"params": params}] if groups == 1 else [{"params": [p], "seed": seed} for p in params]
        optimizer = warpsmith.optim.AdamW(kinds, lr=LR, precision="bf16_sr", seed=seed if groups == 1 else 0)
        run(optimizer, params, steps)
        return torch.cat([p.detach() for p in params])

    assert bitwise_equal(trained(1), trained(1))
    assert bitwise_equal(trained(1), trained(1, groups=2))
    assert not torch.equal(trained(1), trained(2))
    assert not torch.equal(trained(0), trained(2**32))
    p, q = nn.Parameter(torch.ones(1 << 12, dtype=BF16)), nn.Parameter(torch.ones(1 << 12, dtype=BF16))
    optimizer = warpsmith.optim.SGD([p, q], lr=2.0**-9, precision="bf16_sr")
    ups = []
    for _ in range(2):
        with torch.no_grad():
            p.fill_(1)
            q.fill_(1)
        p.grad = q.grad = -torch.ones_like(p)
        optimizer.step()
        ups += [p.detach() > 1, q.detach() > 1]
    pairs = [(i, j) for i in range(4) for j in range(i)]
    for i, j in pairs:  # independent: equal in 1/16 + 9/16 of the elements
        assert abs(float((ups[i] == ups[j]).double().mean()) - 5 / 8) < 0.05


def test_a_parameter_without_gradient_keeps_others_numbers():
    """Elements are numbered over all parameters, whether they take part or not."""
    results = []
    for skip in (False, True):
        params = make_params(BF16, shapes=[(100,), (200,)])
        optimizer = warpsmith.optim.AdamW(params, lr=LR, precision="bf16_sr")
        for i in range(2):
            set_grads(params, i)
            if skip:
                params[0].grad = None
            optimizer.step()
        results.append(params[1].detach())
    assert bitwise_equal(*results)


@pytest.mark.parametrize("precision", REFINED)
@pytest.mark.parametrize("options", [*FULL, LION], ids=str)
def test_states_go_to_torch_and_come_from_there(options, precision):
    params = make_params(BF16, shapes=SHAPES)
    optimizer = options.ours(params, lr=LR, precision=precision)
    run(optimizer, params, 3)
    if options is not LION:
        theirs = copy.deepcopy(params)
        b = options.theirs(theirs, lr=LR)
        b.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(b, theirs, 1, first=3)
        ours = copy.deepcopy(theirs)
        a = options.ours(ours, lr=LR, precision=precision)
        state = b.state_dict()
        for group in state["param_groups"]:
            group["precision"] = precision
        a.load_state_dict(copy.deepcopy(state))
        dtype = torch.float32 if precision == "remainder" else BF16
        for p, q in zip(ours, theirs, strict=True):
            for name in set(a.state[p]) - {"step", "compensation", "remainder"}:
                assert bitwise_equal(a.state[p][name], b.state[q][name].to(dtype))
        set_grads(ours, 4)
        kept = [p.detach().clone() for p in ours]
        a.step()
        assert all(torch.isfinite(p).all() for p in ours)
        assert not any(torch.equal(p, q) for p, q in zip(ours, kept, strict=True) if p.numel() > 9)
    before = copy.deepcopy((params, optimizer.state_dict()))
    fresh = options.ours(copy.deepcopy(params), lr=0.5)
    fresh.load_state_dict(copy.deepcopy(before[1]))
    assert fresh.param_groups[0]["precision"] == precision
    again = fresh.param_groups[0]["params"]
    assert_same_bits(states_of(fresh, again), states_of(optimizer, params))


@pytest.mark.parametrize(
    ("given", "message"), [({"seed": -1}, "-1"), ({"seed": 2**53}, "9007"), ({"seed": 0.5}, "0.5")]
)
def test_bad_seeds_are_refused(given, message):
    with pytest.raises(ValueError, match=rf"^Lion: seed: expected a whole number in \[0, 2\^53\), got {message}"):
        warpsmith.optim.Lion(make_params(BF16), precision="bf16_sr", **given)


@pytest.mark.parametrize("first", [-1, 0.5, True])
def test_a_bad_first_element_is_refused(first):
    params = make_params(BF16)
    params[1].first_element = first
    optimizer = warpsmith.optim.SGD(params, lr=LR, precision="bf16_sr")
    set_grads(params, 0)
    before = copy.deepcopy(params)
    text = r"^SGD: param_groups\[0\]\['params'\]\[1\]: first_element: expected a whole number >= 0, got"
    with pytest.raises(ValueError, match=f"{text} {first}"):
        optimizer.step()
    assert_same_bits(params, before)
    assert not optimizer.state


@pytest.mark.parametrize("precision", REFINED)
def test_float16_is_refused_and_float32_is_plain(precision):
    params = make_params(torch.float16)
    optimizer = warpsmith.optim.AdamW(params, precision=precision)
    set_grads(params, 0)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match=rf"expected bfloat16 or float32 for precision {precision}, got float16"):
        optimizer.step()
    assert_same_bits(params, before)
    wide, plain = make_params(), make_params()
    run(warpsmith.optim.AdamW(wide, lr=LR, precision=precision), wide, 3)
    run(warpsmith.optim.AdamW(plain, lr=LR), plain, 3)
    assert_same_bits(wide, plain)


@pytest.mark.parametrize(("precision", "extra"), [("bf16_kahan", "compensation"), ("remainder", "remainder")])
def test_extras_of_another_dtype_or_shape_are_refused(precision, extra):
    params = make_params(BF16, shapes=[(3,), (4,)])
    optimizer = warpsmith.optim.AdamW(params, precision=precision)
    run(optimizer, params, 1)
    good = optimizer.state[params[1]][extra]
    before = copy.deepcopy(params)
    for bad, text in ((good.double(), "float64"), (good.new_zeros(5), r"\(5\)")):
        optimizer.state[params[1]][extra] = bad
        with pytest.raises(ValueError, match=rf"{extra}.*expected .*{text}"):
            optimizer.step()
    assert_same_bits(params, before)
