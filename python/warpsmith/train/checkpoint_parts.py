"""The parts of a checkpoint: checked before anything is loaded, and loaded so that a refusal changes nothing."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith import optim
from warpsmith._core import checks
from warpsmith.optim._loading import check_names
from warpsmith.optim._multi_tensor import MultiTensorOptimizer


def plain(model: Any) -> Any:
    """The model inside of DistributedDataParallel and ``torch.compile``, whose names its state has."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := getattr(model, "_orig_mod", None)) is not None:
            model = inner
        else:
            return model


def check_parts(op: str, given: dict[str, Any], method: str) -> None:
    """Raises TypeError for a part that lacks the method."""
    for name, value in given.items():
        if value is not None and not hasattr(value, method):
            checks.refuse_type(op, name, f"an object with {method}()", value)


def load_parts(wanted: dict[str, Any], parts: dict[str, Any]) -> None:
    """Loads what may refuse its state first, and the model, whose state has been checked, last. Where a later one
    refuses, the small ones before it get their states back."""
    undo = []
    try:
        for name in ("sampler", "scaler", "scheduler", "optimizer", "model"):
            if name in wanted:
                value = plain(wanted[name]) if name == "model" else wanted[name]
                small = name in ("sampler", "scaler", "scheduler") and hasattr(value, "state_dict")
                before = copy.deepcopy(value.state_dict()) if small else None
                value.load_state_dict(parts[name])
                if before is not None:
                    undo.append((value, before))
    except Exception:
        for value, before in undo:
            value.load_state_dict(before)
        raise


def check_model(name: str, model: Any, state: dict[str, Any]) -> None:
    own, saved = ({k: _shape(k, v) for k, v in entries.items()} for entries in (model.state_dict(), state))
    if own == saved:
        return
    found = [f"{k}: missing in the checkpoint" for k in own if k not in saved]
    found += [f"{k}: not in the model" for k in saved if k not in own]
    found += [f"{k}: {saved[k]} for {own[k]}" for k in own if k in saved and own[k] != saved[k]]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise ValueError(f"Checkpointer.load: model: expected the one of {name}, got another: {'; '.join(found[:5])}{more}")


def _shape(key: str, value: Any) -> tuple[int, ...] | None:
    """The shape that an entry of a model's state must have. An extra state may be another object at each save."""
    return tuple(value.shape) if isinstance(value, Tensor) and key.rpartition(".")[2] != "_extra_state" else None


def known_class(optimizer: Any) -> str | None:
    """The name of the class of ``torch.optim`` or ``warpsmith.optim`` that an optimizer is, or is derived from. Classes
    of one name load each other's states. None for another optimizer, whose class may have got a new name since."""
    for kind in getattr(optimizer, "optimizer_class", type(optimizer)).__mro__[:-1]:
        public = (vars(package).get(kind.__name__) for package in (torch.optim, optim))
        if kind is not torch.optim.Optimizer and kind in public:
            name: str = kind.__name__
            return name
    return None


def check_optimizer(name: str, optimizer: Any, state: dict[str, Any], saved_class: str | None) -> None:
    """Refuses the state of another optimizer, of the class ``saved_class`` where that is known."""
    _check_states(name, optimizer, state)
    own_class = known_class(optimizer)
    if own_class is None:
        return
    expected = f"Checkpointer.load: optimizer: expected a state of {own_class}"
    if saved_class is not None and saved_class != own_class:
        raise ValueError(f"{expected}, got one of {saved_class} in {name}")
    # A checkpoint of an earlier version does not tell the class. Flags are left out: torch adds some at times.
    kind = getattr(torch.optim, own_class, None) or getattr(optim, own_class)
    flags = {key for key, value in optimizer.defaults.items() if value is None or isinstance(value, bool)}
    needed = [key for key in inspect.signature(kind).parameters if key in optimizer.defaults and key not in flags]
    for group in state["param_groups"]:
        if missing := [key for key in needed if key not in group]:
            raise ValueError(f"{expected}, got groups without {', '.join(missing)} in {name}")


def _check_states(name: str, optimizer: Any, state: dict[str, Any]) -> None:
    if hasattr(optimizer, "check_state_dict"):  # a ShardedOptimizer, whose groups have fragments
        try:
            optimizer.check_state_dict(state)
        except ValueError as error:
            raise ValueError(f"Checkpointer.load: optimizer: {name}: {error}") from None
        return
    if isinstance(optimizer, MultiTensorOptimizer):
        try:
            check_names(optimizer, state)
        except ValueError as error:
            raise ValueError(f"Checkpointer.load: optimizer: {name}: {error}") from None
    groups = getattr(optimizer, "param_groups", None) or optimizer.state_dict()["param_groups"]
    own = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if own != saved:
        raise ValueError(
            f"Checkpointer.load: optimizer: expected groups of {saved} parameters, as {name} has, got {own}"
        )
