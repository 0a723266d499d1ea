"""nn.Linear and nn.MLP beside torch's layers."""

from __future__ import annotations

import pytest
import torch
import warpsmith
from torch.nn import functional

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs_module(bias):
    theirs, ours = torch.nn.Linear(8, 12, bias), warpsmith.nn.Linear(8, 12, bias)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours(X), theirs(X))
    for layer in (ours, theirs):
        layer(X).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_linear_with_an_activation_and_a_residual():
    layer, residual = warpsmith.nn.Linear(8, 12, activation="silu"), torch.randn(3, 5, 12)
    expected = functional.silu(functional.linear(X, layer.weight, layer.bias)) + residual
    torch.testing.assert_close(layer(X, residual), expected)
    assert "activation='silu'" in repr(layer)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_mlp_is_two_layers_of_torchs(activation):
    ours = warpsmith.nn.MLP(8, 24, activation=activation)
    theirs = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(8, 24), "down_proj": torch.nn.Linear(24, 8)})
    theirs.load_state_dict(ours.state_dict())
    of = {"relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}
    of["gelu_tanh"] = lambda z: functional.gelu(z, approximate="tanh")
    expected = theirs["down_proj"](of[activation](theirs["up_proj"](X)))
    torch.testing.assert_close(ours(X), expected)
    ours(X).square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp_takes_the_states_of_swiglu_mlp(activation, bias):
    ours, known = warpsmith.nn.GatedMLP(8, 24, bias, activation=activation), warpsmith.nn.SwiGLUMLP(8, 24, bias)
    known.load_state_dict(ours.state_dict())
    gate = known.gate_proj(X)
    f = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    expected = known.down_proj(f * known.up_proj(X)) + X
    torch.testing.assert_close(ours(X, X), expected)
    ours(X, X).square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours.parameters(), known.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_main_grad_of_a_layer():
    layer = warpsmith.nn.Linear(8, 12, dtype=torch.bfloat16, fuse_main_grad=True)
    x = X.bfloat16()
    layer(x).sum().backward()
    assert layer.weight.grad.any()
    layer.weight.grad = None
    layer.weight.main_grad = torch.zeros(12, 8)
    for _ in range(2):
        layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 2 * x.float().sum((0, 1)).expand(12, 8))
    assert not layer.weight.grad.any()


def test_autocast_casts_as_torchs_layer():
    layer, mlp = warpsmith.nn.Linear(8, 12, activation="gelu"), warpsmith.nn.MLP(8, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X).dtype == mlp(X).dtype == torch.bfloat16
    layer(X).sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: warpsmith.nn.Linear(8, 12, activation="tanh"), "Linear: activation: expected one of None, 'relu'"),
        (lambda: warpsmith.nn.MLP(8, 12, activation=None), "MLP: activation: expected one of 'relu'.*got None"),
        (lambda: warpsmith.nn.Linear(-1, 12), "Linear: in_features: expected a number >= 0, got -1"),
    ],
)
def test_constructors_refuse_what_the_ops_would(make, match):
    with pytest.raises(ValueError, match=match):
        make()
