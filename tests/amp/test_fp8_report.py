"""What amp.fp8_report says of layers of which it is known what casts lose."""

import copy
import importlib
import math

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.amp import Fp8Recipe, fp8, fp8_report, fp8_state

module = importlib.import_module("warpsmith.amp.fp8_report")  # the package's name of it is the function's


def decibels(signal, value):
    return 10 * math.log10(float(signal.square().sum() / (value - signal).square().sum()))


def test_products_are_as_good_as_the_report_says():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 128)), torch.randn(192, 256) * torch.randn(192, 1).exp()
    model[0].bias.data.zero_()
    dy = torch.randn(192, 128)
    report = fp8_report(model, x, lambda y: (y * dy).sum())
    assert [p.grad for p in model.parameters()] == [None, None]
    assert not model[0]._forward_hooks
    layer = report.layers["0"]
    for scaling in ("row", "tensor", "block"):
        leaves = [t.detach().clone().requires_grad_() for t in (x, model[0].weight)]
        exact = [x.double() @ leaves[1].double().t(), dy.double() @ leaves[1].double(), dy.double().t() @ x.double()]
        y = warpsmith.scaled_linear(*leaves, recipe=scaling)
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        for name, e, f in zip(("y", "dx", "dweight"), exact, found, strict=True):
            assert layer.products[name, scaling] == pytest.approx(decibels(e.detach(), f.double()), abs=1.5), name
        assert layer.casts["x", scaling].saturated == 0


def test_what_is_suggested():
    torch.manual_seed(0)
    plain, wide_rows = torch.randn(64, 64), torch.randn(64, 64)
    wide_rows *= 1e12 ** torch.linspace(0, 1, 64)[:, None]
    layer = nn.Linear(64, 64)
    even = lambda y: (y / y.detach().norm(dim=-1, keepdim=True)).sum()  # noqa: E731
    assert fp8_report(nn.Sequential(layer), plain, even).layers["0"].suggested == "tensor"
    found = fp8_report(nn.Sequential(layer), wide_rows).layers["0"]
    assert found.casts["x", "tensor"].underflow > 0.3 > found.casts["x", "row"].underflow
    broken = plain.clone()
    broken[0, 0] = torch.inf
    assert fp8_report(nn.Sequential(layer), broken, even).layers["0"].not_finite == 1


def test_delayed_scales_show_what_they_saturate():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    done = fp8(model, Fp8Recipe("tensor", amax="delayed"))
    model(torch.randn(16, 32)).square().mean().backward()
    done.update()
    before = copy.deepcopy(fp8_state(model))
    found = fp8_report(model, 100 * torch.randn(16, 32)).layers["0"]
    assert found.casts["x", "tensor"].saturated > 0.5 and found.casts["x", "row"].saturated == 0
    assert torch.equal(before["counts"][0], fp8_state(model)["counts"][0])
    done.update()
    history = fp8_state(model)["history"]
    assert not history[0].any() and torch.equal(history[1], before["history"][0])  # the report was no step


def test_the_speed_of_each_layer_is_timed_where_it_is_asked_for():
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 48)), torch.randn(16, 32)
    assert not any(layer.speed for layer in fp8_report(model, x).layers.values())  # products are emulated
    report = fp8_report(model, x, speed=True)
    first, other, again = report.layers.values()
    assert first.speed.keys() == {"row", "tensor", "block"} and min(first.speed.values()) > 0
    assert again.speed is first.speed is not other.speed
    assert f"{first.speed['row']:.2f}" in str(report)
    slower, faster = (dict.fromkeys(first.speed, times) for times in (0.9, 1.1))
    assert module._suggest(first.casts, first.products, slower) == "keep"
    assert module._suggest(first.casts, first.products, faster) == module._suggest(first.casts, first.products, {})
    with pytest.raises(TypeError, match="speed: expected True or False"):
        fp8_report(model, x, speed=2)


def test_a_layer_that_is_called_by_keyword():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return self.layer(input=x)

    assert list(fp8_report(Model(), torch.randn(4, 32)).layers) == ["layer"]


def test_table_plot_and_models_of_keywords(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.unused = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(2, 2)

        def forward(self, *, x):
            return self.down(self.up(x).relu())

    report = fp8_report(Model(), {"x": torch.randn(8, 32)})
    assert list(report.layers) == ["up", "down"]
    lines = str(report).splitlines()
    assert lines[0].startswith("layer  scaling  y dB") and len(lines) == 7
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000
    with torch.no_grad():
        frozen = nn.Sequential(nn.Linear(16, 16).requires_grad_(False))
        assert ("y", "row") in fp8_report(frozen, torch.randn(4, 16)).layers["0"].products
    with pytest.raises(ValueError, match=r"^fp8_report: model: expected a torch.nn.Module, got 3$"):
        fp8_report(3, None)
