"""Modules of the activations in place of what they replace."""

import pytest
import torch
import warpsmith
from torch import nn


class LlamaMLP(nn.Module):
    """The layer as transformers has it: names and formula."""

    def __init__(self, hidden, intermediate, bias):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gated_mlp_is_llamas(bias, inplace):
    theirs = LlamaMLP(16, 40, bias)
    ours = warpsmith.nn.GatedMLP(16, 40, bias, inplace_backward=inplace)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    one = torch.randn(3, 5, 16, requires_grad=True)
    two = one.detach().clone().requires_grad_()
    torch.testing.assert_close(ours(one), theirs(two))
    ours(one).square().sum().backward()
    theirs(two).square().sum().backward()
    torch.testing.assert_close(one.grad, two.grad)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gated_mlp_under_autocast_and_on_meta():
    mlp = warpsmith.nn.GatedMLP(8, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(torch.randn(2, 8)).dtype == torch.bfloat16
    meta = warpsmith.nn.GatedMLP(8, 24, device="meta", dtype=torch.bfloat16)
    assert meta(torch.empty(2, 8, device="meta", dtype=torch.bfloat16)).shape == (2, 8)
    assert "inplace_backward=False" in repr(mlp)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu_takes_the_place_of_a_bias_and_gelu(approximate):
    theirs = nn.Sequential(nn.Linear(6, 16), nn.GELU(approximate))
    ours = nn.Sequential(nn.Linear(6, 16, bias=False), warpsmith.nn.BiasGELU(16, approximate))
    weight, bias = theirs[0].weight.detach(), theirs[0].bias.detach()
    ours.load_state_dict({"0.weight": weight, "1.bias": bias})
    x = torch.randn(5, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    torch.testing.assert_close(ours[1].bias.grad, theirs[0].bias.grad)
    assert approximate in repr(ours)


def test_dropout_add_drops_in_training_alone():
    module = warpsmith.nn.DropoutAdd(0.5)
    x, residual = torch.ones(40, 40), torch.full((40, 40), 3.0)
    assert set(module(x, residual).unique().tolist()) == {3.0, 5.0}
    assert torch.equal(module.eval()(x, residual), x + residual)
    assert repr(module) == "DropoutAdd(p=0.5)"
