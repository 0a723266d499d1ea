"""What a ``ShardedOptimizer`` refuses, and what it asks all ranks to agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith import optim
from warpsmith._core import checks
from warpsmith._core.grad_norm import CUT_ELEMS
from warpsmith._core.raw_step import COUNTER
from warpsmith._core.tensor_list import all_params, describe, is_dense
from warpsmith.distributed.agreement import fingerprints
from warpsmith.distributed.exchange import rank_and_size
from warpsmith.distributed.gradients.hook import _WIRES
from warpsmith.optim._precision import storage_of

OP = "ShardedOptimizer"
_CLASSES = (optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW, optim.Lion, optim.RMSprop)
_PRECISIONS = (None, "fp32", "bf16", "master", "bf16_states", "bf16_sr", "remainder", "bf16_kahan")
_NOT_VALUES = ("params", "param_names")  # entries of a group that are no hyperparameters


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group.

    Example:
        >>> values_of({"params": [], "lr": 0.1})
        {'lr': 0.1}
    """
    return {name: value for name, value in group.items() if name not in _NOT_VALUES}


def check_arguments(optimizer_class: Any, stage: Any, wire: Any, bucket_cap_mb: Any, unused: Any) -> None:
    """Raises ValueError for an argument that does not fit."""
    if optimizer_class not in _CLASSES:
        names = ", ".join(c.__name__ for c in _CLASSES)
        got = getattr(optimizer_class, "__name__", str(optimizer_class))
        reason = "each rank has only parts of tensors, so an update may need nothing but its own element"
        checks.refuse(OP, "optimizer_class", f"{names} of warpsmith.optim ({reason})", got)
    if type(stage) is not int or stage not in (1, 2):
        checks.refuse(OP, "stage", "1 or 2", checks.value_text(stage))
    checks.flags(OP, find_unused_parameters=unused)
    if wire not in _WIRES:
        checks.refuse(OP, "wire", "torch.bfloat16 or torch.float16", str(wire))
    checks.number(OP, "bucket_cap_mb", bucket_cap_mb, "a finite number > 0", lambda mb: 0 < mb * 2.0**20 < math.inf)


def check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for a parameter or precision that cannot be shared out."""
    params = all_params(groups)  # type: ignore[arg-type]
    owners = [group for group in groups for _ in group["params"]]
    trainable = [i for i, p in enumerate(params) if p.requires_grad]
    if not trainable:
        checks.refuse(OP, "params", "a parameter that requires a gradient", "none")
    for group in groups:
        _check_precision(OP, "precision", group)
    first = params[trainable[0]]
    for i in trainable:
        p, argument = params[i], describe(groups, i)  # type: ignore[arg-type]
        if hasattr(p, "to_local"):
            checks.refuse(
                OP, argument, "a plain tensor: FSDP2 and tensor parallelism share it out already", "a DTensor"
            )
        if p.device.type not in CUT_ELEMS:
            checks.refuse(OP, argument, "a tensor on the CPU or on CUDA", str(p.device))
        checks.same_device(OP, argument, p, first)
        storage, precision = storage_of(owners[i].get("precision"), p.dtype), owners[i].get("precision")
        if storage is None or (p.dtype == torch.float64 and p.device.type != "cpu"):
            expected = "a floating dtype" if precision is None else f"a dtype of precision {precision}"
            checks.refuse(OP, argument, expected, checks.dtype_text(p.dtype))
        if not is_dense(p):
            got = f"strides {p.stride()} for shape {tuple(p.shape)}"
            checks.refuse(OP, argument, "elements without gaps or overlap", got)


def _check_precision(op: str, argument: str, group: Mapping[str, Any]) -> None:
    if group.get("precision") not in _PRECISIONS:
        known = ", ".join(map(str, _PRECISIONS))
        expected = f"one of {known}, whose elements do not depend on others"
        checks.refuse(op, argument, expected, str(group["precision"]))


def description(
    optimizer_class: type, groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """All that must be equal on all ranks: (what, its value)."""
    found = [("optimizer_class", optimizer_class.__name__), *((name, str(v)) for name, v in arguments.items())]
    for g, group in enumerate(groups):
        values = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in values_of(group).items()}
        found.append((f"param_groups[{g}]", f"{len(group['params'])} parameters, {values}"))
    params = all_params(groups)  # type: ignore[arg-type]
    for i, p in enumerate(params):
        frozen = "" if p.requires_grad else ", frozen"
        text = f"{checks.dtype_text(p.dtype)} {tuple(p.shape)} with strides {p.stride()} on {p.device.type}{frozen}"
        found.append((describe(groups, i), text))  # type: ignore[arg-type]
    trainable = [i for i, p in enumerate(params) if p.requires_grad]
    for i, number in zip(trainable, fingerprints([params[i] for i in trainable]), strict=True):
        found.append((f"values of {describe(groups, i)}", f"checksum {number & (2**64 - 1):016x}"))  # type: ignore[arg-type]
    return found


def check_state(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raises TypeError for what is no state, and ValueError for a state of other groups, of a precision that cannot be
    shared out or does not take its parameters, or of another shape than its parameter."""
    expected = "a dict with state and param_groups, as state_dict() gives"
    if not isinstance(state_dict, Mapping):
        checks.refuse_type(f"{OP}.load_state_dict", "state_dict", expected, state_dict)
    if missing := [name for name in ("state", "param_groups") if name not in state_dict]:
        checks.refuse(f"{OP}.load_state_dict", "state_dict", expected, f"one without {' and '.join(missing)}")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    own = [len(group["params"]) for group in groups]
    if saved != own:
        checks.refuse(f"{OP}.load_state_dict", "state_dict", f"groups of {own} parameters", str(saved))
    for g, (group, loaded) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        where = f"state_dict: precision of param_groups[{g}]"
        _check_precision(f"{OP}.load_state_dict", where, loaded)
        for p in group["params"]:
            if p.requires_grad and storage_of(loaded.get("precision"), p.dtype) is None:
                expected = f"one that takes {checks.dtype_text(p.dtype)}"
                checks.refuse(f"{OP}.load_state_dict", where, expected, str(loaded["precision"]))
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for index, (key, p) in enumerate(zip(keys, all_params(groups), strict=True)):  # type: ignore[arg-type]
        for name, value in state_dict["state"].get(key, {}).items():
            if name != COUNTER and isinstance(value, Tensor) and value.shape != p.shape:
                argument = f"state_dict: {name} of {describe(groups, index)}"  # type: ignore[arg-type]
                checks.refuse(f"{OP}.load_state_dict", argument, f"shape {tuple(p.shape)}", str(tuple(value.shape)))


def require_group(group: ProcessGroup | None) -> None:
    """Raises RuntimeError where torch.distributed has no process group, ValueError or TypeError where
    it is no group with this rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError(f"{OP}: expected a process group: call warpsmith.distributed.init() first")
    rank_and_size(group, OP)
