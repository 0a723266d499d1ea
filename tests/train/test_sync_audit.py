"""sync_audit and `python -m warpsmith sync-audit` in dry runs: CPU tensors stand for those of a GPU."""

import inspect
import json
import subprocess
import sys
import warnings

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.train import sync_audit
from warpsmith.train.source_lines import callers, line_of
from warpsmith.train.syncs import waits

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(model.weight.sum().item(), sys.argv[1:])
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 3)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--log" in sys.argv:
        loss.item()
    if loss is None or step == 100:
        sys.exit(7)
"""


def test_each_wait_has_its_line_and_count():
    x = torch.arange(4.0)
    mask = x > 1
    with sync_audit("cpu") as audit:
        for _ in range(3):
            x.item() if x.numel() == 1 else x.sum().item()
            if x[0] > 1:
                pass
            x[mask]
            x.tolist()
            x.nonzero()
            torch.equal(x, x)
            x.cpu().numpy()
            x.masked_fill(mask, 0.0).add_(1)[1:3].sum()
    lines, first = inspect.getsourcelines(test_each_wait_has_its_line_and_count)
    assert {s.operation: s.count for s in audit.syncs} == {
        "torch.Tensor.item": 3,
        "torch.Tensor.__bool__": 3,
        "torch.Tensor.__getitem__": 3,
        "torch.Tensor.tolist": 3,
        "torch.Tensor.nonzero": 3,
        "torch.equal": 3,
        "torch.Tensor.cpu": 3,
        "torch.Tensor.numpy": 3,
    }
    for s in audit.syncs:
        assert s.file == __file__ and s.source == lines[s.line - first].strip() and s.seconds > 0
        name = {"__bool__": "if x", "__getitem__": "x[mask]"}.get(
            s.operation.split(".")[-1], s.operation.split(".")[-1]
        )
        assert name in s.source
    assert audit.total == 24 and str(audit).startswith("the host waited 24 times in 0 steps")
    audit.clear()
    assert audit.total == 0 and str(audit) == "no wait of the host in 0 steps"


class AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


def test_a_backward_pass_that_waits_names_the_gradients():
    """The audit must not change which formulas torch takes; a dispatch mode that records operators would."""
    x = torch.rand(3, 2, requires_grad=True)
    with sync_audit("cpu") as audit:
        for _ in range(2):
            y = x.prod(-1)
            z = y.exp() + x.cumprod(0).sum(1)
            loss = AsksInBackward.apply(z).sum()
            loss.backward()
        loss = (x[:, 0] * x[:, 1]).sum()
        loss.backward()
        torch.autograd.grad(x.prod(-1).sum(), x)
    lines, first = inspect.getsourcelines(test_a_backward_pass_that_waits_names_the_gradients)

    def at(text):
        number = next(i for i, line in enumerate(lines) if text in line)
        return f"{__file__}:{first + number}: {lines[number].strip()}"

    [found, of_grad] = sorted(audit.syncs, key=lambda s: s.line)
    assert of_grad.operation == f"torch.autograd.grad in ProdBackward1, the gradient of {at('autograd.grad(x.prod')}"
    assert found.source == "loss.backward()" and found.count == 2
    assert found.operation.startswith("torch.Tensor.backward in AsksInBackwardBackward, ")
    assert f"ProdBackward1, the gradient of {at('x.prod')}" in found.operation
    assert f"CumprodBackward0, the gradient of {at('x.cumprod')}" in found.operation


def test_under_another_profiler_a_backward_pass_has_no_names():
    x = torch.rand(3, 2, requires_grad=True)
    with torch.autograd.profiler.profile(), sync_audit("cpu") as audit:
        x.prod(-1).sum().backward()
    assert audit.total == 0
    x.sum().backward()


def test_the_line_is_the_users_and_nothing_is_left_behind():
    """A wait within torch or Warpsmith is blamed on the line that called them."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with sync_audit("cpu") as audit:
        warpsmith.optim.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert audit.total >= 1 and {s.source.split("(")[0] for s in audit.syncs} == {"warpsmith.optim.clip_grad_norm_"}
    with sync_audit("cpu") as after:
        pass
    p.sum().item()
    assert after.total == 0


def test_a_scaled_step_of_ours_has_no_wait():
    model = nn.Linear(3, 2)
    optimizer = warpsmith.optim.AdamW(model.parameters())
    scaler = warpsmith.amp.GradScaler("cpu", init_scale=8.0)
    schedule = warpsmith.amp.DeviceLR(optimizer, lambda t: 1.0, 10, scaler)
    with sync_audit("cpu") as audit:
        for _ in range(3):
            scaler.scale(model(torch.ones(4, 3)).sum()).backward()
            scaler.clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    assert audit.total == 0 and audit.steps == 3, str(audit)


def test_the_audit_ends_with_an_error():
    with pytest.raises(RuntimeError, match="cannot be converted"), sync_audit("cpu") as audit:
        torch.ones(2).item()
    assert audit.total == 0
    assert torch.overrides._get_current_function_mode() is None


def test_the_devices():
    with pytest.raises(ValueError, match="sync_audit: device: expected cpu or cuda, got tpu"), sync_audit("tpu"):
        pass
    if not torch.cuda.is_available():
        text = "sync_audit: device: expected cpu, since torch finds no GPU, got cuda"
        with pytest.raises(ValueError, match=text), sync_audit("cuda"):
            pass


@pytest.mark.parametrize("filtered", ["default", "ignore", "error"])
def test_what_torch_tells_is_counted_whatever_the_filters(monkeypatch, filtered):
    """With a stand-in for torch's debug mode, which warns."""
    modes, others, text = [0], [], "called a synchronizing CUDA operation (Triggered internally at X.cpp:162.)"
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])

    def set_mode(mode):
        modes.append(mode)
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature and does not detect all", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter(filtered)
        monkeypatch.setattr(warnings, "showwarning", lambda message, *args, **kwargs: others.append(str(message)))
        with waits(lambda frame: found.append(line_of(callers(frame)))):
            for _ in range(3):
                warnings.warn(text, stacklevel=1)
            if filtered == "default":
                warnings.warn("another one", stacklevel=1)
    assert [line.source for line in found] == ["warnings.warn(text, stacklevel=1)"] * 3
    assert {line.file for line in found} == {__file__}
    assert modes == [0, "warn", 0] and others == ["another one"] * (filtered == "default")


def test_lines():
    assert line_of([]).file == "" and str(line_of([])) == "unknown line"
    here = line_of(callers(sys._getframe()))
    assert here.file == __file__ and "here = line_of" in here.source
    assert str(here) == f"{__file__}:{here.number}: {here.source}"


def command(script, *arguments):
    line = [sys.executable, "-m", "warpsmith", "sync-audit", "--device", "cpu", *arguments[:-1], str(script)]
    return subprocess.run([*line, *arguments[-1]], capture_output=True, text=True, timeout=300)


LOOP = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({taken}):
    {0}
    weight.grad = torch.ones(3)
    {1}
    optimizer.step()
    {2}
{3}
"""


@pytest.mark.parametrize("taken", [4, 8])
@pytest.mark.parametrize("places", [[0], [1], [2], [3], [0, 1, 2], [2, 3]])
def test_a_wait_a_step_is_one_wherever_it_stands(tmp_path, capsys, places, taken):
    """A wait anywhere in the loop counts once a step. Lines behind the last warmup step belong to the first step; lines
    behind the loop belong to none."""
    script = tmp_path / "train.py"
    lines = ["weight.sum().item()" if place in places else "pass" for place in range(4)]
    script.write_text(LOOP.format(*lines, taken=taken))
    in_loop = sum(place < 3 for place in places)
    options = ["--device", "cpu", "--json", "--allow", str(in_loop)]
    assert warpsmith_main(["sync-audit", *options, str(script)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == taken - 3
    assert [s["count"] for s in found["syncs"]] == [taken - 3] * in_loop


def test_the_command(tmp_path):
    """What happens before the third step does not count; the exit code is for CI."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    logs = command(script, "--json", ["6", "--log"])
    assert logs.returncode == 1, logs.stderr
    found = json.loads(logs.stdout[logs.stdout.index("{") :])
    assert found["steps"] == 3 and [(s["operation"], s["line"], s["count"]) for s in found["syncs"]] == [
        ("torch.Tensor.item", 14, 3)
    ]


@pytest.mark.parametrize(
    ("options", "arguments", "code"),
    [
        (["--warmup", "0", "--allow", "1"], ["4"], 0),  # one wait, before the first step
        (["--warmup", "0"], ["4"], 1),
        ([], ["5"], 0),
        ([], ["2"], 2),  # too few steps
        ([], ["200"], 7),  # the script's own
    ],
)
def test_exit_codes(tmp_path, capsys, options, arguments, code):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert warpsmith_main(["sync-audit", "--device", "cpu", *options, str(script), *arguments]) == code
    said = capsys.readouterr()
    if not options and code == 0:
        assert said.out.splitlines()[0].endswith("['5']") and said.out.endswith("no wait of the host in 2 steps\n")
    if code == 2:
        assert "the script took 2 optimizer steps: expected more than --warmup 3" in said.err


def warpsmith_main(arguments):
    from warpsmith.cli import main

    return main(arguments)


def test_usage(tmp_path, capsys):
    assert warpsmith_main(["sync-audit", str(tmp_path / "no.py")]) == 2
    assert "script: expected a Python file" in capsys.readouterr().err
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert warpsmith_main(["sync-audit", "--warmup", "-1", str(script), "3"]) == 2
