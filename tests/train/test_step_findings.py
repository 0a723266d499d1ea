"""What CapturedStep finds in a step that a replay would not repeat, and how it names it; its look at the state."""

import contextlib
import gc
import inspect
import itertools
import random
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import warpsmith
from replayed import CALLS, Replayed, Training, batches, run, same
from torch import nn
from warpsmith.train import CaptureError
from warpsmith.train.step_state import StepState


@pytest.mark.parametrize("self_test", [0, 2])
def test_a_replay_that_differs_is_found(graphs, self_test):
    eager, graphed, inputs = Training(), Training(), batches()
    expected = run(eager.step, inputs)
    step = graphed.captured(self_test=self_test)
    made = graphs[0]

    def spoil():
        graphed.model[3].bias.data.add_(1e-3)

    made.spoil = spoil
    if self_test:
        with pytest.warns(RuntimeWarning, match=r"steps run eagerly: state\[0\].* is not after 2 replays"):
            losses = run(step, inputs)
        assert same(expected, losses) and same(eager.tensors(), graphed.tensors()) and made.replays == 2
    else:
        assert not same(expected, run(step, inputs)) and step.self_test_result is None


def test_eager_steps_that_differ_by_themselves_are_the_measure(graphs):
    """Eager steps differ, as with float atomics. The self-test then compares sizes instead of bits."""
    for spoiled, good in ((0.0, True), (3e-4, False)):
        training, calls = Training(warpsmith.optim.SGD), itertools.count()

        def step(batch, training=training, calls=calls):
            loss = training.step(batch)
            training.model[3].bias.data.add_(1e-6 * (next(calls) % 3))
            return loss

        captured = training.captured(step, self_test=1)
        graphs[-1].spoil = lambda by=spoiled, bias=training.model[3].bias: bias.data.add_(by)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(captured, batches())
        assert (captured.fallback_reason is None) == good == (captured.self_test_result is not None)
        assert not good or "replays differ from eager steps by up to" in captured.self_test_result


def test_a_wait_is_named_with_its_line(graphs):
    eager, graphed, inputs = Training(), Training(), batches()
    expected = run(eager.step, inputs)

    def step(batch):
        loss = graphed.step(batch)
        loss.item()
        return loss

    line = inspect.getsourcelines(step)[1] + 2
    captured = graphed.captured(step)
    with pytest.warns(RuntimeWarning, match=rf"test_step_findings.py:{line}: loss.item\(\): the host waits") as told:
        losses = run(captured, inputs)
    assert len(told) == 1 and graphs[0].captures == 0
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())
    with pytest.raises(CaptureError, match=rf":{line}: "):
        run(graphed.captured(step, fallback=False), inputs)


def test_a_wait_in_backward_is_named_by_its_gradient(graphs, monkeypatch):
    """torch tells of it after the whole backward pass. One more eager step finds what it was."""
    eager, graphed, inputs = Training(), Training(), batches()
    found, run_backward = [], torch.autograd._engine_run_backward

    @contextlib.contextmanager
    def watched(self, tell):
        found.append(tell)
        yield
        found.pop()

    def tells_at_the_end(*args, **kwargs):
        result = run_backward(*args, **kwargs)
        for tell in found:
            tell(sys._getframe(1))
        return result

    monkeypatch.setattr(Replayed, "watched", watched)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", tells_at_the_end)

    def make(training):
        def step(batch):
            loss = training.model(batch).prod(1).square().mean()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss

        return step

    expected = run(make(eager), inputs)
    step = make(graphed)
    first = inspect.getsourcelines(step)[1]
    captured = graphed.captured(step)
    text = (
        rf"test_step_findings.py:{first + 2}: loss.backward\(\): the host waits for the device in ProdBackward1, "
        rf"the gradient of .*test_step_findings.py:{first + 1}: loss = .*prod\(1\).*$"
    )
    with pytest.warns(RuntimeWarning, match=text) as told:
        losses = run(captured, inputs)
    assert len(told) == 1 and graphs[0].captures == 0
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())


def test_an_error_of_the_capture_is_named_with_its_line(graphs):
    """A capture fails in the middle of a step. What the host had changed is restored, and the step runs eagerly."""
    eager, graphed, inputs = Training(), Training(), batches()
    expected = run(eager.step, inputs)
    calls = []

    def step(batch, calls=calls):
        loss = graphed.model(batch).square().mean()
        graphed.scaler.scale(loss).backward()
        graphed.scaler.clip_(graphed.optimizer, 0.1)
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        graphed.scaler.step(graphed.optimizer)
        graphed.scaler.update()
        graphed.schedule.step()
        graphed.optimizer.zero_grad()
        return loss

    captured = graphed.captured(step)
    text = r"test_step_findings.py:\d+: raise RuntimeError\(.*\): RuntimeError: operation not permitted .* capturing$"
    with pytest.warns(RuntimeWarning, match=text):
        losses = run(captured, inputs)
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())


def test_a_scaler_that_is_off_and_a_step_that_stays_eager(graphs):
    """An error of the capture leaves nothing behind, and later steps get their inputs as the earlier ones did."""
    training, moved, calls = Training(), [], []
    training.state[2] = training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.state[3:] = []

    def step(batch, calls=calls):
        calls.append(1)
        moved.append(batch)
        if len(calls) == 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        training.optimizer.zero_grad()
        loss = training.model(batch).square().mean()
        training.scaler.scale(loss).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        return loss

    captured = training.captured(lambda batch: step(batch))
    entered, aside = [], graphs[0].aside
    graphs[0].aside = lambda: entered.append(1) or aside()
    with pytest.warns(RuntimeWarning, match="operation not permitted"):
        losses = run(captured, batches())
    assert len(losses) == CALLS and len(entered) == CALLS and len(moved) == CALLS + 1


def changes_on_the_host():
    training = Training()
    training.state[2:] = [training.scaler]
    training.optimizer.param_groups[0]["lr"] = 0.1
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.9)
    training.schedule = SimpleNamespace(step=scheduler.step)
    return training, training.step, r"state\[1\]\.param_groups\[0\]\['lr'\] was 0\.08\d* and is 0\.07"


def counts_in_a_list():
    training, seen = Training(), []

    def step(batch):
        seen.append(1)
        return training.step(batch)

    return training, step, r"seen had 2 entries and has 3"


def replaces_a_tensor():
    training, average = Training(), {"w": torch.zeros(2)}

    def step(batch):
        average["w"] = average["w"] * 0.9 + training.model[3].bias.detach()
        return training.step(batch)

    return training, step, r"average\['w'\] is another object"


def draws_on_the_host():
    training = Training()
    return training, lambda batch: training.step(batch * random.random()), "random numbers of python"


@pytest.mark.parametrize("case", [changes_on_the_host, counts_in_a_list, replaces_a_tensor, draws_on_the_host])
def test_what_a_replay_would_not_repeat(graphs, case):
    training, step, text = case()
    captured = training.captured(step)
    with pytest.warns(RuntimeWarning, match=text):
        run(captured, batches())
    assert graphs[0].captures == 0 and re.search(text, captured.fallback_reason)


NATIVE = bool(warpsmith.train.step_state.ADDRESS_READER)  # torch has its reader of addresses


class Watched:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = warpsmith.optim.AdamW(self.model.parameters(), lr=0.5)
        self.scaler = warpsmith.amp.GradScaler("cpu", init_scale=4.0)
        self.kept = OrderedDict(average=torch.zeros(2), sizes=[1, (2.0, "x")], frozen=torch.ones(2))
        # The native watch does not look into a subclass.
        self.kept["others"] = type("Others", (list,), {})([1, torch.zeros(2), 3, torch.ones(2)])
        self.scaler.scale(self.model(torch.ones(5, 3)).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.given = [self.model, self.optimizer, self.scaler, self.kept]
        self.state = StepState([(f"state[{i}]", self.given, i) for i in range(4)], torch.device("cpu"))


def first_state(training):
    return training.optimizer.state[training.model[0].weight]


def swapped(training):
    """Another key for the same object, in the same place."""
    training.kept["scale"] = training.kept.pop("frozen")


CHANGES = {
    "parameter": (lambda t: setattr(t.model[0], "weight", nn.Parameter(torch.zeros(4, 3))), "another object"),
    "memory": (lambda t: setattr(t.model[0].weight, "data", torch.zeros(4, 3)), "another address"),
    "state": (lambda t: first_state(t).update(exp_avg=torch.zeros(4, 3)), "exp_avg'\\] is another object"),
    "memory of a state": (lambda t: setattr(first_state(t)["exp_avg"], "data", torch.zeros(4, 3)), "another address"),
    "all states": (lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()), "another object"),
    "no state": (lambda t: t.optimizer.state.pop(t.model[2].bias), "another object|gone"),
    "one more state": (lambda t: first_state(t).update(more=torch.zeros(1)), "had 3 entries and has 4"),
    "frozen": (lambda t: t.model[0].weight.requires_grad_(False), "had requires_grad=True and has False"),
    "buffer that learns": (lambda t: t.model[1].running_mean.requires_grad_(), "had requires_grad=False and has True"),
    "mode": (lambda t: t.model.eval(), "training was True and is False"),
    "number of a group": (lambda t: t.optimizer.param_groups[0].update(lr=0.25), "was 0.5 and is 0.25"),
    "number of another type": (lambda t: t.kept["sizes"].__setitem__(0, "1"), "was 1 and is 1"),
    "number in a tuple": (
        lambda t: t.kept["sizes"].__setitem__(1, (3.0, "x")),
        r"was \(2.0, 'x'\) and is \(3.0, 'x'\)",
    ),
    "entry of a list": (lambda t: t.kept["sizes"].append(2), "had 2 entries and has 3"),
    "number of another list": (lambda t: t.kept["others"].__setitem__(0, 2), r"others'\]\[0\] was 1 and is 2"),
    "last number of another list": (lambda t: t.kept["others"].__setitem__(2, 2), r"others'\]\[2\] was 3 and is 2"),
    "tensor of another list": (lambda t: t.kept["others"].__setitem__(1, torch.ones(2)), "another object"),
    "last tensor of another list": (lambda t: t.kept["others"].__setitem__(3, torch.ones(2)), "another object"),
    "entry of another list": (lambda t: t.kept["others"].append(2), "had 4 entries and has 5"),
    "key": (swapped, "is gone"),
    "module": (lambda t: t.model.__setitem__(2, nn.Identity()), "another object"),
    "buffer gone": (lambda t: t.model[1]._buffers.pop("running_var"), "gone"),
    "scale": (lambda t: setattr(t.scaler, "_scale", torch.ones(())), "another object"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found(name):
    change, text = CHANGES[name]
    training = Watched()
    assert training.state.changed() is None and training.state.watches_natively == NATIVE
    assert training.state.changed() is None
    change(training)
    found = training.state.changed()
    assert found is not None and re.search(text, found), found


def test_what_is_equal_or_not_of_the_step_is_no_change():
    training = Watched()
    assert training.state.changed() is None
    training.optimizer.param_groups[0]["lr"] = 1.0 / 2  # another float object
    training.optimizer.grad_scale = torch.ones(())
    training.model[0].note = object()
    with torch.no_grad():
        training.model[0].weight.add_(1)
    assert training.state.changed() is None and training.state.watches_natively == NATIVE


def test_a_watch_keeps_no_step_alive():
    """A watch holds no reference: a step that its own state refers to is collected."""

    class Holder:
        pass

    holder, training = Holder(), Watched()
    holder.state = StepState([("holder", [holder], 0)], torch.device("cpu"))
    training.given.append(holder)
    training.state = StepState([("given", [training.given], 0)])
    assert training.state.changed() is None and training.state.watches_natively == NATIVE
    gone = weakref.ref(training)
    holder.training = training
    del training, holder
    gc.collect()
    assert gone() is None


def test_without_torchs_reader_of_addresses_python_looks(monkeypatch):
    monkeypatch.setattr(warpsmith.train.step_state, "ADDRESS_READER", 0)
    training = Watched()
    assert training.state.changed() is None and not training.state.watches_natively
    training.model[0].weight.data = torch.zeros(4, 3)
    assert "another address" in training.state.changed()
