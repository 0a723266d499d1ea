"""warpsmith.optim.AdamW beside torch.optim.AdamW: many steps, states both ways, schedulers, copies, bad input."""

import copy
import io

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import cpu_threads

from .adamw_runs import assert_same_bits, make_params, run, set_grads, states_of

OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.0},
    {"betas": (0.0, 0.5), "eps": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_follows_torch_over_many_steps(dtype, options):
    ours, theirs = make_params(dtype), make_params(dtype)
    a = warpsmith.optim.AdamW(ours, lr=1e-2, **options)
    b = torch.optim.AdamW(theirs, lr=1e-2, fused=True, **options)
    run(a, ours, 100)
    run(b, theirs, 100)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert_close(ours, theirs, **tolerance)
    assert_close(states_of(a, ours), states_of(b, theirs), **tolerance)


def test_groups_with_their_own_options():
    ours, theirs = make_params(), make_params()

    def groups(params):
        return [
            {"params": params[:2], "lr": 0.1},
            {"params": params[2:4], "weight_decay": 0.0, "amsgrad": True},
            {"params": params[4:], "betas": (0.5, 0.9), "maximize": True},
        ]

    a, b = warpsmith.optim.AdamW(groups(ours), lr=1e-2), torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    run(a, ours, 20)
    run(b, theirs, 20)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_close(states_of(a, ours), states_of(b, theirs), rtol=1e-5, atol=1e-5)


def test_every_group_is_one_of_torchs_fused_step():
    """Its step counters lie beside the parameters, which torch must know when it loads the state."""
    params = make_params()
    optimizer = warpsmith.optim.AdamW([{"params": params[:2], "foreach": True}], fused=False)
    optimizer.add_param_group({"params": params[2:], "fused": False})
    assert [(g["foreach"], g["fused"]) for g in optimizer.state_dict()["param_groups"]] == [(None, True)] * 2


@pytest.mark.parametrize("place", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_default_device_is_of_no_concern(place):
    params, elsewhere = make_params(), make_params()
    a, b = warpsmith.optim.AdamW(params, lr=1e-2), warpsmith.optim.AdamW(elsewhere, lr=1e-2)
    run(a, params, 2)
    for i in range(2):
        set_grads(elsewhere, i)
        with torch.device(place):
            b.step()
    assert_same_bits(params, elsewhere)
    assert_same_bits(states_of(a, params), states_of(b, elsewhere))


def test_more_groups_than_a_launch_takes():
    ours, theirs = make_params(shapes=[(5,)] * 70), make_params(shapes=[(5,)] * 70)
    a = warpsmith.optim.AdamW([{"params": [p], "lr": 1e-3 * i} for i, p in enumerate(ours)])
    b = torch.optim.AdamW([{"params": [p], "lr": 1e-3 * i} for i, p in enumerate(theirs)], fused=True)
    run(a, ours, 3)
    run(b, theirs, 3)
    assert_close(ours, theirs)


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("torch_options", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_loads_the_state_of_torch_and_is_loaded_by_it(amsgrad, torch_options, through_a_file):
    def passed_on(state):
        if not through_a_file:
            return copy.deepcopy(state)  # torch keeps the tensors it loads
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    theirs = make_params()
    b = torch.optim.AdamW(theirs, lr=1e-2, amsgrad=amsgrad, **torch_options)
    run(b, theirs, 5)
    ours = copy.deepcopy(theirs)
    a = warpsmith.optim.AdamW(ours, lr=0.5)
    a.load_state_dict(passed_on(b.state_dict()))
    back = copy.deepcopy(theirs)
    c = torch.optim.AdamW(back, lr=0.7, **torch_options)
    c.load_state_dict(passed_on(a.state_dict()))
    assert a.param_groups[0]["lr"] == c.param_groups[0]["lr"] == 1e-2
    for optimizer, params in ((a, ours), (b, theirs), (c, back)):
        run(optimizer, params, 5, first=5)
    for optimizer, params in ((a, ours), (c, back)):
        assert_close(params, theirs, rtol=1e-5, atol=1e-6)
        assert_close(states_of(optimizer, params), states_of(b, theirs), rtol=1e-5, atol=1e-6)


def test_loads_steps_that_are_python_numbers():
    params = make_params()
    a = warpsmith.optim.AdamW(params)
    run(a, params, 3)
    state = copy.deepcopy(a.state_dict())
    for s in state["state"].values():
        s["step"] = int(s["step"])
    a.load_state_dict(state)
    run(a, params, 1)
    assert all(s["step"].dtype == torch.float32 and s["step"] == 4 for s in states_of(a, params))


@pytest.mark.parametrize("optim", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD])
def test_the_state_of_another_optimizer_is_refused(optim):
    theirs = make_params()
    other = optim(theirs, **({"momentum": 0.9} if optim is torch.optim.SGD else {}))
    run(other, theirs, 2)
    params = make_params()
    optimizer = warpsmith.optim.AdamW(params)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": other.state_dict()["state"], "param_groups": groups})
    set_grads(params, 0)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match=r"^AdamW: param_groups\[0\]\['params'\]\[0\]: expected a state with exp_avg"):
        optimizer.step()
    assert_same_bits(params, before)


def test_same_bits_again_and_after_resuming():
    params, again, resumed = make_params(), make_params(), make_params()
    a, b, c = (warpsmith.optim.AdamW(p, lr=1e-2, amsgrad=True) for p in (params, again, resumed))
    run(a, params, 10)
    run(b, again, 10)
    assert_same_bits(params, again)
    run(c, resumed, 5)
    fresh = copy.deepcopy(resumed)
    d = warpsmith.optim.AdamW(fresh)
    d.load_state_dict(c.state_dict())
    run(d, fresh, 5, first=5)
    assert_same_bits(params, fresh)
    assert_same_bits(states_of(a, params), states_of(d, fresh))


def test_same_bits_with_one_and_two_threads():
    results = []
    for count in (1, 2):
        with cpu_threads(count):
            params = make_params(shapes=[(100_000,), (5,), (300, 300)])
            run(warpsmith.optim.AdamW(params, lr=1e-2), params, 3)
            results.append(params)
    assert_same_bits(*results)


def test_channels_last_parameters():
    ours = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(ours)
    a, b = warpsmith.optim.AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheduler", ["LinearLR", "OneCycleLR"])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(scheduler, tensor_lr):
    results = []
    for optim in (warpsmith.optim, torch.optim):
        params = make_params()
        extra = {} if optim is warpsmith.optim else {"fused": True}
        optimizer = optim.AdamW(params, lr=torch.tensor(1e-2) if tensor_lr else 1e-2, **extra)
        options = {"OneCycleLR": {"max_lr": 0.1, "total_steps": 12}}.get(scheduler, {"total_iters": 8})
        schedule = getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **options)
        for i in range(10):
            set_grads(params, i)
            optimizer.step()
            schedule.step()
        results.append(params)
    assert_close(*results, rtol=1e-5, atol=1e-5)


def test_closure_hooks_and_zero_grad():
    p = nn.Parameter(torch.ones(3))
    optimizer = warpsmith.optim.AdamW([p], lr=1e-2)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert seen == ["before", "after"]
    optimizer.zero_grad()
    assert p.grad is None


def test_copies_and_pickles_go_on_alike():
    params = make_params()
    optimizer = warpsmith.optim.AdamW(params, lr=1e-2)
    run(optimizer, params, 2)
    other_params, other = copy.deepcopy((params, optimizer))
    file = io.BytesIO()
    torch.save((params, optimizer), file)
    file.seek(0)
    third_params, third = torch.load(file, weights_only=False)
    for o, p in ((optimizer, params), (other, other_params), (third, third_params)):
        run(o, p, 2, first=2)
    assert_same_bits(params, other_params)
    assert_same_bits(params, third_params)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale):
    results = []
    for optim, extra in ((warpsmith.optim, {}), (torch.optim, {"fused": True})):
        params = make_params()
        optimizer = optim.AdamW(params, lr=1e-2, **extra)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.zeros(()))  # makes the scale tensor
        steps = []
        for i in range(6):
            set_grads(params, i, scale=scaler.get_scale())
            if i in (0, 3):
                params[4].grad[7] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            steps.append(optimizer.state[params[0]]["step"].item())
        assert steps == [0, 1, 2, 2, 3, 4]
        results.append(params)
    assert_close(*results, rtol=1e-5, atol=1e-5)


def test_compiled_training_step():
    model = nn.Linear(4, 4)
    plain = copy.deepcopy(model)
    a, b = warpsmith.optim.AdamW(model.parameters(), lr=1e-2), warpsmith.optim.AdamW(plain.parameters(), lr=1e-2)

    def train(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        x = torch.randn(5, 4)
        compiled(model, a, x)
        train(plain, b, x)
    assert_same_bits(model.parameters(), plain.parameters())


BAD_OPTIONS = [
    ({"lr": -1.0}, r"AdamW: lr: expected a number >= 0, got -1.0"),
    ({"lr": torch.tensor(-1.0)}, r"AdamW: lr: expected a number >= 0, got -1.0"),
    ({"lr": torch.ones(2)}, r"AdamW: lr: expected a number, or one"),
    ({"lr": torch.tensor(1)}, r"AdamW: lr: expected .* got int64"),
    ({"betas": (1.0, 0.9)}, r"AdamW: betas: expected two numbers in \[0, 1\), got \(1.0, 0.9\)"),
    ({"betas": (0.9,)}, r"AdamW: betas: expected two numbers"),
    ({"betas": (torch.tensor(0.9), torch.tensor(0.9))}, r"AdamW: betas: expected two numbers"),
    ({"eps": -1.0}, r"AdamW: eps: expected a number >= 0, got -1.0"),
    ({"weight_decay": -0.1}, r"AdamW: weight_decay: expected a number >= 0, got -0.1"),
    ({"differentiable": True}, r"AdamW: differentiable: expected False"),
    ({"foreach": True, "fused": True}, r"AdamW: fused: expected not both"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused(options, message):
    params = make_params()
    with pytest.raises(ValueError, match=message):
        warpsmith.optim.AdamW(params, **options)
    if "foreach" in options:
        return
    optimizer = warpsmith.optim.AdamW(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1
    before = copy.deepcopy(optimizer.state_dict())
    loaded = copy.deepcopy(before)
    loaded["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(loaded)
    assert optimizer.state_dict() == before


def in_dtype(dtype):
    def change(p):
        p.data = p.data.to(dtype)
        p.grad = p.data.clone()

    return change


def sparse(p):
    p.grad = torch.randn(p.shape).to_sparse()


def overlapping(p):
    p.data = torch.randn(7, 1).expand(7, 5)
    p.grad = torch.randn(7, 5)


BAD_PARAMS = {
    "complex": (in_dtype(torch.complex64), "expected float32.*got complex64"),
    "sparse gradient": (sparse, r"\.grad: expected a dense gradient, got sparse_coo"),
    "overlap": (overlapping, "expected elements without overlap, got strides"),
}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("label", BAD_PARAMS)
def test_bad_parameters_are_refused_by_name(label, started):
    spoil, message = BAD_PARAMS[label]
    params = make_params(shapes=[(3,), (2,), (7, 5)])
    optimizer = warpsmith.optim.AdamW(
        [{"params": [("first", params[0])]}, {"params": [("second", params[1]), ("third", params[2])]}]
    )
    if started:
        run(optimizer, params, 2)
    set_grads(params, 2)
    params[2].grad = None
    spoil(params[2])
    before = copy.deepcopy((params[:2], states_of(optimizer, params[:2]) if started else None))
    with pytest.raises(ValueError, match=r"AdamW: param_groups\[1\]\['params'\]\[1\] \(third\).*" + message):
        optimizer.step()
    assert_same_bits(params[:2], before[0])
    if started:
        assert_same_bits(states_of(optimizer, params[:2]), before[1])
    else:
        assert not optimizer.state
