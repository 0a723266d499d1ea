"""Memory of the GPUs of one host that every rank of a group can write to, through torch's symmetric memory."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith.distributed.exchange import all_gather_json, rank_and_size

VARIABLE = "WARPSMITH_PEER_MEMORY"  # "0": not used
MOST_RANKS = 16  # outputs of the kernel that adds (csrc/kernels/optim/rank_mean.h)
_LEAST_BYTES = 8 << 20

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# Of a group: by device and user, the memory, or why there is none.
_known: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[torch.device, str], PeerMemory | str]] = (
    weakref.WeakKeyDictionary()
)


class PeerMemory:
    """Two boxes in the memory of each rank: ``inboxes[r]`` for what rank r adds, ``outboxes[r]`` for what it receives.

    All work with a ``PeerMemory`` belongs on one stream of each rank.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = weakref.ref(group), device
        self.rank, self.world_size = rank_and_size(group)
        self._bytes = 0
        self._buffer: Tensor | None = None
        self._handle: Any = None
        self._boxes: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}
        self.views: dict[Any, Any] = {}  # of the boxes, made by users: gone when the memory is
        self.turn = 0  # for users whose buckets take the boxes in turn
        self._grow(_LEAST_BYTES)

    def boxes(self, dtype: torch.dtype, part: int) -> tuple[list[Tensor], list[Tensor]]:
        """inboxes and outboxes, each (ranks, part) for every rank. A collective where they are larger than any
        before: the host then waits, and all ranks must ask for the same size."""
        wanted = 2 * self.world_size * part * dtype.itemsize
        if wanted > self._bytes:
            self._grow(1 << (wanted - 1).bit_length())
        found = self._boxes.get((dtype, part))
        if found is None:
            shape = self.world_size, part
            inboxes, outboxes = (
                [self._handle.get_buffer(r, shape, dtype, offset) for r in range(self.world_size)]
                for offset in box_offsets(self._bytes, dtype)
            )
            found = self._boxes[dtype, part] = inboxes, outboxes
        return found

    def barrier(self, channel: int) -> None:
        """What a rank's stream wrote before is seen by what follows on every other. The host does not wait."""
        self._handle.barrier(channel=channel)

    def _grow(self, size: int) -> None:
        from torch.distributed import _symmetric_memory

        group = self.group()
        assert group is not None
        torch.cuda.synchronize(self.device)  # the memory that is given up may be in use
        with _without_multicast():
            self._boxes, self.views, self._handle, self._buffer = {}, {}, None, None
            self._buffer = _symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)
            self._handle = _symmetric_memory.rendezvous(self._buffer, group)
        self._bytes = size


def box_offsets(size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Where inboxes and outboxes begin in a buffer of so many bytes, in elements. The same bytes for every shape and
    dtype: a rank fills the inbox for one bucket while another still reads its outbox of the bucket before.

    Example:
        >>> box_offsets(1024, torch.bfloat16), box_offsets(1024, torch.float32)
        ((0, 256), (0, 128))
    """
    return 0, size // 2 // dtype.itemsize


def peer_memory(group: ProcessGroup | None, device: torch.device, user: str) -> PeerMemory | str:
    """The memory that the ranks of a group share for one purpose; or why it cannot be shared, in words: the same
    decision on every rank. A collective on the first call of a group."""
    if device.type != "cuda":
        return f"the gradients are on the {device.type.upper()}"
    if group is None:
        group = dist.group.WORLD
        assert group is not None
    known = _known.setdefault(group, {})
    if (device, user) not in known:
        known[device, user] = _decide(group, device)
    return known[device, user]


def _decide(group: ProcessGroup, device: torch.device) -> PeerMemory | str:
    _, size = rank_and_size(group)
    if size == 1:
        return "one rank"
    if size > MOST_RANKS:
        return f"{size} ranks, more than {MOST_RANKS}"
    own = {"host": _host(), "gpu": _uuid(device.index), "off": os.environ.get(VARIABLE) == "0"}
    ranks = all_gather_json(own, group)
    for rank, it in enumerate(ranks):
        if it["off"]:
            return f"rank {rank} of {size} has {VARIABLE}=0"
        if it["host"] != ranks[0]["host"]:
            return f"rank {rank} of {size} is on another host than rank 0"
        if (first := [other["gpu"] for other in ranks].index(it["gpu"])) != rank:
            return f"ranks {first} and {rank} of {size} share a GPU"
    if why := _first(all_gather_json(_no_access(device, [it["gpu"] for it in ranks]), group)):
        return why
    found: PeerMemory | None = None
    failure = ""
    try:
        found = PeerMemory(group, device)
    except RuntimeError as error:
        rank, _ = rank_and_size(group)
        failure = f"rank {rank} of {size}: torch's symmetric memory: {str(error).splitlines()[0]}"
    return _first(all_gather_json(failure, group)) or found or failure


def _no_access(device: torch.device, gpus: list[str]) -> str:
    """The first GPU of others that this one cannot write to, in words."""
    visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
    for rank, gpu in enumerate(gpus):
        if gpu not in visible:
            return f"the GPU of rank {rank} is not visible to the others (CUDA_VISIBLE_DEVICES)"
        if visible[gpu] != device.index and not torch.cuda.can_device_access_peer(device, visible[gpu]):
            return f"the GPUs of ranks {gpus.index(_uuid(device.index))} and {rank} have no peer access"
    return ""


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _first(reasons: list[str]) -> str:
    return next((why for why in reasons if why), "")


@contextmanager
def _without_multicast() -> Iterator[None]:
    """torch reads the variable where it maps the memory. Nothing here uses multicast."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
