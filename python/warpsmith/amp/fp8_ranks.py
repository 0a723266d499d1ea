"""Whether ranks that train together multiply the same layers in 8-bit floats."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup

_OP = "fp8"
_REMEDY = "convert the model with the same recipe and filter on all ranks that train together, before the first step"
LIMIT_S = 300.0  # how long a rank may take longer than another to come here
_turns: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def group_of_forward() -> ProcessGroup | None:
    """The ranks of the DistributedDataParallel module whose forward runs, if a backward will follow."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    active: Any = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return None if active is None else active.process_group


def require_same_layers(layers: Mapping[str, str], group: ProcessGroup) -> None:
    """Raises where the ranks' layers differ, on each rank that calls. By the store of the job: in a collective a rank
    without such layers, which does not call, would be waited for without end.

    layers: by name, the recipe.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    turn = _turns[group] = _turns.get(group, 0) + 1
    place = f"warpsmith/fp8/{group.group_name}/{turn}"
    store: Any = PrefixStore(place, dist.distributed_c10d._get_default_store())
    store.set(str(rank), json.dumps(dict(layers)))
    deadline, found = time.monotonic() + LIMIT_S, []
    for other in range(size):
        try:
            store.wait([str(other)], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError:
            name, recipe = next(iter(layers.items()), ("any", "none"))
            _refuse(other, size, name, f"{recipe}, as on rank {rank}", f"no layer in FP8 within {LIMIT_S:.0f} s")
        found.append(json.loads(store.get(str(other))))
    first = found[0]
    for other, its in enumerate(found):
        for name in {**first, **its}:
            if first.get(name) != its.get(name):
                expected = f"{first.get(name, 'no FP8')}, as on rank 0"
                _refuse(other, size, name, expected, its.get(name, "no FP8"))


def _refuse(rank: int, size: int, layer: str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{_OP}: rank {rank} of {size}: layer {layer}: expected {expected}, got {got}: {_REMEDY}")
