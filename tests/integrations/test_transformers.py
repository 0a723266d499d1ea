"""attn_implementation="warpsmith" beside eager attention. Losses, gradients and generation: test_patch_rows.py."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from warpsmith.integrations.transformers import attention_forward, register  # noqa: E402

from .families import VOCABULARY, small_model  # noqa: E402

register()
WITH_EACH_OPTION = ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"]


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


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_sequences_are_those_alone(name):
    ours = small_model(name, "warpsmith").eval()
    g = torch.Generator().manual_seed(1)
    parts = [torch.randint(VOCABULARY, (1, n), generator=g) for n in (5, 9)]
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
def test_a_static_cache_that_is_filled_step_by_step(name):
    """Its tensors have room for 16 tokens from the first call on, of which later ones are not seen."""
    tokens, results = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1)), []
    for model in (small_model(name, "eager"), small_model(name, "warpsmith")):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        parts = tokens.split([6, 3, 1, 2], 1)
        with torch.no_grad():
            results.append(torch.cat([model.eval()(t, past_key_values=cache, use_cache=True).logits for t in parts], 1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*WITH_EACH_OPTION, "bert"])
def test_no_mask_is_made_of_what_is_plain(name, monkeypatch):
    # transformers itself decides to make one while a CUDA graph is captured (5.17).
    monkeypatch.setattr("warpsmith.integrations.transformers.sdpa_mask", lambda *a, **o: pytest.fail("a mask was made"))
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    encoder = transformers.BertConfig(**sizes, num_attention_heads=4, attn_implementation="warpsmith")
    model = transformers.BertModel(encoder) if name == "bert" else small_model(name, "warpsmith")
    model(torch.arange(12)[None], use_cache=False)
