"""What scripts and frameworks written for torch's optimizers rely on."""

import copy

import pytest
import torch
import warpsmith

from .adamw_runs import assert_same_bits, make_params, run, set_grads, states_of


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
    """Lightning clips only for optimizers that say so: that GradScaler is to divide before the step."""
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
