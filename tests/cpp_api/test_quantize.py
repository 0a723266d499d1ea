"""The C++ functions of 8-bit floats give Python's results."""

import itertools
import re

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal

SCALINGS, TRANSPOSES = ("row", "tensor", "block", "block2d"), ("no", "also", "only")


def same(a, b):
    if a is None or b is None:
        return a is b
    return bitwise_equal(*(t.view(torch.uint8) if t.itemsize == 1 else t for t in (a, b)))


def test_equal_to_python(cpp):
    x, to = torch.randn(3, 50, 140, requires_grad=True), torch.float8_e5m2
    for (i, scaling), (j, transpose), sums in itertools.product(
        enumerate(SCALINGS), enumerate(TRANSPOSES), (False, True)
    ):
        *found, column_sums = cpp.quantize_fp8(x, None, i, j, to, False, sums)
        wanted = warpsmith.quantize_fp8(x, scaling, to, transpose=transpose, power_of_two=False)
        assert all(map(same, found, wanted)) and (column_sums is None) == (not sums)
        if transpose != "only":
            values = cpp.dequantize_fp8(found[0], found[1], torch.bfloat16)
            assert same(values, warpsmith.dequantize_fp8(wanted, torch.bfloat16)) and not values.requires_grad


def test_a_given_scale(cpp, undefined):
    x, scale = torch.randn(4, 30), torch.tensor(0.25)
    for (i, scaling), (j, transpose) in itertools.product(enumerate(SCALINGS), enumerate(TRANSPOSES)):
        given = torch.rand(() if scaling == "tensor" else (30 if transpose == "only" else 4, 1)) + 0.5
        arguments = x, given, i, j, torch.float8_e4m3fn, True, False
        try:
            wanted = warpsmith.quantize_fp8(x, scaling, scale=given, transpose=transpose)
        except ValueError as refused:
            with pytest.raises(ValueError, match=re.escape(str(refused))):
                cpp.quantize_fp8(*arguments)
        else:
            assert all(map(same, cpp.quantize_fp8(*arguments)[:5], wanted))
    found = cpp.quantize_fp8(x, None, 0, 0, torch.float8_e4m3fn, True, False)[:5]
    assert all(map(same, found, warpsmith.quantize_fp8(x)))
    with pytest.raises(ValueError, match=r"^quantize_fp8: scale: expected shape \(4, 1\), got \(\)"):
        cpp.quantize_fp8(x, scale, 0, 0, torch.float8_e4m3fn, True, False)
