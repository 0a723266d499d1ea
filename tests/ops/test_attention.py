"""attention: the case table. What does not fit a table is in test_attention_edges.py."""

import torch
import warpsmith
from warpsmith.reference.attention import attention as reference
from warpsmith.testing import BadInput, Case, OpSpec, op_tests

from tests.ops.attention_cases import BF16, FP16, FP32, FP64, OF_BOTH, SLOPES, parameters, same_dtype, with_mask
from tests.ops.public_calls import but, raw_ops


def inputs(case, rng):
    """The shape of a case is that of q in bshd; seqlen_k, k_heads and dim_v are options."""
    o = case.options
    batch, seqlen_q, heads, dim = case.shape
    seqlen_k, k_heads = o.get("seqlen_k", seqlen_q), o.get("k_heads", heads)
    q = rng.normal(case.shape)
    k = rng.normal((batch, seqlen_k, k_heads, dim), std=o.get("std", 1.0))
    if "growth" in o:  # of the logits, from the last keys to the first, which kernels may visit last
        k = k * (o["growth"] ** torch.linspace(1, 0, seqlen_k)[:, None, None]).to(k.dtype)
    v = rng.normal((batch, seqlen_k, k_heads, o.get("dim_v", dim)))
    if o.get("layout") == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    if o.get("layout") == "thd":
        q, k, v = (t[0] for t in (q, k, v))
    more = parameters(case, rng, batch, heads, seqlen_q, seqlen_k)
    return {"q": q, "k": k, "v": v, "return_lse": True, **more}


CAUSAL = {"causal": True}
STRIPES = {"bias": "0001", "dropout_p": 0.1, **CAUSAL}
TOP_LEFT = {"causal": True, "causal_align": "top_left"}
# Lengths of q and k in FlashAttention's published tests (tests/test_flash_attn.py), with some of its head dimensions.
PUBLISHED = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1023, 1024), (1024, 1023)]
CASES = [
    *(Case((2, 33, 4, 64), dtype, options=o) for dtype in (BF16, FP16, FP32) for o in ({}, CAUSAL)),
    *(Case((2, 10, 2, 8), FP64, options=o) for o in ({}, CAUSAL)),
    *(Case((1, 70, 2, dim), d, options=CAUSAL) for dim in range(8, 257, 8) for d in (BF16, FP32)),
    *(Case((1, 40, 2, dim), BF16, options={"dim_v": dim_v, **o}) for dim, dim_v in ((192, 128), (64, 256), (8, 104))
      for o in ({}, {"seqlen_k": 300, **TOP_LEFT})),  # keys that no query sees, and some whole tiles of them
    *(Case((2, 40, 4, 32), FP32, options={"k_heads": n, "seqlen_k": 90}) for n in (1, 2)),
    *(Case((1, 40, 12, 32), BF16, options={"k_heads": n, **CAUSAL}) for n in (1, 3, 6)),
    *(Case((1, s, 2, 32), d, options={"seqlen_k": n, **o}) for s, n in ((1, 300), (70, 200), (200, 70), (64, 64),
                                                                         (65, 63), (128, 192), (3, 1), (1, 1))
      for d, o in ((FP32, CAUSAL), (BF16, TOP_LEFT))),
    *(Case((1, 150, 2, 32), d, options={"seqlen_k": n, "window_size": w, **o})
      for n in (150, 290) for w in ((17, 5), (0, 0), (70, -1), (-1, 30)) for d, o in ((FP32, {}), (BF16, CAUSAL))),
    *(Case((1, 70, 2, 32), d, options={"softcap": c, **o}) for c in (0.5, 30.0) for d in (FP32, BF16)
      for o in ({}, CAUSAL)),
    *(Case((2, 70, 4, 32), d, dtypes=SLOPES, options={"alibi": n, **CAUSAL}) for n in (1, 2) for d in (FP32, BF16)),
    *(Case((2, 40, 3, 32), d, options={"seqlen_k": 71, "bias": dims}) for d in (FP32, BF16)
      for dims in ("1111", "0111", "1011", "0011", "1101", "1110", "0101", "0000")),
    *(Case((2, 40, 4, 32), d, options={"bias": dims, "k_heads": 2, **CAUSAL}) for dims in ("1111", "0111", "0011")
      for d in (BF16, FP16)),
    Case((2, 40, 4, 32), BF16, dtypes={"bias": FP32, "sink": FP32}, options={"bias": "0111", "sink": 0.0}),
    *(Case((2, 40, 4, 32), FP32, options={"mask": dims, **o}) for dims in ("1111", "0011", "1001")
      for o in ({}, CAUSAL)),
    *(Case((2, 70, 4, 32), d, options={"sink": mean, **CAUSAL}) for mean in (0.0, 8.0) for d in (FP32, BF16)),
    Case((1, 70, 2, 32), FP32, options={"sink": 1.0, "seqlen_k": 30, **CAUSAL}),
    *(Case((2, 70, 4, 32), d, options={"dropout_p": p}) for p in (0.1, 0.7) for d in (FP32, BF16)),
    Case((1, 270, 4, 32), FP32, dtypes=SLOPES, options={"dropout_p": 0.2, "softcap": 5.0, "alibi": 1, "bias": "0111",
                                                        "sink": 0.5, "window_size": (200, 9), "k_heads": 2,
                                                        "seqlen_k": 300}),
    *(Case((2, 40, 4, 32), d, options={"layout": layout, **CAUSAL}) for layout in ("bhsd",) for d in (FP32, BF16)),
    Case((1, 40, 4, 32), FP32, options={"layout": "thd", **CAUSAL}),
    *(Case((1, 70, 2, 32), FP32, options={"softmax_scale": s}) for s in (0.0, -0.3, 1.0)),
    Case((1, 70, 2, 32), FP32, options={"deterministic": False}),
    *(Case((1, q, 1, dim), d, options={"seqlen_k": k, **o})
      for (q, k), dim, d, o in zip(PUBLISHED, (32, 40, 64, 80, 96, 128, 64, 32), (BF16, FP16) * 4,
                                   (CAUSAL, {}, {"window_size": (60, 40)}, CAUSAL) * 2, strict=True)),
    Case((2, 600, 2, 32), FP32, options={"k_heads": 1, **CAUSAL}),
    # Several tiles on each of the simulated multiprocessors, so that the rings of the Hopper kernels come round.
    *(Case((1, 33, heads, dim), BF16, options={"seqlen_k": 700}) for heads, dim in ((6, 72), (6, 136))),
    *(Case((1, 33, 2, dim), d, options={"seqlen_k": 700, "growth": g}) for dim in (64, 128, 192) for d in (BF16, FP16)
      for g in (8.0, 300.0)),
    *(Case((1, 33, 1, dim), d, options={"seqlen_k": 700, "growth": g, "dropout_p": 0.4}) for g in (8.0, 300.0)
      for dim, d in ((128, BF16), (64, FP16))),
    Case((1, 70, 1, 128), FP16, options={"seqlen_k": 700, "bias": "0001", "slope": 0.25}),
    # Blocks of keys that a mask leaves whole, hides in part and hides as a whole; rows that see no key, or late ones.
    *(Case((3, 40, 1, dim), BF16, options={"seqlen_k": 420, "mask": "1001", "shown": (420, 255, 96)})
      for dim in (64, 128)),
    *(Case((1, 100, 1, dim), BF16, options={"seqlen_k": 700, kind: "0011", "shown": "stairs"}) for dim in (64, 128)
      for kind in ("mask", "bias")),
    *(Case((1, 70, 1, 40), FP16, options={"seqlen_k": 140, "sink": 0.0, "dropout_p": p}) for p in (1e-5, 0.5, 0.9999)),
    # Most rows have a weight near 1: what is left of dP - delta is smaller than the rounding of out.
    *(Case((1, 70, 2, dim), d, options={"seqlen_k": 90, "softmax_scale": 4.0}) for dim, d in ((64, BF16), (128, FP16))),
    *(Case((2, 0, 2, 8), FP32, options={"seqlen_k": n}) for n in (0, 5)),
    Case((2, 5, 2, 8), FP32, options={"seqlen_k": 0}),
    Case((0, 5, 2, 8), FP32),
    Case((2, 5, 0, 8), FP32),
]  # fmt: skip


def other_options(draw, st, case):
    """Some row sees several keys: with one key each a gradient is all cancellation, and PyTorch's exactly 0."""
    batch, tokens, heads, dim = case.shape
    tokens = max(tokens, 8)
    options = {**case.options, "causal": draw(st.booleans())}
    options["seqlen_k"] = draw(st.one_of(st.just(tokens), st.integers(8, 200)))
    options["window_size"] = draw(st.tuples(*[st.one_of(st.just(-1), st.integers(8, 90))] * 2))
    if "k_heads" in options:
        heads = options["k_heads"] * draw(st.integers(1, 3))
    if "dim_v" in options:
        options["dim_v"] = 8 * draw(st.integers(1, 32))
    batch = 1 if options.get("layout") == "thd" else min(batch, 3)
    return case.but(shape=(batch, tokens, min(heads, 6), 8 * min(32, -(-dim // 8))), options=options)


SPEC = OpSpec(
    name="attention",
    op=with_mask(warpsmith.attention),
    reference=with_mask(reference),
    baseline=same_dtype(reference),
    inputs=inputs,
    cases=CASES,
    # Long enough for stripes of keys, whose number must not depend on the threads.
    repeated_cases=[Case((1, 33, 12, 32), BF16), Case((1, 700, 1, 32), FP32, options=STRIPES)],
    batched=("q", "k", "v"),
    redraw=other_options,
    random_cases=1000,
    sim_far=False,
    gradcheck_cases=[
        Case((1, 3, 2, 8), FP64, options={"seqlen_k": 4, "k_heads": 1, "bias": "0111", "sink": 0.0, **CAUSAL}),
        Case((1, 3, 1, 8), FP64, options={"softcap": 2.0, "dropout_p": 0.3}),
    ],
    **OF_BOTH,
    opcheck=raw_ops("attention"),
    bad_inputs=[
        BadInput("v of other heads", but(v=lambda g: g["v"][:, :, 1:]), "v: expected 4 heads, got 3"),
        BadInput("head dim 60", but(q=lambda g: g["q"][..., :60], k=lambda g: g["k"][..., :60]),
                 "q: expected 8 to 256 elements a head, in steps of 8, got 60"),
        BadInput("head dim 264", but(v=lambda g: g["v"].repeat(1, 1, 1, 5)[..., :264]),
                 "v: expected 8 to 256 elements a head, in steps of 8, got 264"),
        BadInput("heads that do not divide", but(k=lambda g: g["k"][:, :, :3], v=lambda g: g["v"][:, :, :3]),
                 "k: expected a number of heads that divides 4, got 3"),
        BadInput("no heads of k", but(k=lambda g: g["k"][:, :, :0], v=lambda g: g["v"][:, :, :0]),
                 "k: expected a number of heads that divides 4, got 0"),
        BadInput("packed q", but(k=lambda g: None, v=lambda g: None),
                 r"q: expected shape \(batch, tokens, 3, heads, head_dim\)"),
        BadInput("packed k", but(v=lambda g: None), r"k: expected shape \(batch, tokens, 2, heads, head_dim\)"),
        BadInput("too many heads of k", but(k=lambda g: None, v=lambda g: None, kv_heads=lambda g: 2),
                 "kv_heads: expected from 1 to 1 of 4 heads, got 2"),
        BadInput("bias of a wrong shape", but(bias=lambda g: g["q"].new_zeros(3, 33)),
                 r"bias: expected a shape that broadcasts to \(2, 4, 33, 33\), got \(3, 33\)"),
        BadInput("mask of a wrong shape", but(bias=lambda g: g["q"].new_zeros(2, 33, 33, dtype=torch.bool)),
                 r"bias: expected a shape that broadcasts to \(2, 4, 33, 33\), got \(2, 33, 33\)"),
        BadInput("slopes with a gradient", but(alibi_slopes=lambda g: torch.zeros(4, requires_grad=True)),
                 "alibi_slopes: expected a tensor that requires no gradient", fake=False),
    ],
)  # fmt: skip

TestAttention = op_tests(SPEC)
