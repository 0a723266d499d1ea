"""attention_varlen: the case table, documents against each other, offsets that are wrong."""

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention_varlen as reference
from warpsmith.testing import BadInput, Case, OpSpec, bitwise_equal, op_tests
from warpsmith.testing.sim import is_loaded

from tests.ops.attention_cases import BF16, FP16, FP32, FP64, OF_BOTH, SEED, SLOPES, parameters, same_dtype, with_mask
from tests.ops.public_calls import but, raw_ops


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(case, rng):
    """The shape of a case is that of q; lengths, lengths_k (default: lengths), rest, k_heads and dim_v are options."""
    o = case.options
    tokens, heads, dim = case.shape
    lengths = o.get("lengths", (tokens,))
    lengths_k = o.get("lengths_k", lengths)
    assert tokens == sum(lengths) + o.get("rest", 0)
    tokens_k, k_heads = sum(lengths_k) + o.get("rest", 0), o.get("k_heads", heads)
    longest, longest_k = max(lengths), max(lengths_k)
    return {
        "q": rng.normal(case.shape),
        "k": rng.normal((tokens_k, k_heads, dim)),
        "v": rng.normal((tokens_k, k_heads, o.get("dim_v", dim))),
        "cu_seqlens_q": offsets(lengths),
        "cu_seqlens_k": offsets(lengths_k),
        "max_seqlen_q": longest,
        "max_seqlen_k": longest_k,
        "return_lse": True,
        **parameters(case, rng, len(lengths), heads, longest, longest_k),
    }


CAUSAL = {"causal": True}
TWO = {"lengths": (20, 13)}
CASES = [
    *(Case((33, 4, 64), dtype, options={**TWO, **o}) for dtype in (BF16, FP16, FP32) for o in ({}, CAUSAL)),
    *(Case((10, 2, 8), FP64, options={"lengths": (3, 0, 7), **o}) for o in ({}, CAUSAL)),
    *(Case((180, 2, 32), d, options={"lengths": (1, 64, 0, 65, 50), **o}) for d in (FP32, BF16)
      for o in ({}, CAUSAL, {"k_heads": 1}, {"window_size": (20, 4)})),
    *(Case((100, 2, 32), d, options={"lengths": (30, 0, 1, 69), "lengths_k": (10, 5, 80, 70), **o})
      for d in (FP32, BF16) for o in ({}, CAUSAL, {"causal": True, "causal_align": "top_left"})),
    *(Case((100, 2, 32), d, options={"lengths": (30, 50), "rest": 20, **CAUSAL}) for d in (FP32, BF16)),
    Case((40, 2, 192), BF16, options={"lengths": (30, 10), "dim_v": 128, **CAUSAL}),
    Case((40, 2, 72), BF16, options={"lengths": (30, 10), "lengths_k": (20, 280), "dim_v": 128, "causal": True,
                                     "causal_align": "top_left"}),
    *(Case((100, 4, 32), d, options={"lengths": (30, 50, 20), "dropout_p": 0.3}) for d in (FP32, BF16)),
    *(Case((100, 4, 32), d, options={"lengths": (30, 50, 20), "sink": mean, "softcap": cap, **CAUSAL})
      for d in (FP32, BF16, FP16) for mean, cap in ((0.5, 3.0), (3.0, 0.0))),
    *(Case((100, 4, 32), FP32, dtypes=SLOPES, options={"lengths": (30, 50, 20), "alibi": n, **CAUSAL}) for n in (1, 2)),
    *(Case((100, 4, 32), d, options={"lengths": (30, 50, 20), "bias": dims})
      for dims in ("1111", "0111", "1101", "0011", "1000") for d in (FP32, BF16)),
    *(Case((100, 4, 32), FP32, options={"lengths": (30, 50, 20), "mask": dims, **CAUSAL}) for dims in ("1111", "0011")),
    Case((600, 2, 32), FP32, options={"lengths": (1, 400, 199), **CAUSAL}),
]  # fmt: skip


def other_lengths(draw, st, case):
    _, heads, dim = case.shape
    options = {**case.options, "causal": draw(st.booleans())}
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5))
    # In the last sequence rows see several keys: with one key each a gradient is all cancellation.
    options["lengths"] = lengths = (*lengths, draw(st.integers(8, 90)))
    if "lengths_k" in options:
        options["lengths_k"] = tuple(draw(st.integers(0, 90)) for _ in lengths[1:]) + (draw(st.integers(8, 90)),)
    if "k_heads" in options:
        heads = options["k_heads"] * draw(st.integers(1, 3))
    if "dim_v" in options:
        options["dim_v"] = 8 * draw(st.integers(1, 32))
    tokens = sum(lengths) + options.get("rest", 0)
    return case.but(shape=(tokens, min(heads, 6), 8 * min(32, -(-dim // 8))), options=options)


SPEC = OpSpec(
    name="attention_varlen",
    op=with_mask(warpsmith.attention_varlen),
    reference=with_mask(reference),
    baseline=same_dtype(reference),
    inputs=inputs,
    cases=CASES,
    redraw=other_lengths,
    random_cases=1000,
    gradcheck_cases=[
        Case((4, 2, 8), FP64, options={"lengths": (1, 3), "k_heads": 1, "bias": "0111", "sink": 0.0, **CAUSAL}),
    ],
    **OF_BOTH,
    opcheck=raw_ops("attention"),
    bad_inputs=[
        BadInput("no offsets", but(cu_seqlens_q=lambda g: None), "cu_seqlens_q: expected a tensor, got None"),
        BadInput("no length", but(max_seqlen_q=lambda g: None), "max_seqlen_q: expected an integer, got NoneType"),
        BadInput("falling offsets", but(cu_seqlens_q=lambda g: g["cu_seqlens_q"].flip(0) * 0 + torch.tensor(
            [0, 20, 13], dtype=torch.int32)), "cu_seqlens_q: expected offsets that never fall, of at most 33 tokens, "
                 "got 13 after 20 at index 2", fake=False, devices=("cpu",)),
        BadInput("offsets past the end", but(cu_seqlens_k=lambda g: g["cu_seqlens_k"] + torch.tensor(
            [0, 0, 1], dtype=torch.int32)), "cu_seqlens_k: expected offsets that never fall, of at most 33 tokens, "
                 "got 34 after 20 at index 2", fake=False, devices=("cpu",)),
        BadInput("a first offset of 1", but(cu_seqlens_q=lambda g: g["cu_seqlens_q"].clamp(min=1)),
                 "cu_seqlens_q: expected 0 as the first offset, got 1", fake=False, devices=("cpu",)),
        BadInput("a longer sequence", but(max_seqlen_q=lambda g: 19),
                 "max_seqlen_q: expected at least 20, the length of sequence 0, got 19", fake=False, devices=("cpu",)),
    ],
)  # fmt: skip

TestAttentionVarlen = op_tests(SPEC)


def problem(lengths, heads=4, dim=16, rest=0):
    g = torch.Generator().manual_seed(7)
    return [torch.randn(sum(lengths) + rest, heads, dim, generator=g) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 2)}])
def test_each_document_has_the_bits_of_itself_alone(options):
    lengths = (5, 0, 70, 1, 30)
    q, k, v = (t.requires_grad_() for t in problem(lengths))
    cu = offsets(lengths)
    out, lse = warpsmith.attention_varlen(q, k, v, cu, max_seqlen_q=70, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), (q, k, v), (out, lse))
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        leaves = [t[begin:end].detach().requires_grad_() for t in (q, k, v)]
        one = warpsmith.attention(*leaves, layout="thd", return_lse=True, **options)
        assert bitwise_equal(one[0], out[begin:end])
        assert bitwise_equal(one[1], lse[:, begin:end].contiguous())
        for a, b in zip(torch.autograd.grad(one, leaves, one), grads, strict=True):
            assert bitwise_equal(a, b[begin:end])


def test_a_looser_bound_changes_nothing():
    q, k, v = problem((10, 20))
    options = {"causal": True, "dropout_p": 0.3, "seed": SEED}
    tight, loose = (
        warpsmith.attention_varlen(q, k, v, offsets((10, 20)), max_seqlen_q=bound, **options) for bound in (20, 500)
    )
    assert bitwise_equal(tight, loose)


def test_compiled_for_any_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(warpsmith.attention_varlen, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((5, 9), (12, 3, 4), (1, 1, 1, 30)):
        leaves = [t.requires_grad_() for t in problem(lengths)]
        results = []
        for op in (compiled, warpsmith.attention_varlen):
            out = op(*leaves, offsets(lengths), max_seqlen_q=max(lengths), causal=True)
            results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        for a, b in zip(*results, strict=True):
            assert bitwise_equal(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "head_dim"), [(FP32, 64), (BF16, 64), (BF16, 256)])
def test_empty_sequences_change_no_bit(dtype, head_dim, device):
    """More of them than the block that counts the tiles of all has threads, and no multiple of its threads."""
    torch.manual_seed(0)
    leaves = [torch.randn(33, 2, head_dim, device=device).to(dtype).requires_grad_() for _ in range(3)]

    def results(*lengths):
        cu = offsets(lengths).to(device)
        out = warpsmith.attention_varlen(*leaves, cu, cu, 20, 20, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    few, many = results(1, 20, 12), results(1, *(0,) * 597, 20, *(0,) * 99, 12)
    assert all(map(bitwise_equal, few, many))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head_dim", [16, 128, 192])
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16])
@pytest.mark.parametrize("rows", [slice(175, 190), slice(70, 100)], ids=["of no sequence", "of a sequence"])
def test_nan_stays_in_its_sequence(device, dtype, head_dim, rows):
    """NaN in q, k, v and the gradients of out and lse. Tokens of no sequence have no result, no sink and no bias."""
    if dtype == FP64 and (device == "cuda" or is_loaded()):
        pytest.skip("float64 has no kernel")
    torch.manual_seed(0)
    cu = torch.tensor([0, 70, 100, 100, 175], dtype=torch.int32, device=device)
    tensors = [torch.randn(190, 2, head_dim, device=device).to(dtype) for _ in range(4)]
    leaves = [*(t.requires_grad_() for t in tensors[:3]), torch.zeros(2, dtype=dtype, device=device).requires_grad_()]
    dlse = torch.randn(2, 190, dtype=FP64 if dtype == FP64 else FP32, device=device)
    behind = rows.stop == 190
    options = {"max_seqlen_q": 80, "max_seqlen_k": 80, "sink": leaves[3], "return_lse": True}
    if behind:  # a sequence with NaN would have its part in the gradient of a bias
        leaves.append(torch.randn(2, 80, 80, device=device).to(dtype).requires_grad_())
        options["bias"] = leaves[4]

    def results():
        out, lse = warpsmith.attention_varlen(*leaves[:3], cu, cu, **options)
        return out, lse.T, *torch.autograd.grad([out, lse], leaves, [tensors[3], dlse])

    want = results()
    with torch.no_grad():
        for t in (*tensors, dlse.T):
            t[rows] = torch.nan
    got = results()
    others = torch.ones(190, dtype=torch.bool, device=device)
    others[rows] = False
    for mine, its in zip(got[:5], want, strict=False):
        assert bitwise_equal(mine[others], its[others]) and its[:175].isfinite().all()
        assert mine[rows].isnan().all() or behind
    if behind:
        assert all(map(bitwise_equal, got[5:], want[5:]))
        assert all((t[rows] == (-torch.inf if i == 1 else 0)).all() for i, t in enumerate(got[:5]))
