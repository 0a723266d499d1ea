"""Modules of the activations in place of what they replace."""

import pytest
import torch
import warpsmith
from torch import nn


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
