"""rope: the case table, and what is its own: writing in place, layouts, positions on the device, the plan."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
import warpsmith
from warpsmith.reference.rope import angles_of, rotate
from warpsmith.reference.rope import rope as reference
from warpsmith.testing import BadInput, Case, OpSpec, bitwise_equal, op_tests

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS_MORE = 5  # rows of the tables beyond the tokens of a case


def table(rows, pairs, first=0):
    """cos and sin of positions first, first + 1, ... in float64, base 10,000."""
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=FP64) / max(pairs, 1))
    angles = torch.arange(first, first + rows, dtype=FP64)[:, None] * frequencies
    return angles.cos(), angles.sin()


def inputs(case, rng):
    o = case.options
    *leading, heads, dim = case.shape
    tokens, k_heads, interleaved = leading[-1], o.get("k_heads", max(1, heads // 2)), o.get("interleaved", False)
    pairs = o.get("rotary_dim", dim // 2 * 2) // 2
    cos, sin = table(tokens + ROWS_MORE, pairs, o.get("first", 0))
    if "cos_batch" in o:  # a row for each token, as transformers makes them
        double = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
        cos, sin = (double(torch.stack([t[b : b + tokens] for b in range(o["cos_batch"])])) for t in (cos, sin))
    lengths = o.get("lengths")
    return {
        "q": rng.normal(case.shape),
        "k": rng.normal((*leading, k_heads, dim)),
        "cos": cos,
        "sin": sin,
        "interleaved": interleaved,
        "cu_seqlens": None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int(),
        "position_offset": torch.tensor(o["offsets"]) if "offsets" in o else o.get("offset", 0),
    }


def torch_rope(q, k, cos, sin, *, interleaved, cu_seqlens, position_offset):
    """Plain PyTorch in the activation's dtype, as models have it."""
    angles = [angles_of(q, t.to(q.dtype), interleaved, cu_seqlens, position_offset) for t in (cos, sin)]
    return rotate(q, *angles, interleaved), rotate(k, *angles, interleaved)


def arguments(good):
    return (
        *(good[n] for n in ("q", "k", "cos", "sin", "interleaved", "cu_seqlens")),
        None,
        good["position_offset"],
        False,
    )


def but(**changes):
    return lambda good: {**good, **{k: change(good) for k, change in changes.items()}}


WIDE = {"cos": FP32, "sin": FP32}
TURNED = {"interleaved": True}
CASES = [
    *(Case((2, 5, 4, 64), dtype, options=o) for dtype in (BF16, FP16, FP32) for o in ({}, TURNED)),
    *(Case((2, 5, 2, 6), FP64, options=o) for o in ({}, TURNED)),
    *(Case((2, 3, 4, 64), dtype, dtypes=WIDE, options=o) for dtype in (BF16, FP16) for o in ({}, TURNED)),
    *(Case((1, 3, 2, dim), BF16, options=o) for dim in (2, 16, 18, 72, 80, 96, 128, 256) for o in ({}, TURNED)),
    *(Case((1, 3, 3, dim), FP32, options=o) for dim in (4, 8, 10, 80, 128, 512) for o in ({}, TURNED)),
    *(Case((2, 3, 4, 64), d, options={"rotary_dim": r}) for d in (BF16, FP32) for r in (0, 2, 16, 20, 32, 48)),
    *(Case((2, 3, 4, 80), BF16, options={"rotary_dim": r, **TURNED}) for r in (16, 20, 32)),
    Case((2, 3, 3, 7), FP32, options={"rotary_dim": 4}),
    *(
        Case((2, 4, 4, 64), d, options={"cos_batch": n, **o})
        for d in (BF16, FP32)
        for n in (1, 2)
        for o in ({}, TURNED)
    ),
    Case((2, 4, 4, 18), FP32, options={"cos_batch": 2, **TURNED}),
    Case((4, 4, 64), BF16, options={"cos_batch": 1}),
    *(Case((12, 4, 64), d, options={"lengths": (3, 0, 1, 8)}) for d in (BF16, FP32)),
    Case((12, 4, 64), BF16, options={"lengths": (5, 7), "offsets": (3, 0)}),
    Case((12, 4, 18), FP32, options={"lengths": (12,), "offset": 2}),
    Case((9, 2, 64), BF16, options={"offset": 5}),
    Case((3, 1, 8, 128), BF16, options={"offsets": (0, 5, 2), "k_heads": 1}),
    Case((2, 3, 4, 64), FP32, options={"offsets": 3}),
    Case((1, 4, 2, 64), BF16, dtypes=WIDE, options={"first": 1_000_000}),
    Case((2, 300, 8, 64), BF16, options={"k_heads": 2}),
    Case((2, 40, 9, 128), FP32, options={"k_heads": 3}),
    Case((1, 2, 140, 128), BF16, options={"k_heads": 1}),
    Case((1, 2, 3, 1030), FP32),
]

SPEC = OpSpec(
    name="rope",
    op=warpsmith.rope,
    reference=reference,
    baseline=torch_rope,
    inputs=inputs,
    cases=CASES,
    differentiable=("q", "k"),
    outputs=("q_out", "k_out"),
    laid_out=("q", "k"),
    batched=("q", "k"),
    gradcheck_cases=[
        Case((2, 3, 2, 6), FP64),
        Case((5, 2, 7), FP64, options={"lengths": (2, 3), "rotary_dim": 4, **TURNED}),
    ],
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::rope",
    opcheck={
        torch.ops.warpsmith.rope.default: arguments,
        torch.ops.warpsmith.rope_forward.default: arguments,
        torch.ops.warpsmith.rope_inplace.default: arguments,
    },
    bad_inputs=[
        BadInput("integers", but(q=lambda g: g["q"].int()), r"q: expected float32.*got int32"),
        BadInput("matrix", but(q=lambda g: g["q"][0, 0]), r"q: expected shape \(batch, tokens, heads, head_dim\) or"),
        BadInput("k of other tokens", but(k=lambda g: g["k"][:, 1:]), "k: expected the shape of q but for its heads"),
        BadInput("k of another width", but(k=lambda g: g["k"][..., 2:]),
                 "k: expected the shape of q but for its heads"),
        BadInput("k dtype", but(k=lambda g: g["k"].float()), "k: expected bfloat16, got float32"),
        BadInput("k on meta", but(k=lambda g: g["k"].to("meta")), "k: expected a", fake=False),
        BadInput("cos dtype", but(cos=lambda g: g["cos"].half()), "cos: expected bfloat16 or float32, got float16"),
        BadInput("cos on meta", but(cos=lambda g: g["cos"].to("meta")), "cos: expected a", fake=False),
        BadInput("vector cos", but(cos=lambda g: g["cos"][0]), r"cos: expected shape \(positions, rotary_dim / 2\) or"),
        BadInput("wide cos", but(cos=lambda g: g["cos"].repeat(1, 2)),
                 "cos: expected a rotary dimension of at most 64"),
        BadInput("odd cos", but(cos=lambda g: g["cos"][None, :5, :3]), "cos: expected an even rotary dimension, got"),
        BadInput("cos of other tokens", but(cos=lambda g: g["cos"][None, :4]),
                 r"cos: expected shape \(2 or 1, 5, rotary_dim\), got \(1, 4, 32\)"),
        BadInput("sin shape", but(sin=lambda g: g["sin"][1:]), r"sin: expected shape \(10, 32\), got \(9, 32\)"),
        BadInput("sin dtype", but(sin=lambda g: g["sin"].float()), "sin: expected bfloat16, got float32"),
        BadInput("cos with a gradient", but(cos=lambda g: g["cos"].clone().requires_grad_()),
                 "cos: expected a tensor that requires no gradient", fake=False),
        BadInput("packed batch", but(cu_seqlens=lambda g: torch.zeros(2, dtype=torch.int32, device=g["q"].device)),
                 r"q: expected shape \(tokens, heads, head_dim\) beside cu_seqlens"),
        BadInput("offset beside rows for each token",
                 but(cos=lambda g: g["cos"][None, :5], sin=lambda g: g["sin"][None, :5], position_offset=lambda g: 1),
                 "position_offset: expected 0 beside cos of a row for each token, got 1"),
        BadInput("float offsets", but(position_offset=lambda g: torch.zeros(2, device=g["q"].device)),
                 "position_offset: expected int32 or int64, got (float32|Float)"),
        BadInput("offsets of another batch", but(position_offset=lambda g: torch.arange(3, device=g["q"].device)),
                 r"position_offset: expected shape \(\) or \(2\), got \(3\)"),
        BadInput("fractional offset", but(position_offset=lambda g: 0.5),
                 "position_offset: expected an integer or a tensor of integers, got float"),
        BadInput("positions beyond the table", but(position_offset=lambda g: 6),
                 "position_offset: expected positions from 0 to 9, the rows of cos, got 5 from 6", fake=False),
        BadInput("positions beyond all tables", but(position_offset=lambda g: 2**63 - 2),
                 "position_offset: expected .*got 5 from 9223372036854775806", fake=False),
        BadInput("positions below 0", but(position_offset=lambda g: -1),
                 "position_offset: expected positions from 0 to 9, the rows of cos, got 5 from -1", fake=False),
        BadInput("offsets beyond the table", but(position_offset=lambda g: torch.tensor([0, 6])),
                 "position_offset: expected .*got 5 from 6 in batch entry 1", fake=False, devices=("cpu",)),
        BadInput("float64", but(**{n: lambda g, n=n: g[n].double() for n in ("q", "k", "cos", "sin")}),
                 "q: expected float32, float16 or bfloat16 on CUDA, got float64", fake=False, devices=("cuda",)),
    ],
    floor_bytes=lambda case: dict.fromkeys(("forward", "backward"), 2 * case.dtype.itemsize * sum(
        torch.Size((*case.shape[:-2], h, case.shape[-1])).numel()
        for h in (case.shape[-2], case.options.get("k_heads", max(1, case.shape[-2] // 2))))),
)  # fmt: skip

TestRope = op_tests(SPEC)


def problem(dtype=FP32, tokens=6, dim=32, q_heads=4, k_heads=2):
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, tokens, h, dim, generator=g, dtype=FP64).to(dtype) for h in (q_heads, k_heads))
    cos, sin = (t.to(dtype) for t in table(tokens + ROWS_MORE, dim // 2))
    return q, k, cos, sin


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_in_place_writes_the_same_bits(interleaved, rotary_dim):
    q, k, cos, sin = problem(BF16)
    cos, sin = cos[:, : rotary_dim // 2], sin[:, : rotary_dim // 2]
    expected = warpsmith.rope(q, k, cos, sin, interleaved=interleaved)
    versions = q._version, k._version
    written = warpsmith.rope(q, k, cos, sin, interleaved=interleaved, inplace=True)
    assert written[0] is q
    assert written[1] is k
    assert all(bitwise_equal(a, b) for a, b in zip(written, expected, strict=True))
    assert q._version > versions[0]
    assert k._version > versions[1]


def fused_qkv(inplace):
    """A projection, rope of the views of its output, and something of all three: the gradient of the projection."""
    q, k, cos, sin = problem()
    x = torch.cat((q, k, k), 2).flatten(2).requires_grad_()
    heads = (x * 1.5).unflatten(-1, (8, 32))
    q, k, v = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
    q, k = warpsmith.rope(q, k, cos, sin, inplace=inplace)
    (q.square().sum() + (k * v).sin().sum()).backward()
    return x.grad


def test_gradients_through_views_that_were_written_in_place():
    assert bitwise_equal(fused_qkv(inplace=True), fused_qkv(inplace=False))


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
def test_what_must_not_be_written_in_place_is_named_and_unchanged(change, message):
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
    """Whatever strides an empty tensor has: those of ``x * 1`` may be 0."""
    q = torch.empty_strided(shape, (0, 0, 0, 2))
    k = torch.zeros(*shape[:2], 1, 8)
    cos = torch.ones(5, 4)
    written, _ = warpsmith.rope(q, k, cos, torch.zeros_like(cos), inplace=True)
    assert written is q


def test_keys_may_be_absent():
    q, k, cos, sin = problem()
    for inplace in (False, True):
        alone = warpsmith.rope(q.clone(), None, cos, sin, inplace=inplace)
        assert alone[1] is None
        assert bitwise_equal(alone[0], warpsmith.rope(q, k, cos, sin)[0])


def test_outputs_lie_as_the_inputs_do():
    q, k, cos, sin = problem()
    expected = warpsmith.rope(q, k, cos, sin)
    head_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
    for got, want in zip(warpsmith.rope(*head_major, cos, sin), expected, strict=True):
        assert got.transpose(1, 2).is_contiguous()
        assert bitwise_equal(got, want)
    fused = torch.cat((q, k, k), 2)
    for got, want in zip(warpsmith.rope(fused[:, :, :4], fused[:, :, 4:6], cos, sin), expected, strict=True):
        assert got.is_contiguous()
        assert bitwise_equal(got, want)


def test_a_table_equals_rows_for_each_token():
    q, k, cos, sin = problem(BF16)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]])
    for interleaved in (False, True):
        expected = warpsmith.rope(q, k, cos, sin, interleaved=interleaved, position_offset=torch.tensor([0, 4]))
        rows = [t[ids].repeat_interleave(2, -1) if interleaved else torch.cat((t[ids],) * 2, -1) for t in (cos, sin)]
        got = warpsmith.rope(q, k, *rows, interleaved=interleaved)
        assert all(bitwise_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([1, 6], "cu_seqlens: expected 0 first, got 1"),
        ([0, 4, 3, 6], "cu_seqlens: expected ascending values, got 4 before 3"),
        ([0, 5], "cu_seqlens: expected the number of tokens last, 6, got 5"),
        ([6], r"cu_seqlens: expected shape \(sequences \+ 1\), got \(1\)"),
    ],
)
def test_bad_sequences_are_named(cu_seqlens, message):
    q, k, cos, sin = problem()
    with pytest.raises(ValueError, match=f"^rope: {message}"):
        warpsmith.rope(q[0], k[0], cos, sin, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))
    with pytest.raises(ValueError, match="^rope: cu_seqlens: expected int32, got int64"):
        warpsmith.rope(q[0], k[0], cos, sin, cu_seqlens=torch.tensor([0, 6]))


def test_positions_of_a_sequence_beyond_the_table_are_named():
    q, k, cos, sin = problem()
    with pytest.raises(ValueError, match="^rope: position_offset: expected .* got 3 from 3 in sequence 1"):
        warpsmith.rope(q[0], k[0], cos[:5], sin[:5], cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32),
                       position_offset=torch.tensor([0, 3]))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_that_the_host_does_not_know_become_nan(interleaved):
    q, k, cos, sin = (t.cuda() for t in problem(BF16, dim=64))
    cos, sin = cos[:6, :16], sin[:6, :16]
    offsets = torch.tensor([0, 3], device="cuda")
    got = warpsmith.rope(q, k, cos, sin, interleaved=interleaved, position_offset=offsets)
    for x, y in zip((q, k), got, strict=True):
        assert bool(y[1, 3:, :, :32].isnan().all())
        assert not bool(y[0].isnan().any() or y[1, :3].isnan().any())
        assert bitwise_equal(y[..., 32:], x[..., 32:])
    packed = warpsmith.rope(q[0], None, cos, sin, cu_seqlens=torch.tensor([1, 4], dtype=torch.int32, device="cuda"))[0]
    assert packed[..., :32].isnan().any(-1).any(-1).tolist() == [True, False, False, False, True, True]


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
