"""The inputs of a declared op's case."""

from __future__ import annotations

from torch import Tensor

from warpsmith.testing.sim import torch_device
from warpsmith.testing.spec import Case, Inputs, OpSpec
from warpsmith.testing.tensors import Random, lay_out, seed_of


def make_inputs(
    spec: OpSpec,
    case: Case,
    device: str = "cpu",
    *,
    edge: tuple[str, float] | None = None,
    place: int = 0,
    draw: int = 0,
) -> Inputs:
    """The inputs of a case: drawn in float64, rounded to the case's dtypes, moved, laid out. Each ``draw`` has other
    values.

    ``edge=(name, value)`` puts ``value`` into the middle of that input, or ``place`` elements behind it, before it is
    laid out.
    """
    laid_out = spec.laid_out if spec.expanded is None or case.layout != "expanded" else spec.expanded
    seed = seed_of(spec.name, case.but(layout="contiguous", layouts={}), *([draw] if draw else []))
    inputs = spec.inputs(case, Random(seed))
    ready: Inputs = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            ready[name] = value
            continue
        if value.is_floating_point():
            value = value.to(case.dtypes.get(name, case.dtype))
            if edge is not None and edge[0] == name and value.numel():
                value = value.clone()
                value.view(-1)[(value.numel() // 2 + place) % value.numel()] = edge[1]
        value = value.to(torch_device(device))
        applies = value.is_floating_point() if laid_out is None else name in laid_out
        layout = case.layouts.get(name, case.layout if applies else "")
        ready[name] = lay_out(value, layout) if layout else value
    return ready
