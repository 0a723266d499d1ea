"""What may change between two steps of warpsmith.optim.AdamW: its table of addresses must notice, as torch's optimizer,
which has none, does by itself."""

import copy
import gc
import weakref

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith._core import tensor_list

from .adamw_runs import assert_same_bits, make_params, run, set_grads, states_of


# Each gets (optimizer, params) of either kind.
def new_data(optimizer, params):
    params[0].data = params[0].data + 1


def new_data_of_another_order(optimizer, params):
    with torch.no_grad():
        params[5].data = params[5].data.t().contiguous().t()


def new_state_tensor(optimizer, params):
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"] * 2


def states_moved_by_data(optimizer, params):
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].data = state[name].data * 2


def one_state_moved_by_data(name):
    def change(optimizer, params):
        state = optimizer.state[params[5]]
        old = state[name].data
        state[name].data = old + 1
        old.fill_(torch.nan)  # whoever still reads or writes the old memory is seen

    change.__name__ = f"{name}_moved_by_data"
    return change


def a_state_of_another_order(optimizer, params):
    state = optimizer.state[params[5]]
    state["exp_avg_sq"].data = state["exp_avg_sq"].data.t().contiguous().t()


def a_parameter_joins_the_group_before(optimizer, params):
    first, second = optimizer.param_groups[0], {**optimizer.param_groups[0], "lr": 0.3}
    second["params"], first["params"] = first["params"][3:], first["params"][:3]
    optimizer.param_groups.append(second)
    for i in range(2):
        set_grads(params, 50 + i)
        optimizer.step()
        first["params"].append(second["params"].pop(0))


def new_equal_step(optimizer, params):
    old = optimizer.state[params[3]]["step"]
    optimizer.state[params[3]]["step"] = old.clone()
    old.fill_(1000)


def new_state_dict_of_a_parameter(optimizer, params):
    optimizer.state[params[4]] = {k: v.clone() + 1 for k, v in optimizer.state[params[4]].items()}


def state_forgotten(optimizer, params):
    optimizer.state.clear()


def one_state_forgotten(optimizer, params):
    del optimizer.state[params[3]]


def another_group(optimizer, params):
    extra = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [extra], "lr": 0.3})
    params.append(extra)


def reloaded(optimizer, params):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def amsgrad_from_now_on(optimizer, params):
    optimizer.param_groups[0]["amsgrad"] = True
    for p in params:
        optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)


def other_options(optimizer, params):
    optimizer.param_groups[0].update(lr=0.2, betas=(0.5, 0.6), eps=1e-2, weight_decay=0.3, maximize=True)


CHANGES = [
    new_data,
    new_data_of_another_order,
    new_state_tensor,
    states_moved_by_data,
    one_state_moved_by_data("exp_avg"),
    one_state_moved_by_data("exp_avg_sq"),
    one_state_moved_by_data("step"),
    a_state_of_another_order,
    a_parameter_joins_the_group_before,
    new_equal_step,
    new_state_dict_of_a_parameter,
    state_forgotten,
    one_state_forgotten,
    another_group,
    reloaded,
    amsgrad_from_now_on,
    other_options,
]


READERS = {"torchs_reader": tensor_list.ADDRESS_READER, "dlpack_alone": 0}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_between_steps_are_seen(change, reader, monkeypatch):
    assert READERS["torchs_reader"], "torch has lost its reader of addresses: both rows would be the same"
    monkeypatch.setattr(tensor_list, "ADDRESS_READER", READERS[reader])
    ours, theirs = make_params(), make_params()
    a = warpsmith.optim.AdamW(ours, lr=1e-2)
    b = torch.optim.AdamW(theirs, lr=1e-2)
    for optimizer, params in ((a, ours), (b, theirs)):
        run(optimizer, params, 3)
        change(optimizer, params)
        run(optimizer, params, 3, first=3)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_close(states_of(a, ours), states_of(b, theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", [[0, 1, 2], [5], [], [1, 4]], ids=str)
def test_parameters_without_a_gradient_are_left_alone(pattern):
    ours, theirs = make_params(), make_params()
    a, b = warpsmith.optim.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for optimizer, params in ((a, ours), (b, theirs)):
        for i in range(6):
            set_grads(params, i)
            for k in pattern if i % 3 != 1 else []:
                params[k].grad = None
            optimizer.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert [a.state[p]["step"] for p in ours] == [b.state[p]["step"] for p in theirs]


def test_frozen_parameters_have_no_state():
    params = make_params()
    optimizer = warpsmith.optim.AdamW(params)
    set_grads(params[:2], 0)
    optimizer.step()
    assert list(optimizer.state) == params[:2]


def test_a_state_without_strided_memory_is_refused():
    params = make_params(shapes=[(8, 8)])
    optimizer = warpsmith.optim.AdamW(params)
    run(optimizer, params, 2)
    state = optimizer.state[params[0]]
    before = params[0].detach().clone()
    state["exp_avg_sq"] = state["exp_avg_sq"].to_sparse()
    with pytest.raises(ValueError, match="exp_avg_sq: expected a dense tensor"):
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("name", ["exp_avg", "step"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "expected a tensor, got None"),
        (3, TypeError, "expected a tensor, got the int 3"),
        (torch.empty(8, 8, device="meta"), ValueError, "expected a tensor on cpu, got one on meta"),
    ],
    ids=["None", "int", "meta"],
)
@pytest.mark.parametrize("started", [False, True])
def test_a_state_that_is_no_tensor_here_is_refused_by_name(name, value, error, message, started):
    params = make_params(shapes=[(8, 8), (3,)])
    optimizer = warpsmith.optim.AdamW(params)
    run(optimizer, params, 2)
    if not started:
        optimizer = copy.deepcopy(optimizer)
        params = optimizer.param_groups[0]["params"]
    set_grads(params, 2)
    before = [p.detach().clone() for p in params]
    optimizer.state[params[1]][name] = value
    with pytest.raises(error, match=rf"AdamW: param_groups\[0\]\['params'\]\[1\]: {name}: {message}"):
        optimizer.step()
    assert_same_bits(params, before)


def test_states_taken_away_between_steps_are_freed():
    params = make_params(shapes=[(1000,)])
    optimizer = warpsmith.optim.AdamW(params)
    run(optimizer, params, 2)
    watched = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(1000)
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_memory_of_states_moved_by_data_is_free_at_once(name):
    params = make_params(shapes=[(1000,)])
    optimizer = warpsmith.optim.AdamW(params)
    run(optimizer, params, 2)
    state = optimizer.state[params[0]][name]
    watched = torch.multiprocessing.reductions.StorageWeakRef(state.untyped_storage())
    state.data = state.data.clone()
    gc.collect()
    assert watched.expired()


def test_a_square_parameter_transposed_in_place_is_seen():
    """Only the strides change: object, address, shape and the order of the gradient stay."""
    ours, theirs = make_params(shapes=[(6, 6)]), make_params(shapes=[(6, 6)])
    a, b = warpsmith.optim.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for optimizer, params in ((a, ours), (b, theirs)):
        run(optimizer, params, 3)
        params[0].data = params[0].data.t()
        run(optimizer, params, 3, first=3)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reader", READERS)
def test_a_shortened_parameter_is_seen_by_its_gradient(reader, monkeypatch):
    monkeypatch.setattr(tensor_list, "ADDRESS_READER", READERS[reader])
    params = make_params(shapes=[(8,), (3,)])
    optimizer = warpsmith.optim.AdamW(params)
    run(optimizer, params, 2)
    params[0].data = params[0].data[:4]
    params[0].grad = None
    set_grads(params, 2)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"exp_avgs\[0\]: expected shape \(4\), got \(8\)"):
        optimizer.step()
    assert_same_bits(params, before)


def test_a_class_with_a_gradient_of_its_own():
    gradient = torch.full((5,), 0.5)

    class Own(nn.Parameter):
        grad = property(lambda self: gradient)

    ours, theirs = Own(torch.ones(5)), nn.Parameter(torch.ones(5))
    theirs.grad = gradient
    a, b = warpsmith.optim.AdamW([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    for _ in range(3):
        a.step()
        b.step()
    assert_close(ours.data, theirs.data)


def test_a_step_without_gradients_is_nothing():
    params = make_params()
    optimizer = warpsmith.optim.AdamW(params)
    assert optimizer.step() is None
    assert not optimizer.state


def test_gradients_of_other_strides_and_at_reused_addresses():
    ours, theirs = [nn.Parameter(torch.ones(8, 8))], [nn.Parameter(torch.ones(8, 8))]
    a, b = warpsmith.optim.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    memory = torch.empty(8, 8)  # one address, two orders
    for i in range(8):
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(i))
        view = memory if i % 3 else memory.t()
        ours[0].grad, theirs[0].grad = view.copy_(gradient), gradient
        a.step()
        b.step()
    assert_close(ours, theirs)


def test_a_gradient_of_zeros_without_memory():
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for optimizer, p in ((warpsmith.optim.AdamW([ours]), ours), (torch.optim.AdamW([theirs]), theirs)):
        p.grad = torch.ones(3)
        optimizer.step()
        p.grad = torch._efficientzerotensor(3)
        optimizer.step()
    assert_close(ours, theirs)
