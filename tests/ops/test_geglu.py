"""geglu under the law, exact and by tanh, and its in-place backward."""

import functools

import pytest
import torch
import warpsmith
from warpsmith.reference.geglu import geglu as reference
from warpsmith.testing import BadInput, op_tests

from .gated import BAD_INPUTS, BF16, FEW_CASES, FP16, FP32, FP64, PACKED, Case, InPlace, but, gated_spec

TANH = {"approximate": "tanh"}
CASES = [
    *FEW_CASES,
    *(Case((5, width), dtype, options=TANH) for width in (7, 256) for dtype in (BF16, FP32, FP16, FP64)),
    Case((5, 66), BF16, options={**PACKED, **TANH}),
]


def torch_geglu(gate, up, approximate):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


BAD = [
    *BAD_INPUTS,
    BadInput("approximation", but(approximate=lambda g: "sigmoid"), r"approximate: expected 'none' or 'tanh', got 'si"),
]
SPEC = gated_spec("geglu", reference, torch_geglu, ("approximate", lambda a: a == "tanh"), CASES, BAD)
TestGeglu = op_tests(SPEC)


class TestInPlace(InPlace):
    op = staticmethod(functools.partial(warpsmith.geglu, approximate="tanh"))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_second_derivatives_of_both_forms(approximate):
    gate, up = (torch.randn(3, 4, dtype=FP64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: warpsmith.geglu(g, u, approximate), (gate, up))
    assert torch.autograd.gradgradcheck(lambda g, u: warpsmith.geglu(g, u, approximate), (gate, up))


def test_small_values_keep_their_digits():
    gate = -torch.linspace(0.0, 12.0, 2001)  # torch's formula loses all of them from -5.5 on, in float64 from -8.3 on
    exact = 0.5 * gate.double() * torch.erfc(-gate.double() / 2**0.5)
    ours = warpsmith.geglu(gate, torch.ones_like(gate)).double()
    assert ((ours - exact).abs() <= 1e-5 * exact.abs()).all()
