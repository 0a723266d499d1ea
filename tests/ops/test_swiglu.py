"""swiglu under the law, and its in-place backward."""

import torch
import warpsmith
from warpsmith.reference.swiglu import swiglu as reference
from warpsmith.testing import op_tests

from .gated import InPlace, gated_spec


def torch_swiglu(gate, up):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


TestSwiglu = op_tests(gated_spec("swiglu", reference, torch_swiglu))


class TestInPlace(InPlace):
    op = staticmethod(warpsmith.swiglu)


def test_plan_says_how_the_card_is_used():
    flat = warpsmith.plan("swiglu", rows=8192, columns=14336)
    assert (flat["flat"], flat["vector_elems"], flat["blocks"]) == (True, 8, 8192 * 14336 // 8 // flat["threads"])
    packed = warpsmith.plan("swiglu", rows=8192, columns=14336, contiguous=False)
    assert (packed["flat"], packed["vector_elems"]) == (False, 8)
    odd = warpsmith.plan("swiglu", rows=10, columns=33, contiguous=False, dtype="float32")
    assert (odd["vector_elems"], odd["vectors"]) == (1, 330)
    assert warpsmith.plan("swiglu", rows=10, columns=33)["vectors"] == 42  # the last one is not full
