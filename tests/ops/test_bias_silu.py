"""bias_silu under the law."""

import pytest
import torch
import warpsmith
from warpsmith.reference.bias_silu import bias_silu as reference
from warpsmith.testing import op_tests

from .biased import CASES, biased_spec, check_gradients_alone, check_thread_counts


def torch_bias_silu(x, bias):
    return reference(x, bias) if bias.dtype != x.dtype else torch.nn.functional.silu(x + bias)


TestBiasSilu = op_tests(biased_spec("bias_silu", reference, torch_bias_silu, cases=CASES[::2]))


def test_results_do_not_depend_on_the_number_of_threads():
    check_thread_counts(warpsmith.bias_silu)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_alone_has_the_same_bits(device):
    check_gradients_alone(torch.ops.warpsmith.bias_silu_backward, device)
