"""A right op passes every check made from its spec."""

from toy_op import SPEC
from warpsmith.testing import op_tests

TestToy = op_tests(SPEC)
