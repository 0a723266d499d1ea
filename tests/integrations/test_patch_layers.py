"""A patched decoder layer: what it keeps for its backward, frozen parameters, hooks, second derivatives."""

import pytest
import torch
import warpsmith

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import add_family, patch  # noqa: E402

from tests.dispatched import Dispatched  # noqa: E402
from tests.nn.test_linear import OPTIONS  # noqa: E402

from .families import THERE, TOKENS, inputs_of, loss_and_gradients, small_model  # noqa: E402
from .laws import assert_close  # noqa: E402

WITH_LAYERS = ["llama", "qwen3", "mistral", "gemma2"]


def kept_bytes(layer, x, rotary):
    """Bytes of the storages that a layer's graph holds, without its parameters and the rotary tables."""
    others = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *rotary)}
    found = {}

    def keep(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in others:
            found[storage.data_ptr()] = storage.nbytes(), t  # held, so that no other storage gets its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x, position_embeddings=rotary)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_keeps_no_normed_rows_and_no_activation(dtype):
    model = small_model("llama").to(dtype)
    model.set_attn_implementation("sdpa")
    tokens, width, keys, inner = 64, 64, 32, 96
    x = torch.randn(1, tokens, width, dtype=dtype).requires_grad_() * 1
    rotary = model.model.rotary_emb(x, torch.arange(tokens)[None])
    with patch(model, attention=False):
        found = kept_bytes(model.model.layers[0], x, rotary)
    # the stream twice, q, k, v, what attention gives, gate and up
    elements = 2 * width + (2 * width + 2 * keys) + 2 * inner
    statistics = 8 + 4 * 4  # rstd of two norms, and attention's logsumexp of four heads, in float32
    assert found <= tokens * (elements * dtype.itemsize + statistics) + 64


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_frozen_parameters_get_no_gradient(name):
    model = small_model(name)
    frozen = ("layers.0.input_layernorm", "layers.1.self_attn.q_proj", "layers.0.mlp.gate_proj", "embed", "lm_head")
    for key, p in model.named_parameters():
        p.requires_grad_(not any(part in key for part in frozen))
    expected = loss_and_gradients(model)
    with patch(model):
        found = loss_and_gradients(model)
    assert found.keys() == expected.keys() and "model.layers.0.mlp.up_proj.weight" in found
    assert_close(found, expected)


def test_a_projection_of_another_kind_is_called():
    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = small_model("llama")
    layer = model.model.layers[0]
    for module, name in ((layer.self_attn, "k_proj"), (layer.mlp, "gate_proj")):
        old = getattr(module, name)
        new = Twice(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        setattr(module, name, new)
    expected = loss_and_gradients(model)
    with patch(model):
        found = loss_and_gradients(model)
    assert_close(found, expected)


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_second_derivatives(name):
    """A penalty on the gradient of the logits by the embeddings, as without the patch."""
    model = small_model(name).to(torch.float64).eval()
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()

    def penalty():
        model.zero_grad()
        out = model(inputs_embeds=embedded, use_cache=False).logits.square().mean()
        (grad,) = torch.autograd.grad(out, embedded, create_graph=True)
        grad.square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = penalty()
    with patch(model, attention=False):  # whose gradient has no derivative
        found = penalty()
    assert found.keys() == expected.keys() and "model.layers.0.input_layernorm.weight" in found
    for n, a in expected.items():
        torch.testing.assert_close(found[n], a, rtol=1e-4, atol=1e-6 * float(a.abs().max()))


def test_a_second_backward_is_refused():
    model = small_model("llama")
    with patch(model):
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_the_loss_has_the_same_bits_without_gradients(name):
    """Without gradients a layer is made of the single ops."""
    model = small_model(name)
    with patch(model):
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
        with torch.no_grad():
            assert torch.equal(model(TOKENS, labels=TOKENS, use_cache=False).loss, loss)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_each_activation_is_made_again(act):
    model = small_model("llama", hidden_act=act)
    expected = loss_and_gradients(model)
    with patch(model) as done:
        found = loss_and_gradients(model)
    assert not done.kept
    assert_close(found, expected)


PROJECTIONS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}


def put_in_ours(model, projection, **options):
    for layer in model.model.layers:
        holder = next(m for m in (layer.self_attn, layer.mlp) if hasattr(m, projection))
        theirs = getattr(holder, projection)
        ours = warpsmith.nn.Linear(theirs.in_features, theirs.out_features, **{"bias": False, **options})
        ours.weight = theirs.weight
        if ours.bias is not None:
            torch.nn.init.normal_(ours.bias)
        if ours.fuse_main_grad:
            ours.weight.main_grad = torch.zeros(ours.weight.shape)
        setattr(holder, projection, ours)


def with_main_gradients(model):
    fused = {f"{n}, main": p.main_grad for n, p in model.named_parameters() if hasattr(p, "main_grad")}
    for t in fused.values():
        t.zero_()
    found = loss_and_gradients(model)
    assert all(t.any() for t in fused.values())
    return found | {n: t.clone() for n, t in fused.items()}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("family", "projection"), [(f, p) for f, names in PROJECTIONS.items() for p in names])
def test_a_linear_layer_of_ours_does_what_its_options_say(family, projection, option):
    model = small_model(family)
    put_in_ours(model, projection, **{option: OPTIONS[option]})
    expected = with_main_gradients(model)
    with patch(model):
        found = with_main_gradients(model)
    assert found.keys() == expected.keys()
    assert_close(found, expected)


def test_a_layer_multiplies_by_our_products_where_they_may_pay(monkeypatch):
    """The same bits on the CPU, where the op's products are torch's."""
    model = small_model("llama").to(torch.bfloat16)
    with patch(model):
        expected = loss_and_gradients(model)
        with monkeypatch.context() as patched:
            asked = []
            patched.setattr("warpsmith.ops._linear.may_pay", lambda *of: bool(asked.append(of) or True))
            found = loss_and_gradients(model)
    assert len(asked) >= 2 * 7  # of a layer: forward of six at least, input gradients of two
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def widths_in(dispatched):
    """How many weights each call had that makes several products of one input."""
    return [len(weights) for _, weights, _ in dispatched.of(torch.ops.warpsmith.linear_siblings.default)]


def joined_in(model, inputs, monkeypatch, pays=True):
    """(How many weights each call had, loss and gradients or logits) where one launch of several products may pay."""
    with monkeypatch.context() as patched, Dispatched() as mode:
        patched.setattr("warpsmith.ops._linear.may_pay", lambda *of: pays)
        loss = model(**inputs, use_cache=False).loss
        found = {"loss": loss.detach()}
        if loss.requires_grad:
            model.zero_grad()
            loss.backward()
            found |= {n: p.grad.clone() for n, p in model.named_parameters()}
    return widths_in(mode), found


# olmo2 and cohere have no decoder layer of ours, and qwen2's projections have biases.
@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "cohere"])
@pytest.mark.parametrize("how", ["training", "checkpoints", "no gradients"])
def test_products_of_one_input_are_one_call(family, how, monkeypatch):
    if family not in THERE:
        pytest.skip(f"transformers has no {family}")
    model = small_model(family)
    if how == "checkpoints":
        model.gradient_checkpointing_enable()
    inputs, layers = inputs_of(family), len(model.model.layers)
    with patch(model, loss=False), torch.set_grad_enabled(how != "no gradients"):
        none, expected = joined_in(model, inputs, monkeypatch, pays=False)
        widths, found = joined_in(model, inputs, monkeypatch)
    assert none == [] and widths == [3, 2] * layers * (2 if how == "checkpoints" else 1)
    for n, a in expected.items():
        torch.testing.assert_close(found[n], a, rtol=1e-4, atol=1e-5, msg=n)


def test_products_of_one_input_are_apart_where_somebody_asks(monkeypatch):
    model, inputs = small_model("cohere"), inputs_of("cohere")
    layers = len(model.model.layers)
    with patch(model, linear=False):
        assert joined_in(model, inputs, monkeypatch)[0] == []
    seen = []
    with patch(model):
        for layer in model.model.layers:
            layer.self_attn.k_proj.register_forward_hook(lambda *of: seen.append(of))
        widths, _ = joined_in(model, inputs, monkeypatch)
        assert widths == [2] * layers and len(seen) == layers
        with torch.autocast("cpu", torch.bfloat16):
            assert joined_in(model, inputs, monkeypatch)[0] == []


def apply_rotary_pos_emb(q, k, cos, sin):
    return ((t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin) for t in (q, k))


class OtherAttention(torch.nn.Module):
    """Its keys read another tensor, and its values may read the first one when that has changed."""

    def __init__(self, writes):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, 8) for _ in range(3))
        self.writes = writes

    def forward(self, hidden_states):
        q = self.q_proj(hidden_states)
        k = self.k_proj(hidden_states + 1)
        if self.writes:
            hidden_states.mul_(2)
        v = self.v_proj(hidden_states)
        angles = torch.linspace(0, 3, hidden_states.shape[1])[None, :, None].to(q) * torch.ones(8).to(q)
        q, k = apply_rotary_pos_emb(q[:, None], k[:, None], angles.cos(), angles.sin())
        return q + k + v[:, None]


class OtherModel(torch.nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8)
        self.attention = OtherAttention(writes)

    def forward(self, x):
        return self.attention(self.norm(x))


@pytest.mark.parametrize("writes", [False, True])
def test_another_tensor_or_version_has_its_own_product(writes, monkeypatch):
    add_family(OtherModel, like="llama")
    model = OtherModel(writes)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = model(x)
        with patch(model) as done, Dispatched() as mode:
            assert "OtherAttention" in done.replaced
            monkeypatch.setattr("warpsmith.ops._linear.may_pay", lambda *of: True)
            found = model(x)
    assert widths_in(mode) == [3]
    torch.testing.assert_close(found, expected)
