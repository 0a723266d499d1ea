"""transformers' models with random weights, with our ops in them and without: loss and gradients within the law."""

import copy
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

import warpsmith  # noqa: E402
from warpsmith.integrations.transformers import patch  # noqa: E402
from warpsmith.testing import measure  # noqa: E402

from tests.dispatched import Dispatched  # noqa: E402

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": lambda **o: transformers.LlamaConfig(**SIZES, **HEADS, **o),
    "qwen3": lambda **o: transformers.Qwen3Config(**SIZES, **HEADS, head_dim=16, **o),
    "mistral": lambda **o: transformers.MistralConfig(**SIZES, **HEADS, head_dim=16, sliding_window=5, **o),
    "gemma2": lambda **o: transformers.Gemma2Config(
        **SIZES, **HEADS, head_dim=16, sliding_window=5, query_pre_attn_scalar=16, final_logit_softcapping=5.0, **o
    ),
    "gpt2": lambda **o: transformers.GPT2Config(
        vocab_size=61, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **o
    ),
}
REPLACED = {
    "llama": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "rope", "DecoderLayer": "add_rms_norm"},
    "qwen3": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "qk_norm_rope", "DecoderLayer": "add_rms_norm"},
    "mistral": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "rope", "DecoderLayer": "add_rms_norm"},
    "gemma2": {"RMSNorm": "rms_norm", "MLP": "swiglu", "Attention": "rope", "DecoderLayer": "add_rms_norm"},
    "gpt2": {"LayerNorm": "layer_norm", "MLP": "bias_gelu", "Block": "add_layer_norm"},
}
TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))


def model_of(name, dtype=torch.float32, **options):
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](**options), attn_implementation="eager")
    torch.manual_seed(0)
    for key, p in model.named_parameters():
        around_one = "norm" in key and name != "gemma2" or "ln_" in key and "weight" in key
        torch.nn.init.normal_(p, mean=1.0 if around_one else 0.0, std=0.1)
    return model.to(dtype).train()


def loss_and_gradients(model, autocast=False, **inputs):
    inputs = {"labels": TOKENS, **inputs}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(TOKENS, use_cache=False, **inputs).loss
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def with_many_losses(model):
    """Loss and gradients, and the losses of 32 other batches: the error of one number is a draw, small by chance."""
    batches = torch.randint(61, (32, 2, 12), generator=torch.Generator().manual_seed(2))
    losses = [model(tokens, labels=tokens, use_cache=False).loss.detach() for tokens in batches]
    return {**loss_and_gradients(model), "loss": torch.stack(losses)}


def assert_law(found, expected, exact):
    """Each within the error law's bound, whose measure is the error of the whole model as it was."""
    assert found.keys() == expected.keys() == exact.keys()
    errors = [measure(n, found[n].to(expected[n].dtype), exact[n], expected[n]) for n in found]
    assert not [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_obey_the_law(name, dtype):
    stock = model_of(name, dtype)
    exact = with_many_losses(copy.deepcopy(stock).double())
    expected = with_many_losses(stock)
    with patch(stock) as done:
        found = with_many_losses(stock)
    assert not done.kept
    assert_law(found, expected, exact)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_replaced_is_said_and_undone(name):
    model = model_of(name)
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


@pytest.mark.parametrize("name", MODELS)
def test_what_is_replaced_is_called(name, monkeypatch):
    """Without gradients, where a layer is made of the single ops."""
    monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)  # `linear` hands plain layers to torch
    model = model_of(name)
    # The one linear layer of torch in GPT-2 is its head.
    with patch(model, linear=name != "gpt2") as done, Dispatched() as ops, torch.no_grad():
        model(TOKENS, labels=TOKENS)
    # A feed-forward layer names three ops, of which its activation takes one.
    for text in done.replaced.values():
        assert any(map(ops.has, re.findall(r"\w+", text))), text


@pytest.mark.parametrize("name", MODELS)
def test_a_class_is_patched_for_all_its_models(name):
    model = model_of(name)
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
    for n, a in expected.items():
        torch.testing.assert_close(found[n], a, rtol=1e-3, atol=1e-4)
    after = loss_and_gradients(model)
    assert all(torch.equal(a, after[n]) for n, a in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_logits_generation_and_masks_are_as_before(name):
    model = model_of(name).eval()
    mask = torch.ones_like(TOKENS)
    mask[1, 8:] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def outputs():
        with torch.no_grad():
            full = model(TOKENS, attention_mask=mask, labels=TOKENS, output_hidden_states=True)
            return [full.logits, full.loss, *full.hidden_states], model.generate(TOKENS, **options)

    (expected, tokens) = outputs()
    with patch(model):
        (found, generated) = outputs()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(tokens, generated)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_options_of_the_loss(name):
    model = model_of(name)
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


@pytest.mark.parametrize("name", MODELS)
def test_autocast_and_checkpoints(name):
    model = model_of(name)
    exact = loss_and_gradients(copy.deepcopy(model).double())
    expected = loss_and_gradients(model, autocast=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with patch(model):
        found = loss_and_gradients(model, autocast=True)
    for n, a in found.items():
        scale = exact[n].abs().max() + 1e-6
        theirs, ours = (expected[n] - exact[n]).abs().max() / scale, (a - exact[n]).abs().max() / scale
        assert ours <= 2 * theirs + 2**-7, (n, float(ours), float(theirs))


def test_what_does_not_fit_is_kept_and_said():
    model = model_of("llama", hidden_act="tanh")
    done = patch(model)
    assert "not fused" in done.kept["LlamaMLP"] and "LlamaMLP" not in done.replaced
    assert "as it was: its activation" in repr(done)
    done.undo()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "lm_head is a Sequential" in patch(model).kept["LlamaForCausalLM"]
    hooked = model_of("llama")
    calls = []
    for norm in [m for m in hooked.modules() if type(m).__name__ == "LlamaRMSNorm"]:
        norm.register_forward_hook(lambda *_: calls.append(1))
    patch(hooked)
    loss_and_gradients(hooked)
    assert len(calls) == 5


def test_attention_is_set_and_put_back():
    model = model_of("llama")
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
    for n, a in expected.items():
        torch.testing.assert_close(found[n], a, rtol=1e-3, atol=1e-4)
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
    model = model_of(name)
    patch(model)
    expected = model(TOKENS, labels=TOKENS, use_cache=False).loss
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS, labels=TOKENS, use_cache=False).loss, expected)
    torch._dynamo.reset()


def test_gradients_of_the_losses_head_are_not_made_of_logits():
    """No tensor of tokens times vocabulary is in memory in training."""
    model, seen = model_of("llama"), []
    with patch(model), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert seen and not [s for s in seen if len(s) > 1 and s[-1] == 61]
    assert warpsmith.__version__
