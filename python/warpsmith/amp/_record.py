"""What a scaler keeps of each optimizer's steps."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from warpsmith.amp import _gradients
from warpsmith.amp._gradients import BadCounts, Verdict
from warpsmith.ops._grad_norm import GradientTable, check_table, table_of_gradients
from warpsmith.optim._multi_tensor import MultiTensorOptimizer
from warpsmith.optim._plan import Plan
from warpsmith.optim._tensor_list import describe


class Overflow(NamedTuple):
    """Which gradients made an optimizer skip a step."""

    first: str | None  #: the first of them in the order of the parameters, with its name if the optimizer has names
    bad_values: int  #: infinite and NaN elements of all gradients of this rank; 0 where only their norm overflowed
    tensors: dict[str, int]  #: of each gradient that has some


class _Places(NamedTuple):
    """Where an optimizer's gradients were: its plan, and the versions of the plan's columns of their addresses."""

    plan: ref[Plan]
    versions: list[int]


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _places(optimizer: Optimizer) -> _Places | None:
    """None where only looking at each gradient tells."""
    plan = optimizer._plan if isinstance(optimizer, MultiTensorOptimizer) else None
    if plan is None or capturing():  # a table made in a capture has its contents only once the graph has run
        return None
    watch = plan.watch
    if not watch.look([group["params"] for group in optimizer.param_groups], optimizer.state) or watch.unusual:
        return None
    return _Places(ref(plan), [watch.version(number) for number in range(len(plan.buckets))])


class Record:
    """What is known about the steps of one optimizer. Its tensors keep their addresses: CUDA graphs write to them."""

    def __init__(self, device: torch.device) -> None:
        self.now = torch.zeros(2, device=device)  # 1, and whether the last step was skipped
        self.now[:1].fill_(1.0)
        self.found_inf = self.now[1]
        self.tally = torch.zeros(2, dtype=torch.float64, device=device)  # steps, and how many of them were skipped
        self.bad: dict[torch.device, list[BadCounts]] = {}  # in the last step that was skipped
        self._checked = torch.zeros((), device=device)  # found_inf of a check by table
        self._table: GradientTable | None = None  # of the gradients at these places; None: several tables were needed
        self._places: _Places | None = None

    @torch.no_grad()
    def check(self, op: str, optimizer: Optimizer, scale: Tensor, p: float, max_norm: float) -> Verdict | None:
        """:func:`_gradients.check` by one table, which is kept while every gradient stays where it is: then three
        launches, and no look of Python at any tensor. Notes what is bad. None where one table is not enough."""
        places = _places(optimizer)
        if places is None:
            return None
        if places != self._places:
            self._places, self._table = places, self._make_table(_gradients.gradients(op, optimizer), scale.device)
        if self._table is None:
            return None
        checked = check_table(self._table, p, scale, max_norm, self._checked, self.bad[scale.device][0].counts)
        return Verdict(checked.found_inf, {}, checked.norm, checked.grad_scale)

    def _make_table(self, grads: list[_gradients.Gradient], device: torch.device) -> GradientTable | None:
        groups = list(_gradients.groups(grads, lambda t: t))
        if len(groups) != 1 or groups[0].shared is not None or groups[0].device != device:
            return None
        (group,) = groups
        if any(part is not original for part, original in zip(group.parts, group.originals, strict=True)):
            return None
        known = self.bad.get(device, [])
        if [part.indices for part in known] != [group.indices]:
            self.bad[device] = [BadCounts(group.indices, torch.zeros(len(grads), dtype=torch.int64, device=device))]
        return table_of_gradients(group.parts)

    def overflow(self, optimizer: Optimizer) -> Overflow | None:
        """What made the last skipped step one; None if no step was skipped. The host waits."""
        if not self.tally[1].item():
            return None
        counts: dict[int, int] = {}
        for part in (part for parts in self.bad.values() for part in parts):
            counts.update({i: n for i, n in zip(part.indices, part.counts.tolist(), strict=True) if n})
        tensors = {describe(optimizer.param_groups, i): counts[i] for i in sorted(counts)}
        return Overflow(next(iter(tensors), None), sum(tensors.values()), tensors)
