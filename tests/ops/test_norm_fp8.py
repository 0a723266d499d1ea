"""The norms that write their y as 8-bit floats too: the bits of the norm alone, and of the cast alone."""

import functools

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal, sim

RAW = torch.ops.warpsmith
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# A row in the registers of a block, of 2 vectors a thread (rms_norm) or 4, at the edges of warps and of instances.
FUSED = [1032, 2048, 2056, 4096, 4104, 12280, 12296, 16384]
OPS = ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"]
OTHERS = [1, 13, 64, 1000, 1024, 16392]  # by a kernel of their own, or no vectors


def calls(op, columns, dtype, device, weight_dtype=None, offset=0.0, bias=False):
    """The norm and the same with a cast, of rows with all that a float may hold."""
    generator = torch.Generator().manual_seed(columns)
    x, residual = (torch.randn(9, columns, generator=generator) for _ in range(2))
    x *= 10.0 ** torch.arange(-4, 5)[:, None]
    x[1], residual[1] = 0, 0
    x[2, columns // 2], x[3, -1], x[4, 0] = float("nan"), float("inf"), -float("inf")
    x[5], residual[5] = -0.0, 0
    x[6, columns - 1] = 3e4
    weight = None if weight_dtype is None else torch.randn(columns, generator=generator).to(device, weight_dtype)
    given = [t.to(device, dtype) for t in ((x, residual) if op.startswith("add") else (x,))]
    if "layer" in op:
        given += [weight, torch.randn(columns, generator=generator).to(weight) if bias else None, 1e-5]
    else:
        given += [weight, 1e-5, offset]

    def call(kind):
        return getattr(RAW, op + kind)(*given)

    call.given = given
    return call


def check(call):
    """Compares an op with a cast to the op and the cast. Returns how many kernels it launched."""
    expected = call("_forward")
    expected = expected if isinstance(expected, tuple) else (expected,)
    before = sim.launches() if sim.is_loaded() else 0
    *found, data, scale, counts = call("_fp8")
    launched = sim.launches() - before if sim.is_loaded() else 0
    assert all(bitwise_equal(a, b) for a, b in zip(found, expected, strict=True))
    wanted = warpsmith.quantize_fp8(found[0])
    assert torch.equal(data.view(torch.uint8), wanted.data.view(torch.uint8)) and torch.equal(scale, wanted.scale)
    assert torch.equal(counts, wanted.counts) and (counts.tolist()[1] > 0 or data.shape[1] == 1)
    return launched


def check_bytes(call, rows, columns, elements):
    """Beside the op's bytes those of the cast are written, and of rows that are not finite some are read again."""
    plain, cast = (sum(sim.counted(functools.partial(call, kind))[1]) for kind in ("_forward", "_fp8"))
    assert plain >= rows * columns * 2 * elements
    assert 0 <= cast - plain - rows * (columns + 4) <= 3 * 32 * 64 * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", FUSED)
@pytest.mark.parametrize("op", OPS)
def test_one_kernel_repeats_the_cast(op, columns, dtype, device):
    """Of layer norms without a bias, and of the sum before one with it; others are kernels of the length."""
    launched = check(calls(op, columns, dtype, device, dtype, bias=op == "add_layer_norm"))
    assert launched == 1 or not sim.is_loaded()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "columns", "alone"), [("layer_norm", 2048, 2), ("add_layer_norm", 1024, 2)])
def test_layer_norms_that_are_cast_behind(op, columns, alone, device):
    launched = check(calls(op, columns, torch.bfloat16, device, torch.bfloat16, bias=True))
    assert launched == alone or not sim.is_loaded()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weight_dtype", "offset"), [(None, 0.0), (torch.float32, 0.0), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("op", OPS)
def test_weights(op, weight_dtype, offset, device):
    check(calls(op, 2048, torch.bfloat16, device, weight_dtype, offset))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", OTHERS)
@pytest.mark.parametrize("op", OPS)
def test_rows_of_other_kernels_are_cast_behind_them(op, columns, dtype, device):
    launched = check(calls(op, columns, dtype, device, dtype))
    assert launched != 1 or not sim.is_loaded()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [*FUSED, *OTHERS, 768, 8192, 12288])
def test_the_sum_that_was_normed_gives_the_same_bits_again(columns, dtype, device):
    """So the backward of 8-bit layers need not have kept them. Alone rms_norm adds up some lengths in another order: in
    one byte of millions it shows, in the rstd of 64 rows for sure."""
    generator = torch.Generator().manual_seed(columns)
    x, residual = (torch.randn(64, columns, generator=generator).to(device, dtype) for _ in range(2))
    weight = torch.ones(columns, dtype=dtype, device=device)
    y, normed, *made = RAW.add_rms_norm_fp8(x, residual, weight, 1e-5, 0.0)
    again = RAW.rms_norm_fp8(normed, weight, 1e-5, 0.0, True)
    assert all(bitwise_equal(a, b) for a, b in zip(again, (y, *made), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 2048), (3, 0)])
def test_nothing_to_cast(shape, device):
    _, _, data, scale, counts = RAW.rms_norm_fp8(torch.zeros(shape, device=device), None, 1e-5, 0.0)
    assert data.shape == shape and counts.tolist() == [0, 0] and torch.equal(scale, torch.ones_like(scale))


@pytest.mark.skipif(not sim.is_loaded(), reason="counts what simulated kernels move")
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("op", "elements"), [("rms_norm", 2), ("add_rms_norm", 4), ("layer_norm", 2), ("add_layer_norm", 4)]
)
def test_bytes_moved(op, elements, device):
    check_bytes(calls(op, 2048, torch.bfloat16, device, torch.bfloat16), 9, 2048, elements)
