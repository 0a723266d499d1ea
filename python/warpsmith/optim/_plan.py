"""The tables of addresses of an optimizer, and whether they are still those of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core import tensor_list as lists
from warpsmith._core.raw_step import COUNTER, SCALES, optim_pointers, optim_table
from warpsmith.optim import _weight_casts as weight_casts
from warpsmith.optim._precision import EXTRA_DTYPES, Storage

Optimizer = Any  # a MultiTensorOptimizer, which imports this module


class Kind(NamedTuple):
    """What decides about a parameter's table: the row and precision of its group, and the names of its states."""

    row: str
    names: tuple[str, ...]
    precision: str | None
    keep_fp32: tuple[str, ...]


class Bucket:
    """The parameters of one device, dtype and row: one table, one launch."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kinds: list[Kind],
        state: dict[Tensor, Any],
        indices: list[int],
        owners: list[int],
        storages_of_all: dict[int, Storage | None],
        staged: dict[int, Tensor],
        casts: bool,
    ) -> None:
        params = lists.all_params(groups)
        parts = [staged[i] if i in staged else lists.local(params[i]) for i in indices]
        kind = kinds[owners[indices[0]]]
        storages = [storage for i in indices if (storage := storages_of_all[i])]
        storage = storages[0]
        self.device, self.row, self.indices = parts[0].device, kind.row, indices
        self.fuses = kind.precision != "8bit" and kind.row not in _C.LAYERWISE_OPTIMIZERS
        self.columns: dict[str, tuple[list[int], Tensor]] = {}  # what those of `column` were made of
        states = [
            {name: lists.local(state[params[i]][name]) for name in stored.arrays(kinds[owners[i]].names)}
            for i, stored in zip(indices, storages, strict=True)
        ]
        first_elems = lists.first_elements(params) if storage.stochastic else []
        casts = casts and not any("max_exp_avg_sq" in kinds[owners[i]].names for i in indices)
        self.row_elems = [
            weight_casts.row_elems(self.row, storage.name, part) if casts and i not in staged else 0
            for i, part in zip(indices, parts, strict=True)
        ]
        self.table, self.facts = optim_table(
            self.row,
            storage.name,
            parts,
            states,
            [owners[i] for i in indices],
            [first_elems[i] for i in indices if storage.stochastic],
            self.row_elems if any(self.row_elems) else (),
        )
        self.pointers = torch.empty(len(indices), dtype=torch.int64, device=self.device)
        self.written = -1  # the version of the column that `pointers` holds

    def gradient_pointers(self, watch: _C.TensorWatch, number: int, capturing: bool) -> Tensor:
        """The column of gradient addresses on the device, as of the last look. `number`: of this bucket."""
        if capturing:
            # A column of the graph's own: an eager step in between must not change what a replay reads. A node of the
            # graph writes it, so later nodes may use its memory again.
            pointers = torch.empty_like(self.pointers)
            optim_pointers(pointers, lists.words(watch.column(number)))
            return pointers
        version = watch.version(number)
        if self.written != version:
            optim_pointers(self.pointers, lists.words(watch.column(number)))
            self.written = version
        return self.pointers

    def column(self, of: str, words: list[int], capturing: bool) -> Tensor:
        """Words on the device, which stay there until others come. A graph writes its own, and has them for itself."""
        known = self.columns.get(of)
        if known is not None and known[0] == words and not capturing:
            return known[1]
        column = torch.empty(len(words), dtype=torch.int64, device=self.device)
        optim_pointers(column, torch.tensor(words, dtype=torch.int64, device="cpu"))
        if not capturing:
            self.columns[of] = words, column
        return column

    def weight_casts(self, params: list[Tensor]) -> tuple[Tensor | None, Sequence[Any]]:
        """Where the step writes 8-bit casts of weights, and what the layers keep of them."""
        words, found = weight_casts.to_write([params[i] for i in self.indices], self.row_elems)
        return self.column("casts", words, False) if found else None, found


class Plan:
    """The tables of an optimizer, and whether the addresses in them are still those of its tensors.

    The tables hold addresses, not references, so that memory which is taken from a parameter or state between two steps
    is free at once. Every step compares all addresses with those of the tensors that the optimizer has then; the memory
    that it touches is therefore that of living tensors.
    """

    def __init__(self, optimizer: Optimizer, active: list[int]) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        params = lists.all_params(groups)
        owners = [g for g, group in enumerate(groups) for _ in group["params"]]
        self.op = optimizer._op
        self.kinds = [optimizer._kind(g) for g in groups]
        self.active_params = [params[i] for i in active]
        by_kind: dict[Any, list[int]] = {}
        for i in active:
            kind = self.kinds[owners[i]]
            by_kind.setdefault((params[i].device, params[i].dtype, kind.row, kind.precision), []).append(i)
        numbers = [-1] * len(params)
        for number, indices in enumerate(by_kind.values()):
            for i in indices:
                numbers[i] = number
        names = [name for kind in self.kinds for name in kind.names]
        self.state_names = tuple(dict.fromkeys([*names, COUNTER, SCALES, *EXTRA_DTYPES]))
        group_params = [g["params"] for g in groups]
        api = Tensor.__dlpack_c_exchange_api__
        self.watch = _C.TensorWatch(
            api, lists.local, group_params, state, self.state_names, numbers, lists.ADDRESS_READER
        )
        storages = {i: optimizer._storage(params[i], groups[owners[i]]) for i in active}
        parts = {i: lists.local(params[i]) for i in active}
        # Dense tensors that the kernels update in place of parameters with gaps or with the negative bit.
        self.staged = {i: torch.empty_like(part) for i, part in parts.items() if not lists.in_place(part)}
        self.buckets = [
            Bucket(groups, self.kinds, state, indices, owners, storages, self.staged, optimizer._fp8_weights)
            for indices in by_kind.values()
        ]
        self.params = params
        self.copied: set[Tensor] = set()  # parameters with copies of their gradients
        self.copies: list[Tensor] = []  # of gradients with other strides than their parameters, until the next look
        self.held: list[Tensor] = []

    def hold(self, state: dict[Tensor, Any]) -> None:
        """Keeps the memory of parameters and states, for a CUDA graph that points to it."""
        states = [state.get(p, {}) for p in self.active_params]
        tensors = [s[name] for s in states for name in self.state_names if name in s]
        self.held = [lists.local(t).detach() for t in [*self.active_params, *tensors]]

    def fused(self) -> set[Tensor]:
        """The parameters whose averages, copies and zeros the kernels write."""
        return {self.params[i] for b in self.buckets if b.fuses for i in b.indices if i not in self.staged}

    def load_staged(self) -> None:
        """Copies the parameters that the kernels cannot read where they lie."""
        for i, staged in self.staged.items():
            staged.copy_(lists.local(self.params[i]))

    def store_staged(self) -> None:
        """Copies them back."""
        for i, staged in self.staged.items():
            lists.local(self.params[i]).copy_(staged)

    def look(self, optimizer: Optimizer) -> bool:
        """Whether the tables hold. Then the columns of gradient addresses are those of now. Raises if a gradient does
        not fit."""
        groups = optimizer.param_groups
        if [optimizer._kind(g) for g in groups] != self.kinds:
            return False
        if not self.watch.look([g["params"] for g in groups], optimizer.state):
            return False
        copies, copied = [], set()
        params = self.params
        with_gradient = [i for i in self.staged if params[i].grad is not None]
        unusual = dict.fromkeys([*self.watch.unusual, *with_gradient])
        for i in unusual:
            grad = lists.checked_gradient(self.op, groups, i, params[i])
            place = self.staged[i] if i in self.staged else lists.local(params[i])
            like_place = lists.same_layout(grad, place) and lists.holds_its_elements(grad)
            if not like_place:
                grad = torch.empty_like(place, dtype=grad.dtype).copy_(grad)
                copies.append(grad)
                copied.add(params[i])
            self.watch.set_gradient(
                i, lists.entry_of(grad, params[i].dtype), like_param=like_place and i not in self.staged
            )
        self.copies, self.copied = copies, copied
        return True
