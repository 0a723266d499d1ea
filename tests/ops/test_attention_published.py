"""attention on the test grids that its peers publish, under their own tolerances.

The grids are those of FlashAttention (tests/test_flash_attn.py and hopper/test_flash_attn.py), xFormers
(tests/test_mem_eff_attention.py), TransformerEngine (tests/pytorch/attention/test_attention.py) and cuDNN's front end,
with what is not attention left out: paged keys, fp8, and head dimensions that are no multiple of 8 or above 256. Here
batches and heads are fewer, so that the reference in float64 fits a CPU. ``small`` problems run always, all with
``--slow``.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Problem:
    seqlen_q: int
    seqlen_k: int
    dim: int
    dtype: torch.dtype = BF16
    heads: int = 2
    k_heads: int = 2
    dim_v: int = 0  # 0: as dim
    std: float = 1.0
    options: dict = field(default_factory=dict, hash=False)

    @property
    def small(self):
        return self.heads * self.seqlen_q * self.seqlen_k * (self.dim + (self.dim_v or self.dim)) <= 1 << 26

    def __str__(self):
        heads = f"{self.heads}:{self.k_heads}"
        sizes = f"{self.seqlen_q}x{self.seqlen_k} {heads} {self.dim}:{self.dim_v or self.dim}"
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{sizes} {str(self.dtype).removeprefix('torch.')} {options}".strip()


class Results:
    """out, dq, dk, dv of ours, of plain PyTorch in the same dtype, and exact ones, rounded to that dtype."""

    names = ("out", "dq", "dk", "dv")

    def __init__(self, p, seed=0):
        g = torch.Generator().manual_seed(seed)

        def made(tokens, heads, dim):
            return (p.std * torch.randn(1, tokens, heads, dim, generator=g)).to(p.dtype)

        dim_v = p.dim_v or p.dim
        q = made(p.seqlen_q, p.heads, p.dim)
        k, v = (made(p.seqlen_k, p.k_heads, dim) for dim in (p.dim, dim_v))
        options, dout = dict(p.options), made(p.seqlen_q, p.heads, dim_v)
        if options.pop("bias", False):
            options["bias"] = 3 * torch.randn(p.heads, 1, p.seqlen_k, generator=g).to(p.dtype)
        tensors = q, k, v
        self.ours = self.run(warpsmith.attention, tensors, dout, options)
        self.plain = self.run(reference, tensors, dout, {**options, "products": p.dtype})
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        self.exact = self.run(reference, [t.double() for t in tensors], dout.double(), wide)
        self.rounded = [t.to(p.dtype).double() for t in self.exact]

    @staticmethod
    def run(op, tensors, dout, options):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = op(*leaves, **options)
        return [t.detach().double() for t in (out, *torch.autograd.grad(out, leaves, dout))]

    def each(self):
        return zip(self.names, self.ours, self.plain, self.rounded, strict=True)

    def assert_close(self, tolerances):
        """``tolerances``: {name: (atol, rtol)}."""
        for name, ours, _, exact in self.each():
            atol, rtol = tolerances[name]
            torch.testing.assert_close(ours, exact, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}")


def is_long(seqlen_q, seqlen_k):
    return seqlen_q * seqlen_k > 1 << 19


def fewer(seqlen_q, seqlen_k, heads, k_heads):
    """Heads of long sequences: two, that share one or do not."""
    return (2, 1 if k_heads == 1 else 2) if is_long(seqlen_q, seqlen_k) else (heads, k_heads)


def dtypes_and_k_heads(seqlen_q, seqlen_k, dim):
    """Of long sequences the head dimensions that models have, each in one dtype."""
    found = [(BF16, 6), (FP16, 2), (BF16, 1)]
    if is_long(seqlen_q, seqlen_k):
        return found[dim // 64 % 2 :][:1] if dim in (64, 128, 256) else []
    return found


def largest(t):
    return float(t.abs().max()) if t.numel() else 0.0


# ------------------------------------------------------------------------------------------------- FlashAttention 2


def flash_attention_2(p):
    """At most twice the error of PyTorch in the same dtype; three times that for separate gradients."""
    for name, ours, plain, exact in Results(p).each():
        assert largest(ours - exact) <= (2 if name == "out" else 3) * largest(plain - exact), name


def grid_of_flash_attention_2():
    lengths = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024),
               (1024, 1023), (2048, 2048)]  # fmt: skip
    masks = [{}, {"causal": True}, {"window_size": (57, 31)}, {"causal": True, "softcap": 50.0}]
    for (q, k), dim, options in itertools.product(lengths, (32, 40, 64, 96, 128, 160, 192, 224, 256), masks):
        for dtype, k_heads in dtypes_and_k_heads(q, k, dim):
            yield Problem(q, k, dim, dtype, *fewer(q, k, 6, k_heads), options=options)


# ------------------------------------------------------------------------------------------------- FlashAttention 3


def flash_attention_3(p):
    """Twice PyTorch's error, with softcap three times, and two roundings of sums of the same size."""
    softcap = p.options.get("softcap", 0.0)
    for name, ours, plain, exact in Results(p).each():
        in_dtype = exact.to(p.dtype)
        atol = 2 * largest((in_dtype + 0.3 - 0.3 - in_dtype).double())
        atol += 3e-4 if softcap and name != "out" else 0
        assert largest(ours - exact) <= (3 if softcap else 2) * largest(plain - exact) + atol, name


def grid_of_flash_attention_3():
    lengths = [(1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217),
               (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024),
               (1024, 1023), (4096, 4096)]  # fmt: skip
    masks = [{}, {"causal": True}, {"window_size": (40, 90)}, {"softcap": 15.0, "causal": True}]
    for (q, k), (dim, dim_v), options in itertools.product(
        lengths, ((64, 64), (64, 256), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)), masks
    ):
        for dtype, k_heads in dtypes_and_k_heads(q, k, dim):
            yield Problem(q, k, dim, dtype, *fewer(q, k, 6, k_heads), dim_v, options=options)


# --------------------------------------------------------------------------------------------------------- xFormers


def xformers(p):
    """The cutlass op's tolerances, of tensors of deviation 3 and logits not scaled down by more than usual."""
    forward = {FP32: (3e-4, 2e-5), FP16: (4e-3, 4e-4), BF16: (2e-2, 5e-3)}[p.dtype]
    backward = {FP32: (9e-4, 1e-4), FP16: (0.2, 2e-2), BF16: (0.9, 0.1)}[p.dtype]
    Results(p).assert_close({"out": forward, **dict.fromkeys(("dq", "dk", "dv"), backward)})


def grid_of_xformers():
    q, k = 256, 128
    lengths = [*itertools.product((32, 256), (32, 64, 256)), (16, 1024), (1024, 16)]
    for n in (2, 3, 15, 31, 32, 34, 68, 72, 90, 132, 136):
        lengths += [(n, k), (q, n)]
    shapes = [(q, k, dim, dim_v, 1) for q, k in lengths for dim, dim_v in ((32, 32), (128, 128))]
    shapes += [(q, k, dim, dim, 1) for dim in (40, 64, 256)] + [(q, k, 32, 64, 1), (q, k, 64, 32, 1)]
    shapes += [(q, k, 32, 32, heads) for heads in (3, 5, 12)]
    r = random.Random(0)
    shapes += [(r.randint(1, 500), r.randint(1, 500), 8 * r.randint(1, 32), 8 * r.randint(1, 32), 2) for _ in range(20)]
    for q, k, dim, dim_v, heads in shapes:
        for dtype, options in itertools.product((FP32, FP16, BF16), ({}, {"causal": True}, {"bias": True})):
            # A lower triangle begins at the top left, and the gradient wants logits of a moderate size.
            mask = {**options, "causal_align": "top_left"} if "causal" in options else options
            more = {**mask, "softmax_scale": 1 / (32 * dim) ** 0.5}
            yield Problem(q, k, dim, dtype, heads, heads, dim_v, std=3.0, options=more)


# ------------------------------------------------------------------------------------------------ TransformerEngine


def transformer_engine(p):
    tolerance = {FP16: (1e-3, 1e-3), BF16: (1.5e-2, 1.5e-2)}[p.dtype]
    Results(p).assert_close(dict.fromkeys(Results.names, tolerance))


def grid_of_transformer_engine():
    shapes = [(128, 128, 16, 16, 64), (128, 256, 16, 16, 64), (2048, 2048, 24, 24, 128), (2048, 4096, 24, 24, 128),
              (1, 2048, 16, 16, 128), (1, 2048, 16, 16, 256), (1, 2048, 16, 16, 192), (128, 2048, 16, 16, 192),
              (1024, 1024, 8, 8, 96), (1024, 1024, 32, 8, 128), (1024, 1024, 16, 1, 128)]  # fmt: skip
    for (q, k, heads, k_heads, dim), dtype, causal in itertools.product(shapes, (FP16, BF16), (False, True)):
        yield Problem(q, k, dim, dtype, *fewer(q, k, heads, k_heads), std=0.1, options={"causal": causal})


# ------------------------------------------------------------------------------------------------------------ cuDNN


def cudnn(p):
    wide = {name: (7e-2 if name in ("dk", "dv") and p.dtype == BF16 else 2e-2, 2e-2) for name in Results.names}
    Results(p).assert_close(wide)


def grid_of_cudnn():
    """128 random geometries."""
    r = random.Random(1)
    for _ in range(128):
        k_heads = r.choice((1, 2, 3))
        causal = {"causal": True}
        options = r.choice(({}, causal, {**causal, "causal_align": "top_left"}, {"window_size": (64, 0)}))
        sizes = r.randint(1, 700), r.randint(1, 700), 8 * r.randint(2, 32), r.choice((BF16, FP16))
        yield Problem(*sizes, k_heads * r.choice((1, 2, 4)), k_heads, 8 * r.randint(2, 32), options=options)


GRIDS = {
    flash_attention_2: grid_of_flash_attention_2,
    flash_attention_3: grid_of_flash_attention_3,
    xformers: grid_of_xformers,
    transformer_engine: grid_of_transformer_engine,
    cudnn: grid_of_cudnn,
}
ALWAYS = 16  # problems of each grid that run without --slow, spread evenly over its small ones


@pytest.mark.parametrize("rule", GRIDS, ids=lambda rule: rule.__name__)
def test_small_problems(rule):
    small = [p for p in GRIDS[rule]() if p.small]
    chosen = small[:: max(1, len(small) // ALWAYS)]
    assert len(chosen) >= 12
    for p in chosen:
        try:
            rule(p)
        except AssertionError as error:
            raise AssertionError(f"{rule.__name__}: {p}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("rule", GRIDS, ids=lambda rule: rule.__name__)
def test_all_problems(rule):
    for p in GRIDS[rule]():
        try:
            rule(p)
        except AssertionError as error:
            raise AssertionError(f"{rule.__name__}: {p}: {error}") from None
