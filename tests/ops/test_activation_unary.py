"""The unary activations under the law."""

import pytest
import torch
from warpsmith.testing import Case, op_tests

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, floor_bytes, op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.warpsmith

SPEC = op_spec(
    name="relu_squared",
    baseline=lambda x: torch.relu(x).square(),
    inputs=lambda case, rng: {"x": rng.normal(case.shape)},
    cases=[
        *(Case((5, width), dtype) for width in (7, 33, 256) for dtype in (BF16, FP32)),
        *(Case((3, 2, 96), dtype) for dtype in (FP16, FP64)),
        Case((20, 1000), BF16),
        Case((768,), FP32),
    ],
    differentiable=("x",),
    outputs=("y",),
    batched=("x",),
    gradcheck_cases=[Case((3, 5), FP64)],
    double_backward=True,
    func_transforms=True,
    bad_inputs=[NO_FLOAT64_ON_CUDA],
    floor_bytes=floor_bytes(2, 3),
)  # fmt: skip

TestReluSquared = op_tests(SPEC)


def test_the_fake_backward_names_the_op():
    x = torch.empty(2, 3, device="meta")
    for dy, words in ((x.half(), "expected float32, got float16"), (x[:1], r"expected shape \(2, 3\), got \(1, 3\)")):
        with pytest.raises(ValueError, match=f"^relu_squared_backward: dy: {words}$"):
            torch.ops.warpsmith.relu_squared_backward(dy, x)
