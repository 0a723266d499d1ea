"""The parts of ``patch`` by choice, and models of transformers in the hands of others: wrapped, sharded, adapted."""

import copy

import pytest
import torch
import warpsmith
from torch import nn

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import patch  # noqa: E402
from warpsmith.testing.distributed import multirank  # noqa: E402

from .families import TOKENS, loss_and_gradients, small_model  # noqa: E402
from .laws import assert_close  # noqa: E402
from .test_patch_layers import kept_bytes  # noqa: E402
from .test_patch_models import Lora, is_patched  # noqa: E402

OF_SWITCH = {
    "norms": {"LlamaRMSNorm", "LlamaDecoderLayer"},
    "rope": {"LlamaAttention"},
    "mlp": {"LlamaMLP"},
    "attention": {"attn_implementation"},
    "linear": {"Linear"},
    "loss": {"LlamaForCausalLM"},
}
ALL = set().union(*OF_SWITCH.values())


@pytest.mark.parametrize("switch", OF_SWITCH)
def test_a_switch_leaves_its_parts(switch):
    model = small_model("llama", "sdpa")
    expected = loss_and_gradients(model)
    for choice, replaced in (
        ({switch: False}, ALL - OF_SWITCH[switch]),
        ({name: name == switch for name in OF_SWITCH}, OF_SWITCH[switch]),
    ):
        with patch(model, **choice) as done:
            assert done.replaced.keys() == replaced and not done.kept
            assert_close(loss_and_gradients(model), expected)
        if switch != "attention":
            by_class = {name: on for name, on in choice.items() if name != "attention"}
            with patch(type(model), **by_class) as done:
                assert done.replaced.keys() == replaced - {"attn_implementation", "Linear"}
                assert_close(loss_and_gradients(model), expected)


@pytest.mark.parametrize("by_class", [False, True], ids=["model", "class"])
def test_logits_are_kept_where_asked_for(by_class):
    model = small_model("gemma2")
    expected = model(TOKENS, labels=TOKENS)
    with patch(type(model) if by_class else model, logits=True) as done:
        found = model(TOKENS, labels=TOKENS)
        assert "Gemma2ForCausalLM" not in {*done.replaced, *done.kept}
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss)


def test_who_uses_logits_that_are_not_there_is_told():
    model = small_model("llama")
    with patch(model):
        out = model(TOKENS, labels=TOKENS)
        assert "logits" not in out and len(out.to_tuple()) == 2 and not hasattr(out.logits, "shape")
        for use in (
            lambda t: t.argmax(-1),
            lambda t: t[..., :-1],
            lambda t: t - 1,
            lambda t: torch.softmax(t, -1),
            lambda t: list(t),
        ):
            with pytest.raises(AttributeError, match=r"^logits: none in training .* patch\(model, logits=True\) keeps"):
                use(out.logits)
        assert isinstance(copy.deepcopy(out.logits), type(out.logits))
        assert torch.is_tensor(model(TOKENS).logits) and torch.is_tensor(model.eval()(TOKENS, labels=TOKENS).logits)


def test_who_asks_for_weights_of_attention_is_told():
    model = small_model("llama")
    with patch(model), pytest.raises(ValueError, match="output_attentions: expected False: weights are never made"):
        model(TOKENS, output_attentions=True)
    with patch(model, attention=False):
        assert model(TOKENS, output_attentions=True).attentions[0].shape == (2, 4, 12, 12)
    model.config.output_attentions = True
    with patch(model) as done:
        assert done.kept == {"attn_implementation": "its config asks for attention weights"}
        assert model(TOKENS).attentions[0] is not None


def test_an_attention_that_does_not_fit_is_kept():
    model = small_model("llama", head_dim=12)
    expected = loss_and_gradients(model)
    with patch(model) as done:
        assert done.kept == {"attn_implementation": "head dimensions are fused from 8 to 256 in steps of 8"}
        assert_close(loss_and_gradients(model), expected)
    transformers.AttentionInterface.register("mine", transformers.integrations.sdpa_attention.sdpa_attention_forward)
    model = small_model("llama", "mine")
    with patch(model) as done:
        assert done.kept == {"attn_implementation": "somebody has chosen mine"}
    assert model.config._attn_implementation == "mine"


def ours_in(model):
    """The model with modules of ours in the place of its linear layers."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                ours = warpsmith.nn.Linear(child.in_features, child.out_features, child.bias is not None)
                ours.weight, ours.bias = child.weight, child.bias
                setattr(parent, name, ours)
    return model


@pytest.mark.parametrize("kind", ["linear=False", "linear=True", "warpsmith.nn.Linear"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_norms_and_heads_join_every_plain_linear_layer(family, kind):
    model = small_model(family)
    expected = loss_and_gradients(model)
    fused = copy.deepcopy(model)
    patch(fused, attention=False, linear=False)
    if kind.startswith("warpsmith"):
        model = ours_in(model)
    with patch(model, attention=False, linear=kind != "linear=False") as done:
        assert not done.kept and not torch.is_tensor(model(TOKENS, labels=TOKENS).logits)
        assert_close(loss_and_gradients(model), expected)
        if family != "gpt2":
            x = torch.randn(1, 12, 64, requires_grad=True) * 1
            rotary = model.model.rotary_emb(x, torch.arange(12)[None])
            assert kept_bytes(model.model.layers[0], x, rotary) == kept_bytes(fused.model.layers[0], x, rotary)


def test_bytes_that_are_kept_less_are_told():
    model, x = small_model("llama"), torch.randn(1, 8, 64, requires_grad=True) * 1
    rotary, layers = model.model.rotary_emb(x, torch.arange(8)[None]), model.model.layers
    before = kept_bytes(layers[0], x, rotary)
    with patch(model, attention=False) as done:
        less = (before - kept_bytes(layers[0], x, rotary)) // 8 * len(layers)
        assert less > 0 and abs(done.saved_bytes["LlamaDecoderLayer"] / less - 1) < 0.1
        assert done.saved_bytes["LlamaForCausalLM"] == 4 * 61 and "bytes a token less for the backward" in repr(done)
    assert not patch(small_model("llama"), norms=False, mlp=False, loss=False, rope=False).saved_bytes


class Two(nn.Module):
    """A model of transformers, and modules of torch."""

    def __init__(self):
        super().__init__()
        self.body = small_model("llama", "sdpa")
        self.norm, self.end = nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 32), nn.GELU())

    def forward(self, tokens, labels=None, use_cache=None):
        out = self.body(tokens, labels=labels, use_cache=False, output_hidden_states=True)
        out.loss = out.loss + self.end(self.norm(out.hidden_states[-1])).square().mean()
        return out


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_a_model_that_holds_one_of_transformers(way):
    torch.manual_seed(0)
    model = Two()
    expected = loss_and_gradients(model)
    target = model if way == "plain" else torch.compile(model.body, backend="aot_eager")
    with warpsmith.patch(target) as done:
        assert not done.kept and done.replaced.keys() == ALL | (
            {"LayerNorm", "Sequential"} if way == "plain" else set()
        )
        if way == "compiled":
            model.body = target
        found = {n.replace("_orig_mod.", ""): t for n, t in loss_and_gradients(model).items()}
        assert_close(found, expected)
    assert not is_patched(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_adapters_stay(after):
    """On projections, which joined norms read else, and on the head."""
    model = small_model("llama")
    done = None if after else patch(model)
    torch.manual_seed(2)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = Lora(layer.self_attn.q_proj), Lora(layer.mlp.down_proj)
    model.lm_head = Lora(model.lm_head)
    done = done or patch(model)
    assert done.kept == ({"LlamaForCausalLM": "its lm_head is a Lora and not a torch.nn.Linear"} if after else {})
    found = loss_and_gradients(model)
    done.undo()
    assert_close(found, loss_and_gradients(model))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_adapters_of_peft(after):
    peft = pytest.importorskip("peft", reason="needs peft")
    model = small_model("llama", "sdpa")
    done = None if after else warpsmith.patch(model)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    done = done or warpsmith.patch(model)
    assert done.replaced.keys() == ALL and not done.kept and sum(type(m).__name__ == "Linear" for m in model.modules())
    found = loss_and_gradients(model)
    assert all("lora_" in name for name in found if name != "loss")
    done.undo()
    assert_close(found, loss_and_gradients(model))


def test_a_subclass_with_a_forward_of_its_own():
    class Same(transformers.LlamaForCausalLM):
        pass

    class Reads(transformers.LlamaForCausalLM):
        def forward(self, *arguments, **options):
            out = super().forward(*arguments, **options)
            out.loss = out.loss + out.logits.mean()
            return out

    config = small_model("llama").config
    for cls in (Same, Reads):
        model = cls(config).train()
        expected = loss_and_gradients(model)
        with patch(model) as done:
            why = {"Reads": "it is a LlamaForCausalLM with a forward of its own"} if cls is Reads else {}
            assert done.kept == why and ("Same" in done.replaced) == (cls is Same)
            assert_close(loss_and_gradients(model), expected)


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_under_fsdp2(rank, world_size, after):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = small_model("llama", "sdpa")
    expected = loss_and_gradients(copy.deepcopy(model))
    done = None if after else patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    done = done or patch(model)
    assert len(done.replaced) == len(ALL) and not done.kept, done
    out = model(TOKENS, labels=TOKENS)
    assert not torch.is_tensor(out.logits)
    found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in loss_and_gradients(model).items()}
    assert_close(found, expected)
    done.undo()
    assert not is_patched(model) and torch.is_tensor(model(TOKENS, labels=TOKENS).logits)
