"""CapturedStep's logic on the CPU, with graphs that are none: a capture keeps the function, a replay calls it again."""

import contextlib
import inspect
import itertools
import random
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import warpsmith
from torch import nn
from torch.utils._pytree import tree_leaves
from warpsmith.testing import bitwise_equal
from warpsmith.train import CapturedStep, CaptureError, captured_step
from warpsmith.train.device_values import DeviceValues
from warpsmith.train.random_state import random_state
from warpsmith.train.step_state import StepState, names_of, same_bits

CALLS = 9


class Replayed:
    """Graphs of the CPU. A real capture runs Python's code and no kernel; this one puts back what the kernels did."""

    def __init__(self, device, generators):
        self.device, self.captures, self.replays, self.spoil = device, 0, 0, lambda: None
        self.made.append(self)

    @staticmethod
    def serves(device):
        return device.type == "cpu"

    @contextlib.contextmanager
    def aside(self):
        yield

    @contextlib.contextmanager
    def watched(self, found):
        item = torch.Tensor.item

        def waits(tensor):
            found(sys._getframe(1))
            return item(tensor)

        torch.Tensor.item = waits
        try:
            yield
        finally:
            torch.Tensor.item = item

    def capture(self, function):
        self.captures += 1
        state = StepState([("state", [self.given], 0)])
        copies, numbers = state.copies(), torch.get_rng_state()
        params = [t for t in state.tensors if t.requires_grad]
        try:
            result = function()
            grads = [p.grad for p in params]
        finally:
            state.restore(copies)
            torch.set_rng_state(numbers)

        def replay():
            self.replays += 1
            for p in params:
                p.grad = None
            for static, new in zip(tree_leaves(result), tree_leaves(function()), strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(new)
            for p, grad in zip(params, grads, strict=True):
                if grad is not None:
                    grad.copy_(p.grad)
                p.grad = grad
            self.spoil()

        return replay, result

    def forget(self):
        self.forgotten = getattr(self, "forgotten", 0) + 1

    def host_random_state(self):
        return {name: value for name, value in random_state().items() if name != "torch"}

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were made, one an instance of CapturedStep."""
    monkeypatch.setattr(captured_step, "CudaGraphs", Replayed)
    monkeypatch.setattr(Replayed, "made", [], raising=False)
    return Replayed.made


class Training:
    def __init__(self, optimizer=warpsmith.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-2, **options})
        self.scaler = warpsmith.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.schedule = warpsmith.amp.DeviceLR(self.optimizer, lambda t: 0.9**t, 50, self.scaler)
        self.state = [self.model, self.optimizer, self.scaler, self.schedule]

    def step(self, batch):
        loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.clip_(self.optimizer, 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss

    def captured(self, step=None, **options):
        Replayed.given = self.state
        return CapturedStep(step or self.step, state=self.state, **options)

    def tensors(self):
        return StepState([("state", [self.state], 0)]).copies()


def batches(count=CALLS, bad=()):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(8, 6, generator=generator) for _ in range(count)]
    for i in bad:
        inputs[i][0, 0] = torch.inf
    return inputs


def run(step, inputs):
    torch.manual_seed(5)
    return [step(batch).detach().clone() for batch in inputs]


def same(a, b):
    return len(a) == len(b) and all(bitwise_equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_call_is_one_step_and_the_self_test_leaves_no_trace(graphs):
    """Random numbers, running statistics, scale, schedule and an overflow included."""
    eager, graphed, inputs = Training(), Training(), batches(bad=(3, 6))
    expected = run(eager.step, inputs)
    step = graphed.captured()
    losses = run(step, inputs)
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())
    assert step.fallback_reason is None and step.self_test_result == "3 steps: the bits of eager steps"
    assert graphs[0].captures == 1 and graphs[0].replays == 3 + CALLS - 3
    assert eager.scaler.skipped_steps == graphed.scaler.skipped_steps == 2
    assert all(p.grad is None for p in graphed.model.parameters())


def test_an_average_of_the_weights(graphs):
    """EMA, which follows the steps that were not skipped."""
    losses, averages, inputs = [], [], batches(bad=(6,))
    for captured in (False, True):
        training = Training()
        ema = warpsmith.optim.EMA(training.model.parameters(), 0.5)

        def step(batch, training=training, ema=ema):
            loss = training.step(batch)
            ema.update(training.scaler.found_inf(training.optimizer))
            return loss

        training.state.append(ema)
        step = training.captured(step) if captured else step
        losses.append(run(step, inputs))
        averages.append(ema.averages)
    assert step.fallback_reason is None and same(*losses) and same(*averages)


def test_each_call_has_its_own_outputs(graphs):
    step = Training().captured()
    losses = [step(batch) for batch in batches()]
    assert len({loss.data_ptr() for loss in losses}) == CALLS and not any(loss.requires_grad for loss in losses)


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


def test_eager_steps_that_differ_among_themselves_are_the_measure(graphs):
    """As by float atomics: the self-test cannot ask for bits, but it does ask for their size."""
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
    with pytest.warns(RuntimeWarning, match=rf"test_captured_step.py:{line}: loss.item\(\): the host waits") as told:
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
        rf"test_captured_step.py:{first + 2}: loss.backward\(\): the host waits for the device in ProdBackward1, "
        rf"the gradient of .*test_captured_step.py:{first + 1}: loss = .*prod\(1\).*$"
    )
    with pytest.warns(RuntimeWarning, match=text) as told:
        losses = run(captured, inputs)
    assert len(told) == 1 and graphs[0].captures == 0
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())


def test_an_error_of_the_capture_is_named_with_its_line(graphs):
    """Half a step was captured: what the host noted of it is taken back, and the step is taken eagerly."""
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
    text = r"test_captured_step.py:\d+: raise RuntimeError\(.*\): RuntimeError: operation not permitted .* capturing$"
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


def test_changes_between_steps_are_noticed(graphs):
    """Each is one eager step and a new capture."""
    eager, graphed, inputs = Training(), Training(), batches(24)

    def between(training, i):
        group = training.optimizer.param_groups[0]
        if i == 5:
            group["maximize"] = True
        if i == 8:
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        if i == 11:
            training.model[0].weight.data = training.model[0].weight.detach().clone()
        if i == 14:
            training.model.eval()
        if i == 17:
            training.model[0].requires_grad_(False)
        if i == 20:
            training.model[2] = nn.Identity()

    for training, step in ((eager, eager.step), (graphed, graphed.captured(self_test=1))):
        torch.manual_seed(5)
        for i, batch in enumerate(inputs):
            between(training, i)
            training.last = step(batch)
    assert bitwise_equal(eager.last.detach(), graphed.last) and same(eager.tensors(), graphed.tensors())
    assert graphs[0].captures == graphs[0].forgotten + 1 == 7 and step.fallback_reason is None


def test_a_step_that_nobody_watches(graphs, monkeypatch):
    """Learning rates are followed all the same; what else a capture fixes is up to forget()."""
    eager, graphed, inputs = Training(), Training(), batches(16)
    for training in (eager, graphed):
        training.state[3:], training.schedule = [], SimpleNamespace(step=lambda: None)
    captured = graphed.captured(watch=False)
    looks, changed = [], StepState.changed
    monkeypatch.setattr(StepState, "changed", lambda self: looks.append(1) or changed(self))
    for training, step in ((eager, eager.step), (graphed, captured)):
        torch.manual_seed(5)
        for i, batch in enumerate(inputs):
            training.optimizer.param_groups[0]["lr"] = 0.01 * (i + 1)
            if i == 6:
                del looks[:]
            if i == 10:
                assert not looks
                training.model.eval()
                if training is graphed:
                    captured.forget()
            training.last = step(batch)
    assert captured.fallback_reason is None and graphs[0].captures == 2
    assert bitwise_equal(eager.last.detach(), graphed.last) and same(eager.tensors(), graphed.tensors())
    training.model.train()  # a replay would have dropout's numbers, or not: nobody looks
    graphed.model[0].weight.grad = torch.ones_like(graphed.model[0].weight)
    captured(inputs[0])
    assert graphs[0].captures == 2


def test_inputs_that_are_freed_after_each_step(graphs):
    """Captures own what they read: replays have the bits of eager steps when the caller's memory is gone."""
    eager, graphed, inputs = Training(), Training(), batches()
    expected = run(eager.step, inputs)
    captured = graphed.captured()
    torch.manual_seed(5)
    losses = []
    for batch in inputs:
        mine = batch.clone()
        losses.append(captured(mine))
        mine.fill_(torch.nan)
        mine.untyped_storage().resize_(0)
    assert graphs[0].replays > len(inputs) - 4 and captured.fallback_reason is None
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())


def test_a_number_that_changes_all_the_time_keeps_steps_eager(graphs):
    training = Training()
    step = training.captured(self_test=0)
    with pytest.warns(RuntimeWarning, match=r"changed 9 times, at last: state\[1\]\.param_groups\[0\]\['seed'\] was"):
        for i, batch in enumerate(batches(40)):
            training.optimizer.param_groups[0]["seed"] = i
            step(batch)


def test_kinds_of_inputs(graphs):
    """Shapes, dtypes and values that are no tensors; one more than the bound changes nothing."""
    training = Training()

    def step(batch, weight=1.0):
        return training.step(batch["x"].float() * weight)

    captured = training.captured(step, max_buckets=3, self_test=1)
    x = batches()[0]
    for _ in range(6):
        captured({"x": x})
        captured({"x": x[:4].double()})
        captured({"x": x}, weight=0.5)
    assert graphs[0].captures == 3
    before = training.tensors()
    text = r"one of max_buckets = 3 kinds \(float32 \(8, 6\); float64 \(4, 6\); .*\), got float32 \(5, 6\)"
    with pytest.raises(ValueError, match=text):
        captured({"x": x[:5]})
    with pytest.raises(ValueError, match="inputs: expected tensors that require no gradient, got one that does"):
        captured({"x": x.clone().requires_grad_()})
    with pytest.raises(ValueError, match="inputs: expected dense tensors, got sparse_coo"):
        captured({"x": x.to_sparse()})
    with pytest.raises(TypeError, match="inputs: expected tensors and hashable values"):
        captured({"x": x}, weight={1.0})
    assert same(before, training.tensors()) and captured.fallback_reason is None


def test_a_step_may_write_to_its_inputs(graphs):
    training = Training()

    def step(batch):
        return training.step(batch.mul_(0.5))

    captured = training.captured(step)
    inputs = batches()
    copies = [b.clone() for b in inputs]
    run(captured, inputs)
    assert captured.self_test_result == "3 steps: the bits of eager steps"
    assert all(torch.equal(b, c / 2) for b, c in zip(inputs[:3], copies, strict=False))


@pytest.mark.parametrize("style", ["first", "in place", "outside"])
def test_styles_of_zero_grad(graphs, style):
    """After a call the gradients are those of the step, unless it dropped them."""

    def make(training):
        optimizer = training.optimizer

        def step(batch):
            if style != "outside":
                optimizer.zero_grad(set_to_none=style == "first")
            loss = training.model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    eager, graphed, inputs = Training(), Training(), batches()
    steps = make(eager), graphed.captured(make(graphed))
    for training, step in zip((eager, graphed), steps, strict=True):
        torch.manual_seed(5)
        for batch in inputs:
            if style == "outside":
                training.optimizer.zero_grad()
            step(batch)
    assert steps[1].fallback_reason is None, steps[1].fallback_reason
    assert same(eager.tensors(), graphed.tensors())
    grads = [[p.grad for p in training.model.parameters()] for training in (eager, graphed)]
    assert same(*grads)
    if style == "outside":
        before = graphed.tensors()
        with pytest.raises(ValueError, match="gradients: expected none before the step, as at its capture, got some"):
            steps[1](inputs[0])
        assert same(before, graphed.tensors())


def test_accumulation_over_calls_stays_eager(graphs):
    """Gradients that the step adds to would be overwritten by a replay."""
    eager, graphed, inputs = Training(), Training(), batches()

    def make(training):
        def micro_step(batch):
            loss = training.model(batch).square().mean()
            loss.backward()
            return loss

        return micro_step

    captured = graphed.captured(make(graphed))
    expected = run(make(eager), inputs)
    with pytest.warns(RuntimeWarning, match="the gradient of .* is not after 3 replays what"):
        losses = run(captured, inputs)
    assert same(expected, losses)


def test_without_a_gpu_steps_are_eager():
    eager, training, inputs = Training(), Training(), batches()
    with pytest.warns(RuntimeWarning, match="steps run eagerly: the state lies on no GPU") as told:
        step = CapturedStep(training.step, state=training.state, fallback=False)
        losses = run(step, inputs)
    assert len(told) == 1 and same(run(eager.step, inputs), losses) and same(eager.tensors(), training.tensors())


def test_arguments():
    training = Training()
    for options, text in (
        ({"warmup": 1}, "warmup: expected a number >= 2, got 1"),
        ({"self_test": -1}, "self_test: expected a number >= 0"),
        ({"max_buckets": 0}, "max_buckets: expected a number >= 1"),
        ({"state": []}, r"state: expected a list of what the step changes, such as \[model, optimizer\], got \[\]"),
        ({"state": training.model}, "state: expected a list"),
    ):
        with pytest.raises(ValueError, match=f"CapturedStep: {text}"):
            CapturedStep(training.step, **{"state": training.state, **options})
    with pytest.raises(TypeError, match="CapturedStep: step_fn: expected a function"):
        CapturedStep(3, state=training.state)
    model, average = training.model, nn.Linear(2, 2)
    with pytest.raises(ValueError, match="state: expected all that step_fn changes, average too"):
        CapturedStep(lambda x: average(model(x)), state=[training.model])
    ema = warpsmith.optim.EMA(model.parameters())
    with pytest.raises(ValueError, match="state: expected all that step_fn changes, ema too"):
        CapturedStep(lambda x: (model(x), ema.update()), state=[training.model])


def test_hyperparameters_on_the_device():
    """A captured optimizer reads tensors; its groups show the numbers."""
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    ours = warpsmith.optim.SGD([{"params": [p]}, {"params": [q], "lr": 0.25}], lr=0.5, weight_decay=0.125)
    torchs = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    values = DeviceValues([ours, torchs], torch.device("cpu"))
    group = ours.param_groups[0]

    def step():
        for t in (p, q):
            t.data.fill_(1.0)
            t.grad = torch.zeros(2)
        ours.step()
        return [t[0].item() for t in (p, q)]

    with values.on_device():
        rate = group["lr"]
        assert rate.dtype == torch.float64 and rate == 0.5 and torchs.param_groups[0]["lr"] == 0.5
        assert step() == [1 - 0.5 * 0.125, 1 - 0.25 * 0.125]
    assert group["lr"] == 0.5 and isinstance(group["lr"], float) and not ours.device_constants
    group["lr"], group["weight_decay"] = 0.1, 0.5
    with values.on_device():
        assert step() == [1 - 0.5 * 0.125, 1 - 0.25 * 0.125]  # as a replay would
    assert values.refresh() is None and rate.item() == 0.1
    group["lr"] = 0.75  # of the launch, which a replay does not read
    with values.on_device():
        assert step() == pytest.approx([1 - 0.1 * 0.5, 1 - 0.25 * 0.125], rel=1e-6)
    assert values.holds(group, "lr") and values.holds(group, "weight_decay") and not values.holds(group, "maximize")
    assert not values.holds(torchs.param_groups[0], "lr")
    group["momentum"] = 0.9  # with a state
    assert values.refresh() == "SGD has other states or groups"
    group["momentum"], group["lr"] = 0, torch.tensor(0.3)
    assert values.refresh() == "a learning rate is a tensor on the device now"


def test_names_of_a_function():
    scale = torch.ones(1)

    def f(x):
        return [nn.functional.relu(x * scale * y) for y in x]

    found = names_of(f)
    assert set(found) == {"nn", "scale"}
    assert found["scale"][0]["scale"] is scale
    scale = 2  # the closure's variable, as it is now
    assert found["scale"][0]["scale"] == 2


def test_bits():
    a = torch.tensor([0.0, float("nan")])
    assert same_bits(a, a.clone()) and not same_bits(a, torch.tensor([-0.0, float("nan")]))
    assert not same_bits(a, a.double()) and same_bits(torch.tensor(1 + 2j), torch.tensor(1 + 2j))
