"""What torch's FlopCounterMode counts for ops that contain products, beside torch's own formulas on the same sizes."""

import re
import subprocess
import sys

import pytest
import torch
import warpsmith
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

B, S, K, H, HK, D, DV = 2, 6, 10, 4, 2, 16, 8
TARGET = torch.tensor([0, 3, 1, 4, 0, 2])


def counted(call):
    """Operations of the forward, and of the backward of all that it returns."""
    with FlopCounterMode(display=False) as forward:
        found = call()
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if outputs:
            torch.autograd.backward([t.sum() for t in outputs])
    return forward.get_total_flops(), backward.get_total_flops()


def leaf(*shape, **kind):
    return torch.randn(*shape, requires_grad=True, **kind)


def of_sdpa(batch, queries, keys, heads=H, width=D, width_v=DV):
    """Of the products of every query head: heads that share keys multiply as often. (torch 2.11's formula takes no
    fewer heads of keys.)"""
    q, k, v = (batch, heads, queries, width), (batch, heads, keys, width), (batch, heads, keys, width_v)
    return sdpa_flop_count(q, k, v), sdpa_backward_flop_count((*q[:3], width_v), q, k, v)


ATTENTION = {
    "bshd": ({"q": (B, S, H, D), "k": (B, K, HK, D), "v": (B, K, HK, DV)}, {}, of_sdpa(B, S, K)),
    "bhsd": ({"q": (B, H, S, D), "k": (B, HK, K, D), "v": (B, HK, K, DV)}, {"layout": "bhsd"}, of_sdpa(B, S, K)),
    "thd": ({"q": (S, H, D), "k": (K, HK, D), "v": (K, HK, DV)}, {"layout": "thd"}, of_sdpa(1, S, K)),
    "causal": (
        {"q": (B, S, H, D), "k": (B, S, H, D), "v": (B, S, H, D)},
        {"causal": True},
        of_sdpa(B, S, S, width_v=D),
    ),
    "kv": ({"q": (B, S, H, D), "k": (B, K, 2, HK, D)}, {}, of_sdpa(B, S, K, width_v=D)),
    "qkv": ({"q": (B, S, 3, H, D)}, {}, of_sdpa(B, S, S, width_v=D)),
    "heads": ({"q": (B, S, H + 2 * HK, D)}, {"kv_heads": HK}, of_sdpa(B, S, S, width_v=D)),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_counts_as_torchs(name, device):
    shapes, options, expected = ATTENTION[name]
    tensors = {k: leaf(*shape, device=device) for k, shape in shapes.items()}
    assert counted(lambda: warpsmith.attention(**tensors, **options)) == expected
    with torch.no_grad():
        assert counted(lambda: warpsmith.attention(**tensors, **options)) == (expected[0], 0)


def test_the_formulas_are_those_of_a_product_in_torch():
    """The composed attention, whose products torch counts itself."""
    q, k, v = leaf(B, H, S, D), leaf(B, H, K, D), leaf(B, H, K, DV)
    forward, backward = counted(lambda: torch.softmax(q @ k.mT, -1) @ v)
    assert forward == of_sdpa(B, S, K)[0]
    assert backward + 2 * B * H * S * K * D == of_sdpa(B, S, K)[1]  # scores are computed again


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sequences_count_by_their_lengths(device):
    q, k, v = leaf(S, H, D, device=device), leaf(K, HK, D, device=device), leaf(K, HK, DV, device=device)
    offsets = [torch.tensor(o, dtype=torch.int32, device=device) for o in ([0, 2, 5], [0, 7, 10])]
    found = counted(lambda: warpsmith.attention_varlen(q, k, v, *offsets, 4, 8))
    pairs = (
        ((2, 7), (3, 3)) if device == "cpu" else ((4, 8), (4, 8))
    )  # a GPU's lengths are not read: the longest counts for each
    each = [of_sdpa(1, *sizes) for sizes in pairs]
    assert found == tuple(map(sum, zip(*each, strict=True)))


def composed(hidden, weight, bias, reduction):
    return functional.cross_entropy(functional.linear(hidden, weight, bias), TARGET, reduction=reduction)


@pytest.mark.parametrize("wanted", ["hidden and weight", "hidden", "weight", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_losses_count_as_their_products(reduction, with_bias, wanted):
    hidden, weight = torch.randn(6, 8), torch.randn(5, 8)
    hidden.requires_grad_("hidden" in wanted)
    weight.requires_grad_("weight" in wanted)
    bias = torch.randn(5) if with_bias else None
    forward, backward = counted(lambda: composed(hidden, weight, bias, reduction))
    found = counted(lambda: warpsmith.linear_cross_entropy(hidden, weight, TARGET, bias, reduction=reduction))
    again = forward if reduction == "none" and backward else 0  # the backward makes logits once more
    assert sum(found) == forward + backward + again
    if reduction == "none":
        assert found[0] == forward
    for keep in (False, True):
        found = counted(lambda keep=keep: warpsmith.linear_log_prob(hidden, weight, TARGET, bias, save_logits=keep))
        assert found == (forward, backward + (forward if backward and not keep else 0))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_main_grad_counts_as_a_gradient(reduction):
    hidden, weight = leaf(6, 8), leaf(5, 8)
    expected = counted(lambda: warpsmith.linear_cross_entropy(hidden, weight, TARGET, reduction=reduction))
    main_grad = torch.zeros(5, 8)
    call = {"reduction": reduction, "main_grad": main_grad}
    assert counted(lambda: warpsmith.linear_cross_entropy(hidden, weight, TARGET, **call)) == expected
    layers = leaf(6, 8), leaf(5, 8), leaf(5, 8)
    of_both = {"main_grads": (torch.zeros(5, 8), torch.zeros(5, 8))}
    assert counted(lambda: warpsmith.linear(*layers[:2], main_grad=main_grad)) == counted(
        lambda: warpsmith.linear(*layers[:2])
    )
    whole = leaf(6, 16), leaf(32, 16), leaf(32)
    assert counted(lambda: warpsmith.scaled_linear(*whole)) == counted(lambda: functional.linear(*whole))
    assert counted(lambda: warpsmith.gated_linear(*layers, **of_both)) == counted(
        lambda: warpsmith.gated_linear(*layers)
    )


class Exported(torch.nn.Module):
    def forward(self, q, hidden, weight):
        losses = [warpsmith.linear_cross_entropy(hidden, weight, TARGET, reduction=r) for r in ("mean", "none")]
        return warpsmith.attention(q, q, q), *losses, *warpsmith.linear_log_prob(hidden, weight, TARGET)


def test_exported_ops_count_alike():
    tensors = torch.randn(B, S, H, D), torch.randn(6, 8), torch.randn(5, 8)
    exported = torch.export.export(Exported(), tensors).module()
    expected = of_sdpa(B, S, S, width_v=D)[0] + 3 * 2 * 6 * 5 * 8
    assert counted(lambda: exported(*tensors)) == counted(lambda: Exported()(*tensors)) == (expected, 0)


def test_modules_of_products_count_every_one():
    layer, x = warpsmith.nn.Attention(32, 4, 2), leaf(1, S, 32)
    projections = 2 * S * 32 * 64 + 2 * S * 32 * 32
    of_attention = of_sdpa(1, S, S, 4, 8, 8)
    assert counted(lambda: layer(x)) == (projections + of_attention[0], 2 * projections + of_attention[1])
    mlp = warpsmith.nn.GatedMLP(32, 48)
    assert counted(lambda: mlp(x)) == (3 * 2 * S * 32 * 48, 6 * 2 * S * 32 * 48)


def test_every_op_with_products_has_a_formula():
    """Ops that take a weight matrix or keys; those that finish a gradient, by scaling it, have no product."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("warpsmith::")}
    families = re.compile(
        "::(linear|mlp|gated_linear|scaled_linear(?!_cast)|attention|matmul_symmetric|symmetric_product)"
    )
    with_products = {n.split("::")[1].split(".")[0] for n in names if families.search(n)}
    without = {n for n in with_products if n.endswith(("_scaled", "_scale_", "_add_"))}
    packets = {getattr(torch.ops.warpsmith, name) for name in with_products - without}
    assert packets == {packet for packet in flop_registry if str(packet).startswith("warpsmith.")}


LATE = """
import sys, torch
{before}
import warpsmith
assert {imported} == ("torch.utils.flop_counter" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    warpsmith.attention(*[torch.ones(1, 2, 1, 8)] * 3)
assert counter.get_total_flops() == 2 * 2 * 2 * 16, counter.get_total_flops()
"""


@pytest.mark.parametrize("before", ["", "import torch.utils.flop_counter"])
def test_the_counter_is_not_imported_for_its_formulas(before):
    script = LATE.format(before=before, imported=bool(before))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
