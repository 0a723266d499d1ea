"""A right op passes every check made from its spec."""

from warpsmith.testing import op_tests

from toy_op import SPEC

TestToy = op_tests(SPEC)
