"""Brings the parameters that other ranks have updated: in the step, or behind the next forward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from warpsmith.distributed.gradients.hook import _all_gather
from warpsmith.distributed.gradients.peer_memory import PeerMemory, peer_memory
from warpsmith.distributed.sharded.gradient_shards import IN_FLIGHT, GradientShards, flat
from warpsmith.distributed.sharded.shards import Bucket

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Sent(NamedTuple):
    number: int  # of the bucket
    own: Tensor
    received: Tensor
    work: Any


class ParamGather:
    """The all-gathers of the parameters, a bucket each.

    Either ``gather`` starts and ends them; or ``start`` starts all of them, and hooks of :meth:`wait_in_forward` wait
    for a bucket when a module needs it. All ranks start them in the same order at the same place of their programs,
    whatever their forwards do.
    """

    def __init__(self, shards: GradientShards, params: Sequence[Tensor]) -> None:
        self._shards, self._params = shards, params
        self._in_flight: deque[_Sent] = deque()
        self._turn = 0  # which box of the peer memory the next bucket takes
        self.in_forward = False

    @torch.no_grad()
    def gather(self) -> None:
        """With few buckets in flight, so that little memory is held."""
        if self._shards.world_size > 1:
            peers = peer_memory(self._shards.group, self._params[0].device, "parameters of ShardedOptimizer")
            if not isinstance(peers, str):
                for bucket in self._shards.buckets:
                    self._exchange(bucket, peers)
                return
        for number in range(len(self._shards.buckets)):
            self._start(number)
            if len(self._in_flight) > IN_FLIGHT:
                self._take_first()
        self.take()

    @torch.no_grad()
    def start(self) -> None:
        """All buckets, in the order of the forward: the backward's from the end."""
        for number in reversed(range(len(self._shards.buckets))):
            self._start(number)

    @torch.no_grad()
    def take(self, buckets: frozenset[int] | None = None) -> None:
        """Writes what has been gathered into the parameters: until all of these buckets are there, or all there are.
        On CUDA the stream waits, not the host."""
        while self._in_flight and (buckets is None or any(sent.number in buckets for sent in self._in_flight)):
            self._take_first()

    def _exchange(self, bucket: Bucket, peers: PeerMemory) -> None:
        """Straight into the memory of the other ranks. Buckets take the two boxes in turn, so that one barrier is
        enough: a rank writes into a box again behind the barrier of the next bucket, and by then its owner has taken
        what was in it."""
        if bucket.numel == 0:
            return
        rank, size = self._shards.rank, self._shards.world_size
        boxes = peers.boxes(self._params[bucket.params[0]].dtype, max(bucket.parts))[self._turn]
        self._turn ^= 1
        own: list[tuple[Tensor, int, int, int]] = []
        others: list[tuple[Tensor, int, int, int]] = []
        for f in bucket.fragments:
            whole, begin = flat(self._params[f.param].detach()), f.offset - bucket.first_of(f.rank)
            place = whole[f.start : f.start + f.count], begin, begin + f.count, f.rank
            (own if f.rank == rank else others).append(place)
        for step in range(1, size):  # not all to the same rank at once
            box = boxes[(rank + step) % size][rank]
            if own:
                torch._foreach_copy_([box[a:b] for _, a, b, _ in own], [part for part, *_ in own])
        peers.barrier(self._turn)
        _copy([part for part, *_ in others], [boxes[rank][r, a:b] for _, a, b, r in others])

    def _start(self, number: int) -> None:
        bucket = self._shards.buckets[number]
        if self._shards.world_size == 1 or bucket.numel == 0:
            return
        like = self._params[bucket.params[0]].detach()
        own = like.new_empty(max(bucket.parts))
        first = bucket.first_of(self._shards.rank)
        for f in bucket.fragments:
            if f.rank == self._shards.rank:
                of = flat(self._params[f.param].detach())[f.start : f.start + f.count]
                own[f.offset - first : f.offset - first + f.count].copy_(of)
        received = own.new_empty(self._shards.world_size * len(own))
        work = _all_gather(received, own, group=self._shards.group, async_op=True)
        self._in_flight.append(_Sent(number, own, received, work))

    def _take_first(self) -> None:
        number, own, received, work = self._in_flight.popleft()
        bucket: Bucket = self._shards.buckets[number]
        work.wait()  # on CUDA the stream waits, not the host
        to, of = [], []
        for f in bucket.fragments:
            if f.rank != self._shards.rank:
                at = f.rank * len(own) + f.offset - bucket.first_of(f.rank)
                to.append(flat(self._params[f.param].detach())[f.start : f.start + f.count])
                of.append(received[at : at + f.count])
        _copy(to, of)

    def wait_in_forward(self, model: nn.Module) -> None:
        """From now on the forward of a unit (:func:`units_of`) waits for the unit's buckets, and so does all that
        reads or writes a state_dict of the model."""
        self.in_forward = True
        this = weakref.ref(self)  # a model must not keep its optimizer alive
        bucket_of = {id(self._params[p]): n for n, bucket in enumerate(self._shards.buckets) for p in bucket.params}

        def waiting(buckets: frozenset[int] | None) -> Callable[..., None]:
            def wait(*_: Any) -> None:
                gather = this()
                if gather is not None:
                    gather.take(buckets)

            return wait

        for module, params in units_of(model):
            module.register_forward_pre_hook(waiting(frozenset(bucket_of[id(p)] for p in params if id(p) in bucket_of)))
        for module in model.modules():
            module.register_state_dict_pre_hook(waiting(None))
            module.register_load_state_dict_pre_hook(waiting(None))


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    """In one launch, but for parameters with the negative bit, which torch's operations on lists do not write."""
    pairs = list(zip(to, of, strict=True))
    for t, value in pairs:
        if t.is_neg():
            t.copy_(value)
    plain = [(t, value) for t, value in pairs if not t.is_neg()]
    if plain:
        torch._foreach_copy_([t for t, _ in plain], [value for _, value in plain])


def units_of(model: nn.Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """Modules whose forwards wait, with the parameters that each waits for: the elements of the outermost lists,
    sequences and dicts of modules, whole; the modules that hold those, with all that is not in an element.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
        >>> [(type(module).__name__, len(params)) for module, params in units_of(net)]
        [('Sequential', 0), ('Linear', 2), ('Sequential', 1)]
    """
    own: list[Tensor] = list(model.parameters(recurse=False))
    inner: list[tuple[nn.Module, list[Tensor]]] = []
    for child in model.children():
        if isinstance(model, _CONTAINERS):
            inner.append((child, list(child.parameters())))
        elif any(isinstance(module, _CONTAINERS) for module in child.modules()):
            inner += units_of(child)
        else:
            own += child.parameters()
    return [(model, own), *inner]
