"""Every 16-bit value, borders of the formats, counts, column sums, and how much of a signal is left."""

import math

import pytest
import torch
import warpsmith
from torch.utils._python_dispatch import TorchDispatchMode
from warpsmith.reference.quantize import cast, finite_amax, scale_of
from warpsmith.testing import bitwise_equal, measure, sim
from warpsmith.testing.checks.kernels import FAR, far

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TO_NEAREST = "the same bits as torch's cast of x / scale"
raw = torch.ops.warpsmith
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def every_value(dtype):
    """All 65,536 values of a 16-bit dtype, those that are not finite too."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(256, 256)


def same(t, data, scale=None):
    assert bitwise_equal(t.data.view(torch.uint8), data.view(torch.uint8)), TO_NEAREST
    assert scale is None or bitwise_equal(t.scale, scale)


@on_each_device
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**20, 0.0037, 1e-30, 2.0**127, 2.0**-126])
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_every_16_bit_value(dtype, to, scale, device):
    x, given = every_value(dtype).to(device), torch.tensor(scale, device=device)
    t = warpsmith.quantize_fp8(x, "tensor", to, scale=given, transpose="also")
    data, counts = cast(x, given, to)
    same(t, data)
    assert bitwise_equal(t.transposed.view(torch.uint8), data.t().contiguous().view(torch.uint8))
    assert t.counts.tolist() == counts.tolist()


@on_each_device
@pytest.mark.parametrize("to", FORMATS)
def test_ties_go_to_even_and_subnormals_stay(to, device):
    values = torch.arange(256).to(torch.uint8).view(to).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1])]).to(device)
    t = warpsmith.quantize_fp8(x, "tensor", to, scale=torch.ones((), device=device))
    same(t, x.to(to))
    assert t.counts.tolist() == [0, 0]


@on_each_device
@pytest.mark.parametrize("transpose", ["no", "only"])
@pytest.mark.parametrize("to", FORMATS)
def test_quotients_near_ties_of_scales_that_are_no_powers_of_two(to, transpose, device):
    values = torch.arange(128).to(torch.uint8).view(to).float()
    values = values[values.isfinite()].unique()
    scales = torch.tensor([0.0037, 1.1, 3.0, 77.7, 1e-5, 1e6])[:, None]
    near = scales * (values[1:] + values[:-1]) / 2
    infinity = torch.tensor(math.inf)
    x = torch.cat([scales * values[-1], near, near.nextafter(infinity), near.nextafter(-infinity)], 1).to(device)
    turned = x if transpose == "no" else x.t().contiguous()
    t = warpsmith.quantize_fp8(turned, "row", to, transpose=transpose, power_of_two=False)
    made, data = (t.scale, t.data) if transpose == "no" else (t.transposed_scale, t.transposed)
    assert bitwise_equal(data.view(torch.uint8), cast(x, made, to)[0].view(torch.uint8)), TO_NEAREST


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("to", FORMATS)
def test_largest_magnitudes_at_the_border_of_a_scale(to, power_of_two):
    largest, infinity = torch.finfo(to).max, torch.tensor(math.inf)
    exact = largest * 2.0 ** torch.arange(-160, 112).double()
    amax = torch.cat([exact.float(), exact.float().nextafter(infinity), exact.float().nextafter(-infinity)])
    amax = amax[amax.isfinite() & (amax >= 0)]
    scale = raw.fp8_scale(amax, to, power_of_two)
    assert bitwise_equal(scale, scale_of(amax, to, power_of_two))
    assert bool((amax / scale <= largest).all())
    above = scale[(scale > 2.0**-126) & (amax > 0)], amax[(scale > 2.0**-126) & (amax > 0)]
    smaller = above[0] / 2 if power_of_two else above[0].nextafter(-infinity)
    assert bool((above[1] / smaller > largest).all()), "a smaller scale would do"
    normal = exact[(exact > 2.0**-100) & (exact < 2.0**120)]
    assert bitwise_equal(raw.fp8_scale(normal.float(), to, True).double() * largest, normal)
    t = warpsmith.quantize_fp8(amax[:, None].clone(), "row", to, power_of_two=power_of_two)
    assert bitwise_equal(t.scale, scale[:, None]) and t.counts.tolist() == [0, 0]


@on_each_device
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [13, 129])
def test_a_single_row_of_any_length(columns, dtype, device):
    """Rows that are not there have addresses all the same, on 16 bytes whatever the length."""
    x = torch.linspace(-3.0, 3.0, columns, dtype=dtype, device=device)[None]
    t = warpsmith.quantize_fp8(x, "tensor", E4M3, transpose="also")
    same(t, cast(x, t.scale, E4M3)[0])
    assert bitwise_equal(t.transposed.view(torch.uint8), t.data.view(torch.uint8).t().contiguous())


@pytest.mark.parametrize("scaling", ["row", "tensor", "block", "block2d"])
def test_zeros_and_denormal_numbers(scaling):
    x = torch.zeros(3, 40)
    t = warpsmith.quantize_fp8(x, scaling, transpose="also")
    assert not t.data.float().any() and bool((t.scale == 1).all()) and bool((t.transposed_scale == 1).all())
    x = torch.full((3, 40), 2.0**-149)
    x[0, 0] = 2.0**-130
    t = warpsmith.quantize_fp8(x, scaling)
    assert bool((t.scale == 2.0**-126).all()) and t.counts.tolist() == [0, 0]
    same(t, (x * 2.0**126).to(E4M3))
    assert float(warpsmith.dequantize_fp8(t)[0, 0]) == 2.0**-130


@on_each_device
@pytest.mark.parametrize("transpose", ["no", "also", "only"])
@pytest.mark.parametrize("scaling", ["row", "tensor", "block", "block2d"])
def test_what_is_not_finite_is_counted_once_and_never_saturates(scaling, transpose, device):
    x = 1e4 * torch.randn(130, 300).to(device)  # beyond both formats before they are scaled
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    x[129, 299] = -math.nan
    for to in FORMATS:
        t = warpsmith.quantize_fp8(x, scaling, to, transpose=transpose)
        found = t.data if t.data is not None else t.transposed.view(torch.uint8).t().contiguous().view(to)
        first, last = found[0, :3].float(), found[129, 299].float()
        assert t.counts.tolist() == [0, 4]
        assert last.isnan() and first[2].isnan() and int(found.float().isfinite().sum()) == x.numel() - 4
        expected = torch.tensor([math.inf, -math.inf]) if to == E5M2 else torch.tensor([math.nan] * 2)
        assert torch.equal(first[:2].cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_given_scale_saturates_and_counts():
    x = torch.tensor([[447.0, 448.0, 449.0, 500.0], [-1e30, 3e38, 1.0, -449.0]])
    t = warpsmith.quantize_fp8(x, "tensor", scale=torch.tensor(1.0), transpose="also")
    assert t.data.float().tolist() == [[448.0, 448.0, 448.0, 448.0], [-448.0, 448.0, 1.0, -448.0]]
    assert t.counts.tolist() == [5, 0]
    assert t.scale is t.transposed_scale
    many = torch.full((300, 4000), 1e3, dtype=torch.bfloat16)
    for scaling, scale in (("tensor", torch.ones(())), ("row", torch.ones(300, 1))):
        assert warpsmith.quantize_fp8(many, scaling, scale=scale).counts.tolist() == [many.numel(), 0]


def sqnr(x, t):
    noise = warpsmith.dequantize_fp8(t).double() - x.double()
    return 10 * math.log10(float(x.double().square().sum() / noise.square().sum()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_signal_over_noise_of_rows(dtype):
    torch.manual_seed(0)
    x = torch.randn(256, 1024)
    outlier = x.clone()
    outlier[:, 77] *= 60
    assert sqnr(x.to(dtype), warpsmith.quantize_fp8(x.to(dtype))) >= 30
    assert sqnr(outlier.to(dtype), warpsmith.quantize_fp8(outlier.to(dtype))) >= 25
    assert sqnr(x.to(dtype), warpsmith.quantize_fp8(x.to(dtype), dtype=E5M2)) >= 24


# TransformerEngine's: tests/cpp/operator/test_cast_transpose_dbias.cu, the small ones.
@pytest.mark.parametrize("shape", [(64, 400), (256, 256), (300, 33), (1, 5), (0, 7), (5, 0), (1000, 8)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_transpose_and_column_sums_in_one_call(dtype, shape):
    torch.manual_seed(1)
    dy = torch.randn(shape).to(dtype)
    for number, scaling in enumerate(("row", "tensor", "block", "block2d")):
        for how, transpose in enumerate(("no", "also", "only")):
            *found, counts, sums = raw.quantize_fp8(dy, None, number, how, E4M3, True, True)
            t = warpsmith.quantize_fp8(dy, scaling, transpose=transpose)
            for name, mine in zip(("data", "scale", "transposed"), found, strict=False):
                wanted = getattr(t, name)
                if wanted is not None:
                    pair = (mine.view(torch.uint8), wanted.view(torch.uint8)) if name != "scale" else (mine, wanted)
                    assert bitwise_equal(*pair), name
            error = measure("column_sums", sums, dy.double().sum(0), dy.float().sum(0))
            assert error.ok and counts.tolist() == [0, 0], str(error)


def test_largest_magnitudes():
    x = torch.randn(5, 300)
    x[2, 3], x[4] = math.inf, math.nan
    assert bitwise_equal(raw.fp8_amax(x, True), finite_amax(x, 1))
    assert bitwise_equal(raw.fp8_amax(x, False), finite_amax(x, (0, 1)).view(()))
    assert raw.fp8_amax(x[:0], False).item() == 0 and raw.fp8_amax(x[:, :0], True).tolist() == [[0.0]] * 5
    wrong = {
        "fp8_amax: x: expected float32": lambda: raw.fp8_amax(x.double(), True),
        "fp8_scale: amax: expected float32": lambda: raw.fp8_scale(x.half(), E4M3, True),
        "fp8_scale: dtype: expected float8_e4m3fn": lambda: raw.fp8_scale(x, torch.int8, True),
    }
    for words, call in wrong.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_results_require_no_gradient():
    x = torch.randn(4, 32, requires_grad=True)
    t = warpsmith.quantize_fp8(x, transpose="also")
    assert not any(part.requires_grad for part in t)
    assert not warpsmith.dequantize_fp8(t._replace(scale=t.scale.requires_grad_())).requires_grad
    mapped = torch.func.vmap(lambda row: warpsmith.quantize_fp8(row).data.view(torch.uint8))(x.detach())
    assert torch.equal(mapped, t.data.view(torch.uint8))


def test_the_transpose_alone_comes_back_as_it_lies():
    x = torch.randn(3, 5)
    t = warpsmith.quantize_fp8(x, transpose="only")
    assert t.data is None and t.scale is None and t.transposed_scale.shape == (5, 1)
    assert bitwise_equal(warpsmith.dequantize_fp8(t), warpsmith.dequantize_fp8(warpsmith.quantize_fp8(x.t())))


def test_one_call_of_the_library():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    x, seen = torch.randn(4, 32), []
    with Calls():
        warpsmith.quantize_fp8(x, "tensor", transpose="also")
    assert seen == ["warpsmith.quantize_fp8.default"]


def test_no_tuple_and_no_tensor():
    with pytest.raises(TypeError, match="dequantize_fp8: t: expected an Fp8Tensor, got Tensor"):
        warpsmith.dequantize_fp8(torch.ones(3))


@pytest.mark.skipif(not sim.is_loaded(), reason="memory that nothing touches is there on the simulated machine alone")
@pytest.mark.parametrize("scaling", ["block", "block2d"])
def test_squares_behind_2_to_the_31_elements(scaling):
    """The last blocks of the grid, whose offsets need 64 bits in x and in both kinds of bytes."""
    x = torch.randn(3, 256).bfloat16()
    before = FAR // 256 // 128 * 128 + 128
    with sim.machine(last_blocks=2):
        t = warpsmith.quantize_fp8(far(x, before), scaling, transpose="also")
    wanted = warpsmith.quantize_fp8(x, scaling, transpose="also")
    assert bitwise_equal(t.data[before:].view(torch.uint8), wanted.data.view(torch.uint8))
    assert bitwise_equal(t.transposed[:, before:].contiguous().view(torch.uint8), wanted.transposed.view(torch.uint8))
    assert bitwise_equal(t.scale[-wanted.scale.shape[0] :], wanted.scale)
    assert bitwise_equal(t.transposed_scale[:, -1:], wanted.transposed_scale)
