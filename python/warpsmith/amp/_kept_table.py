"""Checks of gradients that are where they were at the last check."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from warpsmith._core.captures import capturing
from warpsmith._core.grad_norm import GradientTable, check_table, table_of_gradients
from warpsmith._core.gradient_sums import has_sums
from warpsmith._core.tensor_list import all_params
from warpsmith.amp._gradients import BadCounts, Gradient, Verdict, gradients, groups
from warpsmith.optim._multi_tensor import MultiTensorOptimizer
from warpsmith.optim._plan import Plan


class _Places(NamedTuple):
    """Where an optimizer's gradients were: its plan, and the versions of the plan's columns of their addresses."""

    plan: ref[Plan]
    versions: list[int]


def _places(optimizer: Optimizer) -> _Places | None:
    """None where only looking at each gradient tells."""
    plan = optimizer._plan if isinstance(optimizer, MultiTensorOptimizer) else None
    if plan is None or capturing():  # a table made in a capture has its contents only once the graph has run
        return None
    watch = plan.watch
    if (
        not watch.look([group["params"] for group in optimizer.param_groups], optimizer.state)
        or watch.unusual
        or plan.staged
    ):
        return None
    return _Places(ref(plan), [watch.version(number) for number in range(len(plan.buckets))])


class KeptTable:
    """The table of an optimizer's gradients, while every gradient stays where it is."""

    def __init__(self, device: torch.device, bad: dict[torch.device, list[BadCounts]]) -> None:
        """bad: what is bad of a step that is skipped is noted there."""
        self._bad = bad
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._table: GradientTable | None = None  # None: several tables were needed
        self._places: _Places | None = None
        self._noted: list[BadCounts] | None = None  # of the table's gradients

    @torch.no_grad()
    def check(self, op: str, optimizer: Optimizer, scale: Tensor, p: float, max_norm: float) -> Verdict | None:
        """What ``_gradients.check`` says, in three launches and without a look of Python at any gradient. None where
        one table is not enough, or a reduction has kept sums, by which the device need not read the gradients."""
        if has_sums(all_params(optimizer.param_groups)):
            return None
        places = _places(optimizer)
        if places is None:
            return None
        # A step without a table may have noted fewer gradients, though all lie again where they were.
        if places != self._places or self._bad.get(scale.device) is not self._noted:
            self._places, self._table = places, self._make_table(gradients(op, optimizer), scale.device)
            self._noted = self._bad.get(scale.device)
        if self._table is None:
            return None
        counts = self._bad[scale.device][0].counts
        checked = check_table(self._table, p, scale, max_norm, self._found_inf, counts)
        return Verdict(checked.found_inf, {}, checked.norm, checked.grad_scale)

    def _make_table(self, grads: list[Gradient], device: torch.device) -> GradientTable | None:
        found = list(groups(grads, lambda t: t))
        if len(found) != 1 or found[0].shared is not None or found[0].device != device:
            return None
        (group,) = found
        if any(part is not original for part, original in zip(group.parts, group.originals, strict=True)):
            return None
        known = self._bad.get(device, [])
        if [part.indices for part in known] != [group.indices]:
            self._bad[device] = [BadCounts(group.indices, torch.zeros(len(grads), dtype=torch.int64, device=device))]
        return table_of_gradients(group.parts)
