"""RotaryEmbedding and QKNormRoPE: their tables and weights, and the parts that they are made of."""

import copy

import pytest
import torch
import warpsmith


def transformers_tables(positions, dim, base):
    """As the rotary embedding of transformers' Llama computes them (modeling_rope_utils), in float32."""
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def test_equals_what_llama_does_in_the_layout_of_transformers():
    rotary = warpsmith.nn.RotaryEmbedding(32, max_positions=64, base=500000.0)
    cos, sin = transformers_tables(64, 32, 500000.0)
    q, k = torch.randn(2, 4, 20, 32), torch.randn(2, 1, 20, 32)  # (batch, heads, tokens, head_dim)
    got = rotary(q.transpose(1, 2), k.transpose(1, 2))
    for x, y in zip((q, k), got, strict=True):
        torch.testing.assert_close(y.transpose(1, 2), x * cos[:20] + rotate_half(x) * sin[:20], rtol=1e-4, atol=1e-5)


def test_tables_of_far_positions_are_exact_to_rounding():
    rotary = warpsmith.nn.RotaryEmbedding(64, max_positions=1_000_000)
    angle = 999_999 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(rotary.cos[-1].double(), angle.cos(), rtol=0, atol=1e-7)


def test_tables_are_no_state_and_follow_the_module():
    rotary = warpsmith.nn.RotaryEmbedding(8, max_positions=16)
    assert not rotary.state_dict()
    assert rotary.to(torch.bfloat16).cos.dtype == torch.bfloat16
    assert "max_positions=16" in repr(copy.deepcopy(rotary))


def test_meta_device():
    rotary = warpsmith.nn.RotaryEmbedding(8, max_positions=16, device="meta")
    q, k = rotary(torch.empty(2, 3, 4, 8, device="meta"), None)
    assert q.shape == (2, 3, 4, 8)
    assert k is None
    rotary = rotary.to_empty(device="cpu")
    rotary.reset_parameters()
    assert torch.equal(rotary.cos, warpsmith.nn.RotaryEmbedding(8, max_positions=16).cos)


def test_decoding_continues_a_prefix():
    rotary = warpsmith.nn.RotaryEmbedding(16, max_positions=32, interleaved=True)
    q, k = torch.randn(2, 9, 4, 24), torch.randn(2, 9, 2, 24)
    whole = rotary(q, k)
    lengths = torch.tensor([8, 8])
    step = rotary(q[:, 8:], k[:, 8:], position_offset=lengths)
    assert all(torch.equal(a[:, 8:], b) for a, b in zip(whole, step, strict=True))
    written = rotary(q, k, inplace=True)
    assert written[0] is q
    assert torch.equal(q, whole[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim: expected an even number >= 2, got 7"),
        ({"dim": 0}, "dim: expected an even number >= 2, got 0"),
        ({"dim": 8, "max_positions": 0}, "max_positions: expected a number >= 1, got 0"),
        ({"dim": 8, "base": -1.0}, "base: expected a number > 0, got -1.0"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^RotaryEmbedding: {message}"):
        warpsmith.nn.RotaryEmbedding(**arguments)


SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn, another ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, a ramp that ends behind the last pair": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-8},
    "yarn, a factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_scalings_are_those_of_transformers(name, theta):
    """A configuration's own dict, for a model that was trained on 64 positions and runs on 256."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    trained, length, scaling = 64, 256, {**SCALINGS[name], "rope_theta": theta}
    if scaling["rope_type"] in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = trained
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=trained if scaling["rope_type"] == "dynamic" else length,
        rope_parameters=dict(scaling),
    )
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1, 1), torch.arange(length)[None])
    scaling["original_max_position_embeddings"] = trained
    rotary = warpsmith.nn.RotaryEmbedding(32, length, scaling=scaling)
    for ours, theirs in zip((rotary.cos, rotary.sin), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, :16], rtol=1e-4, atol=5e-5)
    assert f"scaling={scaling['rope_type']}" in repr(rotary)
    plain = warpsmith.nn.RotaryEmbedding(32, length, theta)
    assert torch.equal(plain.cos, rotary.cos) == (name == "default")
    assert warpsmith.nn.RotaryEmbedding(2, length, scaling=scaling).cos.isfinite().all()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope"}, r"scaling\['rope_type'\]: expected default or linear .*, got longrope"),
        ({"rope_type": "linear"}, r"scaling\['factor'\]: expected a number > 0, got None"),
        ({"type": "linear", "factor": -1.0}, r"scaling\['factor'\]: expected a number > 0, got -1.0"),
        ({"rope_type": "yarn", "factor": 2.0}, r"scaling\['original_max_position_embeddings'\]: expected a number"),
    ],
)
def test_scalings_that_say_too_little_are_named(scaling, message):
    with pytest.raises(ValueError, match=f"^RotaryEmbedding: {message}"):
        warpsmith.nn.RotaryEmbedding(32, scaling=scaling)


def test_equals_its_parts_and_trains_its_weights():
    rotary, both = warpsmith.nn.RotaryEmbedding(32, max_positions=16), warpsmith.nn.QKNormRoPE(32, interleaved=True)
    torch.nn.init.normal_(both.q_norm.weight)
    torch.nn.init.normal_(both.k_norm.weight)
    q, k = torch.randn(2, 9, 4, 32), torch.randn(2, 9, 2, 32)
    expected = warpsmith.rope(both.q_norm(q), both.k_norm(k), rotary.cos, rotary.sin, interleaved=True)
    got = both(q, k, rotary.cos, rotary.sin)
    torch.testing.assert_close(got, expected)
    weights = list(both.parameters())
    grads = [torch.randn_like(y) for y in got]
    torch.testing.assert_close(torch.autograd.grad(got, weights, grads), torch.autograd.grad(expected, weights, grads))


def test_state_dict_and_repr():
    both = warpsmith.nn.QKNormRoPE(8, dtype=torch.bfloat16)
    assert list(both.state_dict()) == ["q_norm.weight", "k_norm.weight"]
    assert both.q_norm.weight.dtype == torch.bfloat16
    assert "interleaved=False" in repr(both)
