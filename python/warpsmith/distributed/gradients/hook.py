"""A DDP communication hook: 16 bits on the wire, float32 sums in rank order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup

from warpsmith._core import checks
from warpsmith._core.main_grad import have_reduced
from warpsmith._core.raw_step import rank_mean
from warpsmith._core.tensor_list import is_dense
from warpsmith.distributed.exchange import rank_and_size
from warpsmith.distributed.gradients.bucket_norms import BucketNorms
from warpsmith.distributed.gradients.peer_memory import PeerMemory, peer_memory

Future = torch.futures.Future[Tensor]
Hook = Callable[[Any, GradBucket], Future]

_WIRES = (torch.bfloat16, torch.float16)
_ALIGN_ELEMS = 8  # parts of a bucket begin at multiples of 16 bytes
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
_USER = "accurate_hook"  # of peer memory
_USER_OF_WHOLE = "accurate_hook, whole buckets"  # boxes of its own: the two ways take turns differently
_MOST_WHOLE_BYTES = 32 << 20  # of gradients; larger buckets are worth two barriers
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


@overload
def accurate_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future: ...
@overload
def accurate_hook(*, wire: torch.dtype = ..., keep_norm: bool = ...) -> Hook: ...
def accurate_hook(  # type: ignore[misc]  # DDP reads these annotations, and wants them exactly so
    state: Any = None,
    bucket: GradBucket = None,  # type: ignore[assignment]
    *,
    wire: torch.dtype = torch.bfloat16,
    keep_norm: bool = False,
) -> torch.futures.Future[torch.Tensor]:
    r"""Averages gradients over ranks with half the bytes of float32 and one rounding of the sum.

    For ``DistributedDataParallel.register_comm_hook(state, hook)``; ``state`` is the process group, or None for all
    ranks. ``accurate_hook`` itself sends bfloat16; ``accurate_hook(wire=torch.float16)`` is a hook that sends float16.

    .. math::
        g \leftarrow \mathrm{wire}\Big(\frac{1}{N} \sum_{r=0}^{N-1} \mathrm{wire}(g_r)\Big)

    The sum is taken in float32, in the order of the ranks. Rank r sums the r-th part of the bucket. Where all ranks
    are GPUs of one host with access to each other's memory, they write the parts, and the kernel that adds writes the
    means, straight into it. Elsewhere an all-to-all brings the ranks' parts and an all-gather takes the means back.
    :func:`reduction_plan` tells which. A ring's all-reduce in bfloat16 rounds at every rank instead, and its error
    grows with their number.

    Buckets of bfloat16 and float16 gradients travel in their own dtype, buckets of float64 are sent and summed in
    float64. float16 has no values above 65,504: a gradient beyond is infinite on the wire, which a loss scaler sees.
    Under ``no_sync()`` DDP calls no hook, so accumulated gradients are rounded and reduced once. Where a parameter has
    a ``main_grad``, to which :func:`warpsmith.linear` and others add its gradient, that is averaged with the bucket, in
    place of the parameter's gradient. What other ops gave the parameter is added to ``main_grad`` before, and
    ``p.grad`` is left as zeros, or None.

    ``accurate_hook(keep_norm=True)`` is a hook that also sums the squares of each bucket right after its reduction.
    :func:`warpsmith.optim.clip_grad_norm_`, :func:`~warpsmith.optim.grad_norm`, :class:`warpsmith.amp.GradScaler` and
    :class:`~warpsmith.amp.StepGuard` then take the 2-norm and the check for infinite and NaN elements from these sums,
    and do not read the gradients: their first pass is gone, the bits are the same. They read the gradients as before
    where one was replaced or written to in place since (by a backward under ``no_sync()`` too), where one took no part
    in the reduction, and on CUDA in the first step, which does not know how many elements there are. Writes that torch
    does not count (``p.grad.data.mul_()``, collectives, ``torch.amp.GradScaler.unscale_``) are seen if they reach the
    first elements of the smallest gradient of a bucket, as those to all gradients do; one to a few others leaves the
    norm of before. Hence the hook keeps norms only when asked. Not for hooks that change what this one returns.

    Deterministic: the same bits in every run, on every rank, for every backend and topology. On CUDA the bucket is
    reduced on a side stream while the backward goes on. The host waits only where ranks set up the memory that they
    share: at the first bucket, and at a larger one than any before. On the CPU the reduction runs where the hook is
    called.

    Raises:
        ValueError: ``wire`` is neither bfloat16 nor float16.
        TypeError: a bucket of another dtype.

    Example:
        >>> import torch, warpsmith
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> with warpsmith.distributed.init(device="cpu"):
        ...     ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
        ...     ddp.register_comm_hook(None, warpsmith.distributed.accurate_hook)
        ...     ddp(torch.ones(2, 3)).sum().backward()
        >>> ddp.module.weight.grad
        tensor([[2., 2., 2.]])
    """
    if wire not in _WIRES:
        raise ValueError(f"accurate_hook: wire: expected torch.bfloat16 or torch.float16, got {wire}")
    checks.flags("accurate_hook", keep_norm=keep_norm)
    if bucket is not None:
        rank_and_size(state, "accurate_hook")
        return _reduce(state, bucket, wire, None)
    norms = BucketNorms() if keep_norm else None

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        rank_and_size(state, "accurate_hook")
        return _reduce(state, bucket, wire, norms)

    hook.reduces_main_grad = True
    return hook


accurate_hook.reduces_main_grad = True  # type: ignore[attr-defined]


def reduction_plan(process_group: ProcessGroup | None = None, device: torch.device | str | None = None) -> str:
    """How :func:`accurate_hook` reduces gradients of these ranks, and why. A collective: every rank must call.

    Args:
        process_group: the ranks; default: all.
        device: of the gradients; default: this rank's current GPU, or the CPU where there is none.

    Example:
        >>> import warpsmith
        >>> with warpsmith.distributed.init(device="cpu"):
        ...     warpsmith.distributed.reduction_plan(device="cpu")
        'all-to-all, sum, all-gather: the gradients are on the CPU'
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    rank_and_size(process_group, "reduction_plan")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    found = peer_memory(process_group, device, _USER)
    if isinstance(found, str):
        return f"all-to-all, sum, all-gather: {found}"
    return f"one kernel over peer memory: {found.world_size} GPUs of one host"


def mean_in_rank_order(parts: Tensor) -> Tensor:
    """The mean over dimension 0: a sum in float32 (float64 for float64) from the first rank to the last, divided by
    their number and rounded once to the parts' dtype.

    Example:
        >>> mean_in_rank_order(torch.tensor([[1.0, 4.0], [2.0, 4.0]], dtype=torch.bfloat16))
        tensor([1.5000, 4.0000], dtype=torch.bfloat16)
    """
    if parts.dtype == torch.float64 and parts.is_cuda:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.div_(torch.full_like(total[:1], len(parts)))  # by a number torch would multiply by its inverse
    mean = torch.empty_like(parts[0])
    rank_mean(parts, [mean])
    return mean


def _reduce(group: ProcessGroup | None, bucket: GradBucket, wire: torch.dtype, norms: BucketNorms | None) -> Future:
    gradients = bucket.buffer()
    if not gradients.is_floating_point():
        raise TypeError(f"accurate_hook: bucket: expected floating point gradients, got {gradients.dtype}")
    future: Future
    if gradients.is_cuda:
        device = gradients.device
        with side_stream(device, wait_for_end=False):  # DDP waits for the future
            _average_bucket(bucket, group, wire, norms)
            future = torch.futures.Future(devices=[device])
            future.set_result(gradients)  # DDP's wait makes its stream wait for this one
    else:
        _average_bucket(bucket, group, wire, norms)
        future = torch.futures.Future()
        future.set_result(gradients)
    return future


def _average_bucket(
    bucket: GradBucket, group: ProcessGroup | None, wire: torch.dtype, norms: BucketNorms | None
) -> None:
    params = bucket.parameters()
    by_wire: dict[torch.dtype, list[Tensor]] = {}
    for piece in _pieces(bucket, params):
        sent_as = wire if piece.dtype == torch.float32 else piece.dtype
        by_wire.setdefault(sent_as, []).append(piece)
    for sent_as, pieces in by_wire.items():
        _average(pieces, group, sent_as)
    if norms is not None:
        norms.take(bucket)
    if params and bucket.is_last():
        have_reduced(params)


def _pieces(bucket: GradBucket, params: list[Tensor]) -> list[Tensor]:
    """What is to be averaged of a bucket: each main_grad, in the place of its parameter's gradient, and what lies
    between. A main_grad takes what other ops gave the parameter as its gradient; without any, DDP has put zeros."""
    main_grads = [getattr(p, "main_grad", None) for p in params]
    if not any(isinstance(t, Tensor) for t in main_grads):
        return [bucket.buffer()]
    sizes: list[int] = []
    owners: list[Any] = []  # of main_grads; None for what lies between
    for p, main_grad in zip(params, main_grads, strict=True):
        fused = isinstance(main_grad, Tensor)
        if fused or not owners or owners[-1] is not None:
            owners.append(p if fused else None)
            sizes.append(0)
        sizes[-1] += p.numel()
    pieces = list(bucket.buffer().split(sizes))
    for i, p in enumerate(owners):
        if p is None:
            continue
        main_grad = p.main_grad
        if not is_dense(main_grad) or main_grad.shape != p.shape or not main_grad.is_floating_point():
            expected = f"dense floating point numbers {tuple(p.shape)}"
            raise ValueError(
                f"accurate_hook: main_grad: expected {expected}, got {main_grad.dtype} {tuple(main_grad.shape)}"
            )
        if p.grad is not None:
            # DDP lets it lie as the parameter does, and bucket.gradients() does not say so.
            gradient = pieces[i].as_strided(p.shape, p.stride()) if is_dense(p) else pieces[i].view(p.shape)
            main_grad.add_(gradient)
            gradient.zero_()
        pieces[i] = main_grad.as_strided(pieces[i].shape, (1,))
    return pieces


@contextmanager
def side_stream(device: torch.device, wait_for_end: bool = True) -> Iterator[Callable[[], None]]:
    """On CUDA: work in the block runs on a stream of its own, behind what the current stream has to do. What the block
    is given makes, called later, the then current stream wait for the block, if ``wait_for_end``. Elsewhere the block
    runs as ever."""
    if device.type != "cuda":
        yield lambda: None
        return
    side = _side_streams.get(device)
    if side is None:
        side = _side_streams[device] = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    end = torch.cuda.Event() if wait_for_end else None
    with torch.cuda.stream(side):
        yield lambda: None if end is None else torch.cuda.current_stream(device).wait_event(end)
        if end is not None:
            end.record(side)


def _average(pieces: list[Tensor], group: ProcessGroup | None, sent_as: torch.dtype) -> None:
    """In place, as if the vectors were one."""
    ranks = dist.get_world_size(group)
    sizes = [len(piece) for piece in pieces]
    count = sum(sizes)
    part = -(-count // (ranks * _ALIGN_ELEMS)) * _ALIGN_ELEMS
    whole = ranks == 2 and sum(piece.nbytes for piece in pieces) <= _MOST_WHOLE_BYTES
    user, device = _USER_OF_WHOLE if whole else _USER, pieces[0].device
    peers = peer_memory(group, device, user) if sent_as != torch.float64 else "float64"
    if not isinstance(peers, str):
        one = pieces[0] if len(pieces) == 1 else torch.empty(count, dtype=sent_as, device=device)
        pairs = by_dtype(one.split(sizes), pieces) if len(pieces) > 1 else []
        for places, some in pairs:
            torch._foreach_copy_(places, some)
        average_whole(one, peers, sent_as) if whole else average_by_peers(one, peers, sent_as, part)
        for places, some in pairs:
            torch._foreach_copy_(some, places)
        return
    sent = torch.empty(ranks * part, dtype=sent_as, device=device)
    pairs = by_dtype(sent[:count].split(sizes), pieces)
    for places, some in pairs:
        torch._foreach_copy_(places, some)
    sent[count:].zero_()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    _all_gather(sent, mean_in_rank_order(received.view(ranks, part)), group=group)
    for places, some in pairs:
        torch._foreach_copy_(some, places)


def by_dtype(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Tensors of one dtype each, and their places: of mixed lists torch copies one tensor after the other."""
    found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, t in zip(places, tensors, strict=True):
        of_dtype = found.get(t.dtype) or found.setdefault(t.dtype, ([], []))
        of_dtype[0].append(place)
        of_dtype[1].append(t)
    return list(found.values())


def average_whole(gradients: Tensor, peers: PeerMemory, sent_as: torch.dtype) -> None:
    """In place, for two ranks: each writes its whole bucket into the other's memory and adds both. As many bytes travel
    as by :func:`average_by_peers`, in three launches: copy, barrier, mean. Buckets take the two boxes in turn: a rank
    writes into a box again behind the barrier of the next bucket, and by then its owner has added what was in it."""
    count, rank, turn = len(gradients), peers.rank, peers.turn
    boxes = peers.boxes(sent_as, -(-count // _ALIGN_ELEMS) * _ALIGN_ELEMS)[turn]
    peers.turn ^= 1
    views = peers.views.get((sent_as, count, turn))
    if views is None:
        views = peers.views[sent_as, count, turn] = boxes[1 - rank][rank, :count], boxes[rank][:, :count]
    inbox_of_other, inbox = views
    inbox_of_other.copy_(gradients)
    peers.barrier(turn)
    rank_mean(inbox, [gradients], own=gradients, rank=rank)


class _Views(NamedTuple):
    """Of the memory of all ranks, for buckets of one size."""

    pushes: list[tuple[int, Tensor]]  # where this rank's parts go: (rank of the part, its inbox)
    inbox: Tensor
    outs: list[Tensor]  # where the mean of this rank's part goes
    takes: list[tuple[int, int, Tensor]]  # (begin, end) in the bucket, and the means of other ranks' parts


def _views_of(peers: PeerMemory, dtype: torch.dtype, part: int, count: int) -> _Views:
    inboxes, outboxes = peers.boxes(dtype, part)
    found: _Views | None = peers.views.get((dtype, count))
    if found is None:
        rank, ranks = peers.rank, peers.world_size
        lengths = [max(0, min(part, count - r * part)) for r in range(ranks)]  # the last may be shorter, or empty
        others = [(rank + step) % ranks for step in range(1, ranks)]  # not all to the same rank at once
        means = outboxes[rank].view(1, -1)
        ranges = [(0, min(rank * part, count)), (min((rank + 1) * part, count), count)]
        found = peers.views[dtype, count] = _Views(
            pushes=[(r, inboxes[r][rank, : lengths[r]]) for r in others if lengths[r]],
            inbox=inboxes[rank][:, : lengths[rank]],
            outs=[outboxes[r][rank, : lengths[rank]] for r in others],
            takes=[(begin, end, means[:, begin:end]) for begin, end in ranges if begin < end],
        )
    return found


def average_by_peers(gradients: Tensor, peers: PeerMemory, sent_as: torch.dtype, part: int) -> None:
    """In place. Each rank writes what it sends into the inboxes of the others; adds what came into its own and writes
    the mean into their outboxes; and takes their means out of its own. An inbox is free again after the second barrier,
    an outbox after the first of the next bucket."""
    views = _views_of(peers, sent_as, part, len(gradients))
    parts = gradients.split(max(part, 1))
    for r, inbox in views.pushes:
        inbox.copy_(parts[r])
    peers.barrier(0)
    if views.inbox.shape[1]:
        own = parts[peers.rank]
        rank_mean(views.inbox, [own, *views.outs], own=own, rank=peers.rank)
    peers.barrier(1)
    for begin, end, means in views.takes:
        rank_mean(means, [gradients[begin:end]])  # of one rank: only widens, with vectors
