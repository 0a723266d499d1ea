"""qk_norm_rope: the case table, the parts against each other, the plan."""

from __future__ import annotations

import pytest
import torch
import warpsmith
from warpsmith.reference.qk_norm_rope import normalised
from warpsmith.reference.qk_norm_rope import qk_norm_rope as reference
from warpsmith.reference.rope import angles_of, rotate
from warpsmith.testing import BadInput, Case, OpSpec, bitwise_equal, op_tests

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 1e-6
ROWS_MORE = 5  # rows of the tables beyond the tokens of a case


def table(rows, pairs):
    """cos and sin of positions 0, 1, ... in float64, base 10,000."""
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=FP64) / max(pairs, 1))
    angles = torch.arange(rows, dtype=FP64)[:, None] * frequencies
    return angles.cos(), angles.sin()


def inputs(case, rng):
    o = case.options
    *leading, heads, dim = case.shape
    tokens, k_heads, interleaved = leading[-1], o.get("k_heads", max(1, heads // 2)), o.get("interleaved", False)
    cos, sin = table(tokens + ROWS_MORE, o.get("rotary_dim", dim // 2 * 2) // 2)
    if "cos_batch" in o:  # a row for each token, as transformers makes them
        double = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
        cos, sin = (double(torch.stack([t[b : b + tokens] for b in range(o["cos_batch"])])) for t in (cos, sin))
    lengths = o.get("lengths")
    return {
        "q": rng.normal(case.shape),
        "k": rng.normal((*leading, k_heads, dim)),
        "q_weight": rng.normal((dim,), mean=1.0, std=0.3),
        "k_weight": rng.normal((dim,), mean=1.0, std=0.3),
        "cos": cos,
        "sin": sin,
        "eps": EPS,
        "interleaved": interleaved,
        "cu_seqlens": None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int(),
        "position_offset": torch.tensor(o["offsets"]) if "offsets" in o else o.get("offset", 0),
    }


def torch_qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps, interleaved, cu_seqlens, position_offset):
    """Plain PyTorch as models have it: the norm in float32, its result and the rotation in the activation's dtype."""

    def one(x, weight):
        wide = torch.promote_types(x.dtype, FP32)
        x = normalised(x.to(wide), weight.to(wide), eps).to(x.dtype)
        angles = [angles_of(q, t.to(x.dtype), interleaved, cu_seqlens, position_offset) for t in (cos, sin)]
        return rotate(x, *angles, interleaved)

    return one(q, q_weight), one(k, k_weight)


NAMES = ("q", "k", "q_weight", "k_weight", "cos", "sin", "eps", "interleaved", "cu_seqlens")


def arguments(good):
    return *(good[n] for n in NAMES), None, good["position_offset"]


def backward_arguments(good):
    return torch.ones_like(good["q"]), torch.ones_like(good["k"]), *arguments(good), True, True, True, True


def but(**changes):
    return lambda good: {**good, **{k: change(good) for k, change in changes.items()}}


WIDE_WEIGHTS = {"q_weight": FP32, "k_weight": FP32}
WIDE_ANGLES = {"cos": FP32, "sin": FP32}
TURNED = {"interleaved": True}
CASES = [
    *(Case((2, 5, 4, 64), dtype, options=o) for dtype in (BF16, FP16, FP32) for o in ({}, TURNED)),
    *(Case((2, 5, 2, 6), FP64, options=o) for o in ({}, TURNED)),
    *(Case((2, 3, 4, 64), d, dtypes=w) for d in (BF16, FP16) for w in (WIDE_WEIGHTS, WIDE_ANGLES)),
    *(Case((2, 3, 4, 18), d, dtypes={**WIDE_WEIGHTS, **WIDE_ANGLES}, options=TURNED) for d in (BF16, FP16)),
    *(Case((1, 3, 2, dim), BF16, options=o) for dim in (2, 16, 18, 72, 80, 96, 128, 256, 512) for o in ({}, TURNED)),
    *(Case((1, 3, 3, dim), FP32, options=o) for dim in (1, 4, 8, 10, 80, 128, 256) for o in ({}, TURNED)),
    *(Case((2, 3, 4, 64), d, options={"rotary_dim": r}) for d in (BF16, FP32) for r in (0, 16, 20, 48)),
    Case((2, 3, 4, 80), BF16, options={"rotary_dim": 32, **TURNED}),
    Case((2, 3, 3, 7), FP32, options={"rotary_dim": 4}),
    *(Case((2, 4, 4, 64), BF16, options={"cos_batch": n, **o}) for n in (1, 2) for o in ({}, TURNED)),
    Case((12, 4, 64), BF16, options={"lengths": (3, 0, 1, 8), "offsets": (0, 1, 2, 3)}),
    Case((12, 4, 18), FP32, options={"lengths": (5, 7)}),
    Case((3, 1, 8, 128), BF16, options={"offsets": (0, 5, 2), "k_heads": 1}),
    Case((2, 300, 8, 64), BF16, options={"k_heads": 2}),
    Case((2, 40, 9, 128), FP32, options={"k_heads": 3}),
    Case((1, 2, 70, 128), BF16, options={"k_heads": 1}),
    Case((1, 2, 3, 1030), FP32),
    Case((1, 40, 3, 520), BF16),
]

SPEC = OpSpec(
    name="qk_norm_rope",
    op=warpsmith.qk_norm_rope,
    reference=reference,
    baseline=torch_qk_norm_rope,
    inputs=inputs,
    cases=CASES,
    differentiable=("q", "k", "q_weight", "k_weight"),
    outputs=("q_out", "k_out"),
    laid_out=("q", "k"),
    batched=("q", "k"),
    gradcheck_cases=[
        Case((2, 2, 2, 4), FP64),
        Case((3, 1, 5), FP64, options={"lengths": (2, 1), "rotary_dim": 4, **TURNED}),
    ],
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::qk_norm_rope",
    opcheck={
        torch.ops.warpsmith.qk_norm_rope.default: arguments,
        torch.ops.warpsmith.qk_norm_rope_forward.default: arguments,
        torch.ops.warpsmith.qk_norm_rope_backward.default: backward_arguments,
    },
    bad_inputs=[
        BadInput("integers", but(q=lambda g: g["q"].int()), r"q: expected float32.*got int32"),
        BadInput("matrix", but(q=lambda g: g["q"][0, 0]), r"q: expected shape \(batch, tokens, heads, head_dim\) or"),
        BadInput("k of other tokens", but(k=lambda g: g["k"][:, 1:]), "k: expected the shape of q but for its heads"),
        BadInput("short weight", but(q_weight=lambda g: g["q_weight"][1:]), r"q_weight: expected shape \(64\), got"),
        BadInput("matrix weight", but(k_weight=lambda g: g["k_weight"][None]), r"k_weight: expected shape \(64\), got"),
        BadInput("weight dtype", but(q_weight=lambda g: g["q_weight"].half()),
                 "q_weight: expected bfloat16 or float32, got float16"),
        BadInput("two weight dtypes", but(k_weight=lambda g: g["k_weight"].float()),
                 "k_weight: expected bfloat16, got float32"),
        BadInput("weight on meta", but(k_weight=lambda g: g["k_weight"].to("meta")), "k_weight: expected a",
                 fake=False),
        BadInput("cos dtype", but(cos=lambda g: g["cos"].half()), "cos: expected bfloat16 or float32, got float16"),
        BadInput("wide cos", but(cos=lambda g: g["cos"].repeat(1, 2)),
                 "cos: expected a rotary dimension of at most 64"),
        BadInput("sin shape", but(sin=lambda g: g["sin"][1:]), r"sin: expected shape \(10, 32\), got \(9, 32\)"),
        BadInput("sin with a gradient", but(sin=lambda g: g["sin"].clone().requires_grad_()),
                 "sin: expected a tensor that requires no gradient", fake=False),
        BadInput("negative eps", but(eps=lambda g: -1.0), r"eps: expected a number >= 0, got -1", fake=False),
        BadInput("nan eps", but(eps=lambda g: float("nan")), r"eps: expected a number >= 0, got nan", fake=False),
        BadInput("positions beyond the table", but(position_offset=lambda g: 6),
                 "position_offset: expected positions from 0 to 9, the rows of cos, got 5 from 6", fake=False),
        BadInput("offsets beyond the table", but(position_offset=lambda g: torch.tensor([0, 6])),
                 "position_offset: expected .*got 5 from 6 in batch entry 1", fake=False, devices=("cpu",)),
    ],
    floor_bytes=lambda case: {direction: factor * case.dtype.itemsize * sum(
        torch.Size((*case.shape[:-2], h, case.shape[-1])).numel()
        for h in (case.shape[-2], case.options.get("k_heads", max(1, case.shape[-2] // 2))))
        for direction, factor in (("forward", 2), ("backward", 3))},
)  # fmt: skip

TestQkNormRope = op_tests(SPEC)


def problem(dtype=FP32, tokens=6, dim=32):
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, tokens, h, dim, generator=g, dtype=FP64).to(dtype) for h in (4, 2))
    weights = [(1 + 0.3 * torch.randn(dim, generator=g, dtype=FP64)).to(dtype) for _ in range(2)]
    return q, k, *weights, *(t.to(dtype) for t in table(tokens + ROWS_MORE, dim // 2))


def test_equals_rms_norm_and_rope_one_after_the_other():
    q, k, q_weight, k_weight, cos, sin = problem()
    heads = warpsmith.rms_norm(q, q_weight, EPS), warpsmith.rms_norm(k, k_weight, EPS)
    torch.testing.assert_close(
        warpsmith.qk_norm_rope(q, k, q_weight, k_weight, cos, sin), warpsmith.rope(*heads, cos, sin)
    )


@pytest.mark.parametrize("which", [0, 1])
def test_one_output_alone_has_the_gradients_of_its_own_inputs(which):
    leaves = [t.requires_grad_() for t in problem()[:4]]
    cos, sin = problem()[4:]
    outputs = warpsmith.qk_norm_rope(*leaves, cos, sin)
    grads = [torch.ones_like(y) for y in outputs]
    together = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    alone = torch.autograd.grad(outputs[which], leaves, grads[which], allow_unused=True)
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        if i % 2 == which:
            assert bitwise_equal(a, b)
        else:
            assert a is None


def test_outputs_and_gradients_lie_as_the_inputs_do():
    q, k, *others = problem()
    head_major = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k)]
    outputs = warpsmith.qk_norm_rope(*head_major, *others)
    for y in (*outputs, *torch.autograd.grad(outputs, head_major, outputs)):
        assert y.transpose(1, 2).is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_positions_that_the_host_does_not_know_become_nan():
    q, k, q_weight, k_weight, cos, sin = (t.cuda() for t in problem(BF16, dim=64))
    offsets = torch.tensor([0, 3], device="cuda")
    for y in warpsmith.qk_norm_rope(q, k, q_weight, k_weight, cos[:6], sin[:6], position_offset=offsets):
        assert bool(y[1, 3:].isnan().all())
        assert not bool(y[0].isnan().any() or y[1, :3].isnan().any())


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
def test_plan_fills_blocks(heads, head_dim, tokens, forward, backward):
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
