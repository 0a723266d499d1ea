"""rope in place: the same bits, gradients through views, and what must not be written; and the plans of both ops."""

import math
import random
from collections import Counter

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal, sim

from .test_rope import BF16, FP32, FP64, KERNELS, problem, table


@pytest.mark.parametrize("device", ["cpu", *KERNELS] if not sim.is_loaded() else KERNELS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [20, 32, 64])
def test_in_place_writes_the_same_bits(interleaved, rotary_dim, device):
    q, k, cos, sin = (t.to(device) for t in problem(BF16, dim=64))
    cos, sin = cos[:, : rotary_dim // 2], sin[:, : rotary_dim // 2]
    expected = warpsmith.rope(q, k, cos, sin, interleaved=interleaved)
    versions = q._version, k._version

    def call():
        return warpsmith.rope(q, k, cos, sin, interleaved=interleaved, inplace=True)

    written, (_, moved) = sim.counted(call) if sim.is_loaded() else (call(), (0, 0))
    assert not sim.is_loaded() or moved == (q.nbytes + k.nbytes) * rotary_dim // 64
    assert written[0] is q
    assert written[1] is k
    assert all(bitwise_equal(a, b) for a, b in zip(written, expected, strict=True))
    assert q._version > versions[0]
    assert k._version > versions[1]


@pytest.mark.parametrize("device", ["cpu", *KERNELS] if not sim.is_loaded() else KERNELS)
@pytest.mark.parametrize("op", ["rope", "qk_norm_rope"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_empty_sequences_change_no_bit(op, interleaved, device):
    q, k, cos, sin = (t.to(device) for t in problem(BF16, dim=64))
    weights = [torch.linspace(0.5, 1.5, 64, device=device).bfloat16()] * (2 if op == "qk_norm_rope" else 0)
    leaves = [t.clone().requires_grad_() for t in (q[0], k[0], *weights)]
    first, second = len(q[0]) // 2, len(q[0]) - len(q[0]) // 2

    def results(*lengths):
        cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        out = getattr(warpsmith, op)(*leaves, cos, sin, cu_seqlens=cu, interleaved=interleaved)
        return *out, *torch.autograd.grad(sum(t.float().square().cos().sum() for t in out), leaves)

    few, many = results(first, second), results(*(0,) * 300, first, *(0,) * 300, second, 0)
    assert all(map(bitwise_equal, few, many))


def fused_qkv(inplace):
    """The gradient of a projection's input, where rope takes views of the projection's output."""
    q, k, cos, sin = problem()
    x = torch.cat((q, k, k), 2).flatten(2).requires_grad_()
    heads = (x * 1.5).unflatten(-1, (8, 32))
    q, k, v = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
    q, k = warpsmith.rope(q, k, cos, sin, inplace=inplace)
    (q.square().sum() + (k * v).sin().sum()).backward()
    return x.grad


def test_gradients_through_views_that_were_written_in_place():
    assert bitwise_equal(fused_qkv(inplace=True), fused_qkv(inplace=False))


@pytest.mark.not_on_sim(reason="in float64")
def test_second_derivatives_of_what_was_written_in_place():
    q, k, cos, sin = problem(FP64, tokens=2, dim=4, q_heads=1, k_heads=1)

    def call(q, k):
        return warpsmith.rope(q * 1, k * 1, cos, sin, inplace=True)

    leaves = q.requires_grad_(), k.requires_grad_()
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_in_place_under_compile():
    q, k, cos, sin = problem()
    expected = warpsmith.rope(q, k, cos, sin)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k):
        return warpsmith.rope(q, k, cos, sin, inplace=True)

    written = call(q, k)
    assert all(bitwise_equal(a, b) for a, b in zip((q, k, *written), (*expected, *expected), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k: (q.requires_grad_(), k), "q: expected no leaf that requires a gradient"),
        (lambda q, k: (q, k.requires_grad_().view_as(k)), "k: expected no leaf that requires a gradient"),
        (lambda q, k: ((q.requires_grad_() * 1).split(2, 2)[0], k), "q: expected a view that torch lets be written"),
        (lambda q, k: (q, q), "k: expected other memory than that of q"),
        (lambda q, k: (q[:, :, :3], q[:, :, 2:]), "k: expected other memory .* got elements that are q's as well"),
        (lambda q, k: (q, q.flatten()[32:].as_strided((2, 6, 1, 32), (6 * 4 * 32, 4 * 32, 1, 1))), "k: expected other"),
        (lambda q, k: (q.as_strided(q.shape, (700, 100, 16, 1)), k), "q: expected elements of their own .*overlap"),
        (lambda q, k: (q[:1].expand(2, -1, -1, -1), k), "q: expected elements of their own"),
        (lambda q, k: (q, k.transpose(-1, -2).contiguous().transpose(-1, -2)), "k: expected adjacent elements"),
    ],
)
def test_what_must_not_be_written_in_place_is_named_unchanged(change, message):
    q, k, cos, sin = problem()
    q, k = change(q, k)
    before = q.detach().clone(), k.detach().clone()
    with pytest.raises(ValueError, match=f"^rope: {message}"):
        warpsmith.rope(q, k, cos, sin, inplace=True)
    assert all(bitwise_equal(a, b.detach()) for a, b in zip(before, (q, k), strict=True))


def test_whatever_overlaps_is_refused_in_place_and_nothing_else():
    """Random views of one piece of memory, compared with the sets of elements that they have."""
    memory = torch.zeros(600)
    cos, sin = (t.float() for t in table(9, 2))
    draw = random.Random(7)
    outcomes = Counter()
    for _ in range(1500):
        sizes, strides = [draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4), 4], []
        for _ in range(2):  # often nested, often alike, sometimes neither
            kind = draw.choice([(4, 16, 64), (4, 12, 48), (16, 4, 64), (4, 8, 32), (draw.randint(2, 9),) * 3])
            strides.append((*(draw.choice([s, s, s, s + 1]) for s in reversed(kind)), 1))
        if draw.random() < 0.7:
            strides[1] = strides[0]
        heads = sizes[2], draw.randint(1, 4)
        starts = draw.randint(0, 200), draw.randint(0, 200)
        q, k = (
            memory.as_strided((*sizes[:2], h, 4), s, start) for h, s, start in zip(heads, strides, starts, strict=True)
        )
        places = [
            torch.arange(600).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist() for t in (q, k)
        ]
        twice = [len(set(p)) < len(p) for p in places]
        shared = bool(set(places[0]) & set(places[1]))
        expected = (
            "q: expected el" if twice[0] else "k: expected el" if twice[1] else "k: expected other" if shared else ""
        )
        outcomes[expected] += 1
        if expected:
            with pytest.raises(ValueError, match=f"^rope: {expected}"):
                warpsmith.rope(q, k, cos, sin, inplace=True)
        else:
            warpsmith.rope(q, k, cos, sin, inplace=True)
    assert len(outcomes) == 4
    assert min(outcomes.values()) > 30, outcomes


@pytest.mark.parametrize("head_major", [False, True])
def test_slices_of_a_large_projection_are_told_apart(head_major):
    fused = torch.ones(4, 2048, 12, 16, dtype=BF16)
    if head_major:
        fused = fused.transpose(1, 2).contiguous().transpose(1, 2)
    cos, sin = (t.to(BF16) for t in table(2048, 8))
    q, k = warpsmith.rope(fused[:, :, :8], fused[:, :, 8:10], cos, sin, inplace=True)
    assert bitwise_equal(q[:, :, :2], k)
    assert bool((fused[:, :, 10:] == 1).all())
    with pytest.raises(ValueError, match="k: expected other memory"):
        warpsmith.rope(fused[:, :, :8], fused[:, :, 7:9], cos, sin, inplace=True)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (3, 0, 2, 8), (3, 4, 0, 8)])
def test_nothing_may_be_written_in_place(shape):
    """Empty tensors may have any strides: those of ``x * 1`` may be 0."""
    q = torch.empty_strided(shape, (0, 0, 0, 2))
    k = torch.zeros(*shape[:2], 1, 8)
    cos = torch.ones(5, 4)
    written, _ = warpsmith.rope(q, k, cos, torch.zeros_like(cos), inplace=True)
    assert written is q


def test_the_plan_of_a_llama_layer():
    plan = warpsmith.plan("rope", tokens=16384, q_heads=32, k_heads=8, head_dim=128, dtype=BF16)
    assert plan["vector_elems"] == 8
    columns, groups, tokens = (a * b for a, b in zip(plan["threads"], reversed(plan["blocks"]), strict=True))
    assert columns * 2 * plan["vector_elems"] == 128
    assert groups * plan["heads_a_thread"] == 40
    assert tokens == 16384
    assert plan["why"]
    wide = warpsmith.plan("rope", tokens=8192, q_heads=64, k_heads=8, head_dim=128, dtype=BF16)
    assert (wide["heads_a_thread"], wide["threads"]) == (4, (8, 18, 1))


@pytest.mark.parametrize(
    ("heads", "inplace", "heads_a_thread", "threads"),
    [
        ((16, 16), False, 1, (4, 16, 1)),
        ((16, 16), True, 1, (4, 32, 1)),
        ((12, 12), False, 1, (4, 24, 2)),
        ((12, 12), True, 1, (4, 24, 1)),
        ((14, 2), False, 1, (4, 16, 1)),
        ((32, 4), True, 1, (4, 36, 1)),
        ((64, 8), False, 2, (4, 36, 1)),
    ],
)
def test_the_plan_of_short_heads(heads, inplace, heads_a_thread, threads):
    given = {"tokens": 16384, "q_heads": heads[0], "k_heads": heads[1], "head_dim": 64, "inplace": inplace}
    plan = warpsmith.plan("rope", **given, dtype=BF16)
    assert (plan["heads_a_thread"], plan["threads"]) == (heads_a_thread, threads)


def test_plans_without_vectors_go_element_by_element():
    assert warpsmith.plan("rope", tokens=8, q_heads=2, head_dim=128, aligned=False)["vector_elems"] == 1
    assert warpsmith.plan("rope", tokens=8, q_heads=2, head_dim=128, rotary_dim=20)["vector_elems"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_heads", [1, 3, 32, 4000])
@pytest.mark.parametrize("head_dim", [1, 2, 64, 72, 128, 1000])
def test_every_plan_covers_its_tokens(dtype, q_heads, head_dim):
    plan = warpsmith.plan("rope", tokens=1000, q_heads=q_heads, k_heads=1, head_dim=head_dim, dtype=dtype)
    assert math.prod(plan["threads"]) <= 256
    assert plan["threads"][2] <= 64
    columns, groups, tokens = (a * b for a, b in zip(plan["threads"], reversed(plan["blocks"]), strict=True))
    assert columns * 2 * plan["vector_elems"] >= head_dim
    assert groups * plan["heads_a_thread"] >= q_heads + 1
    assert tokens >= 1000


@pytest.mark.parametrize(
    ("problem", "forward", "backward"),
    [
        ({"tokens": 16384, "q_heads": 32, "k_heads": 8, "head_dim": 128}, "registers", "ring"),
        ({"tokens": 4, "q_heads": 200, "k_heads": 1, "head_dim": 512}, "registers", "ring"),
        ({"tokens": 4, "q_heads": 2, "k_heads": 1, "head_dim": 520}, "looped", "looped"),
        ({"tokens": 4, "q_heads": 2, "k_heads": 1, "head_dim": 128, "rotary_dim": 20}, "looped", "looped"),
        ({"tokens": 4, "q_heads": 2, "k_heads": 1, "head_dim": 128, "aligned": False}, "looped", "looped"),
    ],
)
def test_plan_says_which_kernel_runs_and_why(problem, forward, backward):
    plan = warpsmith.plan("qk_norm_rope", **problem, dtype=BF16)
    assert (plan["forward"]["kernel"], plan["backward"]["kernel"]) == (forward, backward)
    assert plan["forward"]["why"]
    assert plan["partial_rows"] >= plan["backward"]["blocks"]


@pytest.mark.parametrize(
    ("heads", "head_dim", "tokens", "forward", "backward"),
    [
        ((32, 8), 128, 16384, (96, 1), (2, 480)),
        ((64, 8), 128, 8192, (160, 1), (4, 448)),
        ((64, 8), 128, 132, (160, 1), (2, 288)),
        ((16, 16), 64, 16384, (96, 3), (2, 512)),
        ((200, 8), 128, 16384, (160, 1), (4, 416)),
    ],
)
def test_plans_fill_blocks(heads, head_dim, tokens, forward, backward):
    given = {"tokens": tokens, "q_heads": heads[0], "k_heads": heads[1], "head_dim": head_dim}
    plan = warpsmith.plan("qk_norm_rope", **given, dtype=BF16)
    assert tuple(plan["forward"][k] for k in ("threads", "tokens_a_block")) == forward
    assert tuple(plan["backward"][k] for k in ("heads_a_thread", "threads")) == backward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(1, 0), (1, 1), (32, 8), (300, 7)])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128, 256, 512, 513])
def test_every_plan_covers_its_heads_and_fits_the_chip(dtype, heads, head_dim):
    given = {"tokens": 1000, "q_heads": heads[0], "k_heads": heads[1], "head_dim": head_dim, "dtype": dtype}
    plan = warpsmith.plan("qk_norm_rope", **given)
    for c in (plan["forward"], plan["backward"]):
        assert c["threads"] % 32 == 0
        assert 32 <= c["threads"] <= (512 if c is plan["backward"] else 256)
        assert c["shared_bytes"] <= 227 * 1024
        if c["kernel"] == "looped":
            continue
        assert 32 % c["threads_a_head"] == 0
        assert c["threads_a_head"] * 2 * c["vector_elems"] >= head_dim
        assert c["threads_a_token"] % c["threads_a_head"] == 0
        groups = sum(-(-h // c["heads_a_thread"]) for h in heads)
        if c["kernel"] == "ring":
            assert c["threads_a_token"] == groups * c["threads_a_head"]
            assert c["threads"] * 16 * 4 * c["stages"] <= c["shared_bytes"]
            assert c["heads_a_thread"] % c["stages"] == 0
            assert groups * c["tokens_a_block"] * head_dim * 4 <= c["shared_bytes"]
        else:
            assert c["blocks"] * c["threads"] >= 1000 * groups * c["threads_a_head"]


@pytest.mark.parametrize(
    ("change", "forward", "backward"),
    [
        ({}, True, True),
        ({"head_dim": 64}, True, True),
        ({"head_dim": 256}, False, False),
        ({"interleaved": True}, False, False),
        ({"weight_dtype": FP32}, False, True),
        ({"k_heads": 6}, False, True),
        ({"rotary_dim": 64}, False, True),
    ],
)
def test_plans_know_the_threads_of_usual_heads(change, forward, backward):
    given = {"tokens": 16384, "q_heads": 32, "k_heads": 8, "head_dim": 128, "dtype": BF16, **change}
    plan = warpsmith.plan("qk_norm_rope", **given)
    assert [plan[d]["known_threads_a_head"] for d in ("forward", "backward")] == [forward, backward]
