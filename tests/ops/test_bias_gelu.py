"""bias_gelu under the law, exact and by tanh."""

import pytest
import torch
import warpsmith
from warpsmith.reference.bias_gelu import bias_gelu as reference
from warpsmith.testing import BadInput, Case, op_tests

from .biased import (
    BAD_INPUTS,
    BF16,
    CASES,
    FP16,
    FP32,
    FP64,
    biased_spec,
    but,
    check_gradients_alone,
    check_thread_counts,
)

EXACT = {"approximate": "none"}
ALL = [*CASES, *(Case((5, 136), dtype, options=EXACT) for dtype in (BF16, FP32, FP16, FP64))]
BAD = [
    *BAD_INPUTS,
    BadInput("approximation", but(approximate=lambda g: "erf"), "approximate: expected 'none' or 'tanh', got 'erf'"),
]


def torch_bias_gelu(x, bias, approximate):
    if bias.dtype != x.dtype:
        return reference(x, bias, approximate)
    return torch.nn.functional.gelu(x + bias, approximate=approximate)


SPEC = biased_spec("bias_gelu", reference, torch_bias_gelu, ("approximate", "tanh", lambda a: a == "tanh"), ALL, BAD)
TestBiasGelu = op_tests(SPEC)


def test_results_do_not_depend_on_the_number_of_threads():
    check_thread_counts(warpsmith.bias_gelu)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_alone_has_the_same_bits(device):
    check_gradients_alone(torch.ops.warpsmith.bias_gelu_backward, device, True)


def test_second_derivatives_of_the_exact_form():
    x, bias = torch.randn(3, 4, dtype=FP64, requires_grad=True), torch.randn(4, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, b: warpsmith.bias_gelu(x, b, "none"), (x, bias))


@pytest.mark.parametrize("columns", [*range(1, 20), 33, 96, 768, 1000, 4096, 5120, 12288, 2**20, 100001])
def test_every_plan_covers_its_problem(columns):
    for rows in (1, 7, 16384):
        for dtype in ("float32", "bfloat16"):
            plan = warpsmith.plan("bias_gelu", rows=rows, columns=columns, dtype=dtype)
            for c in (plan["forward"], plan["backward"]):
                assert c["width"] * c["vector_elems"] * c["tiles"] >= columns
                assert c["width"] * c["vector_elems"] * (c["tiles"] - 1) < columns
                assert c["blocks"] == c["tiles"] * c["row_blocks"]
            assert plan["forward"]["row_blocks"] * (256 // plan["forward"]["width"]) >= rows
            assert plan["backward"]["row_blocks"] <= max(1, 5 * 132 // plan["backward"]["tiles"])
