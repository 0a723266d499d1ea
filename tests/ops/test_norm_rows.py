"""How many rows stand beside a row changes no bit of its result, though it may choose another kernel."""

import pytest
import torch
import warpsmith
from warpsmith.reference.norm import layer_norm as layer_norm_reference
from warpsmith.reference.norm import rms_norm as rms_norm_reference
from warpsmith.testing.sim import is_loaded

# The chooser of an H200 (132 multiprocessors) has other kernels from 529 rows of 8192 columns on, and for 529 to 1056
# of 12288; that of the simulated machine, with 4, from 17. Short rows share a warp, whose last one may lack some; 1600,
# 2560 and 7168 columns have a block each.
PROCESSORS = 4 if is_loaded() else 132
SIZES = [
    (4 * PROCESSORS + 1, 8192),
    (4 * PROCESSORS + 1, 12288),
    (8 * PROCESSORS + 1, 12288),
    (41, 64),
    (37, 128),
    (7, 256),
    (5, 512),
    (9, 768),
    (3, 1024),
    (6, 1600),
    (37, 2560),
    (5, 7168),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_row_does_not_depend_on_the_others(op, rows, columns, dtype, device):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator).to(device, dtype)
    weight, bias = (torch.randn(columns, generator=generator).to(device, dtype) for _ in range(2))
    layer = op == "layer_norm"
    norm = warpsmith.layer_norm if layer else warpsmith.rms_norm
    reference = layer_norm_reference if layer else rms_norm_reference
    affine = (weight, bias, 1e-5) if layer else (weight, 1e-5)
    some = torch.tensor([0, 1, rows // 2, rows - 1], device=device)

    together = norm(x, *affine)[some]
    alone = norm(x[some], *affine)
    assert torch.equal(together, alone)
    wanted = reference(x[some].double(), *(a.double() for a in affine[:-1]), 1e-5)
    torch.testing.assert_close(together.double(), wanted, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)
