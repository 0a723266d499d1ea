"""The modules of warpsmith.nn in place of torch's; what an op would refuse, its module's constructor refuses."""

import inspect
import math
import re

import numpy as np
import pytest
import torch
import warpsmith

from tests.nn.test_no_copies import NAMES, first_case


def test_a_weight_stored_around_zero_starts_as_the_identity():
    module = warpsmith.nn.RMSNorm(8, weight_offset=1.0)
    assert torch.equal(module.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    assert torch.equal(module(x), warpsmith.nn.RMSNorm(8)(x))


@pytest.mark.parametrize(
    "frame, known", [("nn", {"RMSNorm", "LayerNorm", "BatchNorm2d", "CrossEntropyLoss"}), ("amp", {"GradScaler"})]
)
def test_a_name_that_torch_has_is_a_subclass_of_torchs(frame, known):
    """The law of names: what torch calls by a name means the same here, to policies that look at modules, too."""
    ours, theirs = getattr(warpsmith, frame), getattr(torch, frame)
    classes = [name for name in ours.__all__ if isinstance(getattr(ours, name), type)]
    shared = {name for name in classes if hasattr(theirs, name)}
    assert known <= shared
    assert {name for name in shared if not issubclass(getattr(ours, name), getattr(theirs, name))} == set()
    for name in shared & set(NAMES):
        given = first_case(name)[0]
        theirs_takes = inspect.signature(getattr(theirs, name)).parameters
        plain = getattr(theirs, name)(**{k: v for k, v in given.items() if k in theirs_takes})
        assert set(vars(plain)) <= set(vars(getattr(ours, name)(**given)))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("CrossEntropyLoss", "DropoutAdd")])
def test_a_module_of_the_meta_device_is_made_by_reset_parameters(name):
    """As FSDP initialises: ``to_empty``, then the ``reset_parameters`` of each module that has tensors."""
    with torch.device("meta"):
        module = getattr(warpsmith.nn, name)(**first_case(name)[0])
    module.to_empty(device="cpu")
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for t in tensors.values():
            t.fill_(float("nan") if t.is_floating_point() else -1)
        for part in module.modules():
            if (
                next(part.parameters(recurse=False), None) is not None
                or next(part.buffers(recurse=False), None) is not None
            ):
                part.reset_parameters()
    assert tensors
    assert not [key for key, t in tensors.items() if t.isnan().any() or (not t.is_floating_point() and (t < 0).any())]


@pytest.mark.parametrize("shape", [(), 0, (4, -1)])
def test_bad_shapes_are_named(shape):
    with pytest.raises(ValueError, match="RMSNorm: normalized_shape: expected one or more sizes >= 1"):
        warpsmith.nn.RMSNorm(shape)


def test_cross_entropy_loss_is_torchs_module():
    weight = torch.rand(7)
    ours = warpsmith.nn.CrossEntropyLoss(weight, None, 3, None, "sum", 0.1)
    theirs = torch.nn.CrossEntropyLoss(weight, None, 3, None, "sum", 0.1)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    ours.load_state_dict(theirs.state_dict())
    logits, target = torch.randn(5, 7), torch.tensor([0, 3, 6, 1, 2])
    torch.testing.assert_close(ours(logits, target), theirs(logits, target))
    both = warpsmith.nn.CrossEntropyLoss(z_loss=1e-2, softcap=4.0, check_labels=True)
    expected = warpsmith.cross_entropy(logits, target, z_loss=1e-2, softcap=4.0)
    assert torch.equal(both(logits, target), expected)
    assert "softcap=4.0" in repr(both)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 5), (2, 7, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_loss_has_its_classes_where_torch_has_them(shape, dtype):
    torch.manual_seed(0)  # where torch's loss of one row is right by luck, the law allows one step
    logits, classes = torch.randn(shape).to(dtype).requires_grad_(), shape[min(1, len(shape) - 1)]
    target = torch.randint(classes, shape[:1] * (len(shape) > 1) + shape[2:])
    results = []
    for module in (warpsmith.nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss):
        loss = module(label_smoothing=0.1)(logits, target)
        results.append([loss, *torch.autograd.grad(loss, logits)])
    wide = logits.detach().double().requires_grad_()
    exact = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(wide, target)
    for a, b, oracle in zip(*results, [exact, *torch.autograd.grad(exact, wide)], strict=True):
        assert a.dtype == b.dtype and (error := warpsmith.testing.measure("loss", a, oracle, b)).ok, str(error)
    both = warpsmith.nn.CrossEntropyLoss(z_loss=1e-2)(logits, target)
    expected = warpsmith.cross_entropy(logits.movedim(1, -1) if len(shape) > 2 else logits, target, z_loss=1e-2)
    assert torch.equal(both, expected.to(dtype))


def test_class_probabilities_are_torchs():
    logits, target = torch.randn(5, 7), torch.softmax(torch.randn(5, 7), -1)
    assert torch.equal(warpsmith.nn.CrossEntropyLoss()(logits, target), torch.nn.CrossEntropyLoss()(logits, target))
    with pytest.raises(ValueError, match="CrossEntropyLoss: target: expected class indices beside z_loss"):
        warpsmith.nn.CrossEntropyLoss(z_loss=0.1)(logits, target)


def test_cross_entropy_loss_in_place():
    leaf = torch.randn(5, 7, requires_grad=True)
    target = torch.tensor([0, 3, 6, 1, 2])
    logits = leaf * 1
    loss = warpsmith.nn.CrossEntropyLoss(inplace_backward=True)(logits, target)
    (found,) = torch.autograd.grad(loss, leaf)
    (expected,) = torch.autograd.grad(torch.nn.CrossEntropyLoss()(leaf, target), leaf)
    torch.testing.assert_close(found, expected)
    assert torch.equal(logits, found)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("old", [{"size_average": False}, {"reduce": False}])
def test_arguments_that_torch_has_for_old_scripts(old):
    logits, target = torch.randn(5, 7), torch.tensor([0, 3, 6, 1, 2])
    expected = torch.nn.CrossEntropyLoss(**old)(logits, target)
    torch.testing.assert_close(warpsmith.nn.CrossEntropyLoss(**old)(logits, target), expected)


MODULES = {
    "RMSNorm": ((8,), 1),
    "LayerNorm": ((8,), 1),
    "AddRMSNorm": ((8,), 2),
    "AddLayerNorm": (((2, 8),), 2),
    "DropoutAddRMSNorm": ((8, 0.1), 2),
    "DropoutAddLayerNorm": ((8, 0.1), 2),
    "BiasGELU": ((8,), 1),
    "DropoutAdd": ((0.1,), 2),
    "GatedMLP": ((8, 16), 1),
    "Linear": ((8, 16), 1),
    "MLP": ((8, 16), 1),
    "NormLinear": ((8, (16, 4)), 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_symbolic_trace(name):
    """torch.fx: the module becomes a graph with our op in it, and computes the same."""
    arguments, count = MODULES[name]
    module = torch.nn.Sequential(getattr(warpsmith.nn, name)(*arguments)).eval()[0]
    inputs = [torch.randn(3, 2, 8) for _ in range(count)]
    graph = torch.fx.symbolic_trace(module)
    for a, b in zip(*(as_tuple(m(*inputs)) for m in (graph, module)), strict=True):
        assert torch.equal(a, b)
    called = [
        n.target.__module__ for n in graph.graph.nodes if n.op == "call_function" and hasattr(n.target, "__module__")
    ]
    assert any(m.startswith("warpsmith.ops.") for m in called)


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


def test_symbolic_trace_of_losses_and_functions():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary, self.heads = warpsmith.nn.RotaryEmbedding(4, 8), warpsmith.nn.QKNormRoPE(4)
            self.loss, self.head = warpsmith.nn.CrossEntropyLoss(), warpsmith.nn.LinearCrossEntropyHead(4, 5)

        def forward(self, q, k, target):
            q, _ = self.rotary(q, k)
            q, _ = self.heads(q, k, self.rotary.cos, self.rotary.sin)
            h = warpsmith.swiglu(q, q).flatten(0, 2)
            return self.loss(h, target) + self.head(h, target)

    model = Model()
    inputs = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 1, 4), torch.randint(4, (12,))
    assert torch.equal(torch.fx.symbolic_trace(model)(*inputs), model(*inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "BiasGELU"])
def test_jit_trace_of_a_module_that_trains(name):
    module, x = getattr(warpsmith.nn, name)(8), torch.randn(3, 8)
    traced = torch.jit.trace(module, (x,))
    assert torch.equal(traced(x + 1), module(x + 1))
    grads = [torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (traced, module)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


VALUES = {
    "-1": -1,
    "-5": -5,
    "0": 0,
    "1": 1,
    "0.5": 0.5,
    "3": 3,
    "-0.5": -0.5,
    "True": True,
    "None": None,
    "nan": math.nan,
    "inf": math.inf,
    "1e39": 1e39,
    "1e-40": 1e-40,
    "2**63": 2**63,
    "2**2000": 2**2000,
    "text": "False",
    "mean": "mean",
    "tanh": "tanh",
    "relu": "relu",
    "list": [1],
    "window": (-5, 0),
    "beyond": (2**63, 0),
    "three": (1, 2, 3),
    "tensor": torch.ones(3),
    "learned": torch.tensor(0.5, requires_grad=True),
    "numpy": np.float32(0.25),
    "int64": torch.int64,
    "float32": torch.float32,
}
# What an input must fit, so that the first call may still refuse it; and what is no scalar, or left to torch's modules.
SIZES = {"normalized_shape", "num_features", "in_features", "hidden_size", "embed_dim", "num_heads", "head_dim", "dim"}
SIZES |= {"max_positions", "out_features", "max_bytes", "in_channels", "out_channels", "groups"}
SIZES |= {"kernel_size", "stride", "padding", "dilation", "num_groups", "num_channels"}
TORCHS = {"device", "dtype", "elementwise_affine", "size_average", "reduce", "weight", "scaling"}
CASES = [
    (name, parameter)
    for name in NAMES
    for parameter in inspect.signature(getattr(warpsmith.nn, name)).parameters
    if parameter not in TORCHS and not (parameter == "bias" and name != "Attention")
]


def is_kept(kind, value):
    """Whether a value is of the kind that an annotation names, or stands for one."""
    kinds = {"bool": bool, "str": str, "float": (int, float, np.floating), "int": int}
    return isinstance(value, kinds[kind]) and (kind == "bool" or not isinstance(value, bool)) if kind in kinds else True


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_what_the_first_call_refuses_is_not_made(name, parameter):
    module, (given, call) = getattr(warpsmith.nn, name), first_case(name)
    inputs, more = call()
    if name == "CrossEntropyLoss":  # it does not know the dtype: what fits float64 alone is made
        inputs = inputs[0].double(), inputs[1]
    *kinds, none = f"{inspect.signature(module).parameters[parameter].annotation} | None".split(" | ")
    made = 0
    for what, value in VALUES.items():
        try:
            layer = module(**given | {parameter: value})
        except (TypeError, ValueError) as error:
            message = str(error)
            named = r"\w+" if parameter in SIZES or parameter == "window_size" else parameter
            assert re.match(rf"{name}: {named}: expected .*, got ", message), (what, message)
            continue
        made += 1
        assert any(is_kept(kind, value) for kind in kinds) or value is None, what
        if parameter not in SIZES:
            layer(*inputs, **more)
    assert made or parameter in SIZES
