"""CapturedStep's logic on the CPU."""

from types import SimpleNamespace

import pytest
import torch
import warpsmith
from replayed import CALLS, Training, batches, run, same
from torch import nn
from warpsmith.testing import bitwise_equal
from warpsmith.train import CapturedStep
from warpsmith.train.device_values import DeviceValues
from warpsmith.train.step_inputs import input_key
from warpsmith.train.step_state import StepState, names_of, same_bits


def test_a_call_is_one_step_and_the_self_test_leaves_no_trace(graphs):
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


def test_each_mode_of_torch_has_a_capture_of_its_own():
    """What decides over the kernels of a step beside its inputs."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    keys = [input_key("step", [torch.ones(2)], None)]
    with torch.no_grad():
        keys.append(input_key("step", [torch.ones(2)], None))
    try:
        torch.set_autocast_enabled("cuda", True)
        for dtype in (torch.float16, torch.bfloat16):
            torch.set_autocast_dtype("cuda", dtype)
            keys.append(input_key("step", [torch.ones(2)], None))
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert len(set(keys)) == 4 and keys[0] == input_key("step", [torch.zeros(2)], None)


def test_each_kind_of_inputs_has_a_capture_of_its_own():
    images = torch.ones(1, 2, 3, 3)
    of_tensors = images, images.to(memory_format=torch.channels_last), images.double(), images[0], images[..., :2]
    leaves = [*([t] for t in of_tensors), [images, images], [1], [1.0], [True], [2], ["1"], [None], []]
    keys = [input_key("step", given, None) for given in leaves]
    assert len({*keys, input_key("step", [], "another structure")}) == len(leaves) + 1


def test_graphs_go_before_their_process_group_ends(graphs, monkeypatch):
    """NCCL would wait for them."""
    there, training, end = [], Training(), torch.distributed.destroy_process_group
    ranks, step = warpsmith.distributed.init(device="cpu"), training.captured()
    run(step, batches())

    def looked_at():
        there.extend(bucket.replay for bucket in step._buckets.values())
        end()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", looked_at)
    ranks.close()
    assert there == [None] and graphs[0].captures == 1
    run(step, batches())
    assert graphs[0].captures == 2


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
    """Shapes, dtypes and the values of other arguments make a kind. One too many is refused and changes nothing."""
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
        assert step() == [1 - 0.5 * 0.125, 1 - 0.25 * 0.125]  # the new values count after refresh()
    assert values.refresh() is None and rate.item() == 0.1
    group["lr"] = 0.75  # read by the next refresh(), not by this step
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
