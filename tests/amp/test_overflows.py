"""What a scaler does at the edges: which gradients overflowed, bounds of the scale, hysteresis, messages."""

import math

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import bitwise_equal

from tests.amp.runs import backward, by_scaler, make_model, ours, torchs_scaler, train

CLIPS = [None, by_scaler(1.0)]


def one(values, dtype=torch.float32, scale=1024.0, **more):
    """An SGD with lr 1 over one parameter of zeros, whose scaled gradient has these values."""
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    optimizer, scaler = warpsmith.optim.SGD([p], lr=1.0, momentum=0.5), ours(init_scale=scale, **more)
    scaler.scale(torch.ones(()))
    p.grad = torch.tensor(values, dtype=dtype)
    return p, optimizer, scaler


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", CLIPS, ids=["step", "clip"])
def test_tensors_are_named_and_bad_values_counted(clip, unscale):
    """The first in the order of parameters, whichever dtype; kept until another step is skipped."""
    names = ["embed", "head", "tail"]
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    params = [nn.Parameter(torch.zeros(20_000, dtype=d)) for d in dtypes]
    for optimizer, first in (
        (warpsmith.optim.AdamW(list(zip(names, params, strict=True))), "param_groups[0]['params'][1] (head)"),
        (warpsmith.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}]), "param_groups[1]['params'][0]"),
    ):
        scaler = ours()

        def step(bad, optimizer=optimizer, scaler=scaler):
            scaler.scale(torch.ones(()))
            for p, places in zip(params, bad, strict=True):
                p.grad = None if places is None else torch.ones_like(p)
                if places:
                    p.grad[list(places)] = torch.tensor([math.inf, -math.inf, math.nan] * 2, dtype=p.dtype)[
                        : len(places)
                    ]
            if unscale:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip(scaler, None, optimizer)
            scaler.step(optimizer)
            scaler.update()

        step([(), (), ()])
        assert scaler.overflow(optimizer) is None and not scaler.last_skipped
        step([(), (0, 16_383, 16_384, 19_999), (7,)])
        for _ in range(2):
            report = scaler.overflow(optimizer)
            assert report.first == first and report.bad_values == 5
            assert list(report.tensors.values()) == [4, 1]
            step([(), (), ()])
        assert scaler.skipped_steps == 1 and not scaler.last_skipped
        step([(), (), (3, 4)])
        assert scaler.overflow(optimizer).bad_values == 2 and scaler.last_skipped
        step([None, (), (1,)])
        step([(1,), (), None])  # as many gradients, of other parameters
        assert scaler.overflow(optimizer).first.startswith("param_groups[0]['params'][0]")


@pytest.mark.not_on_sim(reason="one dtype is float64")
def test_an_overflow_in_one_dtype_stops_all():
    """Any group of parameters: nothing of a step is taken if anything of it is bad."""
    for bad in range(3):
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        params = [nn.Parameter(torch.zeros(3, dtype=d)) for d in dtypes]
        optimizer, scaler = warpsmith.optim.SGD([{"params": [p]} for p in params], lr=1.0), ours()
        scaler.scale(torch.ones(()))
        for i, p in enumerate(params):
            p.grad = torch.ones_like(p)
            p.grad[1] = math.inf if i == bad else 1.0
        scaler.step(optimizer)
        assert not any(p.any() for p in params)
        assert list(scaler.overflow(optimizer).tensors) == [f"param_groups[{bad}]['params'][0]"]


@pytest.mark.parametrize("way", ["step", "clip", "unscale"])
def test_a_scaled_gradient_that_is_finite_and_unscaled_is_not(way):
    """A scale below 1 makes gradients larger: what counts is what the step would see."""
    for value, skipped in ((3e38, True), (3e34, False)):
        p, optimizer, scaler = one([0.0, value], scale=2.0**-13)
        if way == "clip":
            scaler.clip_(optimizer, 1.0, math.inf)
        if way == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.last_skipped == skipped
        assert bool(p.any()) != skipped
        assert (scaler.overflow(optimizer) is not None) == skipped
        if skipped:
            assert scaler.overflow(optimizer).bad_values == 1


def test_a_norm_that_overflows_alone_skips_a_clipped_step():
    p, optimizer, scaler = one([1e30, 1e30], scale=1.0)
    assert scaler.clip_(optimizer, 1.0) == math.inf
    scaler.step(optimizer)
    assert not p.any() and scaler.last_skipped
    assert scaler.overflow(optimizer) == warpsmith.amp.Overflow(None, 0, {})


@pytest.mark.parametrize("scale", [2.0**-100, 0.5, 1.0, 3.0, 2.0**16, 1e30])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_of_scaled_gradients_do_not_overflow(scale, norm_type, dtype):
    """Gradients of 1e15 at scale 2^16 have squares of 4e39; torch divides by the scale before it squares."""
    values = 1e15 if scale <= 2**16 else 1.0
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * values
    p = nn.Parameter(torch.zeros(20_000, dtype=dtype))
    optimizer, scaler = warpsmith.optim.SGD([p], lr=1.0), ours(init_scale=scale)
    scaler.scale(torch.ones(()))
    p.grad = (gradient * scale).to(dtype)
    expected = (p.grad.double() / scale).norm(norm_type)
    assert_close(scaler.clip_(optimizer, 1.0, norm_type).double(), expected, rtol=1e-6, atol=0)
    scaler.step(optimizer)
    assert not scaler.last_skipped
    assert_close(p.detach().double().norm(norm_type), torch.ones((), dtype=torch.float64), rtol=1e-2, atol=0)


def test_floor_and_ceiling_hold():
    model = make_model()
    optimizer = warpsmith.optim.AdamW(model.parameters())
    scaler = ours(init_scale=16.0, min_scale=4.0, max_scale=32.0, growth_interval=1)
    assert train(model, optimizer, scaler, 4, {0, 1, 2, 3}) == [8.0, 4.0, 4.0, 4.0]
    assert scaler.skipped_steps == 4
    assert train(model, optimizer, scaler, 5) == [8.0, 16.0, 32.0, 32.0, 32.0]
    scaler.scale(torch.ones(()))
    scaler.update(1024.0)
    assert scaler.get_scale() == 32.0
    scaler.update(torch.tensor(1.0))
    assert scaler.get_scale() == 4.0


def test_hysteresis_forgives_overflows_that_stand_alone():
    """The rule as a loop on the host, on every pattern of ten steps out of a fixed set."""
    for hysteresis in (1, 2, 3):
        for seed in range(6):
            bits = torch.randint(0, 2, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
            scaler = ours(hysteresis=hysteresis, growth_interval=2)
            scaler.scale(torch.ones(()))
            scale, growth, left = 1024.0, 0, hysteresis
            for bad in bits:
                if bad:
                    left, growth = left - 1, 0
                    scale *= 0.5 if left <= 0 else 1.0
                else:
                    left, growth = hysteresis, growth + 1
                    if growth == 2:
                        scale, growth = scale * 2, 0
                p = nn.Parameter(torch.zeros(1))
                p.grad = torch.tensor([math.nan if bad else 1.0])
                scaler.step(warpsmith.optim.SGD([p]))
                scaler.update()
                assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (scale, growth)


def test_settings_beyond_torchs_are_saved():
    scaler = ours(min_scale=2.0, max_scale=2048.0, hysteresis=3)
    extra = {"min_scale": 2.0, "max_scale": 2048.0, "hysteresis": 3, "_hysteresis_tracker": 3}
    assert {k: v for k, v in scaler.state_dict().items() if k in extra} == extra
    torchs_scaler().load_state_dict(scaler.state_dict())
    other = ours()
    model = make_model()
    train(model, warpsmith.optim.AdamW(model.parameters()), scaler, 2, {1})
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() and other.state_dict()["_hysteresis_tracker"] == 2
    scaler.load_state_dict({**torchs_scaler().state_dict(), "scale": 1.0})
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_scale": 2.0, "max_scale": 1.0}, "GradScaler: min_scale: expected a number from 0 to max_scale = 1.0"),
        ({"max_scale": 8.0}, "GradScaler: init_scale: expected a number from 0.0 to 8.0, got 1024.0"),
    ],
)
def test_settings_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ours(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"min_scale": math.nan}, "min_scale: expected a number from 0 to max_scale = 4096.0, got nan"),
        ({"min_scale": 8192.0}, "min_scale: expected a number from 0 to max_scale = 4096.0, got 8192.0"),
        ({"max_scale": math.nan}, "max_scale: expected a number >= 0, got nan"),
        ({"max_scale": 1.0}, "min_scale: expected a number from 0 to max_scale = 1.0, got 2.0"),
        ({"hysteresis": 0}, "hysteresis: expected a number of overflows >= 1, got 0"),
        ({"_hysteresis_tracker": 4}, "_hysteresis_tracker: expected a number from 0 to hysteresis = 3, got 4"),
        ({"scale": math.nan}, "scale: expected a number >= 0, got nan"),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_states_that_are_refused_change_nothing(changed, message, used):
    scaler = ours(min_scale=2.0, max_scale=4096.0, hysteresis=3)
    if used:
        scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="GradScaler.load_state_dict: " + message):
        scaler.load_state_dict({**before, "_growth_tracker": 7, **changed})
    assert scaler.state_dict() == before


def test_groups_without_gradients_are_no_obstacle():
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    groups = [{"params": [a]}, {"params": [b, frozen]}, {"params": [c]}]
    optimizer, scaler = warpsmith.optim.AdamW(groups, lr=0.1), ours()
    for i in range(3):
        optimizer.zero_grad()
        scaler.scale((a if i < 2 else c).sum()).backward()
        scaler.clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert a.all() and c.all() and not b.any()
    assert optimizer.state[a]["step"] == 2 and optimizer.state[c]["step"] == 1
    assert scaler.skipped_steps == 0


@pytest.mark.parametrize("kind", ["AdamW", "torch's", "torch's fused"])
@pytest.mark.parametrize("method", ["step", "clip_"])
def test_a_step_without_backward_names_the_optimizer(kind, method):
    params = make_model().parameters()
    theirs = {"fused": True} if "fused" in kind else {}
    optimizer = warpsmith.optim.AdamW(params) if kind == "AdamW" else torch.optim.AdamW(params, **theirs)
    scaler = ours()
    call = (lambda: scaler.step(optimizer)) if method == "step" else (lambda: scaler.clip_(optimizer, 1.0))
    with pytest.raises(AssertionError, match=f"GradScaler.{method}: AdamW: expected scaler.scale.*no call of scale"):
        call()
    scaler.scale(torch.ones(()))
    with pytest.raises(
        AssertionError, match=f"GradScaler.{method}: AdamW: expected a gradient of one of its 4 .*Check"
    ):
        call()
    with pytest.raises(AssertionError, match="GradScaler.update: expected step"):
        scaler.update()
    assert scaler.skipped_steps == 0


def test_calls_out_of_order_are_refused_and_change_nothing():
    p, optimizer, scaler = one([1024.0, 2048.0])
    with pytest.raises(ValueError, match="GradScaler.clip_: max_norm: expected a number >= 0, got nan"):
        scaler.clip_(optimizer, math.nan)
    with pytest.raises(ValueError, match=r"GradScaler.clip_: norm_type: expected 1, 2 or inf, got 3"):
        scaler.clip_(optimizer, 1.0, 3)
    scaler.clip_(optimizer, 10.0)
    with pytest.raises(RuntimeError, match="a second one"):
        scaler.clip_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match=r"unscale_: called after clip_\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 0)
    assert bitwise_equal(p.grad, torch.tensor([1024.0, 2048.0]))
    scaler.step(optimizer)
    assert bitwise_equal(p.detach(), torch.tensor([-1.0, -2.0]))
    for call in (
        lambda: scaler.step(optimizer),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.clip_(optimizer, 1),
    ):
        with pytest.raises(RuntimeError):
            call()
    assert bitwise_equal(p.detach(), torch.tensor([-1.0, -2.0]))


def test_a_gradient_of_another_dtype_is_refused_before_a_write():
    good, bad = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([good, bad]), ours()
    scaler.scale(torch.ones(()))
    good.grad, bad.grad = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"GradScaler.unscale_: param_groups\[0\]\['params'\]\[1\].grad: .*complex64"):
        scaler.unscale_(optimizer)
    assert bitwise_equal(good.grad, torch.ones(2))


def test_a_step_that_the_optimizer_refuses_can_be_repeated():
    p, optimizer, scaler = one([1024.0, 2048.0])
    p.data = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="shape"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")
    p.data = torch.zeros(2)
    scaler.step(optimizer)
    assert bitwise_equal(p.detach(), torch.tensor([-1.0, -2.0])) and scaler.skipped_steps == 0


def test_two_optimizers_skip_alone_and_share_the_scale():
    models = make_model(), make_model()
    optimizers = [warpsmith.optim.AdamW(m.parameters()) for m in models]
    scaler = ours()
    for model, bad in zip(models, (True, False), strict=True):
        backward(model, scaler, 0, bad)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [float(next(iter(o.state.values()))["step"]) for o in optimizers] == [0.0, 1.0]
    assert scaler.get_scale() == 512.0 and scaler.skipped_steps == 1 and scaler.last_skipped


@pytest.mark.parametrize("clip", [False, True])
def test_flags_that_others_reduced_are_obeyed(clip):
    """Code for tensor parallelism adds up found_inf over ranks between unscale_ and step."""
    p, optimizer, scaler = one([1.0, 2.0])
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.add_(2)
    if clip:
        scaler.clip_(optimizer, 1.0)
    scaler.step(optimizer)
    assert not p.any() and scaler.skipped_steps == 1
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_the_ops_are_checked_by_torch():
    tensors = [torch.randn(5), torch.randn(3, 2).bfloat16()]
    scale, found_inf, counts = torch.tensor(3.0), torch.zeros(()), torch.zeros(2, dtype=torch.int64)
    ops = torch.ops.warpsmith
    torch.library.opcheck(ops.grad_check.default, (tensors, 2.0, scale, 1.0, found_inf, counts))
    torch.library.opcheck(ops.unscale_grads.default, (tensors, scale, found_inf, counts))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensors": []}, "tensors: expected at least one tensor, got none"),
        ({"counts": torch.zeros(4, dtype=torch.int64)[::2]}, "bad_counts: expected adjacent elements"),
    ],
)
def test_what_the_ops_refuse(changed, message):
    given = {"tensors": [torch.ones(5), torch.ones(3, 2)], "scale": torch.ones(()), "found_inf": torch.zeros(())}
    given |= {"counts": torch.zeros(2, dtype=torch.int64)} | changed
    tensors, scale, found_inf, counts = given.values()
    with pytest.raises(ValueError, match=f"grad_check: {message}"):
        torch.ops.warpsmith.grad_check(tensors, 2.0, scale, 1.0, found_inf, counts)
    with pytest.raises(ValueError, match=f"unscale_grads: {message.replace('scale:', 'inv_scale:')}"):
        torch.ops.warpsmith.unscale_grads(tensors, scale, found_inf, counts)
    assert all(bool((t == 1).all()) for t in tensors)
