"""Whether all ranks describe the same thing; if not, which rank differs and in what."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith.distributed.exchange import all_gather_json, rank_and_size

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_ELEMS = 1 << 20
# By group of NCCL: the calls that all its ranks have compared.
_agreed: weakref.WeakKeyDictionary[ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def require_agreement(
    op: str, describe: Callable[[], list[tuple[str, str]]], remedy: str, group: ProcessGroup | None = None
) -> None:
    """Raises the same error on every rank where their descriptions differ. A collective.

    describe: (what, its value) pairs. Where it raises on a rank, that rank raises its error, and the others one that
    names the rank.

    Raises:
        ValueError: the first rank that differs from rank 0, in what, and the remedy.

    Example:
        >>> require_agreement("f", lambda: [("size", "3")], "give all ranks the same size")
    """
    rank, size = rank_and_size(group)
    failure: Exception | None = None
    own: list[tuple[str, str]] = []
    try:
        own = describe()
    except Exception as error:
        failure = error
    report = {"values": own, "error": failure and str(failure)}
    reports = all_gather_json(report, group)
    if failure is not None:
        raise failure
    for other, found in enumerate(reports):
        if found["error"]:
            raise ValueError(f"{op}: rank {other} of {size}: {found['error']}")
    first = reports[0]["values"]
    for other, found in enumerate(reports):
        values = found["values"]
        for (what, expected), (also, got) in zip(first, values, strict=False):
            if what != also or expected != got:
                got = got if what == also else f"{also} {got}"
                raise ValueError(
                    f"{op}: rank {other} of {size}: {what}: expected {expected}, as on rank 0, got {got}: {remedy}"
                )
        if len(values) != len(first):
            counts = f"expected {len(first)} entries, as on rank 0, got {len(values)}"
            raise ValueError(f"{op}: rank {other} of {size}: {counts}: {remedy}")


def agree_on_call(
    op: str, group: ProcessGroup | None, facts: Mapping[str, str], refusal: Exception | None, remedy: str
) -> None:
    """Raises where the ranks do not make the same call, on every rank. A collective before those of the call: ranks in
    different collectives would wait for each other.

    facts: what must be the same on all ranks, by argument. refusal: this rank's error of its arguments; the other ranks
    raise a ValueError with its words. In groups of NCCL the host would have to wait for the device, so a rank compares
    only calls that are new to it, or that it refuses.

    Example:
        >>> agree_on_call("f", None, {"size": "3"}, None, "give all ranks the same size")
    """
    rank, ranks = rank_and_size(group)
    if ranks > 1:
        _compare(op, group, facts, refusal, remedy, rank, ranks)
    elif refusal is not None:
        raise refusal


@torch._disable_dynamo  # type: ignore[attr-defined]  # tracing it would break the graph at each of its steps
def _compare(
    op: str,
    group: ProcessGroup | None,
    facts: Mapping[str, str],
    refusal: Exception | None,
    remedy: str,
    rank: int,
    ranks: int,
) -> None:
    key = group if group is not None else dist.group.WORLD
    assert key is not None
    known, signature = _agreed.setdefault(key, set()), json.dumps([op, dict(facts)])
    if "nccl" not in dist.get_backend_config(key):
        if _is_everywhere(signature if refusal is None else "", ranks, key):
            return
    elif refusal is None and signature in known:
        return
    words = str(refusal or "").removeprefix(f"{op}: ")

    def describe() -> list[tuple[str, str]]:
        if refusal is not None:
            raise ValueError(words)
        return list(facts.items())

    try:
        require_agreement(op, describe, remedy, group)
    except ValueError:
        if isinstance(refusal, ValueError):
            raise ValueError(f"{op}: rank {rank} of {ranks}: {words}") from None
        if refusal is not None:
            raise refusal from None
        raise
    known.add(signature)


def _is_everywhere(signature: str, ranks: int, group: ProcessGroup) -> bool:
    """Whether all ranks have this signature, and none the empty one of a refusal. A collective of 8 bytes a rank."""
    digest = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:7], "little") if signature else -1
    own = torch.tensor([digest], dtype=torch.int64, device="cpu")
    found = torch.empty(ranks, dtype=torch.int64, device="cpu")
    dist.all_gather(list(found.split(1)), own, group=group)
    return all(other == digest != -1 for other in found.tolist())


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """A number of 64 bits for each tensor, from the bits of its elements and their places. Two tensors that are not
    made to collide have the same number only if they are equal. The host waits once.

    Example:
        >>> a, b, c = fingerprints([torch.zeros(3), torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])])
        >>> a == b, a == c
        (True, False)
    """
    sums = []
    for t in tensors:
        words = t.detach().resolve_neg().contiguous().view(-1).view(_INTEGERS[t.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=t.device)
        for at in range(0, len(words), _PIECE_ELEMS):
            piece = words[at : at + _PIECE_ELEMS].to(torch.int64)
            total += (piece * (2 * torch.arange(at, at + len(piece), device=t.device) + 1)).sum()
        sums.append(total)
    return torch.stack(sums).tolist() if sums else []
