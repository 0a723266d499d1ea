"""scaled_linear under the law; then the signal that is left, casts that are kept, and what a recipe refuses."""

import hashlib
import itertools
import os
from dataclasses import replace

import pytest
import torch
import warpsmith
from warpsmith import reference
from warpsmith.amp import Fp8Recipe
from warpsmith.ops.linear import Fp8State
from warpsmith.reference.quantize import finite_amax
from warpsmith.testing import BadInput, Case, bitwise_equal, op_tests
from warpsmith.testing.sim import is_loaded, torch_device

from tests.ops.public_calls import but, op_spec, raw_ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
OPS = torch.ops.warpsmith
RECIPES = [
    {},
    {"scaling": "tensor"},
    {"scaling": "block"},
    {"grad_dtype": "e5m2"},
    {"wgrad": "high"},
    {"scaling": "tensor", "grad_dtype": "e5m2", "power_of_two": False},
    {"scaling": "block", "wgrad": "high"},
]
OPTIONS = Fp8Recipe().options + 128 + 256  # emulated, and watched
ARGUMENTS = ("scaling", "grad_dtype", "wgrad", "power_of_two")
ON_CUDA = pytest.mark.gpu
OWN_DEVICES = ["sim-"] if is_loaded() else ["cpu", pytest.param("cuda", marks=ON_CUDA)]


def inputs(case, rng):
    width, o = case.shape[-1], case.options
    out = o.get("out", 48)
    return {
        "x": rng.normal(case.shape) * rng.normal((*case.shape[:-1], 1)).exp(),
        "weight": rng.normal((out, width), std=1.5 / max(width, 1) ** 0.5),
        "bias": rng.normal((out,)) if o.get("bias", True) else None,
        **{n: o.get(n, default) for n, default in zip(ARGUMENTS, ("row", "e4m3", "fp8", True), strict=True)},
    }


def op(x, weight, bias, **options):
    return warpsmith.scaled_linear(x, weight, bias, recipe=Fp8Recipe(**options), emulate=True)


def whole_sizes(draw, st, case):
    """Features are multiples of 16, rows are any."""
    width = 16 * draw(st.integers(1, 20))
    shape = (*case.shape[:-1], width)
    return case.but(shape=shape, options={**case.options, "out": 16 * draw(st.integers(1, 20))})


CASES = [
    *(Case((6, 32), dtype, options=r) for dtype in (BF16, FP16, FP32) for r in RECIPES),
    *(Case((9, 48), dtype, dtypes={"weight": FP32, "bias": FP32}, options=r) for dtype in (BF16, FP16)
      for r in RECIPES),
    *(Case((m, 144), BF16, options={**r, "out": 272}) for m in (1, 15, 16, 17, 129) for r in RECIPES[:3]),
    *(Case((20, k), FP32, options={"out": 16, "bias": False}) for k in (16, 112, 128, 2064)),
    *(Case((6, 32), BF16, options=r, wanted=w) for r in RECIPES[:5] for w in (("x",), ("weight",), ("bias",))),
    Case((2, 3, 64), BF16),
    Case((64,), FP32, options={"scaling": "tensor"}),
    # torchao's: test/float8/test_base.py, x of its linear layers
    *(Case(shape, dtype, options={"out": 32, "bias": b}) for shape in ((16, 16), (2, 16, 16), (3, 2, 16, 16))
      for dtype in (BF16, FP32) for b in (True, False)),
    # TransformerEngine's products of blocks: tests/pytorch/test_float8_blockwise_gemm_exact.py, the small ones
    *(Case((m, k), BF16, options={"scaling": "block", "out": n, "bias": False})
      for m, k, n in ((128, 128, 128), (256, 128, 256), (320, 128, 336), (320, 64, 336))),
]  # fmt: skip

SPEC = op_spec(
    name="scaled_linear",
    op=op,
    inputs=inputs,
    cases=CASES,
    differentiable=("x", "weight", "bias"),
    one_element=False,
    float64_devices=(),
    thread_counts=(),
    redraw=whole_sizes,
    random_cases=200,
    opcheck={o: None for o in raw_ops("scaled_linear") if "backward" not in str(o)},  # which reads 8-bit floats
    autocast=lambda g, dtype: (dtype,),
    bad_inputs=[
        BadInput("float64", but(x=lambda g: g["x"].double()), "x: expected float32, float16 or bfloat16, got float64"),
        BadInput(
            "in_features",
            but(x=lambda g: g["x"][:, 8:], weight=lambda g: g["weight"][:, 8:]),
            "weight: expected in_features that are a multiple of 16, got 24",
        ),
        BadInput(
            "out_features",
            but(weight=lambda g: g["weight"][8:], bias=lambda g: g["bias"][8:]),
            "weight: expected out_features that are a multiple of 16, got 40",
        ),
    ],
)
TestScaledLinear = op_tests(SPEC)

# Edges of tiles of 128 x 256 (fast) and 128 x 192 (sums of 128 terms in float32), of clusters of two, of stages of 128.
# The first cases are those of edge values: by powers of two the oracle's bytes of the largest x are 2^128, an infinity
# in float32, which our scaled sums never hold.
OWN_CASES = [
    *(Case((6, 32), dtype, options={"power_of_two": False}) for dtype in (BF16, FP16)),
    *(Case((6, 32), dtype, options=r) for dtype in (BF16, FP16) for r in RECIPES),
    *(Case((m, 144), BF16, options={**r, "out": 272}) for m in (1, 15, 129, 300) for r in RECIPES[:2]),
    *(Case((20, k), BF16, options={"out": 16, "bias": False, "accumulate": a}) for k in (16, 112, 128, 528, 2064)
      for a in ("fast", "float32")),
    *(Case((130, 400), dtype, options={"out": 208, "accumulate": "float32", "scaling": s, "grad_dtype": "e5m2"})
      for dtype in (BF16, FP16) for s in ("row", "tensor", "block")),
    # Several blocks of terms and columns, whose scales differ.
    *(Case((m, k), BF16, options={"out": out, "scaling": "block", "power_of_two": False})
      for m, k, out in ((300, 144, 272), (20, 272, 144), (144, 32, 32))),
    Case((2, 3, 64), BF16, dtypes={"bias": FP32}),
    Case((5, 16400), BF16, options={"out": 16}),  # too many terms for fast sums
    # The library's, whose sums are not in float32 on a card: of the sim alone.
    *([Case((5, 32), FP32)] if is_loaded() else []),
]  # fmt: skip


def own_inputs(case, rng):
    return {**inputs(case, rng), "accumulate": case.options.get("accumulate", "auto")}


def own_op(x, weight, bias, **options):
    return warpsmith.scaled_linear(x, weight, bias, recipe=Fp8Recipe(**options))


def own_reference(x, weight, bias, accumulate, **options):
    return reference.scaled_linear(x, weight, bias, **options)


OWN_SPEC = replace(SPEC, op=own_op, reference=own_reference, inputs=own_inputs, cases=OWN_CASES, bad_inputs=(),
                   random_cases=50)  # fmt: skip
SUMS = [*itertools.product(("fast", "float32"), ("row", "tensor")), ("float32", "block")]
# Of results and gradients, by accumulate and scaling; the same of the CPU, the simulated kernels and a card.
BITS = {
    ("e4m3", "fast", "row"): "43b88ee93ed2", ("e4m3", "fast", "tensor"): "ab89442fb95e",
    ("e4m3", "float32", "row"): "9618700107b4", ("e4m3", "float32", "tensor"): "8913417b54bb",
    ("e5m2", "fast", "row"): "a07c4e1b679b", ("e5m2", "fast", "tensor"): "1e5d4fd17ab4",
    ("e5m2", "float32", "row"): "22392e6d74e3", ("e5m2", "float32", "tensor"): "38c3a3e7bcb4",
    ("e4m3", "float32", "block"): "afb0542859a5", ("e5m2", "float32", "block"): "c3c16a1026f0",
}  # fmt: skip


def exponents(values, smallest):
    """Those of zeros are below all others."""
    return torch.where(values == 0, -1000, (torch.frexp(values).exponent - 1).clamp(min=smallest)).double()


def hopper_sums(a, b):
    """Of e4m3 values in float64, 32 terms an instruction."""
    total = torch.zeros(len(a), len(b), 1, dtype=torch.float64)
    for x, y in zip(a.split(32, 1), b.split(32, 1), strict=True):
        terms = torch.cat([total, x[:, None] * y], 2)
        of_terms = torch.cat([exponents(total, -126), exponents(x, -6)[:, None] + exponents(y, -6)], 2)
        unit = 2.0 ** (of_terms.amax(2, keepdim=True) - 13)
        total = ((terms / unit).trunc() * unit).sum(2, keepdim=True)
        unit = 2.0 ** (exponents(total, -126) - 13)
        total = torch.where(total == 0, 0, (total / unit).trunc() * unit)
    return total[..., 0]


class TestByOwnProducts(op_tests(OWN_SPEC)):
    @pytest.fixture(autouse=True)
    def ours(self):
        OPS._own_product("1")
        yield
        OPS._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto"))

    @pytest.mark.parametrize("device", OWN_DEVICES)
    @pytest.mark.parametrize("accumulate, scaling", SUMS)
    def test_rows_do_not_change_bits(self, accumulate, scaling, device):
        """The order of a sum depends on its length alone. Each product of a layer is one of ours."""
        g = torch.Generator().manual_seed(1)
        x, w, dy = (torch.randn(*s, generator=g).to(torch_device(device.strip("-")), BF16)
                    for s in ((300, 208), (272, 208), (300, 272)))  # fmt: skip
        x[0, 0] = dy[0, 0] = 9  # the first row is in every part: the same scale of the tensor
        recipe = Fp8Recipe(scaling, accumulate=accumulate)

        def made(rows):
            some = torch.cat([x[:1], x[rows]]).requires_grad_()
            y = warpsmith.scaled_linear(some, w, recipe=recipe)
            y.backward(torch.cat([dy[:1], dy[rows]]))
            return y.detach()[1:], some.grad[1:]

        before = OPS._own_product("1")
        whole = made(slice(0, 300))
        for rows in (slice(0, 1), slice(100, 117), slice(37, 300)):
            assert all(bitwise_equal(part, all_of[rows]) for part, all_of in zip(made(rows), whole, strict=True))
        assert OPS._own_product("1") == before + 8

    @pytest.mark.parametrize("device", OWN_DEVICES)
    @pytest.mark.parametrize("accumulate, scaling", SUMS)
    @pytest.mark.parametrize("grad_dtype", ["e4m3", "e5m2"])
    def test_every_device_has_the_bits_of_a_card(self, grad_dtype, accumulate, scaling, device):
        """Also of outliers, of values whose bytes are subnormal or 0, of ties, and of what is not finite."""
        digest, g = hashlib.sha256(), torch.Generator().manual_seed(5)
        recipe = Fp8Recipe(scaling, accumulate=accumulate, grad_dtype=grad_dtype)
        for k, rows in ((32, 40), (48, 7), (128, 130), (512, 33), (2064, 17)):
            x, w, dy, bias = (torch.randn(*s, generator=g) for s in ((rows, k), (80, k), (rows, 80), (80,)))
            x[::3] *= torch.logspace(0, -4, k)
            x[1, :7], w[3], dy[2, :9] = 60 * x[1, :7], 0, 300 * dy[2, :9]
            x[:, 5] = torch.arange(rows) / 8
            if k == 48:
                x[2, 3], w[7, 1], dy[4, 4] = torch.inf, torch.nan, -torch.inf
            leaves = [t.to(torch_device(device.strip("-")), BF16).requires_grad_() for t in (x, w, bias)]
            y = warpsmith.scaled_linear(*leaves, recipe=recipe)
            y.backward(dy.to(y))
            for t in (y.detach(), leaves[0].grad, leaves[1].grad):
                digest.update(t.cpu().nan_to_num(1.5, 2.5, 3.5).view(torch.int16).numpy().tobytes())
        assert digest.hexdigest()[:12] == BITS[grad_dtype, accumulate, scaling]

    @pytest.mark.parametrize("device", OWN_DEVICES)
    def test_sums_are_cut_as_on_hopper(self, device):
        """Bytes are the values: the largest of each row is 448, beside a zero of the other factor."""
        g = torch.Generator().manual_seed(2)
        x, w = (torch.randn(rows, 256, generator=g).to(E4M3).double() for rows in (24, 16))
        x[:, 0], w[:, 0], x[:, 1], w[:, 1] = 448, 0, 0, 448
        given = [t.to(torch_device(device.strip("-")), FP16) for t in (x, w)]
        y = warpsmith.scaled_linear(*given, recipe=Fp8Recipe()).cpu()
        assert torch.equal(y, hopper_sums(x, w).to(FP16))
        assert not torch.equal(y, (x @ w.T).to(FP16))

    @pytest.mark.parametrize("device", OWN_DEVICES)
    @pytest.mark.parametrize("accumulate", ["fast", "float32"])
    def test_small_terms_beside_large_ones(self, accumulate, device):
        """Added in float32 a stage at a time, 128 ones survive 25,690,112; one by one they do not."""
        x = (
            torch.tensor([448.0, 1, -448])
            .repeat_interleave(128)
            .expand(5, -1)
            .to(torch_device(device.strip("-")), BF16)
        )
        y = warpsmith.scaled_linear(x, x[:1].abs().expand(16, -1), recipe=Fp8Recipe(accumulate=accumulate))
        assert y.unique().tolist() == [128 if accumulate == "float32" else 0]


@pytest.mark.parametrize("device", ["sim-"] if is_loaded() else ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(1, 16, 16), (33, 272, 48), (300, 16, 272), (70, 4112, 16)])
def test_delayed_scales_watch_the_largest_finite_magnitudes(device, dtype, shape):
    rows, width, out = shape
    device = torch_device(device.strip("-"))
    g = torch.Generator().manual_seed(rows)
    x, w, dy = (torch.randn(*s, generator=g).to(device, dtype) for s in ((rows, width), (out, width), (rows, out)))
    x[-1, -1], dy[0, 0] = -17.5, -float("inf")
    state = Fp8State(torch.device(device))
    state.x_scale, state.dy_scale = (torch.tensor(s, device=device) for s in (0.25, 0.5))
    recipe = Fp8Recipe("tensor", amax="delayed")
    for factor in (1, 2, 0.5):  # the largest of all calls since a step
        y = warpsmith.scaled_linear(x * factor, w.requires_grad_(), recipe=recipe, state=state, emulate=True)
        y.backward(dy * factor)
    assert state.x_amax == 2 * finite_amax(x, (0, 1)).item() == 35
    assert state.dy_amax == 2 * finite_amax(dy, (0, 1)).item()
