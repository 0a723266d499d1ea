"""What AdamW has beyond every optimizer's tests, and what scripts and frameworks written for torch's rely on."""

import copy
import io

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close

from .adamw_runs import assert_same_bits, make_params, run, set_grads, states_of


def test_every_group_is_one_of_torchs_fused_step():
    """Its step counters lie beside the parameters, which torch must know when it loads the state."""
    params = make_params()
    optimizer = warpsmith.optim.AdamW([{"params": params[:2], "foreach": True}], fused=False)
    optimizer.add_param_group({"params": params[2:], "fused": False})
    assert [(g["foreach"], g["fused"]) for g in optimizer.state_dict()["param_groups"]] == [(None, True)] * 2


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


def in_dtype(dtype):
    def change(p):
        p.data = p.data.to(dtype)
        p.grad = p.data.clone()

    return change


def overlapping(p):
    p.data = torch.randn(7, 1).expand(7, 5)
    p.grad = torch.randn(7, 5)


BAD_PARAMS = {
    "complex": (in_dtype(torch.complex64), "expected float32.*got complex64"),
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


def test_hooks_before_loading_change_what_is_checked_and_loaded():
    params, others = make_params(), make_params()
    a, b = (warpsmith.optim.AdamW(p, lr=1e-2) for p in (params, others))
    run(a, params, 2)
    saved = copy.deepcopy(a.state_dict())
    saved["param_groups"][0]["lr"] = "of another program"

    def mend(_, state_dict):
        return {**state_dict, "param_groups": [{**group, "lr": 1e-2} for group in state_dict["param_groups"]]}

    handle = b.register_load_state_dict_pre_hook(mend)
    b.load_state_dict(saved)
    assert_same_bits(states_of(b, others), states_of(a, params))
    handle.remove()
    b.register_load_state_dict_pre_hook(lambda _, state_dict: {**state_dict, "param_groups": [{"lr": -1.0}]})
    before = copy.deepcopy(b.state_dict())
    for _ in range(2):  # no hook of ours is left behind
        with pytest.raises(ValueError, match="AdamW: lr: expected a number >= 0, got -1.0"):
            b.load_state_dict(a.state_dict())
    assert b.state_dict().keys() == before.keys() and b.state_dict()["param_groups"] == before["param_groups"]
    assert len(b._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_fused_false_leaves_the_gradients_to_the_scaler(name):
    """Lightning clips only where an optimizer says that GradScaler divides the gradients before the step."""
    make = getattr(warpsmith.optim, name)
    for fused in (None, True, False):
        optimizer = make(make_params(), lr=1e-2, fused=fused)
        for made in (optimizer, copy.deepcopy(optimizer)):
            assert made._step_supports_amp_scaling is (fused is not False)
    (scaled, plain), scaler = (make_params(), make_params()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    set_grads(scaled, 0, scale=1024.0)
    set_grads(plain, 0)
    scaler.step(make(scaled, lr=1e-2, fused=False))
    make(plain, lr=1e-2).step()
    assert_same_bits(scaled, plain)
    assert_same_bits([p.grad for p in scaled], [p.grad for p in plain])


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Adagrad", "RMSprop", "LAMB"])
def test_dtypes_that_no_step_takes_are_refused_with_their_group(name):
    make = getattr(warpsmith.optim, name)
    good, frozen = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.int32)
    optimizer = make([good, frozen], lr=0.1)  # a frozen parameter may have any dtype, as in torch
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        bad = torch.ones(3).to(dtype).requires_grad_()
        got = str(dtype).removeprefix("torch.")
        message = rf"{name}: param_groups\[{{}}\]\['params'\]\[1\] \(b\): expected float32.*got {got}"
        with pytest.raises(ValueError, match=message.format(0)):
            make([("a", good), ("b", bad)], lr=0.1)
        with pytest.raises(ValueError, match=message.format(1).replace(r" \(b\)", "")):
            optimizer.add_param_group({"params": [torch.ones(3, requires_grad=True), bad]})
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})  # nothing is left of the refused one
    good.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(good, torch.ones(3))
