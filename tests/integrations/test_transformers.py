"""transformers' models with random weights: attn_implementation="warpsmith" beside their eager attention."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import attention_forward, register  # noqa: E402

register()
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS),
    "mistral": lambda: transformers.MistralConfig(**SIZES, **HEADS, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **HEADS, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **HEADS, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
}


def pair(name):
    """Two models of equal weights, eager and ours, in training mode."""
    made = []
    for implementation in ("eager", "warpsmith"):
        config = MODELS[name]()
        config._attn_implementation = implementation
        made.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation))
    torch.manual_seed(0)
    for name_of, p in made[0].named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name_of and name != "gemma2" else 0.0, std=0.1)
    made[1].load_state_dict(made[0].state_dict())
    assert made[1].config._attn_implementation == "warpsmith"
    return made


def loss_and_gradients(model, tokens, **inputs):
    logits = model(tokens, use_cache=False, **inputs).logits
    mask = inputs.get("attention_mask")
    kept = logits if mask is None or mask.dim() == 4 else logits[mask.bool()]
    loss = kept.float().square().mean()
    model.zero_grad()
    loss.backward()
    return kept.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(a, b):
    torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-5)
    assert a[1].keys() == b[1].keys()
    for name, grad in a[1].items():
        torch.testing.assert_close(grad, b[1][name], rtol=2e-3, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_itself_with_eager_attention(name):
    eager, ours = pair(name)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    assert_equal(loss_and_gradients(eager, tokens), loss_and_gradients(ours, tokens))


def definition(q, k, v, attention_mask, scaling, is_causal=True, sliding_window=7, softcap=0, s_aux=None, bias=0.0):
    s = q @ k.mT * scaling
    s = (softcap * torch.tanh(s / softcap) if softcap else s) + bias
    ahead = torch.arange(6) - torch.arange(6)[:, None]
    if attention_mask is None:
        seen = (ahead.abs() < sliding_window) & ((ahead <= 0) | torch.tensor(not is_causal))
    else:
        seen = attention_mask if attention_mask.dtype == torch.bool else torch.ones(6, 6, dtype=torch.bool)
        s = s if attention_mask.dtype == torch.bool else s + attention_mask
    sinks = torch.full((2,), -torch.inf) if s_aux is None else s_aux
    s = torch.cat([s.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(1, 2, 6, 1)], -1)
    return (s.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def test_each_argument_of_a_call_alone_and_in_pairs():
    draw = torch.Generator().manual_seed(0)
    q, k, v, bias = (torch.randn(1, 2, 6, n, generator=draw, dtype=torch.float64) for n in (8, 8, 8, 6))
    mask = torch.rand(1, 2, 6, 6, generator=draw) > 0.3
    mask |= torch.eye(6, dtype=torch.bool)
    others = {"scaling": 0.7, "is_causal": False, "sliding_window": 2, "softcap": 0.5, "s_aux": bias[0, :, 0, 0]}
    others |= {"attention_mask": mask, "position_bias": bias}
    given = {"attention_mask": None, "scaling": 8**-0.5}
    for a, b in itertools.product(others, repeat=2):
        for of_mask in (mask, torch.where(mask, 0.25, -torch.inf).double()):
            more = {**given, a: others[a], b: others[b]}
            more |= {"attention_mask": of_mask} if "attention_mask" in (a, b) else {}
            found, weights = attention_forward(torch.nn.Module(), q, k, v, **more)
            expected = definition(q, k, v, **{{"position_bias": "bias"}.get(n, n): t for n, t in more.items()})
            torch.testing.assert_close(found, expected, msg=lambda m, a=a, b=b: f"{a}, {b}: {m}")
            assert weights is None


@pytest.mark.parametrize("of_module", [None, False, True])
@pytest.mark.parametrize("of_call", [None, False, True])
def test_what_a_call_says_comes_before_what_its_module_says(of_call, of_module):
    module = torch.nn.Module()
    if of_module is not None:
        module.is_causal = of_module
    q, k, v = torch.randn(3, 1, 2, 6, 16, generator=torch.Generator().manual_seed(0))
    functions = (transformers.AttentionInterface()[name] for name in ("warpsmith", "sdpa"))
    torch.testing.assert_close(*(f(module, q, k, v, None, is_causal=of_call)[0] for f in functions))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name, side):
    eager, ours = pair(name)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, slice(0, 4) if side == "left" else slice(8, 12)] = 0
    a, b = (loss_and_gradients(m, tokens, attention_mask=mask) for m in (eager, ours))
    assert_equal(a, b)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_sequences_are_those_alone(name):
    ours = pair(name)[1].eval()
    g = torch.Generator().manual_seed(1)
    parts = [torch.randint(64, (1, n), generator=g) for n in (5, 9)]
    offsets = torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    together = ours(torch.cat(parts, 1), position_ids=positions, use_cache=False, **packed).logits
    alone = torch.cat([ours(p, use_cache=False).logits for p in parts], 1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    if name == "gpt_oss":  # whose masks, with every implementation, do not look at positions
        return
    # Without the offsets transformers finds the sequences by their positions and makes a mask.
    masked = ours(torch.cat(parts, 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(masked, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_a_cache(name):
    eager, ours = (m.eval() for m in pair(name))
    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(eager.generate(tokens, **options), ours.generate(tokens, **options))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_static_cache_that_is_filled_step_by_step(name):
    """Its tensors have room for 16 tokens from the first call on, of which later ones are not seen."""
    tokens, results = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1)), []
    for model in pair(name):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        parts = tokens.split([6, 3, 1, 2], 1)
        with torch.no_grad():
            results.append(torch.cat([model.eval()(t, past_key_values=cache, use_cache=True).logits for t in parts], 1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*MODELS, "bert"])
def test_no_mask_is_made_of_what_is_plain(name, monkeypatch):
    # transformers itself decides to make one while a CUDA graph is captured (5.17).
    monkeypatch.setattr("warpsmith.integrations.transformers.sdpa_mask", lambda *a, **o: pytest.fail("a mask was made"))
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    encoder = transformers.BertConfig(**sizes, num_attention_heads=4, attn_implementation="warpsmith")
    model = transformers.BertModel(encoder) if name == "bert" else pair(name)[1]
    model(torch.arange(12)[None], use_cache=False)


def test_compiled_without_graph_breaks():
    _, ours = pair("llama")
    tokens = torch.arange(12)[None]
    expected = ours(tokens, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, use_cache=False).logits, expected)
    torch._dynamo.reset()
