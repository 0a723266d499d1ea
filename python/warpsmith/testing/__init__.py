"""The law as code: one declaration of an op gives the tests that every op must pass, and the timers its speed is
stated with.

Declare an op once and get its tests::

    from warpsmith.testing import Case, OpSpec, op_tests

    SPEC = OpSpec(
        name="scale", op=my_package.scale, reference=lambda x, factor: x * factor,
        inputs=lambda case, rng: {"x": rng.normal(case.shape), "factor": 0.5},
        cases=[Case((7, 33), torch.bfloat16), Case((1,), torch.float32)],
        differentiable=("x",),
    )
    TestScale = op_tests(SPEC)          # in a pytest module

or, without pytest, ``check_op(SPEC)``. Nothing here is imported by ``import warpsmith``; pytest is needed by
``op_tests`` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpsmith.testing.cpu_timer import cpu_threads, host_time_us, time_cpu
    from warpsmith.testing.gpu_timer import GpuTimer, copy_yardstick_ms
    from warpsmith.testing.inputs import make_inputs
    from warpsmith.testing.law import Error, measure, ulp
    from warpsmith.testing.op_timing import time_forward_backward, time_op, timer_of
    from warpsmith.testing.ranks import run_ranks
    from warpsmith.testing.rows import Row, environment, format_table, write_json
    from warpsmith.testing.spec import BadInput, Case, OpSpec
    from warpsmith.testing.suite import check_op, op_tests
    from warpsmith.testing.tensors import LAYOUTS, Random, bitwise_equal, edge_values, lay_out

_HOME = {
    "cpu_timer": ("cpu_threads", "host_time_us", "time_cpu"),
    "gpu_timer": ("GpuTimer", "copy_yardstick_ms"),
    "inputs": ("make_inputs",),
    "law": ("Error", "measure", "ulp"),
    "suite": ("check_op", "op_tests"),
    "op_timing": ("time_forward_backward", "time_op", "timer_of"),
    "ranks": ("run_ranks",),
    "rows": ("Row", "environment", "format_table", "write_json"),
    "spec": ("BadInput", "Case", "OpSpec"),
    "tensors": ("LAYOUTS", "Random", "bitwise_equal", "edge_values", "lay_out"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "LAYOUTS",
    "BadInput",
    "Case",
    "Error",
    "GpuTimer",
    "OpSpec",
    "Random",
    "Row",
    "bitwise_equal",
    "check_op",
    "copy_yardstick_ms",
    "cpu_threads",
    "edge_values",
    "environment",
    "format_table",
    "host_time_us",
    "lay_out",
    "make_inputs",
    "measure",
    "op_tests",
    "run_ranks",
    "time_cpu",
    "time_forward_backward",
    "time_op",
    "timer_of",
    "ulp",
    "write_json",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
