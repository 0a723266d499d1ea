"""Ops that write their y as 8-bit floats too, RMS norms and swiglu: the bits of the op alone, and of the cast alone."""

from __future__ import annotations

import functools

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal, sim

RAW = torch.ops.warpsmith
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# A row in the registers of a block, of 2 vectors a thread (rms_norm) or 4, at the edges of warps and of instances.
FUSED = [1032, 2048, 2056, 4096, 4104, 12280, 12296, 16384]
OTHERS = [1, 13, 64, 1000, 1024, 16392]  # by a kernel of their own, or no vectors


def calls(op, columns, dtype, device, weight_dtype=None, offset=0.0):
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
    given += [weight, 1e-5, offset]
    return lambda kind: getattr(RAW, op + kind)(*given)


def swiglu_calls(shape, dtype, device, packed):
    """The same of swiglu."""
    generator = torch.Generator().manual_seed(shape[-1])
    gate, up = (torch.randn(shape, generator=generator) for _ in range(2))
    gate[0, 0], up[1, -1], up[2] = float("nan"), float("inf"), 0
    up[3] *= 1e-4
    given = (torch.cat([gate, up], -1), None) if packed else (gate, up)
    given = [None if t is None else t.to(device, dtype) for t in given]
    return lambda kind: getattr(RAW, "swiglu" + kind)(*given, False)


def check(call):
    """Returns how many kernels the op with a cast launched."""
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", FUSED)
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_one_kernel_writes_both(op, columns, dtype, device):
    launched = check(calls(op, columns, dtype, device, dtype))
    assert launched == 1 or not sim.is_loaded()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weight_dtype", "offset"), [(None, 0.0), (torch.float32, 0.0), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_weights(op, weight_dtype, offset, device):
    check(calls(op, 2048, torch.bfloat16, device, weight_dtype, offset))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", OTHERS)
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_rows_of_other_kernels_are_cast_behind_them(op, columns, dtype, device):
    launched = check(calls(op, columns, dtype, device, dtype))
    assert launched != 1 or not sim.is_loaded()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [8, 13, 264, 2048, 8192, 14336, 16384, 16392])
def test_swiglu(columns, dtype, packed, device):
    launched = check(swiglu_calls((5, columns), dtype, device, packed))
    fused = dtype != torch.float32 and columns % 8 == 0 and columns <= 16384
    assert not sim.is_loaded() or (launched == 1) == fused


@pytest.mark.skipif(not sim.is_loaded(), reason="counts what simulated kernels move")
def test_bytes_moved_beside_the_op():
    columns = 2048
    for call, elements in (
        (calls("rms_norm", columns, torch.bfloat16, "cpu"), 2),
        (calls("add_rms_norm", columns, torch.bfloat16, "cpu"), 4),
        (swiglu_calls((9, columns), torch.bfloat16, "cpu", False), 3),
    ):
        plain, cast = (sum(sim.counted(functools.partial(call, kind))[1]) for kind in ("_forward", "_fp8"))
        assert plain >= 9 * columns * 2 * elements
        more = cast - plain - 9 * (columns + 4)
        assert 0 <= more <= 3 * 32 * 64 * 4, "beside bytes and scales only rows that are not finite are read again"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 2048), (3, 0)])
def test_nothing_to_cast(shape, device):
    _, _, data, scale, counts = RAW.rms_norm_fp8(torch.zeros(shape, device=device), None, 1e-5, 0.0)
    assert data.shape == shape and counts.tolist() == [0, 0] and torch.equal(scale, torch.ones_like(scale))
