"""Compares replays of a captured step with eager steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from warpsmith.train.step_state import copies_of, same_bits

# Where eager steps differ among themselves, a replay may differ from one by so many times as much.
GAP = 8.0


class Differs(Exception):
    """Where a replay differs from an eager step."""


Named = Sequence[tuple[str, Tensor]]


def compare(
    steps: int,
    changed: Callable[[], Named],
    eager: Callable[[], Any],
    replay: Callable[[], Any],
    rewind: Callable[[], None],
) -> str:
    """Runs ``steps`` eager steps and as many replays from one state, and compares what they return and change.

    Args:
        changed: the tensors that the steps change, with their names, as they are.
        eager, replay: one step each; they return the step's outputs.
        rewind: brings everything back to before the first step. It is called last, too.

    Returns:
        what was found, in words.

    Raises:
        Differs: the replays are not the eager steps.
    """

    def results(step: Callable[[], Any]) -> tuple[Named, list[Any]]:
        outputs = [step() for _ in range(steps)]
        return [*changed(), *(("what the step returns", t) for t in _tensors(outputs))], _values(outputs)

    try:
        found, values = results(eager)
        wanted = copies_of([t for _, t in found])
        rewind()
        got, values_of_replay = results(replay)
        if values != values_of_replay:
            raise Differs(f"the step returns {values} in eager steps, and {values_of_replay} in replays")
        if names := {name for name, _ in found} ^ {name for name, _ in got}:
            raise Differs(f"{min(names)} is there after eager steps or after replays, not after both")
        different = [name for (name, a), b in zip(got, wanted, strict=True) if not same_bits(a, b)]
        if not different:
            return f"{steps} steps: the bits of eager steps"
        of_replay = _gaps(got, wanted)
        rewind()
        of_eager = _gaps(results(eager)[0], wanted)
        for (name, t), by_replay, by_eager in zip(got, of_replay, of_eager, strict=True):
            if not by_replay <= GAP * by_eager + _rounding(t):
                raise Differs(
                    f"{name} is not after {steps} replays what it is after eager steps: a relative difference of "
                    f"{by_replay:.1e}, among eager steps {by_eager:.1e}"
                )
        most = f"{max(of_replay):.1e}, and these among themselves by up to {max(of_eager):.1e}"
        return f"{steps} steps: replays differ from eager steps by up to {most}"
    finally:
        rewind()


def _tensors(outputs: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]


def _values(outputs: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in tree_flatten(outputs)[0] if not isinstance(leaf, Tensor)]


def _gaps(tensors: Named, others: Sequence[Tensor]) -> list[float]:
    """The largest difference of each two tensors, relative to the largest value; infinite where it has no meaning."""
    return [_gap(a, b) for (_, a), b in zip(tensors, others, strict=True)]


def _gap(a: Tensor, b: Tensor) -> float:
    if same_bits(a, b):
        return 0.0
    if not a.is_floating_point() or a.shape != b.shape:
        return math.inf
    x, y = a.detach().double(), b.to(a.device).double()
    gap = ((x - y).abs().amax() / y.abs().amax()).item()
    return gap if gap == gap else math.inf


def _rounding(t: Tensor) -> float:
    """What a few operations may round, where two eager steps were alike by chance."""
    return 64 * torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
