"""What a module is told reaches the op that it calls, and its tensors: each option of its constructor, beside each."""

import contextlib
import copy
import inspect
import sys

import pytest
import torch
import warpsmith
from torch.utils._pytree import tree_map

from tests.nn.test_no_copies import CASES, NAMES

# Values that are no module's default, by option.
OTHER = dict.fromkeys(
    ("eps", "p", "dropout_p", "softmax_scale", "label_smoothing", "z_loss", "weight_offset", "momentum"), 0.25
)
OTHER |= dict.fromkeys(("interleaved", "causal", "check_labels", "inplace_backward"), True) | {"deterministic": False}
OTHER |= {"softcap": 4.0, "ignore_index": 3, "max_chunk_bytes": 4096, "max_bytes": 1 << 30, "window_size": (3, 5)}
OTHER |= {"activation": "relu", "approximate": "tanh", "reduction": "sum", "dw_dtype": torch.float32}
OTHER |= {"num_groups": 4}
# Without options beyond torch's it calls the function of torch's signature.
ALWAYS = {"CrossEntropyLoss": {"z_loss": 0.125}}


def calls(monkeypatch, cls, arguments, call):
    """The arguments by name of each call of a public op while a module is called."""
    found = []
    with monkeypatch.context() as patched:
        for name, op in list(vars(sys.modules[cls.__module__]).items()):
            if inspect.isfunction(op) and getattr(warpsmith, name, None) is op:

                def noted(*given, op=op, **more):
                    bound = inspect.signature(op).bind(*given, **more)
                    bound.apply_defaults()
                    found.append((op, bound.arguments))
                    return op(*given, **more)

                patched.setattr(sys.modules[cls.__module__], name, noted)
        given, more = call()
        with contextlib.suppress(ValueError):  # of an option that does not fit these tensors
            cls(**arguments)(*given, **more)
    return found


def others_of(name):
    return OTHER | {"activation": "silu"} if name == "GroupNorm" else OTHER


ONCE = ("Attention", "CrossEntropyLoss", "LinearCrossEntropyHead")  # refuse a second derivative
FLAGS = {"bias": True, "qk_norm": True, "sink": True, "affine": False, "elementwise_affine": False}


def ways_of(name):
    """(constructor's arguments, call) of a module's cases, with each option of the constructor, and with none."""
    told = inspect.signature(getattr(warpsmith.nn, name)).parameters
    for _, given, options, call in (case for case in CASES if case[0] == name):
        named = inspect.signature(getattr(warpsmith.nn, name)).bind(*given, **options).arguments
        others = {
            k: v for k, v in {**others_of(name), **FLAGS}.items() if k in told and named.get(k, told[k].default) != v
        }
        others = {
            k: v for k, v in others.items() if k not in ("inplace_backward", "max_bytes", "max_chunk_bytes", "dw_dtype")
        }
        for base in [{}, {"weight": torch.rand(16)}] if name == "CrossEntropyLoss" else [{}]:
            for option in ({}, *({k: v} for k, v in others.items())):
                yield {**named, **base, **option}, call


@pytest.mark.parametrize("name", NAMES)
def test_an_option_reaches_the_op(monkeypatch, name):
    cls = getattr(warpsmith.nn, name)
    for given, call in ways_of(name):
        arguments = {**ALWAYS.get(name, {}), **given}
        ops = {op for op, _ in calls(monkeypatch, cls, arguments, call)}
        assert ops or name in ("NormLinear", "ConvBNReLU")  # a step of autograd, and modules
        taken = [p for op in ops for p in inspect.signature(op).parameters.values()]
        names = {p.name for p in taken if "Tensor" not in str(p.annotation)} & inspect.signature(cls).parameters.keys()
        zeros = {k: 0 for k in names if not isinstance(others_of(name)[k], (bool, str, tuple, torch.dtype))} | {
            "dw_dtype": None
        }
        for option, value in [*((k, others_of(name)[k]) for k in names), *zeros.items()]:
            if option in names and (
                value != 0 or option not in ("max_bytes", "max_chunk_bytes", "num_groups", *ALWAYS.get(name, ()))
            ):
                made = calls(monkeypatch, cls, {**arguments, option: value}, call)
                assert any(option in seen and seen[option] == value for _, seen in made), (option, value, given)


def tensors_of(module):
    return dict(module.named_parameters()) | dict(module.named_buffers())


def outcome(module, call, but):
    """What a call gives in training and in evaluation, and what it leaves in the module's other buffers."""
    found = []
    for training in (True, False):
        torch.manual_seed(0)
        given, more = call()
        made = module.train(training)(*given, **more)
        found += [t.detach() for t in (made if isinstance(made, tuple) else (made,))]
    return found + [t.clone() for name, t in module.named_buffers() if name != but]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_counts_beside_every_option(name):
    for given, call in ways_of(name):
        torch.manual_seed(1)
        module = getattr(warpsmith.nn, name)(**given)
        for key in [key for key, t in tensors_of(module).items() if t.is_floating_point()]:
            expected = outcome(copy.deepcopy(module), call, key)
            changed = copy.deepcopy(module)
            t = tensors_of(changed)[key].data
            t.add_(torch.rand(t.shape, generator=torch.Generator().manual_seed(7)))
            pairs = zip(expected, outcome(changed, call, key), strict=True)
            assert any(not torch.equal(a, b) for a, b in pairs), (key, given)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_with_a_graph_are_those_without(name):
    for arguments, call in ways_of(name):
        module, results = getattr(warpsmith.nn, name)(**arguments), []
        for graph in (False, True):
            torch.manual_seed(0)
            given, more = call()
            found = module(*given, **more)
            found = found if isinstance(found, tuple) else (found,)
            wanted = [t for t in (*given, *more.values(), *module.parameters()) if getattr(t, "requires_grad", False)]
            loss = sum(t.square().sum() for t in found)
            results.append(torch.autograd.grad(loss, wanted, create_graph=graph, allow_unused=True))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def wide(t):
    floats = isinstance(t, torch.Tensor) and t.is_floating_point()
    return t.detach().double().requires_grad_(t.requires_grad) if floats else t


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ONCE])
def test_second_derivatives_are_what_differences_say(name):
    """Of the sum of the squares of all gradients, along one direction."""
    for arguments, call in ways_of(name):
        torch.manual_seed(0)
        module, (given, more) = getattr(warpsmith.nn, name)(**arguments).double(), tree_map(wide, call())
        wanted = [t for t in (*given, *more.values(), *module.parameters()) if getattr(t, "requires_grad", False)]
        along = [torch.randn_like(t) for t in wanted]

        def squares(step, module=module, given=given, more=more, wanted=wanted, along=along):
            torch.manual_seed(0)
            torch._foreach_add_([t.data for t in wanted], along, alpha=step)
            found = module(*given, **more)
            loss = sum(t.square().sum() for t in (found if isinstance(found, tuple) else (found,)))
            grads = torch.autograd.grad(loss, wanted, create_graph=step == 0)
            torch._foreach_sub_([t.data for t in wanted], along, alpha=step)
            return sum(t.square().sum() for t in grads)

        second = torch.autograd.grad(squares(0.0), wanted, allow_unused=True, materialize_grads=True)
        difference = (squares(1e-6) - squares(-1e-6)) / 2e-6
        found = sum((s * a).sum() for s, a in zip(second, along, strict=True))
        torch.testing.assert_close(found, difference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_new_module_has_its_device_dtype_and_no_old_memory(name):
    """torch fills what it makes with NaN meanwhile."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    for given, _ in ways_of(name):
        for more in ({"device": "meta"}, {"dtype": torch.float64}):
            if more.keys() <= inspect.signature(getattr(warpsmith.nn, name)).parameters.keys():
                torch.use_deterministic_algorithms(True)
                try:
                    tensors = tensors_of(getattr(warpsmith.nn, name)(**{**given, **more}))
                finally:
                    torch.use_deterministic_algorithms(deterministic)
                for key, t in tensors.items():
                    found = {"device": t.device.type, "dtype": t.dtype}
                    assert more.items() <= found.items() or (not t.is_floating_point() and "dtype" in more), key
                    assert t.is_meta or not t.isnan().any(), key
