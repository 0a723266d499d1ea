"""Loading the state of a multi-tensor optimizer: the checks before torch loads it, and the dtypes after."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import tensor_list as lists
from warpsmith._core.raw_step import COUNTER, SCALES, state_names
from warpsmith.optim import _eight_bit as eight_bit
from warpsmith.optim._precision import EXTRA_DTYPES


def check_shapes(optimizer: Any, state_dict: dict[str, Any], names: Collection[str]) -> None:
    """Refuses states of these names and other shapes than their parameters' before anything is loaded."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = lists.all_params(optimizer.param_groups)
    if len(saved) != len(params):
        return  # torch says so
    for index, (key, p) in enumerate(zip(saved, params, strict=True)):
        state, quantized = state_dict["state"].get(key, {}), 0
        for name, value in state.items():
            if name not in names or not isinstance(value, Tensor):
                continue
            quantized += value.dtype == torch.uint8
            if value.shape != p.shape:
                argument = f"state_dict: {name} of {lists.describe(optimizer.param_groups, index)}"
                optimizer._refuse(argument, f"shape {tuple(p.shape)}", tuple(value.shape))
        expected, scales = (quantized, eight_bit.blocks_of(p.numel())), state.get(SCALES)
        got = tuple(scales.shape) if isinstance(scales, Tensor) else scales
        if (quantized or got is not None) and got != expected:
            argument = f"state_dict: {SCALES} of {lists.describe(optimizer.param_groups, index)}"
            optimizer._refuse(argument, f"shape {expected} beside 8-bit states", got)


def check_names(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Refuses the states of another optimizer before anything is loaded."""
    keys = [i for group in state_dict["param_groups"] for i in group["params"]]
    for index, key in enumerate(keys[: len(lists.all_params(optimizer.param_groups))]):
        argument = f"state_dict: {lists.describe(optimizer.param_groups, index)}"
        check_state(optimizer, argument, state_dict["state"].get(key, ()))


def check_state(optimizer: Any, argument: str, state: Iterable[str]) -> None:
    """Refuses the state of a parameter that is another optimizer's."""
    needed = sorted(optimizer._needed, key=COUNTER.__eq__)
    names = set(state) - {*EXTRA_DTYPES, SCALES, *(() if COUNTER in needed else (COUNTER,))}
    if missing := [name for name in needed if names and name not in names]:
        optimizer._refuse(argument, f"a state with {', '.join(needed)}", f"one without {', '.join(missing)}")


def restore_precision(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Restores the dtypes of loaded states: torch has given each the dtype of its parameter.

    Encodes or decodes states if they are 8-bit codes on one side only.
    """
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    owners = [group for group in optimizer.param_groups for _ in group["params"]]
    for key, p, group in zip(saved, lists.all_params(optimizer.param_groups), owners, strict=True):
        storage, row = optimizer._storage(p, group), optimizer._row_of(group)
        saved_state = state_dict["state"].get(key, {})
        if storage is None or (storage.state_dtype == p.dtype and storage.extra is None and SCALES not in saved_state):
            continue
        state = (eight_bit.encoded_state if storage.is_quantized else eight_bit.decoded_state)(saved_state, row)
        for name, value in state.items():
            if isinstance(value, Tensor) and name in (*state_names(row), storage.extra):
                optimizer.state[p][name] = value.to(device=p.device, dtype=storage.array_dtype(name))
        if SCALES not in state:
            optimizer.state[p].pop(SCALES, None)
