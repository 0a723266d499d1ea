"""What a captured step looks at before every replay, natively: nothing that Python's comparison finds escapes it."""

import gc
import re
import weakref
from collections import OrderedDict

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.train.step_state import StepState

NATIVE = bool(warpsmith.train.step_state.ADDRESS_READER)  # torch has its reader of addresses


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = warpsmith.optim.AdamW(self.model.parameters(), lr=0.5)
        self.scaler = warpsmith.amp.GradScaler("cpu", init_scale=4.0)
        self.kept = OrderedDict(average=torch.zeros(2), sizes=[1, (2.0, "x")], frozen=torch.ones(2))
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
    "key": (swapped, "is gone"),
    "module": (lambda t: t.model.__setitem__(2, nn.Identity()), "another object"),
    "buffer gone": (lambda t: t.model[1]._buffers.pop("running_var"), "gone"),
    "scale": (lambda t: setattr(t.scaler, "_scale", torch.ones(())), "another object"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found(name):
    change, text = CHANGES[name]
    training = Training()
    assert training.state.changed() is None and training.state.watches_natively == NATIVE
    assert training.state.changed() is None
    change(training)
    found = training.state.changed()
    assert found is not None and re.search(text, found), found


def test_what_is_equal_or_not_of_the_step_is_no_change():
    training = Training()
    assert training.state.changed() is None
    training.optimizer.param_groups[0]["lr"] = 1.0 / 2  # another float object
    training.optimizer.grad_scale = torch.ones(())
    training.model[0].note = object()
    with torch.no_grad():
        training.model[0].weight.add_(1)
    assert training.state.changed() is None and training.state.watches_natively == NATIVE


def test_a_watch_keeps_no_step_alive():
    """It is no owner: a step that its own state refers to goes away."""

    class Holder:
        pass

    holder, training = Holder(), Training()
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
    training = Training()
    assert training.state.changed() is None and not training.state.watches_natively
    training.model[0].weight.data = torch.zeros(4, 3)
    assert "another address" in training.state.changed()
