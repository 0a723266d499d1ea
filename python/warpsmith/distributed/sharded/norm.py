"""The norm of gradients of which each rank has fragments, with the bits of the norm of whole ones."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core.grad_norm import chunk_elems, norm_of_partials, partial_power_sums
from warpsmith.distributed.gradients.hook import _all_gather
from warpsmith.distributed.sharded.gradient_shards import GradientShards


class ShardNorm:
    """``norm(p)`` of the gradients of all ranks. A collective.

    A norm sums chunks in float32 and their sums in float64, in order. Parameters are cut only where chunks begin, so
    the ranks exchange the sums of their chunks, and each adds all of them in the order of the whole gradients.
    """

    def __init__(self, shards: GradientShards) -> None:
        self._shards = shards
        self._known: tuple[list[bool], int, int, Tensor] | None = None

    def norm(self, p: float, scale: Tensor | None = None) -> Tensor:
        """A scalar: float64 if a gradient is, else float32. ``scale``: by what the gradients were multiplied, so that
        their squares do not overflow; the norm is that of the scaled ones."""
        shards = self._shards
        like = shards.params[0]
        total, most, order = self._chunk_order()
        own = [g for g in shards.gradients if g is not None]
        sums = torch.zeros(most, dtype=torch.float64, device=like.device)
        if own:
            known = shards.known_sums(total) if p == 2 else None
            partials = partial_power_sums(own, p, total, scale, known.of_all if known else None)
            sums[: len(partials)] = partials
        gathered = sums.new_empty(shards.world_size * most)
        _all_gather(gathered, sums, group=shards.group)
        used = [param for param, has in zip(shards.params, shards.used, strict=True) if has]
        wide = any(param.dtype == torch.float64 for param in used)
        return norm_of_partials(gathered[order], p, wide)[0]

    def _chunk_order(self) -> tuple[int, int, Tensor]:
        """Elements of all gradients, sums that each rank sends, and where among the sums of all ranks those of the
        whole gradients' chunks are, in order."""
        shards = self._shards
        if self._known is not None and self._known[0] == shards.used:
            return self._known[1:]
        like = shards.params[0]
        total = sum(p.numel() for p, has in zip(shards.params, shards.used, strict=True) if has)
        elems = chunk_elems(like, total)
        fragments = [f for bucket in shards.buckets for f in bucket.fragments if shards.used[f.param]]
        fragments.sort(key=lambda f: (f.param, f.start))
        sent = [0] * shards.world_size
        of_param: list[list[tuple[int, int]]] = [[] for _ in shards.params]
        for f in fragments:
            for _ in range(-(-f.count // elems)):
                of_param[f.param].append((f.rank, sent[f.rank]))
                sent[f.rank] += 1
        most = max(sent) + 1  # the last is zero on every rank: the chunk of a gradient without elements
        order = []
        for chunks, has in zip(of_param, shards.used, strict=True):
            if has:
                order += [rank * most + at for rank, at in chunks] or [most - 1]
        self._known = (list(shards.used), total, most, torch.tensor(order, dtype=torch.int64, device=like.device))
        return self._known[1:]
