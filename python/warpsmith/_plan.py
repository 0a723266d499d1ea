from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from warpsmith import _C


class _Choice(NamedTuple):
    """Between an op of ours and torch's function of a name: ``why_not(**problem)`` is None, or why it is torch's."""

    ours: str
    why_not: Callable[..., str | None]
    theirs: str


_choices: dict[str, _Choice] = {}


def register(name: str, ours: str, why_not: Callable[..., str | None], theirs: str | None = None) -> None:
    """Lets ``plan(name, **problem)`` say whether a function of torch's name calls ``ours`` or ``theirs`` (None: torch's
    function of that name), and why."""
    _choices[name] = _Choice(ours, why_not, theirs or f"torch.{name}")


def _dtype(value: Any) -> Any:
    import torch

    found = getattr(torch, value, None) if isinstance(value, str) else value
    return found if isinstance(found, torch.dtype) else value


def _choose(name: str, problem: dict[str, Any]) -> dict[str, Any]:
    ours, why_not, theirs = _choices[name]
    keys = inspect.signature(why_not).parameters
    if not problem:
        optional = inspect.Parameter.empty
        return {"keys": {k: "a value" + "; may be left out" * (p.default is not optional) for k, p in keys.items()}}
    for key in problem:
        if key not in keys:
            raise ValueError(f"plan: {name}: expected arguments among {', '.join(keys)}, got {key}")
    for key, parameter in keys.items():
        if parameter.default is inspect.Parameter.empty and key not in problem:
            raise ValueError(f"plan: {name}: {key}: expected a value, got none")
    why = why_not(**{key: _dtype(v) if key.endswith("dtype") else v for key, v in problem.items()})
    return {"calls": ours if why is None else theirs, "why": why or "fused"}


def plan(op: str, **problem: Any) -> dict[str, Any]:
    """Says which kernel would run for a problem, and why, without running it. Needs no GPU.

    Args:
        op: name of the op, for example ``"rms_norm"``, or of a function of ``warpsmith.nn.functional``, for example
            ``"nn.functional.layer_norm"``: then ``calls`` is what would be called, ours or torch's.
        problem: sizes and dtypes of the op; a missing or unknown one is named in the error.

    Returns:
        A dict of plain values, the kernel's name, its launch configuration, and ``why``, a sentence. Without a problem:
        ``keys``, what the problem of this op is made of.

    Raises:
        ValueError: an op without a chooser, or a problem that does not fit it.

    Example:
        >>> import warpsmith
        >>> warpsmith.plan("rms_norm", rows=16384, columns=4096, dtype="bfloat16")["forward"]["kernel"]
        'registers'
        >>> warpsmith.plan("linear_log_prob")["keys"]["rows"]
        'an integer >= 0'
    """
    return _choose(op, problem) if op in _choices else _C.plan(op, **problem)
