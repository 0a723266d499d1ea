"""Times an op forward and backward beside its rivals, on either device, as benchmark rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.testing.cpu_timer import time_cpu
from warpsmith.testing.gpu_timer import GpuTimer, Timing, copy_call
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.rows import OURS, YARDSTICK, Row, make_rows
from warpsmith.testing.run import as_leaves, flatten, wanted_inputs
from warpsmith.testing.spec import Case, OpSpec

Calls = Mapping[str, Callable[[], Any]]


def timer_of(device: str, rounds: int = 25, **gpu: Any) -> Callable[[Calls], dict[str, Timing]]:
    """The function that times ``{name: callable}`` on a device type; ``gpu`` are arguments of :class:`GpuTimer`."""
    if device == "cuda":
        return GpuTimer(rounds=rounds, **gpu).time
    return lambda contenders: time_cpu(contenders, rounds=rounds)


def time_forward_backward(
    op: str,
    contenders: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Tensor],
    floor_bytes: Mapping[str, int],
    *,
    rounds: int = 25,
) -> list[Row]:
    """Rows of one cell: forward with gradients recorded, then backward alone, of all inputs, on a retained graph.

    Args:
        op: the op's name; the cell's shape and dtype are those of the first input.
        contenders: functions of ``inputs`` that return one tensor or several; ours is named ``warpsmith``.
        inputs: leaves that require gradients.
        floor_bytes: least bytes moved, ``{"forward": n, "backward": n}``. On CUDA a copy of that many joins in.
        rounds: samples of each contender.
    """
    first = inputs[0]
    device = first.device.type
    measure = timer_of(device, rounds)
    shape, dtype = "x".join(map(str, first.shape)), str(first.dtype).removeprefix("torch.")
    forward: dict[str, Callable[[], Any]] = {n: (lambda fn=fn: fn(*inputs)) for n, fn in contenders.items()}  # type: ignore[misc]
    backward: dict[str, Callable[[], Any]] = {}
    for name, fn in contenders.items():
        try:
            y = fn(*inputs)
        except Exception:
            continue  # its forward row says why
        outputs = [t for t in (y if isinstance(y, (tuple, list)) else (y,)) if t.requires_grad]
        backward[name] = _backward(outputs, inputs)
    rows = []
    for direction, calls in (("forward", forward), ("backward", backward)):
        floor = floor_bytes[direction]
        if device == "cuda":
            calls[YARDSTICK] = copy_call(floor)
        rows += make_rows(op, shape, dtype, direction, measure(calls), floor_bytes=floor)
    return rows


def _backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    grads = [torch.randn_like(t) for t in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def time_op(
    spec: OpSpec,
    case: Case,
    device: str = "cpu",
    *,
    rivals: Mapping[str, Callable[..., Any]] | None = None,
    rounds: int = 25,
) -> list[Row]:
    """Times a declared op on one case, beside plain PyTorch and ``rivals`` (functions with the op's parameters).

    The spec must state ``floor_bytes``. Print the rows with :func:`format_table`.
    """
    if spec.floor_bytes is None:
        raise ValueError(f"{spec.name}: floor_bytes: expected a function of the case, got None")
    inputs = make_inputs(spec, case, device)
    names = wanted_inputs(spec, inputs)
    leaves = as_leaves(inputs, names)

    def positional(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: tuple(
            flatten(fn(**{**leaves, **dict(zip(names, tensors, strict=True))}), spec.outputs).values()
        )

    functions = {OURS: spec.op, "torch": spec.baseline or spec.reference, **(rivals or {})}
    contenders = {name: positional(fn) for name, fn in functions.items()}
    floor = spec.floor_bytes(case)
    return time_forward_backward(spec.name, contenders, [leaves[n] for n in names], floor, rounds=rounds)
