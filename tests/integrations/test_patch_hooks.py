"""Hooks of every kind that torch has, on the modules of a patched model: called as without the patch."""

import contextlib
import inspect
import re
from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import patch  # noqa: E402

from .families import ALL, FAMILIES, PADDED, inputs_of, small_model  # noqa: E402

Module, registries = torch.nn.Module, torch.nn.modules.module


def methods(owner, pattern):
    return {n: getattr(owner, n) for n in dir(owner) if re.fullmatch(pattern, n)}


KINDS = methods(Module, r"_?register_.*hook")
GLOBAL_KINDS = methods(registries, r"register_module_.*hook")
# Each kind, also with the keywords of the call where a hook of the kind can get them.
WAYS = [
    (name, options)
    for name, register in KINDS.items()
    for options in ({}, {"with_kwargs": True})
    if options.keys() <= inspect.signature(register).parameters.keys()
]
OF_CALLS = [(name, options) for name, options in WAYS if "state_dict" not in name]
GLOBALS_OF_CALLS = [name for name in GLOBAL_KINDS if "registration" not in name]
warnings_of_torch = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def id_of(way):
    return "_".join([way[0], *way[1]])


def shapes(thing):
    """What a hook sees, without values: the patch rounds otherwise."""
    if isinstance(thing, torch.Tensor):
        return tuple(thing.shape)
    if isinstance(thing, dict):
        return {n: shapes(t) for n, t in sorted(thing.items())}
    return [shapes(t) for t in thing] if isinstance(thing, (tuple, list)) else type(thing).__name__


class Recorder:
    """Counts what hooks see, by the module's name."""

    def __init__(self, model, kind):
        self.kind = kind
        # torch's first backward hook sees the gradients of the last op, whichever that is.
        self.part = slice(1, None) if "backward_hook" in kind and "full" not in kind else slice(None)
        self.names = {module: name for name, module in model.named_modules()}
        self.calls = Counter()

    def hook(self, module, *seen):
        name = self.names.get(module)
        # The whole model has no logits in training, where the head has no hooks: only its calls are compared.
        self.calls[name, str([shapes(t) for t in seen[self.part]] if name else "")] += 1

    def state_hook(self, *seen):
        self.calls[str([shapes(t) for t in seen])] += 1

    def of_modules(self, step, options, names=None):
        """The calls of the modules' hooks in a step, and what the step returns."""
        hook, handles = self.state_hook if "state_dict" in self.kind else self.hook, []
        for module, name in self.names.items():
            if names is None or name in names:  # torch marks some functions
                handles.append(KINDS[self.kind](module, lambda *seen: hook(*seen), **options))
        found = step()
        for handle in filter(None, handles):
            handle.remove()
        return self.calls, found

    def of_all(self, step):
        """The calls of a hook on all modules that are, in a step."""
        handle = GLOBAL_KINDS[self.kind](self.hook)
        try:
            step()
        finally:
            handle.remove()
            registries._global_is_full_backward_hook = None
        return self.calls


def step(model, mode):
    model.zero_grad()
    model.train(mode != "evaluation")
    loss = model(**inputs_of(model.config.model_type, PADDED)).loss
    loss.backward()
    model.load_state_dict(model.state_dict())
    return loss.detach()


def hooked(model, kind, options, mode="training", names=None):
    return Recorder(model, kind).of_modules(lambda: step(model, mode), options, names)


def test_every_kind_of_hook_is_known():
    """A registry that no ``register`` method fills would be a kind that these tests do not see."""
    filled = set()
    for name, options in [*WAYS, ("register_forward_hook", {"always_call": True})]:
        module = torch.nn.Linear(1, 1)
        KINDS[name](module, lambda *_: None, **options)
        filled |= {n for n in vars(module) if re.fullmatch(r"_\w*hooks\w*", n) and getattr(module, n)}
    assert filled == {n for n in vars(torch.nn.Linear(1, 1)) if re.fullmatch(r"_\w*hooks\w*", n)}
    filled = set()
    for register in GLOBAL_KINDS.values():
        before = {n: len(t) for n, t in vars(registries).items() if re.fullmatch(r"_global_\w*hooks", n)}
        handle = register(print)
        filled |= {n for n, size in before.items() if len(getattr(registries, n)) > size}
        handle.remove()
        registries._global_is_full_backward_hook = None
    assert filled == before.keys()


@warnings_of_torch
@pytest.mark.parametrize("way", WAYS, ids=id_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_is_called_as_without_the_patch(family, way):
    """Hooks on all modules at once, in training, in evaluation, and where activations are made again."""
    model = small_model(family, num_hidden_layers=2)
    for mode in ("training", "evaluation", "checkpointing") if way in OF_CALLS else ("training",):
        if mode == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        expected, loss = hooked(model, *way, mode)
        assert expected
        for target in (model, type(model)) if mode == "checkpointing" else (model,):
            with patch(target, attention=False) as done:
                found, ours = hooked(model, *way, mode)
            assert set(done.kept) <= {"LayerNorm"}
            assert found == expected, (mode, target)
            torch.testing.assert_close(ours, loss, rtol=1e-3, atol=1e-4)


@warnings_of_torch
@pytest.mark.parametrize("way", OF_CALLS, ids=id_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_on_one_module_alone(family, way):
    """Beside it everything may be fused."""
    model = small_model(family, num_hidden_layers=2)
    expected, _ = hooked(model, *way)
    names = [n for n, _ in model.named_modules() if ".1" in n or not re.search(r"\.\d", n)]
    with patch(model, attention=False):
        for name in names:
            found, _ = hooked(model, *way, names=[name])
            assert found == Counter({key: n for key, n in expected.items() if key[0] == name}), name


@pytest.mark.parametrize("family", ALL)
def test_what_a_hook_keeps_stays_as_it_was(family):
    """A hook on one module alone keeps the tensors that it sees. The backward writes over none of them."""
    model, kept = small_model(family, num_hidden_layers=2), []

    def keep(module, inputs, output):
        kept.extend((t, t.detach().clone()) for t in tree_leaves((inputs, output)) if isinstance(t, torch.Tensor))

    with patch(model, attention=False):
        for name, module in model.named_modules():
            handle = module.register_forward_hook(keep)
            step(model, "training")
            handle.remove()
            assert all(torch.equal(t, before) for t, before in kept), name
            kept.clear()


@warnings_of_torch
@pytest.mark.parametrize("kind", GLOBALS_OF_CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_on_all_modules_that_are(family, kind):
    model, found = small_model(family, num_hidden_layers=2), []
    for target in (None, model, type(model)):
        with contextlib.nullcontext() if target is None else patch(target, attention=False):
            found.append(Recorder(model, kind).of_all(lambda: step(model, "training")))
    assert found[0] and found[1] == found[0] and found[2] == found[0]
