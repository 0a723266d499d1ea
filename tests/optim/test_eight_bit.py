"""8-bit states: the map, blocks and scales, steps, trajectories, which tensors stay in float32, states both ways."""

import copy

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.reference.optim import dequantize_blockwise, dynamic_map, quantize_blockwise
from warpsmith.testing import bitwise_equal

from .adamw_runs import assert_one_result, assert_same_bits, make_params, run, set_grads, states_of
from .optimizers import LION, Options

KINDS = [
    Options("AdamW", {"weight_decay": 0.1}, "decay"),
    Options("Adam", {}, "plain"),
    LION,
    Options("SGD", {"momentum": 0.9, "nesterov": True}, "nesterov"),
]
LR = 1e-2
SHAPES = [(4096,), (5000,), (70, 100), (10,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def decoded(state):
    """A parameter's state in float32."""
    if "scales" not in state:
        return dict(state)
    names = [name for name in state if name not in ("step", "scales")]
    values = [
        dequantize_blockwise(state[name], scales, name != "exp_avg_sq")
        for name, scales in zip(names, state["scales"], strict=True)
    ]
    return {**{n: v for n, v in state.items() if n == "step"}, **dict(zip(names, values, strict=True))}


def encoded(state):
    pairs = {n: quantize_blockwise(v, n != "exp_avg_sq") for n, v in state.items() if n != "step"}
    scales = torch.stack([scales for _, scales in pairs.values()])
    return {**state, **{name: codes for name, (codes, _) in pairs.items()}, "scales": scales}


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_what_is_behind_the_last_element_is_zero(options):
    """A short last block has the codes and scales of one that zeros fill, also where its states shrink."""
    params = [nn.Parameter(torch.zeros(n)) for n in (4224, 4352)]
    optimizer = options.ours(params, lr=LR, precision="8bit")
    for factor in (1.0, -1.0, 0.01, 0.0):
        for p in params:
            p.grad = torch.zeros_like(p)
            p.grad[:4224] = factor * torch.linspace(0.5, 1, 4224)
        optimizer.step()
        short, whole = (optimizer.state[p] for p in params)
        for name, value in short.items():
            other = whole[name] if name in ("step", "scales") else whole[name][:4224]
            assert bitwise_equal(value, other), name


@pytest.mark.parametrize("signed", [False, True])
def test_the_map_is_the_dynamic_one(signed):
    """As bitsandbytes makes it."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i * (1 if signed else 2) + 1, dtype=torch.float64)
        middles = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    ours = dynamic_map(signed)
    assert ours.shape == (256,)
    torch.testing.assert_close(ours.double(), torch.tensor(sorted(values), dtype=torch.float64), rtol=2**-23, atol=0)


@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_the_nearest(signed):
    value = torch.randn(3000, generator=torch.Generator().manual_seed(0)) ** 5
    value = value if signed else value.abs()
    value[256:512] = 0
    codes, scales = quantize_blockwise(value, signed)
    per_element = scales.repeat_interleave(256)[:3000]
    assert bitwise_equal(scales, torch.stack([part.abs().max() for part in value.split(256)]))
    x = torch.where(per_element == 0, 0, value.double() / per_element.double())
    distances = (x[:, None] - dynamic_map(signed).double()).abs()
    chosen = distances.gather(1, codes.long()[:, None])[:, 0]
    kept_from_zero = (codes == 1) & (x > 0) & (not signed)
    assert bool(((chosen <= distances.min(1).values + 1e-6) | kept_from_zero).all())
    assert signed or not bool(((codes == 0) & (x > 0)).any())


def test_every_code_has_its_value_and_floats_become_codes():
    p = nn.Parameter(torch.zeros(4096))
    optimizer = warpsmith.optim.Adam([p], precision="8bit")
    run(optimizer, [p], 1)
    state = optimizer.state[p]
    for name in ("exp_avg", "exp_avg_sq"):
        state[name].copy_(torch.arange(4096) % 256)
    state["scales"].copy_(torch.rand(2, 16))
    floats = warpsmith.optim.float32_states(optimizer.state_dict())
    assert_same_bits([floats["state"][0]], [decoded(state)])
    floats["param_groups"][0]["precision"] = "8bit"
    again = warpsmith.optim.Adam([nn.Parameter(p.detach().clone())], precision="8bit")
    values = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)) ** 3
    floats["state"][0].update(exp_avg=values[0], exp_avg_sq=values[1].abs())
    again.load_state_dict(copy.deepcopy(floats))
    (loaded,) = again.state.values()
    expected = encoded(floats["state"][0])
    assert all(bitwise_equal(loaded[n], expected[n]) for n in ("exp_avg", "exp_avg_sq", "scales"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_step_is_that_of_float32_states_then_encoded(options, dtype):
    """Bit by bit, from states as after five steps; small tensors have float32 states."""
    params = make_params(dtype, shapes=SHAPES)
    optimizer = options.ours(params, lr=LR, precision="8bit")
    run(optimizer, params, 5)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    plain = options.ours(wide, lr=LR)
    for p, w in zip(params, wide, strict=True):
        plain.state[w] = decoded(copy.deepcopy(optimizer.state[p]))
    set_grads(params, 7)
    for p, w in zip(params, wide, strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    plain.step()
    for p, w in zip(params, wide, strict=True):
        assert bitwise_equal(p.detach(), w.detach().to(dtype))
        expected = encoded(plain.state[w]) if p.numel() >= 4096 else plain.state[w]
        assert optimizer.state[p].keys() == expected.keys()
        for name, value in optimizer.state[p].items():
            assert value.dtype == (torch.float32 if name in ("scales", "step") or p.numel() < 4096 else torch.uint8)
            assert bitwise_equal(value, expected[name]), name


@pytest.mark.not_on_sim(reason="the oracle is a step in float64")
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_200_steps_stay_beside_float64(options):
    """The end is near that of a float64 run, relative to the length of the way, and the loss falls as far.

    Lion's steps all have one size, and the rounding of a code may decide a sign: only its loss is compared."""
    target = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    scale = 10 ** torch.linspace(-1, 0, 8192)  # blocks with elements of unlike sizes
    ends = []
    for dtype, given in ((torch.float32, {"precision": "8bit"}), (torch.float64, {})):
        p = nn.Parameter(torch.zeros(8192, dtype=dtype))
        optimizer = options.ours([p], lr=0.005, **given)
        for i in range(200):
            noise = 0.1 * torch.randn(8192, generator=torch.Generator().manual_seed(i))
            p.grad = ((p.detach() - target.to(dtype)) * scale.to(dtype) + noise.to(dtype)).detach()
            optimizer.step()
        ends.append(p.detach().double())
    ours, exact = ends
    error = float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert options is LION or error < 0.05, error
    start, *losses = (float((scale * (p - target).square()).mean()) for p in (torch.zeros(8192), ours, exact))
    assert losses[1] < 0.7 * start
    assert start - losses[0] > 0.95 * (start - losses[1]), (start, losses)


def test_a_tiny_second_moment_never_becomes_zero():
    """Its block has gradients a million times larger. Adam's step must stay near the learning rate."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = warpsmith.optim.Adam([p], lr=1.0, precision="8bit")
    for _ in range(20):
        before = p.detach().clone()
        p.grad = torch.full_like(p, 1e-5)
        p.grad[::256] = 10.0
        optimizer.step()
        assert float((p.detach() - before).abs().max()) < 1.5


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_same_bits_again_resumed_in_any_order_cut_at_blocks(options):
    assert_one_result(lambda params, lr: options.ours(params, lr=lr, precision="8bit"), [4096, 16 * 1024 + 256, 5000])


def test_named_and_small_tensors_keep_float32_states():
    shapes = {"embed.weight": (64, 100), "block.norm.weight": (5000,), "block.weight": (5000,), "bias": (4095,)}
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = warpsmith.optim.AdamW(params.items(), precision="8bit", keep_fp32=["embed.*", "*norm*"])
    run(optimizer, list(params.values()), 2)
    coded = {name for name, p in params.items() if "scales" in optimizer.state[p]}
    assert coded == {"block.weight"}
    assert all((optimizer.state[p]["exp_avg"].dtype == torch.uint8) == (name in coded) for name, p in params.items())
    state = optimizer.state[params["block.weight"]]
    assert state["scales"].shape == (2, 20)
    # One byte a state and four for each 256.
    assert sum(t.nbytes for n, t in state.items() if n != "step") == 2 * (5000 + 4 * 20)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_states_go_to_torch_and_come_from_there(options):
    params = make_params(shapes=SHAPES)
    optimizer = options.ours(params, lr=LR, precision="8bit")
    run(optimizer, params, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    floats = warpsmith.optim.float32_states(saved)
    theirs = copy.deepcopy(params)
    b = options.ours(theirs, lr=LR) if options is LION else options.theirs(theirs, lr=LR)
    b.load_state_dict(copy.deepcopy(floats))
    run(b, theirs, 1, first=3)
    run(optimizer, params, 1, first=3)
    for p, q in zip(params, theirs, strict=True):  # the same step, but for the order of float32 operations
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-5)
    a = options.ours(copy.deepcopy(theirs), lr=LR, precision="8bit")
    back = copy.deepcopy(b.state_dict())
    for group in back["param_groups"]:
        group["precision"] = "8bit"
    a.load_state_dict(back)
    for p, q in zip(a.param_groups[0]["params"], theirs, strict=True):
        expected = dict(b.state[q])
        if q.numel() >= 4096:
            expected = encoded(expected)
        assert_same_bits(
            [{n: a.state[p][n] for n in expected if n != "step"}], [{n: v for n, v in expected.items() if n != "step"}]
        )
    again = options.ours(copy.deepcopy(params), lr=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_bits(states_of(again, again.param_groups[0]["params"]), states_of(optimizer, params))


def test_a_channels_last_parameter_has_blocks_in_memory_order():
    weight = torch.randn(16, 32, 3, 3).to(memory_format=torch.channels_last)
    flat = weight.permute(0, 2, 3, 1).reshape(-1).clone()
    p, q = nn.Parameter(weight), nn.Parameter(flat)
    for t in (p, q):
        optimizer = warpsmith.optim.AdamW([t], lr=LR, precision="8bit")
        for i in range(3):
            g = torch.randn(flat.shape, generator=torch.Generator().manual_seed(i))
            t.grad = g if t is q else g.view(16, 3, 3, 32).permute(0, 3, 1, 2)
            optimizer.step()
    assert bitwise_equal(p.detach().permute(0, 2, 3, 1).reshape(-1), q.detach())


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("loaded", [False, True])
def test_codes_follow_a_parameter_into_another_memory_order(options, loaded):
    """Blocks then hold other elements, whose scales differ by decades."""
    size = torch.logspace(-4, 0, 8 * 16 * 6 * 6).view(8, 16, 6, 6)
    p = nn.Parameter(torch.randn(8, 16, 6, 6))
    optimizer = options.ours([p], lr=0.0, precision="8bit")
    p.grad = size.clone()
    optimizer.step()
    before = decoded(optimizer.state[p])
    saved = copy.deepcopy(optimizer.state_dict())
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    if loaded:
        optimizer = options.ours([p], lr=0.0, precision="8bit")
        optimizer.load_state_dict(saved)
    optimizer.found_inf = torch.tensor(1.0)  # the step is skipped: only the layout changes
    optimizer.step()
    state, names = optimizer.state[p], [name for name in before if name != "step"]
    for name, scales in zip(names, state["scales"], strict=True):
        expected = quantize_blockwise(before[name].permute(0, 2, 3, 1).contiguous(), name != "exp_avg_sq")
        assert state[name].stride() == p.stride()
        assert bitwise_equal(state[name].permute(0, 2, 3, 1).contiguous(), expected[0])
        assert bitwise_equal(scales, expected[1])


BAD = [
    ("AdamW", {"amsgrad": True}, r"precision: expected another one: 8bit is for Adam without amsgrad"),
    ("RMSprop", {}, r"precision: expected another one"),
    ("Adagrad", {}, r"precision: expected another one"),
]


@pytest.mark.parametrize(("name", "given", "message"), BAD, ids=str)
def test_bad_options_are_refused(name, given, message):
    with pytest.raises(ValueError, match=rf"^{name}: {message}"):
        getattr(warpsmith.optim, name)(make_params(), precision="8bit", **given)


def test_bad_parameters_and_states_are_refused():
    params = make_params(shapes=[(5000,)])
    optimizer = warpsmith.optim.AdamW(params, precision="8bit", keep_fp32=["a"])
    set_grads(params, 0)
    with pytest.raises(ValueError, match=r"expected a parameter that was given with its name, for keep_fp32"):
        optimizer.step()
    assert not optimizer.state
    optimizer = warpsmith.optim.AdamW(params, precision="8bit")
    run(optimizer, params, 1)
    before = copy.deepcopy(params)
    good = optimizer.state[params[0]]["scales"]
    for bad in (good.double(), good[:, :-1].clone(), good.t().contiguous().t()):
        optimizer.state[params[0]]["scales"] = bad
        with pytest.raises(ValueError, match=r"scales.*expected"):
            optimizer.step()
    optimizer.state[params[0]]["scales"] = good
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].float()
    with pytest.raises(ValueError, match=r"exp_avg: expected uint8, got float32"):
        optimizer.step()
    assert_same_bits(params, before)
    state = {"state": {0: {"a": torch.zeros(3, dtype=torch.uint8), "scales": torch.zeros(1, 1)}}, "param_groups": []}
    with pytest.raises(ValueError, match=r"^float32_states: state_dict: expected states of Adam, Lion or SGD, got a"):
        warpsmith.optim.float32_states(state)


def test_loaded_states_may_be_views_of_anything():
    p = nn.Parameter(torch.zeros(64, 64))
    saved = warpsmith.optim.Adam([p]).state_dict()
    first = torch.randn(64, 64)
    wide = torch.cat([first, torch.full((64, 64), 99.0)], 1)
    saved["state"] = {
        0: {"step": torch.ones(()), "exp_avg": wide[:, :64], "exp_avg_sq": torch.tensor(0.5).expand(64, 64)}
    }
    optimizer = warpsmith.optim.Adam([p], precision="8bit")
    optimizer.load_state_dict(saved)
    codes, scales = quantize_blockwise(first, True)
    assert bitwise_equal(optimizer.state[p]["exp_avg"], codes)
    assert bitwise_equal(optimizer.state[p]["scales"], torch.stack([scales, torch.full((16,), 0.5)]))


def test_scales_that_do_not_fit_are_refused_before_loading():
    params = make_params(shapes=[(5000,)])
    optimizer = warpsmith.optim.Adam(params, precision="8bit")
    run(optimizer, params, 1)
    before = copy.deepcopy(states_of(optimizer, params))
    for bad in (torch.ones(2, 3), torch.ones(3, 20), None):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["scales"] = bad
        with pytest.raises(ValueError, match=r"^Adam: state_dict: scales .* expected shape \(2, 20\)"):
            optimizer.load_state_dict(saved)
        assert_same_bits(states_of(optimizer, params), before)


def test_options_that_change_between_steps():
    params = make_params(shapes=[(5000,)])
    optimizer = warpsmith.optim.SGD(params, momentum=0.9, precision="8bit")
    run(optimizer, params, 1)
    before = copy.deepcopy(states_of(optimizer, params))
    optimizer.param_groups[0]["momentum"] = 0
    run(optimizer, params, 1)  # as in torch: the buffer stays and is not used
    assert_same_bits(states_of(optimizer, params), before)
    adam = warpsmith.optim.Adam(params, precision="8bit")
    run(adam, params, 1)
    adam.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="precision: expected another one: 8bit is for Adam without amsgrad"):
        adam.step()
    assert "max_exp_avg_sq" not in adam.state[params[0]]


# Sizes of blocks: some too small or too large for quick division, zeros, and a NaN, which stays in its block.
SIZES = [1.0, 2.0**-50, 2.0**-70, 2.0**50, 2.0**90, 0.0, torch.nan, 1.0]


@pytest.mark.parametrize("options", [*KINDS, Options("AdamW", {"betas": (0.5, 0.5), "eps": 0.0}, "no eps")], ids=str)
def test_blocks_of_any_size_are_those_of_float32_states_encoded(options):
    size = torch.tensor(SIZES).repeat_interleave(256).repeat(2)
    grad = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * size
    grad[::7] *= 2.0**-12
    ours, plain = (nn.Parameter(torch.ones(4096)) for _ in range(2))
    a, b = options.ours([ours], lr=2.0**-5, precision="8bit"), options.ours([plain], lr=2.0**-5)
    for optimizer, p in ((a, ours), (b, plain)):
        p.grad = grad.clone()
        optimizer.step()
    assert_close(ours.detach(), plain.detach(), rtol=0, atol=0, equal_nan=True)
    expected = encoded(b.state[plain])
    for name, value in a.state[ours].items():
        if name in ("step", "scales"):
            assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)
            continue
        scales = a.state[ours]["scales"][["exp_avg", "exp_avg_sq"].index(name) if "exp_avg" in expected else 0]
        differ = (value != expected[name]).view(-1, 256)[scales.isfinite()]
        assert not differ.any(), (name, differ.sum(1))
