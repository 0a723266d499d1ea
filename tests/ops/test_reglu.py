"""reglu under the law, and its in-place backward."""

import torch
import warpsmith
from warpsmith.reference.reglu import reglu as reference
from warpsmith.testing import op_tests

from .gated import FEW_CASES, InPlace, gated_spec


def torch_reglu(gate, up):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return torch.relu(gate) * up


TestReglu = op_tests(gated_spec("reglu", reference, torch_reglu, cases=FEW_CASES))


class TestInPlace(InPlace):
    op = staticmethod(warpsmith.reglu)


def test_a_dropped_gradient_takes_infinities_with_it_and_a_nan_stays():
    gate = torch.tensor([-1.0, 0.0, 1.0, torch.nan], requires_grad=True)
    y = warpsmith.reglu(gate, torch.full((4,), torch.inf))
    (found,) = torch.autograd.grad(y.sum(), gate)
    assert found.tolist()[:3] == [0.0, 0.0, torch.inf]
    assert y[3].isnan()
