"""Bytes between all ranks of a group, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from warpsmith._core import checks


def rank_and_size(group: ProcessGroup | None, op: str = "") -> tuple[int, int]:
    """This rank in the group and the group's size; 0 and 1 where torch.distributed is not in use. op: refuses, in its
    name, what is no group, and a group without this rank."""
    if op and group is not None:
        _check_group(op, group)
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _check_group(op: str, group: object) -> None:
    outside = group == dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, ProcessGroup):
        hint = ": give one dimension of the mesh, as mesh.get_group('data')" if hasattr(group, "get_group") else ""
        checks.refuse_type(op, "process_group", "a ProcessGroup or None", group, hint)
    if outside or (dist.is_initialized() and dist.get_rank(group) < 0):  # type: ignore[arg-type]
        here = f"a group with this rank, {dist.get_rank()}"
        checks.refuse(op, "process_group", here, "one without: call on the ranks of the group only")


def all_gather_bytes(own: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    """What each rank of the group gave, in rank order, on every rank. A collective."""
    _, size = rank_and_size(group)
    if size == 1:
        return [own]
    on_cpu = any(part.startswith("cpu:") for part in dist.get_backend_config(group).split(","))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(own)], device=device), group=group)
    counts = lengths.tolist()
    padded = torch.zeros(max(1, *counts), dtype=torch.uint8)
    if own:
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    parts = [torch.empty_like(padded, device=device) for _ in range(size)]
    dist.all_gather(parts, padded.to(device), group=group)
    return [bytes(part[:count].tolist()) for part, count in zip(parts, counts, strict=True)]


def all_gather_json(own: Any, group: ProcessGroup | None = None) -> list[Any]:
    """:func:`all_gather_bytes` of what JSON holds."""
    return [json.loads(text) for text in all_gather_bytes(json.dumps(own).encode(), group)]
