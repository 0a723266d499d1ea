"""warpsmith.nn.QKNormRoPE: its weights, and the parts that it is made of."""

from __future__ import annotations

import torch
import warpsmith


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
