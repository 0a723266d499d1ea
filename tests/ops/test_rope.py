"""rope and qk_norm_rope: the case tables, and what is their own: layouts and positions."""

import pytest
import torch
import warpsmith
from warpsmith.reference.rope import angles_of, normalised, rotate
from warpsmith.testing import LAYOUTS, BadInput, Case, bitwise_equal, lay_out, op_tests, sim
from warpsmith.testing.sim import is_loaded

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, op_spec, raw_ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Where ops run by their kernels, which know what the host does not.
KERNELS = ["cpu"] if is_loaded() else [pytest.param("cuda", marks=pytest.mark.gpu)]
OPS = torch.ops.warpsmith
EPS = 1e-6
ROWS_MORE = 5  # rows of the tables beyond the tokens of a case


def table(rows, pairs, first=0):
    """cos and sin of positions first, first + 1, ... in float64, base 10,000."""
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=FP64) / max(pairs, 1))
    angles = torch.arange(first, first + rows, dtype=FP64)[:, None] * frequencies
    return angles.cos(), angles.sin()


def inputs(case, rng, weights=()):
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
        **{name: rng.normal((dim,), mean=1.0, std=0.3) for name in weights},
        "cos": cos,
        "sin": sin,
        **({"eps": EPS} if weights else {}),
        "interleaved": interleaved,
        "cu_seqlens": None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int(),
        "position_offset": torch.tensor(o["offsets"], dtype=o.get("index")) if "offsets" in o else o.get("offset", 0),
    }


def torch_rope(q, k, cos, sin, *, interleaved, cu_seqlens, position_offset):
    """Plain PyTorch in the activation's dtype, as models have it."""
    angles = [angles_of(q, t.to(q.dtype), interleaved, cu_seqlens, position_offset) for t in (cos, sin)]
    return rotate(q, *angles, interleaved), rotate(k, *angles, interleaved)


def torch_qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps, interleaved, cu_seqlens, position_offset):
    """Plain PyTorch as models have it: the norm in float32, its result and the rotation in the activation's dtype."""

    def one(x, weight):
        wide = torch.promote_types(x.dtype, FP32)
        x = normalised(x.to(wide), weight.to(wide), eps).to(x.dtype)
        angles = [angles_of(q, t.to(x.dtype), interleaved, cu_seqlens, position_offset) for t in (cos, sin)]
        return rotate(x, *angles, interleaved)

    return one(q, q_weight), one(k, k_weight)


def moved(case, elements):
    """``elements`` for each of q and k."""
    heads = case.shape[-2] + case.options.get("k_heads", max(1, case.shape[-2] // 2))
    return elements * case.dtype.itemsize * torch.Size((*case.shape[:-2], heads, case.shape[-1])).numel()


def problem_of(case, inputs):
    q, k = inputs["q"], inputs["k"]
    heads = {"q_heads": q.shape[-2], "k_heads": k.shape[-2], "head_dim": q.shape[-1]}
    pairs = 2 if "cos_batch" not in case.options else 1
    found = {"tokens": q.shape[:-2].numel(), **heads, "rotary_dim": pairs * inputs["cos"].shape[-1]}
    return {**found, "dtype": str(case.dtype).removeprefix("torch.")}


def groups_of(problem, heads):
    """Groups of so many heads of q, and of k."""
    return -(-problem["q_heads"] // heads) - (-problem["k_heads"] // heads)


def has_a_formula(case):
    """Whether `norm_beside` is for a case: all heads are made of vectors, and some of each is rotated."""
    options, dtype = case.options, str(case.dtype).removeprefix("torch.")
    rotary_dim = options.get("rotary_dim", case.shape[-1] // 2 * 2)
    if {"lengths", "offsets"} & {*options} or rotary_dim == 0 or case.dtype == FP64:
        return False
    problem = {"tokens": 1, "q_heads": 1, "head_dim": case.shape[-1], "rotary_dim": rotary_dim, "dtype": dtype}
    return sim.plan("qk_norm_rope", **problem)["forward"]["kernel"] != "looped"


def rope_beside(case, inputs):
    """cos and sin of a token once for each of its groups of heads."""
    problem = problem_of(case, inputs)
    groups = groups_of(problem, sim.plan("rope", **problem)["heads_a_thread"])
    angles = problem["tokens"] * groups * problem["rotary_dim"] * case.dtype.itemsize
    return {"forward": (angles, 0), "backward": (angles, 0)}


def norm_beside(case, inputs):
    """Angles and weights once for each group of heads, the weights of the backward once a thread; partial sums, written
    and read, and the weights' gradients."""
    problem = problem_of(case, inputs)
    if "interleaved" in case.options:
        problem["interleaved"] = True
    plan = sim.plan("qk_norm_rope", **problem)
    forward, backward = plan["forward"], plan["backward"]
    size, tokens, weight = case.dtype.itemsize, problem["tokens"], problem["head_dim"] * case.dtype.itemsize
    angles = tokens * problem["rotary_dim"] * size
    groups, back = (groups_of(problem, c["heads_a_thread"]) for c in (forward, backward))
    partials = plan["partial_rows"] * 2 * problem["head_dim"] * 4
    places = backward["blocks"] * backward["tokens_a_block"] * back * weight
    read = groups * (tokens * weight + angles)
    return {"forward": (read, 0), "backward": (places + back * angles + partials, partials + 2 * weight)}


WEIGHTS = ("q_weight", "k_weight")
WIDE = {"cos": FP32, "sin": FP32}
WIDE_WEIGHTS = dict.fromkeys(WEIGHTS, FP32)
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
    *(Case((2, 3, 4, dim), FP32, options={"offsets": (5, 2), "index": torch.int32}) for dim in (64, 20)),
    *(
        Case((11, 2, 64), BF16, options={"lengths": (0, 3, 0, 1, 7), "offsets": (9, 1, 9, 4, 0), "index": index})
        for index in (torch.int32, torch.int64)
    ),
    # Several tokens for a block, and several turns of a small machine's blocks: of one batch entry, or of many a turn.
    *(
        Case((*(leading if one else leading[::-1]), heads, dim), d, options={"k_heads": 2})
        for leading, heads, dim, d in (((1, 250), 4, 16, BF16), ((1, 40), 5, 80, BF16), ((1, 150), 5, 20, FP32))
        for one in (True, False)
    ),
    *(Case((1, 2, heads, 64), BF16, options={"k_heads": k}) for heads in (1, 32, 70) for k in (1, 8)),
    Case((1, 4, 2, 64), BF16, dtypes=WIDE, options={"first": 1_000_000}),
    Case((2, 300, 8, 64), BF16, options={"k_heads": 2}),
    Case((2, 40, 9, 128), FP32, options={"k_heads": 3}),
    Case((1, 2, 140, 128), BF16, options={"k_heads": 1}),
    Case((1, 2, 3, 1030), FP32),
]
NORM_CASES = [
    *(Case((2, 3, 4, 64), d, dtypes=WIDE_WEIGHTS) for d in (BF16, FP16)),
    *(Case((2, 3, 4, 18), d, dtypes={**WIDE_WEIGHTS, **WIDE}, options=TURNED) for d in (BF16, FP16)),
    *(Case((1, 3, 2, 512), BF16, options=o) for o in ({}, TURNED)),
    *(Case((1, 3, 3, dim), FP32, options=o) for dim in (1, 256) for o in ({}, TURNED)),
    Case((1, 40, 3, 520), BF16),
]
BAD_INPUTS = [
    BadInput("matrix", but(q=lambda g: g["q"][0, 0]), r"q: expected shape \(batch, tokens, heads, head_dim\) or"),
    BadInput("k of other tokens", but(k=lambda g: g["k"][:, 1:]), "k: expected the shape of q but for its heads"),
    BadInput("k of another width", but(k=lambda g: g["k"][..., 2:]),
             "k: expected the shape of q but for its heads"),
    BadInput("vector cos", but(cos=lambda g: g["cos"][0]), r"cos: expected shape \(positions, rotary_dim / 2\) or"),
    BadInput("wide cos", but(cos=lambda g: g["cos"].repeat(1, 2)),
             "cos: expected a rotary dimension of at most 64"),
    BadInput("odd cos", but(cos=lambda g: g["cos"][None, :5, :3]), "cos: expected an even rotary dimension, got"),
    BadInput("cos of other tokens", but(cos=lambda g: g["cos"][None, :4]),
             r"cos: expected shape \(2 or 1, 5, rotary_dim\), got \(1, 4, 32\)"),
    BadInput("cos with a gradient", but(cos=lambda g: g["cos"].clone().requires_grad_()),
             "cos: expected a tensor that requires no gradient", fake=False),
    BadInput("packed batch", but(cu_seqlens=lambda g: torch.zeros(2, dtype=torch.int32, device=g["q"].device)),
             r"q: expected shape \(tokens, heads, head_dim\) beside cu_seqlens"),
    BadInput("offset beside rows for each token",
             but(cos=lambda g: g["cos"][None, :5], sin=lambda g: g["sin"][None, :5], position_offset=lambda g: 1),
             "position_offset: expected 0 beside cos of a row for each token, got 1"),
    BadInput("positions beyond the table", but(position_offset=lambda g: 6),
             "position_offset: expected positions from 0 to 9, the rows of cos, got 5 from 6", fake=False),
    BadInput("offsets beyond the table", but(position_offset=lambda g: torch.tensor([0, 6])),
             "position_offset: expected .*got 5 from 6 in batch entry 1", fake=False, devices=("cpu",)),
    NO_FLOAT64_ON_CUDA,
]  # fmt: skip


def fitting(draw, st, case):
    """What options count stays as it is. A norm of one to three elements leaves rounding alone of a gradient."""
    *leading, heads, dim = case.shape
    dim = max(4, dim)
    options = {**case.options}
    counting = {"lengths", "cos_batch", "offsets"}
    if name := next(iter(options.keys() & counting), None):
        line = next(c for c in (*CASES, *NORM_CASES) if c.options.get(name) == options[name])
        leading = line.shape[:-2]
        options = {n: v for n, v in options.items() if n not in counting}
        options |= {n: v for n, v in line.options.items() if n in counting}
    if "rotary_dim" in options:
        options["rotary_dim"] = 2 * draw(st.integers(0, dim // 2))
    return case.but(shape=(*leading, heads, dim), options=options)


BOTH = {
    "redraw": fitting,
    "repeated_cases": [Case((2, 300, 3, 64), FP32)],  # of which CPU threads share the tokens
    "random_cases": 1000,
    "outputs": ("q_out", "k_out"),
    "laid_out": ("q", "k"),
    "batched": ("q", "k"),
    "double_backward": True,
    "func_transforms": True,
}
TestRope = op_tests(
    op_spec(
        name="rope",
        baseline=torch_rope,
        inputs=inputs,
        cases=CASES,
        differentiable=("q", "k"),
        gradcheck_cases=[
            Case((2, 3, 2, 6), FP64),
            Case((5, 2, 7), FP64, options={"lengths": (2, 3), "rotary_dim": 4, **TURNED}),
        ],
        opcheck=raw_ops("rope", "_inplace"),
        bad_inputs=BAD_INPUTS,
        floor_bytes=lambda case: {"forward": moved(case, 2), "backward": moved(case, 2)},
        bytes_beside=rope_beside,
        bytes_cases=[c for c in CASES if not {"lengths", "offsets"} & {*c.options}],
        **BOTH,
    )
)
TestQkNormRope = op_tests(
    op_spec(
        name="qk_norm_rope",
        baseline=torch_qk_norm_rope,
        inputs=lambda case, rng: inputs(case, rng, WEIGHTS),
        cases=[*CASES, *NORM_CASES],
        differentiable=("q", "k", *WEIGHTS),
        gradcheck_cases=[
            Case((2, 2, 2, 4), FP64),
            Case((3, 1, 5), FP64, options={"lengths": (2, 1), "rotary_dim": 4, **TURNED}),
        ],
        bad_inputs=BAD_INPUTS,
        floor_bytes=lambda case: {"forward": moved(case, 2), "backward": moved(case, 3)},
        bytes_beside=norm_beside,
        bytes_cases=[*filter(has_a_formula, (*CASES, *NORM_CASES))],
        **BOTH,
    )
)


def problem(dtype=FP32, tokens=6, dim=32, q_heads=4, k_heads=2):
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, tokens, h, dim, generator=g, dtype=FP64).to(dtype) for h in (q_heads, k_heads))
    return q, k, *(t.to(dtype) for t in table(tokens + ROWS_MORE, dim // 2))


def norm_problem(dtype=FP32, dim=32):
    q, k, *angles = problem(dtype, dim=dim)
    g = torch.Generator().manual_seed(4)
    weights = [(1 + 0.3 * torch.randn(dim, generator=g, dtype=FP64)).to(dtype) for _ in WEIGHTS]
    return q, k, *weights, *angles


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


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_offsets_and_sequences_in_any_layout(layout, index):
    """Beside the law, which lays out floating tensors alone. An offset may stand for all sequences (stride 0)."""
    q, k, q_weight, k_weight, cos, sin = norm_problem()
    offsets, ends = torch.tensor([4, 1], dtype=index), torch.tensor([0, 2, 6], dtype=torch.int32)
    plain = offsets[:1].repeat(2) if layout == "expanded" else offsets
    for heads, options in (((q, k), {}), ((q[0], k[0]), {"cu_seqlens": ends})):
        odd = {n: lay_out(t, "every_second") for n, t in options.items()} | {"position_offset": lay_out(plain, layout)}
        for op, weights in ((warpsmith.rope, ()), (warpsmith.qk_norm_rope, (q_weight, k_weight))):
            expected = op(*heads, *weights, cos, sin, position_offset=plain, **options)
            assert all(map(bitwise_equal, op(*heads, *weights, cos, sin, **odd), expected))


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


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_that_the_host_does_not_know_become_nan(interleaved, device):
    q, k, cos, sin = (t.to(device) for t in problem(BF16, dim=64))
    cos, sin = cos[:6, :16], sin[:6, :16]
    offsets = torch.tensor([0, 3], device=device)
    got = warpsmith.rope(q, k, cos, sin, interleaved=interleaved, position_offset=offsets)
    for x, y in zip((q, k), got, strict=True):
        assert bool(y[1, 3:, :, :32].isnan().all())
        assert not bool(y[0].isnan().any() or y[1, :3].isnan().any())
        assert bitwise_equal(y[..., 32:], x[..., 32:])
    for far in ([2, -1], [2**63 - 1, -(2**63)]):
        y = warpsmith.rope(q, None, cos, sin, interleaved=interleaved, position_offset=torch.tensor(far, device=device))
        assert bool(y[0][1, 0, :, :32].isnan().all()) and bitwise_equal(y[0][..., 32:], q[..., 32:])
    packed = warpsmith.rope(q[0], None, cos, sin, cu_seqlens=torch.tensor([1, 4], dtype=torch.int32, device=device))[0]
    assert packed[..., :32].isnan().any(-1).any(-1).tolist() == [True, False, False, False, True, True]


def test_normalised_outputs_and_gradients_lie_as_the_inputs_do():
    q, k, *others = norm_problem()
    head_major = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k)]
    outputs = warpsmith.qk_norm_rope(*head_major, *others)
    for y in (*outputs, *torch.autograd.grad(outputs, head_major, outputs)):
        assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", KERNELS)
def test_normalised_positions_unknown_to_the_host_become_nan(device):
    q, k, q_weight, k_weight, cos, sin = (t.to(device) for t in norm_problem(BF16, dim=64))
    offsets = torch.tensor([0, 3], device=device)
    for y in warpsmith.qk_norm_rope(q, k, q_weight, k_weight, cos[:6], sin[:6], position_offset=offsets):
        assert bool(y[1, 3:].isnan().all())
        assert not bool(y[0].isnan().any() or y[1, :3].isnan().any())


@pytest.mark.parametrize("device", KERNELS)
def test_sequences_out_of_order_reach_nothing_else(device):
    """They mean nothing, and give the same bits under each schedule."""
    q, k, cos, sin = (t.to(device) for t in problem())
    ends = torch.tensor([5, -3, 100, 4, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    first, again = (warpsmith.rope(q[0], k[0], cos[:2], sin[:2], cu_seqlens=ends) for _ in range(2))
    assert all(map(bitwise_equal, first, again))
