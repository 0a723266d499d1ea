"""Reduces gradients during the backward, so that each rank ends with the means of the elements that it owns."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith._core.grad_norm import check_gradients
from warpsmith._core.gradient_sums import Joined, Sums, joined, sums_of
from warpsmith._core.main_grad import reductions
from warpsmith._core.raw_step import rank_mean
from warpsmith._core.tensor_list import same_layout
from warpsmith.distributed.agreement import require_agreement
from warpsmith.distributed.exchange import rank_and_size
from warpsmith.distributed.gradients.hook import _all_gather, by_dtype, mean_in_rank_order, side_stream
from warpsmith.distributed.gradients.peer_memory import PeerMemory, peer_memory
from warpsmith.distributed.sharded.shards import Bucket, Fragment
from warpsmith.ops._scaled_linear import in_fp8

_OP = "ShardedOptimizer"
IN_FLIGHT = 2  # buckets whose exchange may be under way; more would hold the memory of all gradients once more

IDLE, REDUCING, REDUCED = "idle", "reducing", "reduced"


def _place(p: Tensor) -> tuple[Any, ...]:
    """What must stay as it is while a parameter is shared out."""
    return p.data_ptr(), p.shape, p.stride(), p.dtype, p.requires_grad


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory; shares that memory."""
    return t.as_strided((t.numel(),), (1,))


Gradients = dict[int, Tensor | None]  # by parameter


class _InFlight(NamedTuple):
    """A bucket that is under way."""

    bucket: Bucket
    mean: Callable[[], tuple[Tensor, list[Sums]]]  # waits, on CUDA the stream, for the means of this rank's part
    held: tuple[Tensor, ...]  # what is read meanwhile


class GradientShards:
    """The reduction of the gradients of some parameters over ranks, one backward after another.

    A hook of each parameter reports its gradient. A bucket whose gradients are all there is sent off: an all-to-all
    brings each rank the parts that it owns, and the backward goes on meanwhile. Buckets leave in the same order on all
    ranks. The end of the backward sends what is missing, with zeros for parameters without a gradient, and exchanges a
    report, in which each rank says whether something is wrong.

    ``reduced`` is called when all is there. ``fragments``: those of this rank, in the order of the parameters;
    ``gradients``: what was reduced of each, None for a parameter that no rank used.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        buckets: Sequence[Bucket],
        *,
        group: ProcessGroup | None,
        wire: torch.dtype,
        keep_whole: bool,
        find_unused: bool,
        reduced: Callable[[], None],
    ) -> None:
        self.params, self.names, self.buckets = list(params), list(names), list(buckets)
        self.group, self.wire, self.keep_whole, self.find_unused = group, wire, keep_whole, find_unused
        self._reduced = reduced
        self._places = [_place(p) for p in params]
        self.rank, self.world_size = rank_and_size(group)
        own = [f for bucket in buckets for f in bucket.fragments if f.rank == self.rank]
        self.fragments = sorted(own, key=lambda f: (f.param, f.start))
        self.synchronizing = True
        self._turn = 0  # which box of the peer memory the next bucket takes
        self.used = [True] * len(params)  # after a reduction: whether any rank has a gradient of the parameter
        self.nonfinite: Tensor | None = None  # after a reduction: 1 where any rank's gradients are not finite, else 0
        self._bucket_of = {param: n for n, bucket in enumerate(buckets) for param in bucket.params}
        self._index_of = {id(p): i for i, p in enumerate(params)}
        self._is_compared = False  # with other ranks
        self._added: set[int] = set()  # parameters whose main_grad was added to since the last step or zero_grad
        self._late: int | None = None  # one with a gradient under no_sync() after the reduction
        self.forget()
        this = weakref.ref(self)  # a parameter must not keep its optimizer alive

        def report(index: int) -> Any:
            def arrived(_: Tensor) -> None:
                if (found := this()) is not None and found._begins_beside_rivals():
                    del found
                    gc.collect()  # this reduction and its rivals may be alive in reference cycles alone
                if (shards := this()) is not None:
                    shards._arrived(index)

            arrived.may_be_passed = True  # type: ignore[attr-defined]  # called without a gradient too
            return arrived

        self._rivals: list[weakref.ref[GradientShards]] = []
        for index, p in enumerate(params):
            p.register_post_accumulate_grad_hook(report(index))
            known = reductions.setdefault(p, [])
            for rival in filter(None, (other() for other in known)):
                rival._rivals.append(this)
                self._rivals.append(weakref.ref(rival))
            known[:] = [*(other for other in known if other() is not None), this]

    def forget(self) -> None:
        """Drops the reduced gradients: the next backward reduces anew."""
        self.phase = IDLE
        self.gradients: list[Tensor | None] = [None] * len(self.fragments)
        self._means: dict[Fragment, Tensor] = {}
        self.sums: dict[Fragment, Sums] = {}  # of squares, taken when the mean was made
        self._sent: dict[int, tuple[int, int]] = {}  # of a gradient that was sent and kept: its address and version
        self._arrived_params: set[int] = set()
        self._waiting = [len(bucket.params) for bucket in self.buckets]
        self._next = 0
        self._in_flight: deque[_InFlight] = deque()
        self._added.clear()
        self._late = None

    def adds_to_main_grad(self, param: Tensor) -> None:
        """A backward adds to it now, and gives the parameter no gradient beside; torch calls its hook all the same."""
        self._added.add(self._index_of[id(param)])

    def require_reduced(self, call: str) -> None:
        """Raises unless a backward has reduced the gradients, of parameters that are as they were. Takes the part of
        this rank in a reduction that other ranks may be in, so that they hear of it instead of waiting."""
        if self.phase != REDUCED:
            self._finish(without_backward=call)
        elif (changed := self._changed()) is not None:
            raise RuntimeError(f"{_OP}: {self._describe_change(self.rank, changed)}")
        elif (late := next((i for i, p in enumerate(self.params) if self._is_late(i, p)), self._late)) is not None:
            raise RuntimeError(
                f"{_OP}: rank {self.rank} of {self.world_size}: the gradient of {self.names[late]} was written to "
                f"after it was reduced, which {call} would not see: clip by the optimizer's clip_grad_norm_() or a "
                "scaler's clip_(), let the backward outside of no_sync() be the last of a step, and wrap the model in "
                "no DistributedDataParallel"
            )

    def _is_late(self, index: int, p: Tensor) -> bool:
        return p.grad is not None and (p.grad.data_ptr(), p.grad._version) != self._sent.get(index)

    # The backward.

    def _arrived(self, index: int) -> None:
        if self.params[index].grad is None and index not in self._added:
            return  # gradients of others have passed its layer, whose own result nobody uses
        if not self.synchronizing:
            if self.phase == REDUCED:
                self._late = index
            return
        if self.phase == REDUCED or index in self._arrived_params:
            raise RuntimeError(
                f"{_OP}: rank {self.rank} of {self.world_size}: a second gradient of {self.names[index]} after the "
                "first was reduced: call all backwards of a step but the last under no_sync(), and zero_grad() or "
                "step() after the last"
            )
        if self.phase == IDLE:
            if self._rivals:
                self._refuse_rivals()
            self.phase = REDUCING
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._arrived_params.add(index)
        self._waiting[self._bucket_of[index]] -= 1
        while self._next < len(self.buckets) and self._waiting[self._next] == 0:
            self._send_next()

    def _begins_beside_rivals(self) -> bool:
        return self.synchronizing and self.phase == IDLE and any(rival() is not None for rival in self._rivals)

    def _refuse_rivals(self) -> None:
        """Raises where another optimizer reduces one of these parameters too."""
        self._rivals = [rival for rival in self._rivals if rival() is not None]
        for rival in filter(None, (ref() for ref in self._rivals)):
            if rival.synchronizing:
                shared = {id(p) for p in rival.params}
                name = next(n for n, p in zip(self.names, self.params, strict=True) if id(p) in shared)
                raise RuntimeError(
                    f"{_OP}: rank {self.rank} of {self.world_size}: {name} belongs to another living {_OP} too, which "
                    "would reduce and step it a second time: give each parameter to one, and delete the other"
                )

    def _compare(self) -> None:
        """Raises on all ranks where not all multiply the same layers in 8-bit floats. A collective, once."""
        self._is_compared = True
        layers = [(name, in_fp8.get(p, "no FP8")) for name, p in zip(self.names, self.params, strict=True)]
        try:
            require_agreement(_OP, lambda: layers, "call warpsmith.amp.fp8 alike on all ranks", self.group)
        except ValueError:
            self.forget()
            self._is_compared = False
            raise

    @torch.no_grad()
    def _send_next(self) -> None:
        if not self._is_compared:
            self._compare()
        bucket = self.buckets[self._next]
        self._next += 1
        if bucket.numel == 0:
            return
        like = self.params[bucket.params[0]]
        sent_as = self.wire if like.dtype == torch.float32 else like.dtype
        whole = {i: self._gradient(i) for i in bucket.params}
        peers = peer_memory(self.group, like.device, _OP) if sent_as != torch.float64 else "float64"
        if isinstance(peers, str):
            self._in_flight.append(self._send(bucket, whole, sent_as, like))
        else:
            self._in_flight.append(self._push(bucket, whole, sent_as, like, peers))
        for i in bucket.params:
            if not self.keep_whole:
                self.params[i].grad = None
            elif (gradient := self.params[i].grad) is not None:
                self._sent[i] = gradient.data_ptr(), gradient._version
        while len(self._in_flight) > IN_FLIGHT:
            self._take_first()

    def _send(self, bucket: Bucket, whole: Gradients, sent_as: torch.dtype, like: Tensor) -> _InFlight:
        """By an all-to-all."""
        sent = torch.empty(bucket.numel, dtype=sent_as, device=like.device)
        to, of = [], []
        for f in bucket.fragments:
            gradient, end = whole[f.param], f.offset + f.count
            if gradient is None:
                sent[f.offset : end].zero_()
            else:
                to.append(sent[f.offset : end])
                of.append(gradient[f.start : f.start + f.count])
            sent[end : f.offset + f.padded].zero_()
        for places, some in by_dtype(to, of):
            torch._foreach_copy_(places, some)
        own = bucket.parts[self.rank]
        received = sent.new_empty(self.world_size * own)
        work = dist.all_to_all_single(
            received, sent, [own] * self.world_size, bucket.parts, group=self.group, async_op=True
        )

        def mean() -> tuple[Tensor, list[Sums]]:
            work.wait()  # on CUDA the stream waits, not the host
            found = mean_in_rank_order(received.view(self.world_size, own)).to(like.dtype)
            return found, self._sums(bucket, found)

        return _InFlight(bucket, mean, (sent,))

    def _push(
        self, bucket: Bucket, whole: Gradients, sent_as: torch.dtype, like: Tensor, peers: PeerMemory
    ) -> _InFlight:
        """Into the memory of the other ranks, on a side stream. Buckets take the two boxes in turn, so that one barrier
        is enough: a rank writes into a box again behind the barrier of the next bucket, and by then its owner has added
        what was in it."""
        own = bucket.parts[self.rank]
        boxes = peers.boxes(sent_as, max(bucket.parts))[self._turn]
        self._turn ^= 1
        mean = torch.empty(own, dtype=like.dtype, device=like.device)
        to, of = [], []
        with side_stream(like.device) as done:
            for f in bucket.fragments:
                gradient, begin = whole[f.param], f.offset - bucket.first_of(f.rank)
                box = boxes[f.rank][self.rank, begin : begin + f.count]
                if gradient is None:
                    box.zero_()
                else:
                    to.append(box)
                    of.append(gradient[f.start : f.start + f.count])
            for places, some in by_dtype(to, of):
                torch._foreach_copy_(places, some)
            peers.barrier(self._turn)
            if own:
                rank_mean(boxes[self.rank][:, :own], [mean])
            sums = self._sums(bucket, mean)

        def wait() -> tuple[Tensor, list[Sums]]:
            done()
            return mean, sums

        return _InFlight(bucket, wait, tuple(of))  # which other streams must not write to before

    def _gradient(self, index: int) -> Tensor | None:
        """The elements of a parameter's gradient, and of its main_grad, in the order of the parameter's memory."""
        param, gradient = self.params[index], self.params[index].grad
        main_grad = getattr(param, "main_grad", None)
        alone = gradient is None and index in self._added and isinstance(main_grad, Tensor)
        if (gradient is None and not alone) or _place(param) != self._places[index]:  # the backward's end reports it
            return None
        if gradient is not None and (
            gradient.layout != torch.strided or gradient.dtype != param.dtype or gradient.shape != param.shape
        ):
            dtype = str(param.dtype).removeprefix("torch.")
            got = f"{str(gradient.dtype).removeprefix('torch.')} {tuple(gradient.shape)} {gradient.layout}"
            raise ValueError(
                f"{_OP}: gradient of {self.names[index]}: expected a dense {dtype} {tuple(param.shape)}, got {got}"
            )
        if isinstance(main_grad, Tensor):
            gradient = main_grad if gradient is None else gradient.detach() + main_grad
        assert gradient is not None
        gradient = gradient.detach()
        if not same_layout(gradient, param) or gradient.is_neg():
            gradient = torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
        return flat(gradient)

    @torch.no_grad()
    def _take_first(self) -> None:
        bucket, wait, _ = self._in_flight.popleft()
        mean, sums = wait()
        own = self._own(bucket, mean)
        self._means.update(own)
        self.sums.update(zip(own, sums, strict=True))

    def _own(self, bucket: Bucket, mean: Tensor) -> dict[Fragment, Tensor]:
        """This rank's fragments of a bucket, from the means of its part."""
        first = bucket.first_of(self.rank)
        own = [f for f in bucket.fragments if f.rank == self.rank]
        return {f: mean[f.offset - first : f.offset - first + f.count] for f in own}

    def _sums(self, bucket: Bucket, mean: Tensor) -> list[Sums]:
        """Of its squares while they are in the cache: what norms and checks need of the gradients."""
        own = list(self._own(bucket, mean).values())
        return sums_of(own, sum(p.numel() for p in self.params)) if own else []

    def known_sums(self, total_elems: int) -> Joined | None:
        """The sums of ``gradients`` in their order; None where one was written to since, or for chunks of another
        length than those of so many elements."""
        present = [(f, g) for f, g in zip(self.fragments, self.gradients, strict=True) if g is not None]
        if not present or any(g._version != self._versions[f] for f, g in present):
            return None
        return joined([self.sums[f] for f, _ in present], [g for _, g in present], total_elems)

    def _finish(self, without_backward: str = "") -> None:
        arrived = self._arrived_params | self._added
        used = [p.grad is not None or i in arrived for i, p in enumerate(self.params)]
        while self._next < len(self.buckets):
            self._send_next()
        while self._in_flight:
            self._take_first()
        if self.find_unused:
            self.used = self._on_any_rank(used)
        self.gradients = [self._means[f] if self.used[f.param] else None for f in self.fragments]
        self._versions = {f: mean._version for f, mean in self._means.items()}
        missing = next((i for i, has in enumerate(used) if not has and not self.find_unused), None)
        own = [without_backward != "", _number(missing), _number(self._changed())]
        reports = self._reports(own)
        self.nonfinite = reports[:, 0].max()
        problem = self._problem_of(reports, own, without_backward)
        if problem:
            self.forget()
            raise RuntimeError(f"{_OP}: {problem}")
        self.phase = REDUCED
        self._reduced()

    def _on_any_rank(self, used: list[bool]) -> list[bool]:
        flags = torch.tensor(used, dtype=torch.int32, device=self.params[0].device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def _reports(self, own: list[int]) -> Tensor:
        """[ranks, 4], of each rank: whether its gradients are not finite, and its ``own``: whether it ran no backward;
        1 + the index of a parameter without a gradient, or 0; 1 + that of one that was replaced, or 0."""
        report = torch.tensor([0, *own], dtype=torch.int32).to(self.params[0].device, non_blocking=True)
        present = [g for g in self.gradients if g is not None]
        if present:
            total = sum(p.numel() for p in self.params)
            known = self.known_sums(total)
            one = torch.ones((), dtype=torch.float32, device=report.device)
            checked = check_gradients(present, 2.0, one, torch.inf, total, known.of_all if known else None)
            report[0] = checked.bad_counts.any()
        reports = report.new_empty(self.world_size * 4)
        _all_gather(reports, report, group=self.group)
        return reports.view(self.world_size, 4)

    def _problem_of(self, reports: Tensor, own: list[int], without_backward: str) -> str:
        """What is wrong and on which rank. On CUDA of this rank alone: the host does not wait for the others'."""
        rows = {self.rank: own} if reports.is_cuda else dict(enumerate(reports[:, 1:].tolist()))
        for rank, (_, _, changed) in rows.items():
            if changed:
                return self._describe_change(rank, changed - 1)
        if idle := [rank for rank, row in rows.items() if row[0]]:
            ranks = f"rank {idle[0]}" if len(idle) == 1 else "ranks " + ", ".join(map(str, idle))
            return (
                f"{ranks} of {self.world_size}: {without_backward or 'a step'} without a backward that reduced "
                "gradients: give every rank equally many batches (ResumableSampler does) and run the last backward of "
                "a step outside of no_sync(); a rank without data can run the backward of 0 times the loss of any batch"
            )
        for rank, (_, missing, _) in rows.items():
            if missing:
                return (
                    f"rank {rank} of {self.world_size}: {self.names[missing - 1]} has no gradient: use it in the loss, "
                    "or give ShardedOptimizer find_unused_parameters=True"
                )
        return ""

    def _changed(self) -> int | None:
        places = zip(self.params, self._places, strict=True)
        return next((i for i, (p, place) in enumerate(places) if _place(p) != place), None)

    def _describe_change(self, rank: int, changed: int) -> str:
        return (
            f"rank {rank} of {self.world_size}: {self.names[changed]} was frozen or replaced (memory, dtype, shape) "
            "since this optimizer was made: change the model on all ranks first, then make the optimizer"
        )


def _number(index: int | None) -> int:
    return 0 if index is None else index + 1
