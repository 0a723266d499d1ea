"""What a scaler keeps of each optimizer's steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.optim import Optimizer

from warpsmith._core.tensor_list import describe
from warpsmith.amp._gradients import BadCounts
from warpsmith.amp._kept_table import KeptTable


class Overflow(NamedTuple):
    """Which gradients made an optimizer skip a step."""

    first: str | None  #: the first of them in the order of the parameters, with its name if the optimizer has names
    bad_values: int  #: infinite and NaN elements of all gradients of this rank; 0 where only their norm overflowed
    tensors: dict[str, int]  #: of each gradient that has some


class Record:
    """What is known about the steps of one optimizer. Its tensors keep their addresses: CUDA graphs write to them."""

    def __init__(self, device: torch.device) -> None:
        self.now = torch.zeros(2, dtype=torch.float32, device=device)  # 1, and whether the last step was skipped
        self.now[:1].fill_(1.0)
        self.found_inf = self.now[1]
        self.tally = torch.zeros(2, dtype=torch.float64, device=device)  # steps, and how many of them were skipped
        self.bad: dict[torch.device, list[BadCounts]] = {}  # in the last step that was skipped
        self.kept = KeptTable(device, self.bad)

    def overflow(self, optimizer: Optimizer) -> Overflow | None:
        """What made the last skipped step one; None if no step was skipped. The host waits."""
        if not self.tally[1].item():
            return None
        counts: dict[int, int] = {}
        for part in (part for parts in self.bad.values() for part in parts):
            counts.update({i: n for i, n in zip(part.indices, part.counts.tolist(), strict=True) if n})
        tensors = {describe(optimizer.param_groups, i): counts[i] for i in sorted(counts)}
        return Overflow(next(iter(tensors), None), sum(tensors.values()), tensors)
