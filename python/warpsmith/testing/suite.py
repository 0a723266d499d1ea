"""From one spec, all tests of an op."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from warpsmith.testing.checks import cuda, integration, kernels, numerics
from warpsmith.testing.checks.random_cases import check_random_cases
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.law import Error
from warpsmith.testing.sim import RANDOM_SHARE, is_loaded
from warpsmith.testing.spec import Case, OpSpec

RANDOM = "random_cases"
Check = tuple[str, Callable[[], Any]]


def checks_of(spec: OpSpec, device: str = "cpu") -> list[Check]:
    """Every check of an op on a device type, as (id, function without arguments), in the order of their cost."""
    errors: dict[str, list[Error]] = {}

    def law(case: Any) -> None:
        errors[str(case)] = numerics.check_error_law(spec, case, device, draws=spec.draws)

    def median() -> None:
        missing = [c for c in spec.cases_on(device) if str(c) not in errors]
        for case in missing:
            law(case)
        numerics.check_median(spec, device, errors.values())

    checks: list[Check] = [(f"error_law[{c}]", lambda c=c: law(c)) for c in spec.cases_on(device)]  # type: ignore[misc]
    checks.append(("median_error", median))

    def add(name: str, fn: Callable[..., Any], *arguments: Any) -> None:
        checks.append((name, lambda: fn(*arguments)))

    for case in numerics.layout_cases(spec):
        add(f"layout[{case}]", numerics.check_error_law, spec, case, device)
    for case in numerics.single_layout_cases(spec):
        add(f"layout[{case}]", numerics.check_error_law, spec, case, device)
    for case in numerics.size_cases(spec):
        add(f"size[{case}]", numerics.check_error_law, spec, case, device)
    bounds: dict[str, dict[str, float]] = {}
    for name, value in numerics.edge_cases(spec):
        add(f"edge_value[{name}-{value}]", numerics.check_edge_value, spec, name, value, device, bounds)
    for case in numerics.option_cases(spec, device):
        add(f"edge_value[{case}]", numerics.check_edges_beside_options, spec, case, device)
    of_torch = spec.of_torch and device == "cuda"
    for case in _one_per_dtype(spec, device):
        add(f"repeats_bitwise[{case}]", numerics.check_repeats_bitwise, spec, case, device)
        if not of_torch:
            add(f"no_uninitialised_memory[{case}]", numerics.check_no_uninitialised_memory, spec, case, device)
    add(RANDOM, check_random_cases, spec, spec.random_cases // (RANDOM_SHARE if device == "sim" else 1), device)
    for case in spec.repeated_cases if device != "sim" else spec.few_enough_for_sim(spec.repeated_cases):
        add(f"repeats_bitwise[{case}]", numerics.check_repeats_bitwise, spec, case, device)
    if device == "sim":
        for case in kernels.far_cases(spec) if spec.batched and spec.sim_far else ():
            add(f"far_rows[{case}]", kernels.check_far_rows, spec, case)
        if spec.batched:
            add("rows_far_apart", kernels.check_rows_far_apart, spec)
        add("kernels_ran", kernels.check_kernels_ran, spec)
        for case in kernels.bytes_cases(spec) if spec.floor_bytes else ():
            add(f"bytes_moved[{case}]", kernels.check_bytes_moved, spec, case)
        for case in kernels.allocation_cases(spec) if spec.floor_bytes and spec.differentiable else ():
            add(f"bytes_moved[{case}-allocated]", kernels.check_allocated_is_written, spec, case)
        if spec.opcheck and "sim" not in spec.float64_devices:
            add("float64_refused", kernels.check_float64_refused, spec)
        if spec.differentiable:
            add("needs_input_grad", numerics.check_needs_input_grad, spec, device)
        return checks
    if device == "cuda" and spec.batched:
        add("repeats_bitwise_of_many", numerics.check_batch_repeats_bitwise, spec, _wide_case(spec), 2**22, device)
    if spec.batched:
        narrow = _few_tokens(spec.base_case())
        rows = make_inputs(spec, narrow)[spec.batched[0]].shape
        add("more_than_65535_rows", numerics.check_batch, spec, narrow, 65_536 * int(rows[1:].numel()), device)
        if device == "cuda":
            add("more_elements_than_int32", numerics.check_batch, spec, _wide_case(spec), 2**31, device)
    for bad in spec.bad_inputs:
        if device in bad.devices:
            add(f"bad_input[{bad.label}]", integration.check_bad_input, spec, bad, device)
    for op in spec.opcheck:
        add(f"opcheck[{op}]", integration.check_opcheck, spec, op, device)
    if not of_torch:
        add("fake_and_meta", integration.check_fake_and_meta, spec, device)
    add("autocast", integration.check_autocast, spec, device)
    add("exported", integration.check_exported, spec, device)
    if spec.differentiable:
        add("needs_input_grad", numerics.check_needs_input_grad, spec, device)
        add("forward_mode", integration.check_forward_mode, spec, device)
        if not spec.double_backward:
            add("second_derivative_is_refused", numerics.check_second_derivative_is_refused, spec, device)
        if device == "cpu" and "cpu" in spec.float64_devices:
            add("gradcheck", numerics.check_gradcheck, spec)
    if spec.func_transforms:
        add("func_transforms", integration.check_func_transforms, spec, device)
    if not of_torch:
        add("compiled[aot_eager]", integration.check_compiled, spec, device, "aot_eager")
        add("compiled[aot_eager-dynamic]", integration.check_compiled, spec, device, "aot_eager", True)
        add("compiled[inductor]", integration.check_compiled, spec, device, "inductor")
    if device == "cuda":
        add("no_sync", cuda.check_no_sync, spec)
        add("graph_capture", cuda.check_graph_capture, spec)
        add("side_streams", cuda.check_side_streams, spec)
        if spec.batched:
            add("out_of_memory", cuda.check_out_of_memory, spec)
    return checks


def _wide_case(spec: OpSpec) -> Case:
    """The ordinary case to reach 2^31 elements with: bfloat16 where there is one, for its size (and sums over so many
    elements overflow float16), and as wide as can be, since float32 sums over 10^9 rows mean nothing."""
    ordinary = [c for c in spec.cases if c.layout == "contiguous" and not c.dtypes and 0 not in c.shape]
    small = [c for c in ordinary if torch.Size(c.shape).numel() <= 2**16] or [spec.base_case()]
    return min(small, key=lambda c: (c.dtype != torch.bfloat16, c.dtype.itemsize, -torch.Size(c.shape[1:]).numel()))


def _few_tokens(case: Case) -> Case:
    """With at most 8 of all but rows and columns, which are not the matter where there are many rows."""
    first, *middle, last = (1, *case.shape) if len(case.shape) == 1 else case.shape
    return case.but(shape=(first, *(min(n, 8) for n in middle), last)) if middle else case


def _one_per_dtype(spec: OpSpec, device: str) -> list[Any]:
    """The largest case of each dtype: the one with the most to go wrong between threads."""
    largest: dict[torch.dtype, Any] = {}
    for case in spec.cases_on(device):
        kept = largest.get(case.dtype)
        if kept is None or math.prod(case.shape) > math.prod(kept.shape):
            largest[case.dtype] = case
    return list(largest.values())


def check_op(spec: OpSpec, device: str = "cpu") -> dict[str, str]:
    """Runs all checks of an op on a device and returns those that failed: ``{check: message}``, empty if all hold.

    Random cases are drawn where hypothesis is installed.

    Example:
        >>> import torch
        >>> from warpsmith.testing import Case, OpSpec, check_op
        >>> spec = OpSpec(
        ...     "double", op=lambda x: x + x, reference=lambda x: 2 * x, cases=[Case((5, 3))],
        ...     inputs=lambda case, rng: {"x": rng.normal(case.shape)}, differentiable=("x",), double_backward=True,
        ... )
        >>> check_op(spec)
        {}
    """
    failed = {}
    for name, check in checks_of(spec, device):
        if name == RANDOM and not find_spec("hypothesis"):
            continue
        try:
            check()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def op_tests(spec: OpSpec) -> type:
    """A pytest class with all checks of an op: one test for each on the CPU, and each on CUDA under the marker ``gpu``.

    Without a CUDA device those are skipped and say so. A project that runs pytest with strict markers declares ``gpu``.
    Bind it to a name that begins with ``Test`` in a test module: ``TestRmsNorm = op_tests(SPEC)``.
    """
    import pytest

    parameters = []
    for device in ("sim",) if is_loaded() else spec.devices:
        absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
        marks = [pytest.mark.gpu, absent] if device == "cuda" else []
        for name, check in checks_of(spec, device):
            drawing = [pytest.mark.skipif(not find_spec("hypothesis"), reason="no hypothesis")] * (name == RANDOM)
            parameters.append(pytest.param(check, id=f"{device}-{name}", marks=[*marks, *drawing]))

    class Tests:
        spec: OpSpec

        @pytest.mark.parametrize("check", parameters)
        def test(self, check: Callable[[], Any]) -> None:
            check()

    Tests.spec = spec
    Tests.__name__ = Tests.__qualname__ = "Test_" + spec.name
    return Tests
