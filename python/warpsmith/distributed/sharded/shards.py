"""Which rank owns which elements of which parameter: the layout of a sharded optimizer, a pure function."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_ALIGN_ELEMS = 8  # fragments begin at multiples of 16 bytes or more, where kernels load vectors


@dataclass(frozen=True)
class Fragment:
    """Elements ``[start, start + count)`` of a parameter, in memory order, all owned by one rank.

    ``param``: the parameter's index. ``offset``: of the first element in the bucket's flat buffer.

    Example:
        >>> Fragment(param=0, start=0, count=5, rank=1, offset=0).padded
        8
    """

    param: int
    start: int
    count: int
    rank: int
    offset: int

    @property
    def padded(self) -> int:
        """Elements that the fragment takes in the flat buffer."""
        return _padded(self.count)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are reduced together.

    ``params``: their indices. ``fragments``: in the order of the flat buffer, rank by rank. ``parts``: elements of the
    flat buffer that each rank owns.

    Example:
        >>> bucket = plan_buckets([40, 8], [4, 4], ["f32", "f32"], world_size=2, bucket_bytes=1024, cut_elems=16)[0]
        >>> bucket.parts, [(f.param, f.start, f.count, f.rank) for f in bucket.fragments]
        ([24, 24], [(1, 0, 8, 0), (0, 0, 16, 0), (0, 16, 24, 1)])
    """

    params: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    parts: list[int]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return sum(self.parts)

    def first_of(self, rank: int) -> int:
        """Where a rank's part begins in the flat buffer."""
        return sum(self.parts[:rank])


def plan_buckets(
    numels: Sequence[int],
    element_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    world_size: int,
    bucket_bytes: int,
    cut_elems: int,
) -> list[Bucket]:
    """Buckets in the order in which a backward completes them, about: from the last parameter to the first.

    A bucket holds parameters of one kind, at most ``bucket_bytes`` unless it holds only one. It is shared out evenly
    over the ranks, but a parameter is cut only at multiples of ``cut_elems``.

    Args:
        numels, element_bytes, kinds: of each parameter; equal kinds may share a bucket.

    Example:
        >>> [b.params for b in plan_buckets([9, 9, 9], [4, 2, 4], "aba", world_size=1, bucket_bytes=80, cut_elems=8)]
        [(1,), (2, 0)]
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[int, int]] = {}  # of a kind: the number of its last group, and bytes in it
    for i in reversed(range(len(numels))):
        size = numels[i] * element_bytes[i]
        number, held = open_groups.get(kinds[i], (-1, 0))
        if number < 0 or held + size > bucket_bytes:
            number, held = len(groups), 0
            groups.append([])
        groups[number].append(i)
        open_groups[kinds[i]] = (number, held + size)
    groups.sort(key=lambda group: -group[-1])  # a bucket is complete with its first parameter
    return [_share_out(n, group, numels, world_size, cut_elems) for n, group in enumerate(groups)]


def _share_out(number: int, params: list[int], numels: Sequence[int], world_size: int, cut_elems: int) -> Bucket:
    pieces = [(p, at, min(cut_elems, numels[p] - at)) for p in params for at in range(0, numels[p], cut_elems)]
    total = sum(_padded(count) for _, _, count in pieces)
    of_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    before = 0
    for param, start, count in pieces:
        # By the piece's middle. Each bucket begins with another rank: small ones would all go to the same.
        share = (2 * before + _padded(count)) * world_size // (2 * total)
        before += _padded(count)
        mine = of_rank[(share + number) % world_size]
        if mine and mine[-1][0] == param and sum(mine[-1][1:]) == start:
            mine[-1] = (param, mine[-1][1], mine[-1][2] + count)
        else:
            mine.append((param, start, count))
    fragments, parts, offset = [], [], 0
    for rank, mine in enumerate(of_rank):
        first = offset
        for param, start, count in mine:
            fragments.append(Fragment(param, start, count, rank, offset))
            offset += _padded(count)
        parts.append(offset - first)
    return Bucket(tuple(params), tuple(fragments), parts)


def _padded(count: int) -> int:
    return -(-count // _ALIGN_ELEMS) * _ALIGN_ELEMS
