"""LayerNorm in place of torch's, and the modules that add, perhaps drop, and normalise in place of several of them."""

import copy

import numpy as np
import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.nn import AddLayerNorm, AddRMSNorm, DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm

SHAPES = [16, (16,), (3, 16)]


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "affine"),
    [
        *(("LayerNorm", options) for options in ({}, {"bias": False}, {"elementwise_affine": False})),
        *(("RMSNorm", options) for options in ({}, {"elementwise_affine": False})),
    ],
    ids=str,
)
def test_is_torchs_module(name, affine, shape):
    ours, theirs = (getattr(package, name)(shape, 1e-4, **affine) for package in (warpsmith.nn, nn))
    randomised(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for attribute in ("normalized_shape", "eps", "elementwise_affine"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    x = torch.randn(2, 5, 3, 16)
    torch.testing.assert_close(ours(x), theirs(x))
    gradients = []
    for module in (ours, theirs):
        leaves = [x.clone().requires_grad_(), *module.parameters()]
        gradients.append(torch.autograd.grad(module(leaves[0]).square().sum(), leaves))
    torch.testing.assert_close(*gradients)


def test_fresh_parameters_are_torchs():
    ours, theirs = LayerNorm(8), nn.LayerNorm(8)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert torch.equal(AddRMSNorm(8, weight_offset=1.0).weight, torch.zeros(8))


# Ours, torch's norm that follows the sum, and the arguments that both take.
PAIRS = {
    "AddRMSNorm": (AddRMSNorm, nn.RMSNorm, {"eps": 1e-4}),
    "AddRMSNorm, default eps": (AddRMSNorm, nn.RMSNorm, {}),
    "AddLayerNorm": (AddLayerNorm, nn.LayerNorm, {"eps": 1e-4}),
    "AddLayerNorm without bias": (AddLayerNorm, nn.LayerNorm, {"bias": False}),
    "DropoutAddRMSNorm": (DropoutAddRMSNorm, nn.RMSNorm, {"eps": 1e-4}),
    "DropoutAddLayerNorm": (DropoutAddLayerNorm, nn.LayerNorm, {"eps": 1e-4}),
    "DropoutAddLayerNorm, plain": (DropoutAddLayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_sum_and_its_norm(pair, shape):
    make, torchs, options = PAIRS[pair]
    p = {"p": 0.3} if make in (DropoutAddRMSNorm, DropoutAddLayerNorm) else {}
    ours, theirs = make(shape, **p, **options).eval(), randomised(torchs(shape, **options))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, residual = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 16)
    s = residual + x
    torch.testing.assert_close(ours(x, residual), (theirs(s), s))


@pytest.mark.parametrize("make", [DropoutAddRMSNorm, DropoutAddLayerNorm])
def test_training_mode_drops(make):
    module = make(16, p=0.5)
    x, residual = torch.ones(64, 16), torch.zeros(64, 16)
    torch.manual_seed(2)
    y, s = module(x, residual)
    assert set(s.unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(2)
    assert torch.equal(module(x, residual)[0], y)
    assert torch.equal(module.eval()(x, residual)[1], x)
    assert "p=0.5" in repr(module)


@pytest.mark.parametrize("make", [AddRMSNorm, AddLayerNorm])
def test_a_16_bit_activation_beside_a_float32_stream_and_weight(make):
    x, residual = torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, s = make(16)(x, residual)
    assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)


def test_meta_device_deepcopy_and_repr():
    module = copy.deepcopy(AddLayerNorm((4, 8), device="meta", dtype=torch.bfloat16))
    x = torch.empty(2, 4, 8, device="meta", dtype=torch.bfloat16)
    assert module(x, x)[0].shape == x.shape
    assert "eps=1e-05" in repr(module)


def test_input_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"^AddRMSNorm: residual: expected trailing shape \(4, 6\), got \(6, 4\)$"):
        AddRMSNorm((4, 6))(torch.randn(4, 6), torch.randn(6, 4))
    with pytest.raises(ValueError, match="^LayerNorm: normalized_shape: expected one or more sizes >= 1"):
        LayerNorm(())
    with pytest.raises(ValueError, match=r"^layer_norm: weight: expected shape \(6\), got \(8\)"):
        warpsmith.nn.LayerNorm(8)(torch.randn(2, 6))


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm, AddRMSNorm, AddLayerNorm])
def test_without_a_weight_too_another_width_is_named(make):
    module = make(8, elementwise_affine=False)
    inputs = [torch.randn(2, 6)] * (2 if make in (AddRMSNorm, AddLayerNorm) else 1)
    words = f"^{make.__name__}: {'input' if make is LayerNorm else 'x'}: expected trailing shape"
    with pytest.raises(ValueError, match=rf"{words} \(8\), got \(2, 6\)$"):
        module(*inputs)
    with pytest.raises(ValueError, match=rf"{words} \(8\), got \(\)$"):
        module(*[x[0, 0] for x in inputs])


def test_sizes_may_be_integers_of_other_kinds():
    for shape in (np.int64(8), (np.int64(2), 4)):
        ours, theirs = RMSNorm(shape), nn.RMSNorm(shape)
        assert ours.normalized_shape == theirs.normalized_shape
        assert ours.weight.shape == theirs.weight.shape
