"""matmul_symmetric under the law, by torch's products and by ours; and the products that are known to be symmetric."""

import os
from dataclasses import replace

import pytest
import torch
import warpsmith
from warpsmith.testing import Case, bitwise_equal, op_tests
from warpsmith.testing.sim import is_loaded, launches, torch_device

from tests.ops.public_calls import op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
OPS = torch.ops.warpsmith
ON_CUDA = pytest.mark.gpu
DEVICES = ["sim-"] if is_loaded() else ["cpu", pytest.param("cuda", marks=ON_CUDA)]

CASES = [
    *(Case(shape, dtype) for dtype in DTYPES for shape in ((6, 24), (2, 9, 13), (2, 3, 8, 5))),
    *(Case((m, 48), BF16) for m in (1, 15, 17, 127, 129)),
    *(Case((40, k), FP32) for k in (1, 7, 16, 17, 144)),
    Case((1030, 8), FP32),  # in panels
    Case((2, 1030, 8), BF16, layouts={"x": "transposed"}),
]
SPEC = op_spec(
    name="matmul_symmetric",
    inputs=lambda case, rng: {"x": rng.normal(case.shape)},
    cases=CASES,
    outputs=("y",),
    differentiable=("x",),
    laid_out=("x",),
    expanded=("x",),
    thread_counts=(),
    double_backward=True,
    func_transforms=True,
    backward_kernels=False,  # torch's product
    autocast=lambda good, dtype: (dtype,),
    gradcheck_cases=[Case((3, 4), FP64), Case((2, 3, 2), FP64)],
)

TestMatmulSymmetric = op_tests(SPEC)

OWN_CASES = [
    *(Case(shape, dtype) for dtype in (BF16, FP16) for shape in ((8, 24), (3, 24, 40), (264, 72))),
    *(Case((40, k), BF16) for k in (16, 32, 112, 144)),
    *(Case((2, m, 48), BF16, layouts={"x": "transposed"}) for m in (16, 128, 264)),
    Case((7, 13), BF16),  # on 16 bytes nowhere
]


class TestByOwnProducts(op_tests(replace(SPEC, cases=OWN_CASES, devices=("cuda",), bad_inputs=()))):
    @pytest.fixture(autouse=True)
    def ours(self):
        OPS._own_product("1")
        yield
        OPS._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto"))

    @pytest.mark.skipif(not is_loaded(), reason="counts launches of the simulated device")
    @pytest.mark.parametrize("device", ["sim-"])
    def test_one_launch_of_half_of_the_tiles(self, device):
        x, before = torch.randn(2, 24, 40).bfloat16(), launches()
        warpsmith.matmul_symmetric(x)
        warpsmith.matmul_symmetric(x.mT.contiguous().mT)
        assert launches() - before == 2
        OPS._own_product("0")
        warpsmith.matmul_symmetric(x)
        assert launches() - before == 3  # what lies above the diagonal is copied below it

    @pytest.mark.parametrize("device", ["sim-"] if is_loaded() else [pytest.param("cuda", marks=ON_CUDA)])
    def test_bits_are_those_of_each_matrix_and_of_linear(self, device):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(3, 264, 208, generator=g).to(torch_device(device.strip("-")), BF16)
        y = warpsmith.matmul_symmetric(x)
        turned = x.mT.contiguous().mT
        assert bitwise_equal(y, y.mT) and bitwise_equal(y[1], warpsmith.matmul_symmetric(x[1]))
        assert bitwise_equal(y, warpsmith.matmul_symmetric(turned))
        by_linear = OPS.linear_inference(x[1], None, x[1], None, None, 0)
        assert bitwise_equal(y[1], by_linear)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", ["0", "1"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(8, 24), (2, 264, 264), (1032, 16)])
def test_products_that_are_known_to_be_symmetric(device, own, dtype, shape):
    """The law of symmetric factors that commute, with an addend."""
    if own == "1" and device == "cpu":
        pytest.skip("the CPU has no kernels of ours")
    g = torch.Generator().manual_seed(3)
    on = torch_device(device.strip("-"))
    x = (torch.randn(shape, generator=g, dtype=FP64) / shape[-1] ** 0.5).to(on, dtype)
    z = warpsmith.matmul_symmetric(torch.randn(shape, generator=g).to(on, dtype) / shape[-1] ** 0.5)
    y, alpha, beta = x * 2, 0.75, -1.5
    if hasattr(OPS, "_own_product"):
        OPS._own_product(own)
    try:
        for addend in (None, z):
            got = OPS.symmetric_product(x, y, addend, alpha, beta)
            right, plain = alpha * x.double() @ y.double().mT, alpha * (x @ y.mT)
            if addend is not None:
                right, plain = right + beta * z.double(), plain + beta * z
            step = torch.finfo(dtype).eps / 2 * right.abs().max()
            assert bitwise_equal(got, got.mT)
            assert (got - right).abs().max() <= 2 * (plain - right).abs().max() + 2 * step
    finally:
        if hasattr(OPS, "_own_product"):
            OPS._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto"))


@pytest.mark.parametrize("change, text", [
    ({"y": lambda x: x.float()}, "y: expected bfloat16, got float32"),
    ({"y": lambda x: x[1:]}, r"y: expected shape \(8, 24\), got \(7, 24\)"),
    ({"z": lambda x: x}, r"z: expected shape \(8, 8\), got \(8, 24\)"),
    ({"alpha": lambda x: float("nan")}, "alpha: expected a finite number"),
])  # fmt: skip
def test_wrong_products_are_refused(change, text):
    x = torch.randn(8, 24).bfloat16()
    given = {"x": x, "y": x, "z": None, "alpha": 1.0, "beta": 1.0} | {n: f(x) for n, f in change.items()}
    with pytest.raises(ValueError, match=text):
        OPS.symmetric_product(*given.values())


def test_plan_names_the_tile():
    plan = warpsmith.plan("matmul_symmetric", rows=2048, inner=8192, batches=16)
    assert (plan["path"], plan["tile"], plan["epilogue"]) == ("own", "128x256", "symmetric")
    for change in ({"batches": 1}, {"dtype": "float32"}, {"aligned": False}, {"rows": 2044}, {"code_capability": 80}):
        assert warpsmith.plan("matmul_symmetric", **{"rows": 2048, "inner": 8192, "batches": 16} | change)["path"] == (
            "torch"
        )
