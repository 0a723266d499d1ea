"""Every optimizer of warpsmith.optim beside torch's of the same name: steps, trajectories, states both ways, bits."""

import contextlib
import copy
import io

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.reference.optim import lion as lion_reference
from warpsmith.testing import measure
from warpsmith.testing.checks.cuda import no_waits

from .adamw_runs import (
    ON_SIM,
    STEPS,
    assert_one_result,
    assert_same_bits,
    make_params,
    on_each_device,
    run,
    set_grads,
    states_of,
)
from .optimizers import FEW_STATES, FULL, LAMB, LION, OF_TORCH

ALL = [*FULL, LION, LAMB]
LR = 1e-2


@pytest.mark.parametrize("options", OF_TORCH, ids=str)
def test_a_step_obeys_the_error_law(options):
    """From equal parameters and states; the oracle is the same step of torch's optimizer in float64."""
    ours, theirs = make_params(), make_params()
    wide = [nn.Parameter(p.detach().double()) for p in ours]
    a, b, oracle = options.ours(ours), options.theirs(theirs), options.theirs(wide)
    for i in range(5):
        for params in (ours, theirs):
            set_grads(params, i)
        for w, p in zip(wide, ours, strict=True):
            w.grad = p.grad.double()
        for optimizer in (a, b, oracle):
            optimizer.step()
        for p, q, w in zip(ours, theirs, wide, strict=True):
            pairs = [("param", p.data, w.data, q.data)]
            for name, value in a.state.get(p, {}).items():
                if isinstance(b.state[q].get(name), torch.Tensor):
                    pairs.append((name, value, oracle.state[w][name], b.state[q][name]))
            for name, ours_has, oracle_has, torch_has in pairs:
                if name != "step" and ours_has.numel() > 0:
                    error = measure(name, ours_has, oracle_has, torch_has)
                    assert error.ok, str(error)
                torch_has.copy_(ours_has)  # the next step begins alike
                oracle_has.copy_(ours_has)


@pytest.mark.parametrize("options", OF_TORCH, ids=str)
def test_trajectories_stay_beside_float64(options):
    """Five shapes; the oracle is torch's optimizer in float64, and torch's in float32 says what error is usual."""
    shapes = [(7, 5), (), (3,), (2049,), (33, 129)]
    ours, theirs = make_params(shapes=shapes), make_params(shapes=shapes)
    wide = [nn.Parameter(p.detach().double()) for p in ours]
    runs = ((options.ours(ours), ours), (options.theirs(theirs), theirs), (options.theirs(wide), wide))
    for i in range(STEPS):
        for optimizer, params in runs:
            set_grads(params, i)
            if params is wide:
                for p, q in zip(wide, ours, strict=True):
                    p.grad = q.grad.double()
            optimizer.step()
    for p, q, w in zip(*([p.detach() for p in params] for _, params in runs), strict=True):
        step = 2.0**-24 * max(1.0, float(w.abs().max()))
        assert float((p - w).abs().max()) <= 2 * float((q - w).abs().max()) + 4 * step


@pytest.mark.not_on_sim(reason="in float64")
@pytest.mark.parametrize("options", FULL, ids=str)
def test_float64_follows_torch(options):
    ours, theirs = make_params(torch.float64), make_params(torch.float64)
    a, b = options.ours(ours, lr=LR), options.theirs(theirs, lr=LR)
    run(a, ours, 100)
    run(b, theirs, 100)
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for s, u in zip(states_of(a, ours), states_of(b, theirs), strict=True):
        assert_close([s[name] for name in u], [*u.values()], rtol=1e-12, atol=1e-12)


def test_lion_follows_its_definition():
    ours, plain, wide = make_params(), make_params(), [p.detach().double() for p in make_params()]
    optimizer = warpsmith.optim.Lion(ours, lr=LR, betas=(0.8, 0.95), weight_decay=0.1)
    moments, wide_moments = [torch.zeros_like(p) for p in plain], [torch.zeros_like(p) for p in wide]
    values = {"lr": LR, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1}
    for i in range(STEPS):
        set_grads(ours, i)
        optimizer.step()
        grads = [p.grad for p in ours]
        lion_reference(plain, grads, moments, **values)
        lion_reference(wide, [g.double() for g in grads], wide_moments, **values)
    for p, q, w in zip([p.detach() for p in ours], plain, wide, strict=True):
        # A sign that rounding decides moves a parameter by 2 lr: none does in these steps.
        assert (
            float((p - w).abs().max() if p.numel() else 0) <= 2 * float((q - w).abs().max() if p.numel() else 0) + 1e-6
        )


WITH_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and not ON_SIM


@pytest.mark.parametrize("options", [o for o in OF_TORCH if o.name in ("SGD", "Adagrad")], ids=str)
def test_sgd_and_adagrad_have_torchs_bits(options):
    """One product and one sum round alike on every machine; longer formulas do so only where both compilers use FMA.
    All lengths fill the vectors of torch's loops: torch rounds the elements left over in other code."""
    if not WITH_FMA and set(options.given) - {"lr", "maximize"}:
        pytest.skip("no FMA in this processor, or none in the code of the sim")
    ours, theirs = make_params(shapes=[(64, 16), (1024,)]), make_params(shapes=[(64, 16), (1024,)])
    run(options.ours(ours), ours, 20)
    run(options.theirs(theirs), theirs, 20)
    assert_same_bits(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ALL, ids=str)
def test_cuda_follows_the_cpu_without_waiting(options):
    here, there = make_params(), make_params(device="cuda")
    a, b = options.ours(here, lr=LR), options.ours(there, lr=LR)
    for i in range(20):
        set_grads(here, i)
        set_grads(there, i)
        a.step()
        with no_waits() if i else contextlib.nullcontext():
            b.step()
    assert_close([p.cpu() for p in there], here, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_same_bits_again_resumed_in_any_order_and_in_pieces(options):
    cuts = options is not LAMB  # whose step takes norms of whole tensors
    lengths = [1, 2, 3, 63, 64, 65, 127, 500, 20_000, 7]
    assert_one_result(lambda params, lr: options.ours(params, lr=lr), lengths, cuts=cuts, both=True)


def in_memory(state):
    return copy.deepcopy(state)  # torch keeps the tensors it loads


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("passed_on", [in_memory, through_a_file])
@pytest.mark.parametrize("torch_options", [{"fused": False}, {}, {"foreach": True, "fused": False}], ids=str)
@pytest.mark.parametrize("options", [*FULL, *FEW_STATES], ids=str)
def test_loads_the_state_of_torch_and_is_loaded_by_it(options, torch_options, passed_on):
    theirs = make_params()
    b = options.theirs(theirs, lr=LR, **({} if options.name == "RMSprop" else torch_options))
    run(b, theirs, 5)
    ours = copy.deepcopy(theirs)
    a = options.ours(ours, lr=0.5)
    a.load_state_dict(passed_on(b.state_dict()))
    back = copy.deepcopy(theirs)
    c = options.theirs(back, lr=0.7)
    c.load_state_dict(passed_on(a.state_dict()))
    assert a.param_groups[0]["lr"] == c.param_groups[0]["lr"] == LR
    for optimizer, params in ((a, ours), (b, theirs), (c, back)):
        run(optimizer, params, 5, first=5)
    for optimizer, params in ((a, ours), (c, back)):
        assert_close(params, theirs, rtol=1e-5, atol=1e-5)
        for name in b.state[theirs[0]]:
            found, wanted = ([s[name] for s in states_of(*pair)] for pair in ((optimizer, params), (b, theirs)))
            assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", FULL, ids=str)
def test_states_have_torchs_names_and_groups_torchs_options(options):
    ours, theirs = make_params(), make_params()
    a, b = options.ours(ours, lr=LR), options.theirs(theirs, lr=LR)
    run(a, ours, 1)
    run(b, theirs, 1)
    more = {"step"} if options.name == "SGD" else set()  # with dampening alone
    assert set(a.state[ours[0]]) == set(b.state[theirs[0]]) | more
    assert set(a.param_groups[0]) == set(b.param_groups[0])


def test_sgd_has_torchs_state_without_dampening():
    for given, names in (({}, []), ({"momentum": 0.9}, ["momentum_buffer"])):
        params = make_params()
        optimizer = warpsmith.optim.SGD(params, **given)
        run(optimizer, params, 1)
        expected = [names] * len(params) if names else []
        assert [list(s) for s in optimizer.state_dict()["state"].values()] == expected
        none = {i: {"momentum_buffer": None} for i in range(len(params))}  # as older ones of torch say it
        optimizer.load_state_dict({**optimizer.state_dict(), "state": none})
        assert not any(optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("options", ALL, ids=str)
def test_groups_of_every_option_in_one_optimizer(options):
    """Groups with and without each state share a launch."""
    toggles = {"Adam": "amsgrad", "AdamW": "amsgrad", "RMSprop": "centered"}
    ours, theirs = make_params(), make_params()

    def groups(params):
        more = {toggles[options.name]: False} if options.name in toggles else {}
        more |= {"momentum": 0.0} if options.name == "SGD" else {}
        betas = {"betas": (0.5, 0.9)} if "betas" in defaults else {}
        return [
            {"params": params[:2], "lr": 0.1},
            {"params": params[2:4], "weight_decay": 0.0, **more},
            {"params": params[4:], "maximize": True, **betas},
        ]

    defaults = options.ours(make_params()).defaults
    a = options.ours(groups(ours), lr=LR)
    run(a, ours, 20)
    if options in (LION, LAMB):
        single = [options.ours(**{**g, "lr": g.get("lr", LR)}) for g in groups(theirs)]
        for i in range(20):
            set_grads(theirs, i)
            for optimizer in single:
                optimizer.step()
        assert_same_bits(ours, theirs)
        return
    b = options.theirs(groups(theirs), lr=LR)
    run(b, theirs, 20)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for p, q in zip(ours, theirs, strict=True):
        kept = {name: value for name, value in b.state[q].items() if value is not None}
        assert_close({name: a.state[p][name] for name in kept}, kept, rtol=1e-5, atol=1e-5)


def test_adam_and_adamw_in_one_optimizer():
    def groups(params):
        return [{"params": params[:3]}, {"params": params[3:], "decoupled_weight_decay": True}]

    ours, theirs = make_params(), make_params()
    run(warpsmith.optim.Adam(groups(ours), lr=LR, weight_decay=0.1), ours, 10)
    run(torch.optim.Adam(groups(theirs), lr=LR, weight_decay=0.1), theirs, 10)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_first_step_that_overflows_changes_nothing(options):
    skipped, plain = make_params(), make_params()
    a, b = options.ours(skipped, lr=LR), options.ours(plain, lr=LR)
    a.found_inf, a.grad_scale = torch.tensor(1.0), torch.tensor(1024.0)
    for p in skipped:
        p.grad = torch.full_like(p, torch.inf)
    a.step()
    assert_same_bits(skipped, plain)
    a.found_inf = torch.tensor(0.0)
    for i in range(3):
        set_grads(skipped, i, scale=1024.0)
        set_grads(plain, i)
        a.step()
        b.step()
    assert_same_bits(skipped, plain)
    assert_same_bits(states_of(a, skipped), states_of(b, plain))


@on_each_device
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", FULL, ids=str)
def test_grad_scaler_skips_and_divides_as_with_torch(options, unscale, device):
    overflows, counts = (0, 3), [0, 1, 2, 2, 3, 4]
    if options.name == "SGD":  # torch's has no counter, and another buffer after a first step that was skipped
        overflows, counts = (3,), [1, 2, 3, 3, 4, 5]
    results = []
    for make in (options.ours, options.theirs):
        params = make_params(device=device)
        optimizer = make(params, lr=LR)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.zeros((), device=device))  # makes the scale tensor
        steps = []
        for i in range(6):
            set_grads(params, i, scale=scaler.get_scale())
            if i in overflows:
                params[4].grad[7] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            steps.append(float(optimizer.state[params[0]].get("step", 0)))
        assert steps == counts or options.name == "SGD" and not any(steps)
        results.append(params)
    assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_momentum_and_dampening_that_change_between_steps(momentum):
    ours, theirs = make_params(), make_params()
    a = warpsmith.optim.SGD(ours, lr=LR, momentum=momentum)
    b = torch.optim.SGD(theirs, lr=LR, momentum=momentum, fused=True)
    for optimizer, params in ((a, ours), (b, theirs)):
        run(optimizer, params, 3)
        optimizer.param_groups[0].update(momentum=0.5, dampening=0.25)
        run(optimizer, params, 3, first=3)
        optimizer.param_groups[0].update(momentum=0.0)
        run(optimizer, params, 3, first=6)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


BAD = {
    "AdamW": [
        ({"lr": torch.tensor(-1.0)}, "lr: expected a number >= 0, got -1.0"),
        ({"lr": torch.ones(2)}, "lr: expected a number, or one"),
        ({"lr": torch.tensor(1)}, "lr: expected .* got int64"),
        ({"betas": (1.0, 0.9)}, r"betas: expected two numbers in \[0, 1\), got \(1.0, 0.9\)"),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.9))}, "betas: expected two numbers"),
        ({"differentiable": True}, "differentiable: expected False"),
        ({"foreach": True, "fused": True}, "fused: expected not both"),
    ],
    "LAMB": [
        ({"precision": "bf16"}, "precision: expected one of None, fp32, master, got bf16"),
        ({"precision": "8bit"}, "precision: expected"),
    ],
    "SGD": [
        ({"nesterov": True}, "nesterov: expected momentum > 0 and no dampening"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov: expected momentum > 0 and no dampening"),
    ],
    "RMSprop": [
        ({"alpha": 1.5}, r"alpha: expected a number in \[0, 1\]"),
    ],
}


@pytest.mark.parametrize(
    ("name", "given", "message"), [(n, *bad) for n, all_bad in BAD.items() for bad in all_bad], ids=str
)
def test_bad_options_are_refused(name, given, message):
    params = make_params()
    optim = getattr(warpsmith.optim, name)
    with pytest.raises(ValueError, match=rf"^{name}: {message}"):
        optim(params, **given)
    if "foreach" in given:
        return
    optimizer = optim(params[:1])
    with pytest.raises(ValueError, match=rf"^{name}: {message}"):
        optimizer.add_param_group({"params": params[1:], **given})
    assert len(optimizer.param_groups) == 1
    before = copy.deepcopy(optimizer.state_dict())
    loaded = copy.deepcopy(before)
    loaded["param_groups"][0].update(given)
    with pytest.raises(ValueError, match=rf"^{name}: {message}"):
        optimizer.load_state_dict(loaded)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("options", ALL, ids=str)
def test_bad_parameters_and_gradients_are_refused(options):
    params = make_params(shapes=[(3,), (4,)])
    optimizer = options.ours(params, lr=LR)
    run(optimizer, params, 1)
    before = copy.deepcopy((params, states_of(optimizer, params)))
    set_grads(params, 1)
    good = params[1].grad
    params[1].grad = good.to_sparse()
    with pytest.raises(
        ValueError, match=rf"^{options.name}: param_groups\[0\]\['params'\]\[1\]\.grad: expected a dense"
    ):
        optimizer.step()
    assert_same_bits(params, before[0])
    assert_same_bits(states_of(optimizer, params), before[1])
    for dtype, text in ((torch.complex64, "complex64"), (torch.int32, "int32")):
        other = torch.ones(4, dtype=dtype)
        other.grad = torch.ones(4, dtype=dtype)
        fresh = options.ours([nn.Parameter(other, requires_grad=False)], lr=LR)
        fresh.param_groups[0]["params"][0].grad = other.grad
        with pytest.raises(ValueError, match=rf"^{options.name}: .*expected float32.* got {text}"):
            fresh.step()
        assert not fresh.state
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})


@pytest.mark.parametrize("options", ALL, ids=str)
def test_states_of_another_shape_or_optimizer_are_refused(options):
    params, others = make_params(shapes=[(3,), (4,)]), make_params(shapes=[(3,), (5,)])
    optimizer, other = options.ours(params, lr=LR), options.ours(others, lr=LR)
    run(optimizer, params, 2)
    run(other, others, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=rf"^{options.name}: state_dict: \w+ of .*\[1\]: expected shape \(4,\), got \(5,\)"
    ):
        optimizer.load_state_dict(other.state_dict())
    assert_same_bits(optimizer.state_dict()["state"].values(), before["state"].values())


@pytest.mark.parametrize("options", ALL, ids=str)
def test_states_of_another_optimizer_are_refused(options):
    names = {"SGD", "Adagrad", "RMSprop"} - {options.name}
    if options.name == "SGD":
        names.remove("RMSprop")  # has a buffer of the same name
    for foreign in (o.theirs for o in FULL if o.name in names):
        params = make_params(shapes=[(3,), (4,)])
        alien = foreign(params)
        run(alien, params, 1)
        optimizer = options.ours(params, lr=LR)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": alien.state_dict()["state"], "param_groups": groups})
        set_grads(params, 1)
        before = copy.deepcopy(params)
        words = r"param_groups\[0\]\['params'\]\[0\]: expected a state with .*, got one without"
        with pytest.raises(ValueError, match=rf"^{options.name}: {words}"):
            optimizer.step()
        assert_same_bits(params, before)
