"""Copies, pickles and undoing: nothing stays patched that should not, and all can be patched again."""

import copy
import itertools
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import Patched, patch  # noqa: E402

from .families import FAMILIES, ROWS, TOKENS, classes_of, small_model  # noqa: E402
from .laws import assert_close  # noqa: E402
from .test_patch_models import LOADED  # noqa: E402


def gradients(model):
    model.zero_grad()
    out = model(TOKENS, labels=TOKENS, use_cache=False)
    out.loss.backward()
    return not torch.is_tensor(out.logits), {n: p.grad.clone() for n, p in model.named_parameters()}


def forwards(family):
    """The forward of each class of a family, and of torch's norm."""
    return [cls.forward for cls in (*classes_of(family)[0].values(), torch.nn.LayerNorm)]


@pytest.mark.parametrize("attention", [False, True], ids=["ops", "attention"])
@pytest.mark.parametrize("way", LOADED)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_is_not_patched_and_can_be(family, way, attention):
    model = small_model(family)
    _, expected = gradients(model)
    done = patch(model, attention=attention)
    loaded = LOADED[way](model)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in small_model(family).modules()]
    assert not any("forward" in vars(m) for m in loaded.modules())
    fused, found = gradients(loaded)
    assert not fused
    assert_close(found, expected)
    for target in (loaded, type(loaded)):
        with patch(target) as again:
            fused, found = gradients(loaded)
            assert fused and set(again.kept) <= {"LayerNorm"}
            assert_close(found, expected)
    # The model that was saved is patched as before.
    assert gradients(model)[0]
    done.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in loaded.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_is_patched_until_undo(family):
    model = small_model(family)
    _, expected = gradients(model)
    done = patch(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():  # of which the copy sees nothing
            p.zero_()
    fused, found = gradients(copied)
    assert fused
    assert_close(found, expected)
    assert not patch(copied).replaced
    done.undo()
    fused, found = gradients(copied)
    assert not fused
    assert_close(found, expected)
    with patch(copied) as again:
        assert gradients(copied)[0] and not again.kept
        assert not gradients(pickle.loads(pickle.dumps(copied)))[0]
    assert not gradients(copied)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_class_stays_patched(family):
    """Whatever may be patched, in whatever order it is undone, also where an exception ends it."""
    before, model = forwards(family), small_model(family)
    base = type(getattr(model, model.base_model_prefix))
    targets = [type(model), base, model, getattr(model, model.base_model_prefix)]
    for a, b in itertools.product(targets, repeat=2):
        for backwards in (False, True):
            done = [patch(a)]
            try:
                done.append(patch(b))
            except ValueError as error:
                assert "what is not patched yet" in str(error)
            for each in reversed(done) if backwards else done:
                each.undo()
                gradients(model)
            assert forwards(family) == before and not gradients(model)[0], (a, b, backwards)
    with pytest.raises(KeyError), patch(base):
        with pytest.raises(ValueError, match="not patched yet"):
            patch(type(model))
        raise KeyError
    assert forwards(family) == before


@pytest.mark.parametrize("by_class", [False, True], ids=["model", "class"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_that_fails_changes_nothing(family, by_class, monkeypatch):
    """The replacement of each class in turn raises, and at last what sets the attention."""
    before, model = forwards(family), small_model(family)
    target, types = type(model) if by_class else model, [type(m) for m in model.modules()]
    replace = "patch_class" if by_class else "patch_module"
    theirs = getattr(Patched, replace)

    def fail(*_):
        raise MemoryError

    for stop in range(len(ROWS[family])):
        with monkeypatch.context() as patched:
            steps = iter([theirs] * stop + [fail])
            patched.setattr(Patched, replace, lambda *arguments, steps=steps: next(steps)(*arguments))
            with pytest.raises(MemoryError):
                patch(target)
        assert forwards(family) == before and [type(m) for m in model.modules()] == types
    if not by_class:
        monkeypatch.setattr(model, "set_attn_implementation", fail)
        with pytest.raises(MemoryError):
            patch(model, attention=True)
        assert [type(m) for m in model.modules()] == types
