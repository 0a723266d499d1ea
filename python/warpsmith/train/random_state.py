"""The random state of a process: of torch, of ``random`` and, where it is loaded, of ``numpy.random``."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The state of this process's generators, as numbers, strings, bytes and tuples."""
    state: dict[str, Any] = {"torch": _as_bytes(torch.get_rng_state()), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _as_bytes(torch.cuda.get_rng_state())
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, keys.tobytes(), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Sets what ``random_state`` returned."""
    torch.set_rng_state(_as_tensor(state["torch"]))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_tensor(state["cuda"]))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _as_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
