"""A patched model hands its attention function exactly what the model hands it without the patch."""

import inspect
import textwrap
from itertools import product

import pytest
import torch

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import patch, register  # noqa: E402

from .families import ENCODERS, FAMILIES, PADDED, THERE, TOKENS, classes_of, inputs_of, small_model  # noqa: E402

# The attention implementation of the model, and what patch does with it.
IMPLEMENTATIONS = {"eager": False, "sdpa": False, "warpsmith": True}
MODES = ["training", "evaluation", "generate"]


@pytest.fixture
def calls(monkeypatch):
    """Each call of an attention function: implementation, layer, arguments by place and by name."""
    found, theirs = [], transformers.AttentionInterface.get_interface

    def get_interface(self, implementation, default):
        attend = theirs(self, implementation, default)

        def recorded(module, *arguments, **options):
            found.append(
                (implementation, type(module).__name__, getattr(module, "layer_idx", None), arguments, options)
            )
            return attend(module, *arguments, **options)

        return recorded

    monkeypatch.setattr(transformers.AttentionInterface, "get_interface", get_interface)
    return found


def assert_same(found, expected):
    """Structures of equal types, names, numbers and shapes; tensors of equal values, up to rounding."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif not isinstance(expected, transformers.Cache):
        assert found == expected


def run(model, mode, mask, **options):
    """What a user sees of a model in a mode: loss, logits or tokens, where there is no padding."""
    if mode == "generate":
        given = {} if mask is None else {"attention_mask": mask}
        return model.eval().generate(TOKENS, max_new_tokens=4, do_sample=False, **given)
    model.train(mode == "training")
    out = model(**inputs_of(model.config.model_type, mask), **options)
    if mode == "training":
        out.loss.backward()
        return out.loss.detach()
    logits = out.logits.detach()
    return torch.cat([out.loss.detach().view(1), (logits if mask is None else logits[mask.bool()]).flatten()])


def attention_of(family):
    return next((cls for name, cls in classes_of(family)[0].items() if name.endswith("Attention")), None)


def supported(family, implementation):
    return implementation != "sdpa" or classes_of(family)[1]._supports_sdpa


WAYS = [
    pytest.param(family, mask, mode, id=f"{family}-{mode}-{'no mask' if mask is None else 'mask'}")
    for family, mask, mode in product(THERE, (None, PADDED), MODES)
    if not (family in ENCODERS and mode == "generate" or family == "vit" and mask is not None)
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family, mask, mode", WAYS)
def test_attention_gets_what_it_got(family, mask, implementation, mode, calls):
    if implementation == "sdpa" and not classes_of(family)[1]._supports_sdpa:
        pytest.skip("transformers has no such attention for this model")
    register()
    model = small_model(family, implementation)
    # What the model does not know it hands on too; counts of tokens reach attention beside the loss.
    known = family not in ENCODERS
    options = {"num_items_in_batch": 7, "of_tomorrow": "a value"} if known and mode != "generate" else {}
    expected = run(model, mode, mask, **options)
    before = calls.copy()
    with patch(model, attention=IMPLEMENTATIONS[implementation]) as done:
        calls.clear()  # of random rows, on which patch compares
        found = run(model, mode, mask, **options)
    assert before and not [why for why in done.kept.values() if "stay as they are" not in why]
    assert_same(calls, before)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family, mask, mode", WAYS)
def test_patched_attention_means_what_eager_means(family, mask, mode):
    model = small_model(family)
    expected = run(model, mode, mask)
    with patch(model, attention=True):
        found = run(model, mode, mask)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", [f for f in FAMILIES if attention_of(f)])
@pytest.mark.parametrize("by_class", [False, True], ids=["model", "class"])
def test_a_new_keyword_of_a_layer_is_handed_on(family, by_class, calls, monkeypatch):
    """The layer's code gains an argument, as in a later version of transformers."""
    cls = attention_of(family)
    source = textwrap.dedent(inspect.getsource(cls.forward))
    assert source.count("scaling=self.scaling,") == 1
    source = source.replace("scaling=self.scaling,", "scaling=self.scaling, of_tomorrow=self.layer_idx + 1,")
    names = dict(vars(inspect.getmodule(cls)))
    exec("from __future__ import annotations\n" + source, names)
    monkeypatch.setattr(cls, "forward", names["forward"])
    model = small_model(family)
    with patch(type(model) if by_class else model):
        calls.clear()
        run(model, "training", None)
    assert [options["of_tomorrow"] for *_, options in calls] == [1, 2, 3]


def test_an_unknown_attention_forward_is_kept(monkeypatch):
    cls = attention_of("llama")
    theirs = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *arguments, **options: theirs(self, *arguments, **options))
    model = small_model("llama")
    expected = run(model, "training", None)
    for target in (model, type(model)):
        with patch(target) as done:
            torch.testing.assert_close(run(model, "training", None), expected)
        assert done.kept == {"LlamaAttention": "its forward is not the one that warpsmith knows"}


@pytest.mark.parametrize("family", [f for f in THERE if f not in ENCODERS])
def test_a_host_looks_for_packed_rows_where_they_may_be(family, monkeypatch):
    """Positions that a model counts show none: transformers' look at them, for which the host waits, is left out."""
    look, looks = transformers.masking_utils.find_packed_sequence_indices, []
    look = getattr(look, "__wrapped__", look)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda p: looks.append(look(p)))
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    model, found = small_model(family), []
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    at_all = family != "gpt_oss"  # whose masks do not look at positions
    assert bool(looks) == at_all and all(seen is None for seen in looks)
    monkeypatch.undo()
    for positions in (None, packed, None):
        found.append(model(input_ids=TOKENS, position_ids=positions, use_cache=False).logits)
    monkeypatch.setattr(
        transformers.masking_utils, "find_packed_sequence_indices", lambda p: (looks.append(p), look(p))[1]
    )
    with patch(model, attention=True):
        for positions, expected in zip((None, packed, None), found, strict=True):
            looks.clear()
            logits = model(input_ids=TOKENS, position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert bool(looks) == (at_all and positions is not None)
    looks.clear()
    model(input_ids=TOKENS, use_cache=False)
    assert bool(looks) == at_all and type(model).forward is type(small_model(family)).forward
