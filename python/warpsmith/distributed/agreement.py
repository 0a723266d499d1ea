"""Whether all ranks describe the same thing; if not, which rank differs and in what."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith.distributed.exchange import all_gather_bytes, rank_and_size

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_ELEMS = 1 << 20


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
    reports = [json.loads(text) for text in all_gather_bytes(json.dumps(report).encode(), group)]
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
        words = t.detach().contiguous().view(-1).view(_INTEGERS[t.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=t.device)
        for at in range(0, len(words), _PIECE_ELEMS):
            piece = words[at : at + _PIECE_ELEMS].to(torch.int64)
            total += (piece * (2 * torch.arange(at, at + len(piece), device=t.device) + 1)).sum()
        sums.append(total)
    return torch.stack(sums).tolist() if sums else []
