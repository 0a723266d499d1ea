"""A right op passes every check made from its spec; inputs lie as their case says."""

from dataclasses import replace

import pytest
from toy_op import SPEC
from warpsmith.testing import LAYOUTS, make_inputs, op_tests

TestToy = op_tests(SPEC)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("laid_out", "expanded", "wanted"),
    [(None, None, {"x", "scale"}), (("x",), None, {"x"}), (("x", "scale"), ("x",), {"x"}), (("x",), (), set())],
)
def test_layouts_apply_to_the_inputs_named(layout, laid_out, expanded, wanted):
    spec = replace(SPEC, laid_out=laid_out, expanded=expanded)
    inputs = make_inputs(spec, SPEC.base_case().but(layout=layout))
    plain = make_inputs(spec, SPEC.base_case())
    if layout != "expanded":
        wanted = set(laid_out or ("x", "scale"))
    apart = {n for n, t in inputs.items() if t.stride() != plain[n].stride() or t.storage_offset()}
    assert apart == (set() if layout == "contiguous" else wanted)
