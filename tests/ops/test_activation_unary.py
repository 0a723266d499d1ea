"""The unary activations under the law."""

import pytest
import torch
import warpsmith
from warpsmith.reference.activation import relu_squared as reference
from warpsmith.testing import Case, OpSpec, op_tests

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, floor_bytes, raw_ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.warpsmith

SPEC = OpSpec(
    name="relu_squared",
    op=warpsmith.relu_squared,
    reference=reference,
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
    traced="warpsmith::relu_squared",
    opcheck=raw_ops("relu_squared"),
    bad_inputs=[NO_FLOAT64_ON_CUDA],
    floor_bytes=floor_bytes(2, 3),
)  # fmt: skip

TestReluSquared = op_tests(SPEC)


def test_the_fake_backward_names_the_op():
    x = torch.empty(2, 3, device="meta")
    for dy, words in ((x.half(), "expected float32, got float16"), (x[:1], r"expected shape \(2, 3\), got \(1, 3\)")):
        with pytest.raises(ValueError, match=f"^relu_squared_backward: dy: {words}$"):
            torch.ops.warpsmith.relu_squared_backward(dy, x)
