"""warpsmith.optim.AdamW beside torch.optim.AdamW: many steps, states both ways, changes between steps, bad input."""

import copy
import gc
import io
import weakref

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.optim import _tensor_list
from warpsmith.testing import bitwise_equal

SHAPES = [(7, 5), (), (0,), (3,), (2049,), (33, 129)]
OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.0},
    {"betas": (0.0, 0.5), "eps": 1e-3},
]


def make_params(dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def set_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def run(optimizer, params, steps, first=0):
    for i in range(first, first + steps):
        set_grads(params, i)
        optimizer.step()


def states_of(optimizer, params):
    return [optimizer.state[p] for p in params]


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        if isinstance(x, dict):
            assert x.keys() == y.keys()
            assert_same_bits(x.values(), y.values())
        else:
            assert bitwise_equal(x.detach(), y.detach())


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
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            params = make_params(shapes=[(100_000,), (5,), (300, 300)])
            run(warpsmith.optim.AdamW(params, lr=1e-2), params, 3)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(*results)


# What an optimizer must notice between two steps. Each gets (optimizer, params) of either kind.
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


READERS = {"torchs_reader": _tensor_list.ADDRESS_READER, "dlpack_alone": 0}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_between_steps_are_seen(change, reader, monkeypatch):
    assert READERS["torchs_reader"], "torch has lost its reader of addresses: both rows would be the same"
    monkeypatch.setattr(_tensor_list, "ADDRESS_READER", READERS[reader])
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
    """Same object, same address, same shape, gradients in the order they always had."""
    ours, theirs = make_params(shapes=[(6, 6)]), make_params(shapes=[(6, 6)])
    a, b = warpsmith.optim.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for optimizer, params in ((a, ours), (b, theirs)):
        run(optimizer, params, 3)
        params[0].data = params[0].data.t()
        run(optimizer, params, 3, first=3)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reader", READERS)
def test_a_shortened_parameter_is_seen_by_its_gradient(reader, monkeypatch):
    monkeypatch.setattr(_tensor_list, "ADDRESS_READER", READERS[reader])
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


def with_gaps(p):
    p.data = torch.randn(7, 10)[:, ::2]
    p.grad = torch.randn(7, 5)


BAD_PARAMS = {
    "half": (in_dtype(torch.float16), "expected float32.*got float16"),
    "bfloat16": (in_dtype(torch.bfloat16), "expected float32.*got bfloat16"),
    "complex": (in_dtype(torch.complex64), "expected float32.*got complex64"),
    "sparse gradient": (sparse, r"\.grad: expected a dense gradient, got sparse_coo"),
    "gaps": (with_gaps, "expected elements without gaps or overlap, got strides"),
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
