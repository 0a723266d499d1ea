"""Logits of any finite size, on every device: only -inf and False mask, and p of the backward sums to the forward's.

Logits of a row are equal, or so far below the others that their weights are 0. Then the definition needs no law of
rounding, and a row of 1e38 is compared as tightly as one of 1.
"""

import itertools
import math

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention as reference
from warpsmith.testing.sim import is_loaded

from tests.ops.attention_cases import BF16, FP16, FP32, FP64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [FP32, FP64, BF16, FP16]
SIZES = [1e3, 1e4, 1e6, 1e7, 1e8, 1e9, 1e12, 1e20, 1e30, math.inf]  # inf: the largest number of the dtype
EXPONENTS = [10, 13, 20, 23, 27, 40, 90, 122]
if is_loaded():  # simulated kernels are slow
    SIZES, EXPONENTS = [1e4, 1e8, math.inf], [13, 27, 122]
STEPS = {FP64: 2.0**-40, FP32: 2.0**-17, BF16: 2.0**-6, FP16: 2.0**-9}
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (20, 3)},
    {"dropout_p": 0.25, "seed": (3, 4)},
    {"sink": True},
    {"causal": True, "sink": True},
]


def fits(dtype, device):
    return not (dtype == FP64 and device == "cuda")


def results(op, leaves, dout, dlse, **options):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    out, lse = op(**leaves, **options, return_lse=True)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [dout, dlse], allow_unused=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(leaves, dtype, device, options, names, heads=2):
    """Our results against the definition in the arithmetic type: relative to the largest element of each."""
    wide = FP64 if dtype == FP64 else FP32
    options = dict(options)
    if "seed" in options:
        options["seed"] = torch.tensor(options["seed"], device=device)
    batch, queries, _, _ = leaves["q"].shape
    g = torch.Generator().manual_seed(9)
    dout = torch.randn(batch, queries, heads, leaves["v"].shape[-1], generator=g).to(device, dtype)
    dlse = torch.randn(batch, heads, queries, generator=g).to(device, wide)
    ours = results(warpsmith.attention, leaves, dout, dlse, **options)
    exact = results(reference, {name: t.to(wide) for name, t in leaves.items()}, dout.to(wide), dlse, **options)
    for name in names:
        got, want = ours[name].to(wide), exact[name]
        largest = want[want.isfinite()].abs().max()
        assert torch.equal(got.isfinite(), want.isfinite()), (name, got, want)
        error = (got - want)[want.isfinite()].abs().max()
        assert error <= STEPS[dtype] * largest, f"{name}: off by {error:g}, largest {largest:g}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_bias_of_any_size(device, dtype, size, sign, head_dim):
    """With q = 0 the bias is the logit. Every third key's may be half as large: all or nothing of the weight."""
    asked, size = size, min(size, torch.finfo(dtype).max)
    if not fits(dtype, device):
        pytest.skip("float64 runs on the CPU alone")
    g = torch.Generator().manual_seed(1)
    for i, (options, shape, halves) in enumerate(
        itertools.product(OPTIONS, [(1, 1, 72, 72), (1, 2, 1, 72), (1, 1, 72, 1)], [False, True])
    ):
        if i % 4 != (head_dim // 64 + int(sign > 0)) % 4 or (is_loaded() and i // 4 % 3 != SIZES.index(asked) % 3):
            continue  # each set of parameters runs a quarter of these; together the sets run all of them several times
        q = torch.zeros(1, 72, 2, head_dim)
        k, v = torch.randn(1, 72, 1, head_dim, generator=g), torch.randn(1, 72, 1, head_dim, generator=g)
        bias = torch.full(shape, sign * size, dtype=FP64)
        if halves:
            bias[..., ::3] /= 2
        leaves = {"q": q, "k": k, "v": v, "bias": bias.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)}
        options = dict(options)
        if options.pop("sink", False):
            leaves["sink"] = torch.full((2,), sign * size, dtype=FP64)
        leaves = {name: t.to(device, dtype) for name, t in leaves.items()}
        compare(leaves, dtype, device, options, ["out", "lse", "q", "v", "bias", *(["sink"] * ("sink" in leaves))])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_products_of_any_size(device, dtype, exponent, sign, head_dim):
    """Products of 2^exponent, exact in every order of additions."""
    if not fits(dtype, device):
        pytest.skip("float64 runs on the CPU alone")
    if dtype == FP16 and exponent > 27:
        pytest.skip("products of float16 end at 2^37")
    g = torch.Generator().manual_seed(2)
    left = exponent + 3 - round(math.log2(head_dim))  # of q and k: softmax_scale is 2^-3
    for i, options in enumerate(OPTIONS):
        if is_loaded() and i % 3 != (EXPONENTS.index(exponent) + int(sign > 0)) % 3:
            continue  # together the sets run each option with two of the exponents
        q = torch.full((1, 72, 2, head_dim), 2.0 ** (left // 2), dtype=FP64)
        k = torch.full((1, 72, 1, head_dim), sign * 2.0 ** (left - left // 2), dtype=FP64)
        k[:, ::3] *= -1
        v = torch.randn(1, 72, 1, head_dim, generator=g)
        leaves, options = {"q": q, "k": k, "v": v}, dict(options)
        if options.pop("sink", False):
            leaves["sink"] = torch.full((2,), min(2.0**exponent, torch.finfo(dtype).max), dtype=FP64) * sign
        leaves = {name: t.to(device, dtype) for name, t in leaves.items()}
        # dq sums up ds over equal keys, which cancels: nothing but rounding is left of it.
        compare(leaves, dtype, device, {"softmax_scale": 0.125, **options}, ["out", "lse", "k", "v"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_least_number_is_the_mean(device, dtype):
    """What transformers gives as the mask of a padded query. -inf and False hide, finfo.min does not."""
    if not fits(dtype, device):
        pytest.skip("float64 runs on the CPU alone")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 2, 64, device=device).to(dtype) for _ in range(3))
    bias = torch.zeros(2, 1, 40, 40, device=device, dtype=dtype)
    q[:, 3] = 0  # in float16 the least number is so small in size that a logit beside it would still count
    bias[1, :, :, 20:] = torch.finfo(dtype).min
    bias[:, :, 3] = torch.finfo(dtype).min
    bias[:, :, 5] = -torch.inf
    out, lse = warpsmith.attention(q, k, v, bias=bias, return_lse=True)
    mean = v.to(FP64).mean(1)
    assert (out[:, 3].to(FP64) - mean).abs().max() <= torch.finfo(dtype).eps * 4
    assert (out[:, 5] == 0).all() and (lse[:, :, 5] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plus_infinity_gives_nan_in_its_row(device, dtype, head_dim):
    """As torch's softmax does: in the row of a bias of +inf, and in all rows of a head whose sink is."""
    if not fits(dtype, device):
        pytest.skip("float64 runs on the CPU alone")
    torch.manual_seed(0)
    leaves = {name: torch.randn(1, 70, 2, head_dim, device=device).to(dtype) for name in "qkv"}
    leaves["bias"] = torch.zeros(1, 1, 70, 70, device=device, dtype=dtype)
    leaves["bias"][:, :, 3, 40] = torch.inf
    dout = torch.randn(1, 70, 2, head_dim, device=device).to(dtype)
    got = results(warpsmith.attention, leaves, dout, torch.zeros(1, 2, 70, device=device, dtype=_real(dtype)))
    assert got["out"][:, 3].isnan().all() and got["q"][:, 3].isnan().all() and got["v"].isnan().all()
    for name in ("out", "q"):
        others = got[name][:, [i for i in range(70) if i != 3]]
        assert others.isfinite().all(), name
    del leaves["bias"]
    leaves["sink"] = torch.tensor([0.0, torch.inf], device=device, dtype=dtype)
    got = results(warpsmith.attention, leaves, dout, torch.zeros(1, 2, 70, device=device, dtype=_real(dtype)))
    for name in ("out", "q", "k", "v"):
        assert got[name][:, :, 1].isnan().all() and got[name][:, :, 0].isfinite().all(), name
    assert got["sink"][1].isnan() and got["sink"][0].isfinite()
    leaves["sink"].fill_(-torch.inf)  # none
    out = warpsmith.attention(*(leaves[name] for name in "qkv"), sink=leaves["sink"])
    assert (out - warpsmith.attention(*(leaves[name] for name in "qkv"))).abs().max() <= 2 * torch.finfo(dtype).eps


def _real(dtype):
    return FP64 if dtype == FP64 else FP32
