"""The state of a sharded optimizer as that of the unsharded one, and back: whole tensors, whatever the world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpsmith._core.raw_step import COUNTER
from warpsmith.distributed.exchange import all_gather_json
from warpsmith.distributed.sharded.gradient_shards import GradientShards, flat
from warpsmith.distributed.sharded.shards import Fragment

States = dict[int, dict[str, Any]]  # of each parameter or fragment that has any, by its index


def gather_states(shards: GradientShards, own: Sequence[Mapping[str, Tensor]], to: int) -> States | None:
    """The whole states of all parameters, on the CPU of rank ``to`` of the group; None on the others. A collective.

    own: the states of this rank's fragments, in their order. Each rank sends its states as one message.
    """
    device = shards.params[0].device
    kinds = [[(name, str(t.dtype).removeprefix("torch.")) for name, t in state.items()] for state in own]
    kinds_of = all_gather_json(kinds, shards.group)
    states: States = {}
    for rank in range(shards.world_size):
        fragments = _fragments_of(shards, rank)
        sizes = [
            [(1 if name == COUNTER else f.count) * getattr(torch, dtype).itemsize for name, dtype in kind]
            for f, kind in zip(fragments, kinds_of[rank], strict=True)
        ]
        total = sum(map(sum, sizes))
        if total == 0 or shards.rank not in (rank, to):
            continue
        if rank == shards.rank:
            parts = [t.detach().reshape(-1).view(torch.uint8) for state in own for t in state.values()]
            message = torch.cat([part.to(device) for part in parts])
            if rank != to:
                dist.send(message, group=shards.group, group_dst=to)
                continue
        else:
            message = torch.empty(total, dtype=torch.uint8, device=device)
            dist.recv(message, group=shards.group, group_src=rank)
        _unpack(shards, states, fragments, kinds_of[rank], sizes, message.cpu())
    return states if shards.rank == to else None


def _fragments_of(shards: GradientShards, rank: int) -> list[Fragment]:
    fragments = [f for bucket in shards.buckets for f in bucket.fragments if f.rank == rank]
    return sorted(fragments, key=lambda f: (f.param, f.start))


def _unpack(
    shards: GradientShards,
    states: States,
    fragments: Sequence[Fragment],
    kinds: Sequence[Sequence[tuple[str, str]]],
    sizes: Sequence[Sequence[int]],
    message: Tensor,
) -> None:
    at = 0
    for f, kind, lengths in zip(fragments, kinds, sizes, strict=True):
        whole = states.setdefault(f.param, {}) if kind else {}
        for (name, dtype_name), length in zip(kind, lengths, strict=True):
            dtype = getattr(torch, dtype_name)
            values = message[at : at + length].clone().view(dtype)
            at += length
            if name == COUNTER:  # equal in all fragments of a parameter
                whole[name] = values[0]
                continue
            if name not in whole:
                whole[name] = torch.empty_like(shards.params[f.param], dtype=dtype, device="cpu")
            flat(whole[name])[f.start : f.start + f.count] = values


def cut_states(shards: GradientShards, whole: Mapping[int, Mapping[str, Any]]) -> States:
    """The states of this rank's fragments, from the whole ones of their parameters."""
    cut: States = {}
    laid_out: dict[tuple[int, str], Tensor] = {}
    for number, f in enumerate(shards.fragments):
        if f.param not in whole:
            continue
        state = cut[number] = {}
        for name, value in whole[f.param].items():
            if name == COUNTER or not isinstance(value, Tensor):
                state[name] = value.clone() if isinstance(value, Tensor) else value
                continue
            if (f.param, name) not in laid_out:  # the fragments of a parameter are neighbours: only one is kept
                like = torch.empty_like(shards.params[f.param], dtype=value.dtype, device=value.device)
                laid_out = {k: t for k, t in laid_out.items() if k[0] == f.param}
                laid_out[f.param, name] = flat(like.copy_(value))
            state[name] = laid_out[f.param, name][f.start : f.start + f.count].clone()
    return cut
