"""warpsmith.amp.DeviceLR and schedules beside torch's LambdaLR and transformers' schedules."""

import inspect
import math

import pytest
import torch
import warpsmith
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from warpsmith.amp import DeviceLR, StepGuard, schedules
from warpsmith.testing import bitwise_equal

from tests.amp.runs import backward, make_model, ours

FACTORS = {
    "constant": schedules.constant(3),
    "linear": schedules.linear(20, 3),
    "cosine": schedules.cosine(20, 3, final=0.1),
    "wsd": schedules.wsd(20, 5, 3),
    "inverse_sqrt": schedules.inverse_sqrt(3),
}


def test_the_formulas_are_those_of_transformers():
    library = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    wsd = library.get_wsd_schedule(optimizer, 3, 5, num_training_steps=20, decay_type="linear")
    others = {
        "constant": library.get_constant_schedule_with_warmup(optimizer, 3),
        "linear": library.get_linear_schedule_with_warmup(optimizer, 3, 20),
        "wsd": wsd,
        "inverse_sqrt": library.get_inverse_sqrt_schedule(optimizer, 3),
    }
    for name, scheduler in others.items():
        for t in range(30):
            assert math.isclose(FACTORS[name](t), scheduler.lr_lambdas[0](t), abs_tol=1e-15), (name, t)
    cosine = library.get_cosine_schedule_with_warmup(optimizer, 3, 20).lr_lambdas[0]
    for t in range(21):
        assert math.isclose(schedules.cosine(20, 3)(t), cosine(t), abs_tol=1e-15)
    assert FACTORS["cosine"](20) == FACTORS["cosine"](40) == 0.1


ENDING = {n: f for n in FACTORS if "final" in inspect.signature(f := getattr(schedules, n)).parameters}


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ENDING)
def test_every_schedule_with_an_end_goes_down_to_it(name, warmup):
    more = {"decay_steps": 5} if name == "wsd" else {}
    factors = [ENDING[name](20, warmup_steps=warmup, final=0.25, **more)(t) for t in range(warmup, 25)]
    whole = [ENDING[name](20, warmup_steps=warmup, **more)(t) for t in range(warmup, 25)]
    assert factors == pytest.approx([0.25 + 0.75 * f for f in whole], abs=1e-15)
    assert len(ENDING) == 3


@pytest.mark.parametrize("name", FACTORS)
def test_the_bits_of_lambda_lr_without_skipped_steps(name):
    """Parameters after a run that skips some steps, and after one on the host that never had them."""
    models = make_model(), make_model()
    bad, steps = {0, 4, 5}, 15
    groups = [[{"params": [*m.parameters()][:2], "lr": 0.03}, {"params": [*m.parameters()][2:]}] for m in models]
    optimizers = [warpsmith.optim.AdamW(g, lr=0.01) for g in groups]
    scaler = ours(growth_interval=100, backoff_factor=0.5)
    schedule = DeviceLR(optimizers[0], FACTORS[name], 20, scaler)
    reference = LambdaLR(optimizers[1], FACTORS[name])
    for step in range(steps):
        backward(models[0], scaler, step, step in bad)
        scaler.step(optimizers[0])
        scaler.update()
        schedule.step()
        if step not in bad:
            backward(models[1], ours(enabled=False), step)
            optimizers[1].step()
            reference.step()
        assert schedule.get_last_lr() == reference.get_last_lr()
    assert schedule.steps_taken == steps - len(bad)
    assert all(bitwise_equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_without_a_scaler_every_call_counts_with_its_last_factor():
    optimizer = warpsmith.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = DeviceLR(optimizer, schedules.linear(4, final=0.5), 4)
    seen = [schedule.get_last_lr()[0]]
    address = optimizer.param_groups[0]["lr"].data_ptr()
    for _ in range(6):
        schedule.step()
        seen += schedule.get_last_lr()
    assert seen == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0]
    assert optimizer.param_groups[0]["lr"].data_ptr() == address  # a CUDA graph reads it there


def test_a_guard_counts_too_and_one_that_is_disabled_does_not():
    for enabled, taken in ((True, 2), (False, 3)):
        p = nn.Parameter(torch.zeros(1))
        optimizer, guard = warpsmith.optim.SGD([p], lr=1.0), StepGuard(enabled=enabled)
        schedule = DeviceLR(optimizer, schedules.constant(10), 10, guard)
        for grad in (1.0, math.inf, 1.0):
            p.grad = torch.tensor([grad])
            guard.step(optimizer)
            guard.update()
            schedule.step()
        assert schedule.steps_taken == taken and schedule.get_last_lr() == [taken / 10]


def test_a_checkpointer_keeps_scaler_and_schedule(tmp_path):
    def parts(model):
        optimizer = warpsmith.optim.AdamW(model.parameters(), lr=0.01)
        scaler = ours(growth_interval=4, min_scale=1.0, hysteresis=2)
        schedule = DeviceLR(optimizer, FACTORS["cosine"], 20, scaler)
        return {"model": model, "optimizer": optimizer, "scheduler": schedule, "scaler": scaler}

    def run(model, optimizer, scheduler, scaler, steps):
        for step in steps:
            backward(model, scaler, step, step in {1, 2, 7})
            scaler.clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    first = parts(make_model())
    run(**first, steps=range(5))
    with warpsmith.train.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, **first)
    run(**first, steps=range(5, 12))
    second = parts(make_model())
    with warpsmith.train.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(**second)
    run(**second, steps=range(5, 12))
    pairs = zip(first["model"].parameters(), second["model"].parameters(), strict=True)
    assert all(bitwise_equal(a, b) for a, b in pairs)
    assert all(first[name].state_dict() == second[name].state_dict() for name in ("scheduler", "scaler"))
    assert first["scheduler"].state_dict() == {"steps_taken": 9}


def test_takes_the_place_of_a_lambda_lr_under_way():
    optimizer = warpsmith.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    torchs = LambdaLR(optimizer, [FACTORS["wsd"]])
    for _ in range(4):
        optimizer.step()
        torchs.step()
    expected = LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3), FACTORS["wsd"])
    schedule = DeviceLR.from_lambda_lr(torchs, 20)
    expected.optimizer.step()
    for _ in range(4):
        expected.step()
    for _ in range(16):
        assert schedule.get_last_lr() == expected.get_last_lr()
        schedule.step()
        expected.step()


def test_subclasses_of_our_optimizers_have_its_bits():
    class Own(warpsmith.optim.AdamW):
        pass

    for cls in (warpsmith.optim.AdamW, Own):
        optimizer = cls([nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = DeviceLR(optimizer, lambda t: 1 / 3, 4)
        assert optimizer.param_groups[0]["lr"].dtype == torch.float64
        assert schedule.get_last_lr() == [0.1 * (1 / 3)]


def test_torchs_optimizers_read_it_too():
    models = make_model(), make_model()
    a = torch.optim.AdamW(models[0].parameters(), lr=0.01, fused=True)
    b = torch.optim.AdamW(models[1].parameters(), lr=0.01, fused=True)
    schedule, reference = DeviceLR(a, FACTORS["linear"], 20), LambdaLR(b, FACTORS["linear"])
    for step in range(8):
        for model, optimizer in zip(models, (a, b), strict=True):
            backward(model, ours(enabled=False), step)
            optimizer.step()
        schedule.step()
        reference.step()
    torch.testing.assert_close([*models[0].parameters()], [*models[1].parameters()], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((lambda t: 1.0 - t, 5), ValueError, "lr_lambda: expected finite factors >= 0, got -1.0 for 2 steps taken"),
        ((lambda t: math.nan, 5), ValueError, "lr_lambda: expected finite factors"),
        (([abs, abs], 5), ValueError, "lr_lambda: expected one function, or one for each of 1 groups, got 2"),
        ((0.5, 5), TypeError, "lr_lambda: expected a function of the steps taken, got float"),
    ],
)
def test_what_is_refused(given, error, message):
    optimizer = warpsmith.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    with pytest.raises(error, match=f"DeviceLR: {message}"):
        DeviceLR(optimizer, *given)
    assert optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedules.linear(3, 4), "linear: warmup_steps: expected at most total_steps = 3, got 4"),
        (lambda: schedules.cosine(3, final=2.0), r"cosine: final: expected a number in \[0, 1\], got 2.0"),
        (lambda: schedules.wsd(5, 4, 2), "wsd: decay_steps: expected at most total_steps - warmup_steps = 3, got 4"),
        (lambda: schedules.inverse_sqrt(0), "inverse_sqrt: timescale: expected a number of steps >= 1"),
    ],
)
def test_schedules_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_refused_counts_no_step():
    optimizer = warpsmith.optim.AdamW([nn.Parameter(torch.ones(2))], lr=1.0)
    schedule = DeviceLR(optimizer, schedules.linear(10), 10, ours())
    with pytest.raises(AssertionError, match="expected a call of scale"):
        schedule.step()
    for bad in (-3, math.nan, math.inf, 2.5, "x"):
        with pytest.raises(
            ValueError, match=r"^DeviceLR.load_state_dict: steps_taken: expected a number of steps >= 0"
        ):
            schedule.load_state_dict({"steps_taken": bad})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for call in (schedule.step, lambda: schedule.load_state_dict({"steps_taken": 3})):
        schedule.scaler = None
        with pytest.raises(ValueError, match=r"^DeviceLR: optimizer: expected 1 groups, .* got 2"):
            call()
    assert schedule.steps_taken == 0 and schedule.get_last_lr() == [1.0]
