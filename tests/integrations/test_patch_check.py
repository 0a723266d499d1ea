"""``patch`` compares what it puts in with what was there, and leaves what is not the same."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import add_family, patch  # noqa: E402

from .families import TOKENS, class_of, inputs_of, small_model  # noqa: E402

# A family that is said to be like another, and the classes of which that is not true.
WRONG = {
    ("gemma2", "llama"): {"Gemma2RMSNorm", "Gemma2DecoderLayer"},
    ("llama", "gemma2"): {"LlamaRMSNorm", "LlamaDecoderLayer"},
    ("gemma3", "qwen3"): {"Gemma3RMSNorm", "Gemma3DecoderLayer"},
    ("cohere", "llama"): {"CohereAttention", "CohereDecoderLayer"},
    ("llama", "cohere"): {"LlamaAttention", "LlamaDecoderLayer"},
    ("gpt_oss", "llama"): {"GptOssAttention", "GptOssMLP"},
    ("llama", "gpt_oss"): {"LlamaAttention"},
    ("olmo2", "llama"): {"Olmo2DecoderLayer"},
    ("phi3", "llama"): {"Phi3MLP"},
    ("llama", "phi3"): {"LlamaMLP"},
}


@pytest.mark.parametrize("family, like", WRONG)
def test_a_wrong_row_does_no_harm(family, like):
    model, inputs = small_model(family), inputs_of(family)
    expected = model(**inputs).loss
    add_family(class_of(family), like=like)
    try:
        with patch(model) as done:
            torch.testing.assert_close(model(**inputs).loss, expected)
    finally:
        add_family(class_of(family), like=family)
    left = {n for n, why in done.kept.items() if "stay as they are" not in why}
    assert left == WRONG[family, like] and not left & done.replaced.keys(), done


@pytest.mark.parametrize("changed", ["output", "dropout"])
def test_a_changed_forward_is_found(changed, monkeypatch):
    """In training alone, too."""
    cls = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    theirs = cls.forward

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **options):
        out = theirs(self, hidden_states, attention_mask, position_embeddings=position_embeddings, **options)
        return out * 1.001 if changed == "output" else torch.nn.functional.dropout(out, 0.1, self.training)

    monkeypatch.setattr(cls, "forward", forward)
    done = patch(small_model("llama"), attention=False, linear=False)
    assert "on random rows" in done.kept["LlamaDecoderLayer"] and len(done.kept) == 1 and len(done.replaced) == 4


def test_a_model_of_ones_own():
    """Helium has the norms, layers and head of Llama, and rotates otherwise."""
    cls = transformers.HeliumForCausalLM
    for bad, of in (("helium", cls), ("llama", torch.nn.Linear)):
        with pytest.raises(ValueError, match="^add_family: "):
            add_family(of, like=bad)
    add_family(cls, like="llama")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = cls(transformers.HeliumConfig(vocab_size=61, head_dim=16, num_key_value_heads=2, **sizes)).train()
    expected = model(TOKENS, labels=TOKENS).loss
    with patch(model, attention=False, linear=False) as done:
        torch.testing.assert_close(model(TOKENS, labels=TOKENS).loss, expected)
    assert list(done.kept) == ["HeliumAttention"] and "times as wrong" in done.kept["HeliumAttention"]
    assert {n.removeprefix("Helium") for n in done.replaced} == {"RMSNorm", "MLP", "DecoderLayer", "ForCausalLM"}


def test_a_check_leaves_no_trace():
    """Neither in the random numbers nor in hooks, flags and gradients."""
    model, calls = small_model("llama"), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    done = patch(model, attention=False)
    assert torch.equal(torch.get_rng_state(), state) and not calls and not done.unchecked
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "eager"


def test_what_cannot_be_compared_is_said():
    with torch.device("meta"):
        model = small_model("llama")
    done = patch(model, attention=False)
    assert done.unchecked.keys() == done.replaced.keys() and not done.kept
    assert "LlamaMLP: not compared: its weights are on the meta device" in repr(done)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        done = patch(small_model("llama"))
    finally:
        handle.remove()
    assert "LlamaMLP" in done.replaced and "all modules" in done.unchecked["LlamaMLP"]
