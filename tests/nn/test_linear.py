"""Linear and feed-forward layers beside torch's."""

import copy
import inspect

import pytest
import torch
import warpsmith
from torch.nn import functional

from tests.dispatched import Made

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
@pytest.mark.parametrize("inplace", [True, False])
def test_gated_mlp_is_three_layers_of_torchs(activation, bias, inplace):
    """By the names that Llama's have in transformers."""
    ours = warpsmith.nn.GatedMLP(8, 24, bias, activation=activation, inplace_backward=inplace)
    layers = {"gate_proj": (8, 24), "up_proj": (8, 24), "down_proj": (24, 8)}
    theirs = torch.nn.ModuleDict({name: torch.nn.Linear(*sizes, bias) for name, sizes in layers.items()})
    theirs.load_state_dict(ours.state_dict())
    one, two = (X.clone().requires_grad_() for _ in range(2))
    gate = theirs["gate_proj"](two)
    f = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    expected = theirs["down_proj"](f * theirs["up_proj"](two)) + X
    torch.testing.assert_close(ours(one, X), expected)
    ours(one, X).square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip((one, *ours.parameters()), (two, *theirs.parameters()), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert f"inplace_backward={inplace}" in repr(ours)


class Adapted(torch.nn.Module):
    """A linear layer with an adapter, as LoRA replaces one: it shows the weight of the layer inside."""

    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base, torch.nn.Linear(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def watch(layer):
    layer.seen = []
    layer.register_forward_hook(lambda module, inputs, output: module.seen.append(output.shape[-1]))
    return layer


CONTAINERS = {
    "MLP": (lambda: warpsmith.nn.MLP(8, 24), ("up_proj", "down_proj")),
    "GatedMLP": (lambda: warpsmith.nn.GatedMLP(8, 24, activation="gelu"), ("gate_proj", "up_proj", "down_proj")),
    "in place": (lambda: warpsmith.nn.GatedMLP(8, 24, inplace_backward=True), ("gate_proj", "up_proj", "down_proj")),
    "NormLinear": (lambda: warpsmith.nn.NormLinear(8, (6, 4), bias=True), ("linears.0", "linears.1")),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in CONTAINERS.items() for name in names])
def test_a_layer_that_was_replaced_or_is_watched_is_called(kind, name):
    def gradients(module):
        outputs = module(X, *[X] * ("residual" in inspect.signature(module.forward).parameters))
        sum(y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        return {n: p.grad for n, p in module.named_parameters()}

    plain = CONTAINERS[kind][0]()
    states = plain.state_dict()
    expected = gradients(plain)
    watched = CONTAINERS[kind][0]()
    watched.load_state_dict(states)
    layer = watch(watched.get_submodule(name))
    torch.testing.assert_close(gradients(watched), expected)
    assert layer.seen == [layer.out_features]
    adapted = CONTAINERS[kind][0]()
    adapted.set_submodule(name, Adapted(adapted.get_submodule(name)))
    assert all(g is not None and g.any() for n, g in gradients(adapted).items() if "adapter" in n)


# Each option of a linear layer's constructor, with a value that does more.
OPTIONS = {"bias": True, "activation": "silu", "fuse_main_grad": True}


def test_every_option_of_a_linear_layer_is_asked_below():
    sizes = {"in_features", "out_features", "device", "dtype"}
    assert inspect.signature(warpsmith.nn.Linear).parameters.keys() == OPTIONS.keys() | sizes


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in CONTAINERS.items() for name in names])
def test_a_linear_layer_of_ours_does_what_its_options_say(kind, name, option):
    """As where it is watched, and so is called."""
    module = CONTAINERS[kind][0]()
    old = module.get_submodule(name)
    module.set_submodule(
        name, warpsmith.nn.Linear(old.in_features, old.out_features, **{"bias": False, option: OPTIONS[option]})
    )
    results = []
    for found in (module, copy.deepcopy(module)):
        layer = found.get_submodule(name)
        if option == "fuse_main_grad":
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
        if results:
            watch(layer)
        outputs = found(X)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(y.square().sum() for y in outputs).backward()
        main = [layer.weight.main_grad] if option == "fuse_main_grad" else []
        assert all(t.any() for t in main)
        results.append([*(y.detach() for y in outputs), *(p.grad for p in found.parameters()), *main])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_linear_is_its_modules(dtype, summed, bias):
    eps, size = (0.0, 1e-10) if bias and dtype == torch.float64 else (None, 1.0)
    layer = warpsmith.nn.NormLinear(8, (6, 4, 4), bias, dtype=dtype, eps=eps, weight_offset=1.0)
    torch.nn.init.normal_(layer.norm.weight)
    x, residual = ((torch.randn(3, 5, 8, dtype=dtype) * size).requires_grad_() for _ in range(2))
    inputs = (x, residual) if summed else (x,)
    s = x + residual if summed else x
    expected = [linear(layer.norm(s)) for linear in layer.linears] + [s] * summed
    found = layer(*inputs)
    wanted = [*inputs, *layer.parameters()]
    ups = [torch.randn_like(y) for y in expected]
    of_modules = torch.autograd.grad(expected, wanted, ups, retain_graph=True)
    close = {"rtol": 4e-2, "atol": 4e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(list(found), expected, **close)
    torch.testing.assert_close(torch.autograd.grad(found, wanted, ups), of_modules, **close)


def test_norm_linear_keeps_its_intermediates_once():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        warpsmith.nn.NormLinear(8, (6, 4))(X)
    assert kept == [(3, 5, 8), (8,), (15,), (6, 8), (4, 8)]  # x, and of the norm a number a row


def test_several_layers_make_no_more_activations_than_one():
    found = []
    for outs in ((6,), (6, 4), (6, 4, 4)):
        x = torch.randn(50, 8, requires_grad=True)
        total = sum(y.sum() for y in warpsmith.nn.NormLinear(8, outs)(x))
        with Made(x.numel()) as made:
            total.backward()
        found.append(made.count)
    assert found == [3, 3, 3]  # the norm once more, its gradient and that of x


def test_norm_linear_of_one_layer_under_autocast():
    layer = warpsmith.nn.NormLinear(8, 5, bias=True)
    assert layer(X).shape == (3, 5, 5)
    assert list(layer.state_dict()) == ["norm.weight", "linears.0.weight", "linears.0.bias"]
    with torch.autocast("cpu", torch.bfloat16):
        y, s = layer(X, X)
    assert y.dtype == torch.bfloat16 and torch.equal(s, X + X)


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
    layer, mlps = warpsmith.nn.Linear(8, 12, activation="gelu"), [warpsmith.nn.MLP(8, 24), warpsmith.nn.GatedMLP(8, 24)]
    with torch.autocast("cpu", torch.bfloat16):
        assert {m(X).dtype for m in (layer, *mlps)} == {torch.bfloat16}
    layer(X).sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_a_size_below_zero_is_named():
    with pytest.raises(ValueError, match="Linear: in_features: expected a number >= 0, got -1"):
        warpsmith.nn.Linear(-1, 12)
