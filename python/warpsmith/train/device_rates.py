"""Learning rates of captured steps, which live on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.optim._multi_tensor import MultiTensorOptimizer


class DeviceRates:
    """Learning rates on the host, of optimizers whose kernels can read them on the device.

    A graph reads the tensors here; before a replay they get the numbers as they are then, so that a scheduler of torch
    works around a captured step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._groups, self._tensors, self._last = [], [], []
        for optimizer in optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, MultiTensorOptimizer) else ():
                if not (isinstance(group["lr"], Tensor) and group["lr"].device == device):
                    self._groups.append(group)
                    self._last.append(float(group["lr"]))
                    self._tensors.append(torch.tensor(self._last[-1], dtype=torch.float64).to(device))
        self._device = device
        self._ids = {id(group) for group in self._groups}

    def holds(self, container: Any, key: Any) -> bool:
        return isinstance(key, str) and key == "lr" and id(container) in self._ids

    def now(self) -> list[Any]:
        return [group["lr"] for group in self._groups]

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        numbers = self.now()
        for group, tensor in zip(self._groups, self._tensors, strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, number in zip(self._groups, numbers, strict=True):
                group["lr"] = number

    def refresh(self) -> str | None:
        """Brings the tensors up to date. Returns what is not a number any more."""
        for i, group in enumerate(self._groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device == self._device:
                return "a learning rate is a tensor on the device now"
            lr = float(lr)
            if lr != self._last[i]:
                self._tensors[i].fill_(lr)
                self._last[i] = lr
        return None
