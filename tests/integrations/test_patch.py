"""What `patch` says and does to models of transformers. Losses and gradients: test_patch_rows.py."""

import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

import warpsmith  # noqa: E402
from warpsmith.integrations.transformers import patch  # noqa: E402

from tests.dispatched import Dispatched  # noqa: E402

from .families import FAMILIES, PADDED, TOKENS, loss_and_gradients, small_model  # noqa: E402
from .laws import assert_close  # noqa: E402

REPLACED = {
    "llama": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "rope", "DecoderLayer": "add_rms_norm"},
    "qwen3": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "qk_norm_rope", "DecoderLayer": "add_rms_norm"},
    "mistral": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "rope", "DecoderLayer": "add_rms_norm"},
    "gemma2": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "rope", "DecoderLayer": "add_rms_norm"},
    "gpt2": {"LayerNorm": "layer_norm", "MLP": "bias_gelu", "Block": "add_layer_norm"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_replaced_is_said_and_undone(name):
    model = small_model(name)
    before, parameters = loss_and_gradients(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    done = patch(model)
    for part, op in REPLACED[name].items():
        (text,) = [v for k, v in done.replaced.items() if k.endswith(part)]
        assert f"warpsmith.{op}" in text, text
    assert any("linear_cross_entropy (1)" in v for v in done.replaced.values()) and not done.kept
    assert list(model.state_dict()) == keys and {n: p.data_ptr() for n, p in model.named_parameters()} == parameters
    assert not torch.is_tensor(model(TOKENS, labels=TOKENS).logits)
    types = [type(m) for m in model.modules()]
    again = patch(model)
    assert [type(m) for m in model.modules()] == types and not again.replaced
    assert (
        set(again.kept.values()) == {"it is patched already"}
        and again.kept.keys() | {"attn_implementation"} == done.replaced.keys()
    )
    again.undo()
    assert [type(m) for m in model.modules()] == types
    done.undo()
    done.undo()
    assert all("forward" not in m.__dict__ for m in model.modules())
    after = loss_and_gradients(model)
    assert all(torch.equal(a, after[n]) for n, a in before.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_replaced_is_called(name, monkeypatch):
    """Without gradients, where a layer is made of the single ops."""
    monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)  # `linear` hands plain layers to torch
    model = small_model(name)
    # The one linear layer of torch in GPT-2 is its head.
    with patch(model, linear=name != "gpt2") as done, Dispatched() as ops, torch.no_grad():
        model(TOKENS, labels=TOKENS)
    # A feed-forward layer names three ops, of which its activation takes one.
    for text in done.replaced.values():
        assert any(map(ops.has, re.findall(r"\w+", text))), text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_is_patched_for_all_its_models(name):
    model = small_model(name)
    expected = loss_and_gradients(model)
    with patch(type(model)) as done:
        assert len(done.replaced) == len(REPLACED[name]) + (name != "gpt2")
        assert ("LayerNorm" in done.kept) == (name == "gpt2")
        assert not torch.is_tensor(model(TOKENS, labels=TOKENS).logits)
        found = loss_and_gradients(model)
        with pytest.raises(ValueError, match="expected what is not patched yet"):
            patch(type(model))
        with patch(model) as again:
            assert {again.kept[n] for n in done.replaced} == {"it is patched already"}
    assert_close(found, expected)
    after = loss_and_gradients(model)
    assert all(torch.equal(a, after[n]) for n, a in expected.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_hidden_states_are_as_before(name):
    model = small_model(name).eval()

    def outputs():
        with torch.no_grad():
            full = model(TOKENS, attention_mask=PADDED.flip(1), labels=TOKENS, output_hidden_states=True)
        return [full.logits, full.loss, *full.hidden_states]

    expected = outputs()
    with patch(model):
        torch.testing.assert_close(outputs(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_options_of_the_loss(name):
    model = small_model(name)
    labels = TOKENS.clone()
    labels[0, :5] = -100
    cases = [
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": 7},
        {"labels": labels, "num_items_in_batch": torch.tensor(7)},
        {"labels": TOKENS, "shift_labels": labels.roll(1, -1)},
        {"labels": TOKENS, "ignore_index": 3},
    ]
    expected = [loss_and_gradients(model, **case)["loss"] for case in cases]
    with patch(model):
        found = [loss_and_gradients(model, **case)["loss"] for case in cases]
        as_tuple = model(TOKENS, labels=TOKENS, return_dict=False)
        assert torch.is_tensor(as_tuple[0]) and as_tuple[0].dim() == 0
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_kept_and_said():
    model = small_model("llama", hidden_act="tanh")
    done = patch(model)
    assert "not fused" in done.kept["LlamaMLP"] and "LlamaMLP" not in done.replaced
    assert "as it was: its activation" in repr(done)
    done.undo()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "lm_head is a Sequential" in patch(model).kept["LlamaForCausalLM"]


def test_attention_is_set_and_put_back():
    model = small_model("llama", num_hidden_layers=2)
    seen = []
    hooks = [m.register_forward_hook(lambda *a: seen.append(a[2][1])) for m in model.modules() if hasattr(m, "q_proj")]
    expected = loss_and_gradients(model)
    with patch(model, attention=True) as done:
        assert model.config._attn_implementation == "warpsmith"
        assert done.replaced["attn_implementation"] == "warpsmith.attention"
        found = loss_and_gradients(model)
    assert model.config._attn_implementation == "eager"
    # transformers' eager attention returns its weights, ours never makes them
    assert len(hooks) == 2 and [w is None for w in seen] == [False, False, True, True]
    assert_close(found, expected)
    with pytest.raises(ValueError, match="^patch: attention: expected False for a class"):
        patch(type(model), attention=True)
    assert not hasattr(type(model).forward, "of_warpsmith")


@pytest.mark.parametrize("bad", [torch.nn.Linear(2, 2), torch.nn.Linear, 3])
def test_other_models_are_refused(bad):
    with pytest.raises(ValueError, match="^patch: model_or_class: expected a model of transformers, got"):
        patch(bad)


def test_a_model_of_an_unknown_class_is_left_and_named():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.StableLmConfig(vocab_size=61, num_key_value_heads=4, **sizes)
    model = transformers.StableLmForCausalLM(config)
    done = patch(model)
    why = "warpsmith does not know its class"
    assert done.kept == {"StableLmForCausalLM": why, "StableLmModel": why}
    assert set(done.replaced) == {"Linear", "LayerNorm", "attn_implementation"}
    with pytest.raises(ValueError, match="^patch: model_or_class: expected a class of llama, mistral, "):
        patch(type(model))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_without_graph_breaks(name):
    model = small_model(name)
    patch(model)
    expected = model(TOKENS, labels=TOKENS, use_cache=False).loss
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS, labels=TOKENS, use_cache=False).loss, expected)
    torch._dynamo.reset()


def test_gradients_of_the_losses_head_are_not_made_of_logits():
    """No tensor of tokens times vocabulary is in memory in training."""
    model, seen = small_model("llama"), []
    with patch(model), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert seen and not [s for s in seen if len(s) > 1 and s[-1] == 61]
    assert warpsmith.__version__
