"""Hyperparameters of captured steps, which live on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core.raw_step import optim_pointers
from warpsmith.optim._multi_tensor import MultiTensorOptimizer
from warpsmith.optim._plan import Kind


class _Rate(NamedTuple):
    """A learning rate on the host, and the tensor that a graph reads."""

    group: dict[str, Any]
    tensor: Tensor


class _Own(NamedTuple):
    """An optimizer whose kernels read hyperparameters on the device, and what a capture fixes of it."""

    optimizer: MultiTensorOptimizer
    kinds: list[Kind]
    constants: dict[str, Tensor]  # of each row, on the device


class DeviceValues:
    """Learning rates and other hyperparameters of the optimizers of this package, where a graph can read them.

    The groups keep their numbers. Before a replay :meth:`refresh` writes to the device what has changed, without a
    wait, so that schedulers of torch work around a captured step. A learning rate that is a tensor on the device, such
    as a ``DeviceLR``'s, stays what it is.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._device = device
        self._rates: list[_Rate] = []
        self._owns: list[_Own] = []
        self._last_rates: list[float] = []
        self._last_constants: list[dict[str, Tensor]] = []  # on the host
        self._names: dict[int, frozenset[str]] = {}  # of each group's values, by its id
        for optimizer in optimizers:
            if isinstance(optimizer, MultiTensorOptimizer):
                self._take(optimizer)

    def _take(self, optimizer: MultiTensorOptimizer) -> None:
        host = optimizer.host_constants()
        constants = {row: torch.empty_like(t, device=self._device) for row, t in host.items()}
        for row, t in host.items():
            _write(constants[row], t)
        self._owns.append(_Own(optimizer, [optimizer._kind(g) for g in optimizer.param_groups], constants))
        self._last_constants.append(host)
        for group in optimizer.param_groups:
            names = set(optimizer._checks)
            if not self._on_device(group["lr"]):
                names.add("lr")
                tensor = torch.empty(1, dtype=torch.float64, device=self._device)
                self._rates.append(_Rate(group, tensor))
                self._last_rates.append(float(group["lr"]))
                _write(tensor, torch.tensor([self._last_rates[-1]], dtype=torch.float64))
            self._names[id(group)] = frozenset(names)

    def _on_device(self, lr: Any) -> bool:
        return isinstance(lr, Tensor) and lr.device == self._device

    def holds(self, container: Any, key: Any) -> bool:
        """Whether an entry of a group is on the device, so that a change of it is no other capture."""
        return isinstance(key, str) and key in self._names.get(id(container), ())

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """What is captured within reads the values on the device."""
        rates = [rate.group["lr"] for rate in self._rates]
        try:
            for rate in self._rates:
                rate.group["lr"] = rate.tensor
            for own in self._owns:
                own.optimizer.device_constants = own.constants
            yield
        finally:
            for rate, number in zip(self._rates, rates, strict=True):
                rate.group["lr"] = number
            for own in self._owns:
                own.optimizer.device_constants = {}

    def refresh(self) -> str | None:
        """Brings the device up to date. Returns what does not fit the capture any more."""
        for own in self._owns:
            groups = own.optimizer.param_groups
            if [own.optimizer._kind(g) for g in groups] != own.kinds:
                return f"{type(own.optimizer).__name__} has other states or groups"
        for rate in self._rates:
            if self._on_device(rate.group["lr"]):
                return "a learning rate is a tensor on the device now"
        for i, rate in enumerate(self._rates):
            if (lr := float(rate.group["lr"])) != self._last_rates[i]:
                _write(rate.tensor, torch.tensor([lr], dtype=torch.float64))
                self._last_rates[i] = lr
        for i, own in enumerate(self._owns):
            host = own.optimizer.host_constants()
            for row, t in host.items():
                if t is not self._last_constants[i][row]:
                    _write(own.constants[row], t)
            self._last_constants[i] = host
        return None


def _write(target: Tensor, values: Tensor) -> None:
    """Writes float64 numbers of the host to the device; they travel in the launch."""
    optim_pointers(target.view(torch.int64).view(-1), values.view(torch.int64).view(-1))
