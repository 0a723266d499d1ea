"""warpsmith.nn.Attention: its projections, the parts between them, packed sequences."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from torch.utils.checkpoint import checkpoint


def layer(**options):
    torch.manual_seed(0)
    made = warpsmith.nn.Attention(64, num_heads=4, **options)
    for name, p in made.named_parameters():
        if "norm" in name or name == "sink":
            torch.nn.init.normal_(p)
    return made


def by_hand(module, x, angles=None, **options):
    """The same with torch's functions."""
    heads, kv_heads = module.num_heads, module.num_kv_heads
    q, k, v = (
        module.qkv_proj(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    )
    if module.q_norm is not None:
        q, k = (
            F.rms_norm(t, (t.shape[-1],), n.weight, module.eps) for t, n in ((q, module.q_norm), (k, module.k_norm))
        )
    if angles is not None:
        heads = q.transpose(1, 2), k.transpose(1, 2)
        q, k = (t.transpose(1, 2) for t in warpsmith.rope(*heads, *angles, interleaved=module.interleaved))
    options = {"scale": module.options["softmax_scale"], **options}
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, **options)
    return module.o_proj(out.transpose(1, 2).flatten(-2))


OPTIONS = {
    "num_kv_heads": 2,
    "bias": True,
    "qk_norm": True,
    "eps": 0.5,
    "interleaved": True,
    "softmax_scale": 0.7,
}
PAIRS = [{name: OPTIONS[name] for name in names} for n in (0, 1, 2) for names in itertools.combinations(OPTIONS, n)]


@pytest.mark.parametrize("options", [*PAIRS, {"num_kv_heads": 1, "bias": True}], ids=str)
@pytest.mark.parametrize("rotated", [False, True])
def test_equals_its_parts(options, rotated):
    """Each option alone, and beside each other one."""
    module = layer(**options)
    rotary = warpsmith.nn.RotaryEmbedding(16, max_positions=32)
    angles = (rotary.cos, rotary.sin) if rotated else ()
    x = torch.randn(2, 9, 64, requires_grad=True)
    leaves = [x, *module.parameters()]
    results = []
    for y in (module(x, *angles), by_hand(module, x, angles or None)):
        results.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_those_alone():
    module = layer(num_kv_heads=2, qk_norm=True)
    rotary = warpsmith.nn.RotaryEmbedding(16, max_positions=32)
    x, cu_seqlens = torch.randn(12, 64), torch.tensor([0, 5, 12], dtype=torch.int32)
    together = module(x, rotary.cos, rotary.sin, cu_seqlens=cu_seqlens, max_seqlen=7)
    apart = [module(x[None, a:b], rotary.cos, rotary.sin)[0] for a, b in ((0, 5), (5, 12))]
    torch.testing.assert_close(together, torch.cat(apart))


def test_dropout_is_for_training_and_a_sink_is_learned():
    module = layer(dropout_p=0.5, sink=True)
    x = torch.randn(1, 30, 64)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    module(x).square().sum().backward()
    assert bool((module.sink.grad != 0).all())


def test_without_rotation_the_heads_gradient_is_one_tensor(monkeypatch):
    module, calls = layer(), []
    monkeypatch.setattr(
        "warpsmith.nn._attention.attention",
        lambda q, **options: calls.append(sorted(options)) or warpsmith.attention(q, **options),
    )
    module(torch.randn(1, 5, 64))
    assert "k" not in calls[0]


def test_state_dict_and_repr():
    module = warpsmith.nn.Attention(64, 4, 2, qk_norm=True, sink=True, dtype=torch.bfloat16)
    assert sorted(module.state_dict()) == [
        "k_norm.weight",
        "o_proj.weight",
        "q_norm.weight",
        "qkv_proj.weight",
        "sink",
    ]
    assert module.sink.dtype == torch.bfloat16
    assert "num_kv_heads=2" in repr(module)
    assert not module.sink.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 0), "num_heads: expected a number >= 1, got 0"),
        ((64, 4, 3), "num_kv_heads: expected a divisor of 4, got 3"),
        ((66, 4), "embed_dim: expected a multiple of 4 heads, or head_dim, got 66"),
        ((48, 4), "head_dim: expected 8 to 256 elements a head, in steps of 8, got 12"),
        ((64, 4, 2, 0), "head_dim: expected 8 to 256 elements a head, in steps of 8, got 0"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^Attention: {message}"):
        warpsmith.nn.Attention(*arguments)


def test_one_table_of_angles_alone_is_named():
    with pytest.raises(ValueError, match="^Attention: sin: expected a tensor beside cos"):
        layer()(torch.randn(1, 5, 64), torch.ones(5, 8))


def test_offsets_without_a_length_are_named():
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    for given in ({"cu_seqlens": cu_seqlens}, {"max_seqlen": 3}):
        with pytest.raises(
            ValueError, match="^Attention: max_seqlen: expected an integer beside cu_seqlens, or neither"
        ):
            layer()(torch.randn(5, 64), **given)


PACKED = {"cu_seqlens": torch.tensor([0, 25, 60], dtype=torch.int32), "max_seqlen": 35}
WITH_SINK = {"num_kv_heads": 2, "qk_norm": True, "sink": True}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("more", [{}, PACKED], ids=["", "packed"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}, WITH_SINK], ids=str)
def test_activation_checkpointing_changes_no_bit(options, more, use_reentrant):
    """The forward runs twice with one dropout mask: its seed is drawn from torch's generator, which is put back."""
    module = layer(**options)
    rotary = warpsmith.nn.RotaryEmbedding(16, max_positions=35)
    x = torch.randn(*((60,) if more else (2, 30)), 64, requires_grad=True)
    leaves, results = [x, *module.parameters()], []

    def forward(x):
        return module(x, rotary.cos, rotary.sin, **more)

    for call in (forward, lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        y = call(x)
        for t in leaves:
            t.grad = None
        y.square().sum().backward()  # the reentrant kind knows no torch.autograd.grad
        results.append((y.detach(), *(t.grad for t in leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
