"""swiglu that writes its y as 8-bit floats too: the bits of swiglu alone, and of the cast alone."""

import pytest
import torch
from warpsmith.testing import sim

from tests.ops.test_norm_fp8 import DEVICES, RAW, check, check_bytes


def calls(shape, dtype, device, packed):
    """swiglu, and the same with a cast."""
    generator = torch.Generator().manual_seed(shape[-1])
    gate, up = (torch.randn(shape, generator=generator) for _ in range(2))
    gate[0, 0], up[1, -1], up[2] = float("nan"), float("inf"), 0
    up[3] *= 1e-4
    given = (torch.cat([gate, up], -1), None) if packed else (gate, up)
    given = [None if t is None else t.to(device, dtype) for t in given]
    return lambda kind: getattr(RAW, "swiglu" + kind)(*given, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [8, 13, 264, 2048, 8192, 14336, 16384, 16392])
def test_one_kernel_repeats_the_cast(columns, dtype, packed, device):
    launched = check(calls((5, columns), dtype, device, packed))
    fused = dtype != torch.float32 and columns % 8 == 0 and columns <= 16384
    assert not sim.is_loaded() or (launched == 1) == fused


@pytest.mark.skipif(not sim.is_loaded(), reason="counts what simulated kernels move")
@pytest.mark.parametrize("device", ["cpu"])
def test_bytes_moved(device):
    check_bytes(calls((9, 2048), torch.bfloat16, device, False), 9, 2048, 3)
