from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from warpsmith._core import checks
from warpsmith._core.tensor_list import moved
from warpsmith.amp.grad_scaler import GradScaler

_OP = "DeviceLR"


def _reads_double(optimizer: Optimizer) -> bool:
    """Whether it is an optimizer of this package or of a class that is made from one."""
    return any(base.__module__.startswith("warpsmith.") for base in type(optimizer).__mro__)


class DeviceLR:
    r"""A learning rate on the device that follows the steps which were taken, not those that a scaler skipped.

    .. math::
        \gamma_t = \gamma_0 \, f(\min(t, \text{total\_steps})), \qquad t = \text{steps taken}

    What ``torch.optim.lr_scheduler.LambdaLR`` is on the host. Schedulers of torch count calls, and can only know by a
    wait of the host that a step was skipped. Here the factors of all steps are computed once, on the host and in
    float64, and :meth:`step` picks one on the device, so that it never waits and is part of a CUDA graph.

    Args:
        optimizer: one of :mod:`warpsmith.optim`, whose kernels read the learning rate where it lies, or of torch with
            ``capturable=True`` or ``fused=True``. The ``lr`` of each group becomes a tensor: float64 for ours and
            their subclasses, float32 for others.
        lr_lambda: a function from the number of steps taken to a factor, such as those of
            :mod:`warpsmith.amp.schedules`, or one for each group.
        total_steps: factors are computed for 0 to ``total_steps``, 8 bytes each; the last one holds from then on.
        scaler: the :class:`GradScaler` or :class:`StepGuard` that steps the optimizer. Without one every call counts.

    ``state_dict`` holds the number of steps taken. Deterministic.

    Raises:
        ValueError: a factor that is not finite or negative, a wrong number of functions, ``total_steps`` < 1.
        TypeError: a function that is none.

    Source: ``torch.optim.lr_scheduler.LambdaLR``, whose learning rates these are, bit for bit.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.AdamW(model.parameters(), lr=0.5)
        >>> schedule = warpsmith.amp.DeviceLR(optimizer, warpsmith.amp.schedules.cosine(100), total_steps=100)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> for _ in range(50):
        ...     optimizer.step()
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.25]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        total_steps: int,
        scaler: GradScaler | None = None,
    ) -> None:
        groups = optimizer.param_groups
        lambdas = list(lr_lambda) if isinstance(lr_lambda, Sequence) else [lr_lambda] * len(groups)
        if len(lambdas) != len(groups):
            checks.refuse(_OP, "lr_lambda", f"one function, or one for each of {len(groups)} groups", str(len(lambdas)))
        for f in lambdas:
            if not callable(f):
                raise TypeError(f"{_OP}: lr_lambda: expected a function of the steps taken, got {type(f).__name__}")
        checks.refuse_non_int64(_OP, "total_steps", total_steps, "a number of steps >= 1")
        if total_steps < 1:
            checks.refuse(_OP, "total_steps", "a number of steps >= 1", str(total_steps))
        self.optimizer, self.scaler, self.total_steps = optimizer, scaler, total_steps
        factors = {f: self._factors_of(f) for f in dict.fromkeys(lambdas)}
        self.base_lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
        dtype = torch.float64 if _reads_double(optimizer) else torch.float32
        devices = [group["params"][0].device if group["params"] else torch.device("cpu") for group in groups]
        # One table a group, of learning rates: the product is computed on the host, as LambdaLR's.
        self._tables, self._lrs = [], []
        for base, f, device in zip(self.base_lrs, lambdas, devices, strict=True):
            rates = [base * factor for factor in factors[f]]
            self._tables.append(torch.tensor(rates, dtype=torch.float64, device="cpu").to(device, dtype))
            self._lrs.append(self._tables[-1][0].clone())
        self._taken = torch.zeros((), dtype=torch.float64, device=devices[0])
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["initial_lr"] = base
        self._attach()

    @classmethod
    def from_lambda_lr(
        cls, scheduler: torch.optim.lr_scheduler.LambdaLR, total_steps: int, scaler: GradScaler | None = None
    ) -> DeviceLR:
        """The same schedule on the device, from the step on at which torch's is. torch's is not used any more."""
        schedule = cls(scheduler.optimizer, list(scheduler.lr_lambdas), total_steps, scaler)
        schedule.load_state_dict({"steps_taken": scheduler.last_epoch})
        return schedule

    def _factors_of(self, f: Callable[[int], float]) -> list[float]:
        factors = [float(f(t)) for t in range(self.total_steps + 1)]
        for t, factor in enumerate(factors):
            if not (math.isfinite(factor) and factor >= 0):
                checks.refuse(_OP, "lr_lambda", "finite factors >= 0", f"{factor} for {t} steps taken")
        return factors

    def _attach(self) -> None:
        """The optimizer takes these tensors, also after it has loaded a state."""
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr

    def _check_groups(self) -> None:
        now, then = len(self.optimizer.param_groups), len(self._lrs)
        if now != then:
            checks.refuse(_OP, "optimizer", f"{then} groups, as when this schedule was made", str(now))

    @torch.no_grad()
    def _look_up(self) -> None:
        index = self._taken.clamp(max=self.total_steps).long().view(1)
        for table, lr in zip(self._tables, self._lrs, strict=True):
            lr.copy_(table.index_select(0, moved(index, table.device)).view(()))
        self._attach()

    @torch.no_grad()
    def step(self) -> None:
        """Sets the learning rate for the next step. Call it once after each step of the optimizer."""
        self._check_groups()
        skipped = None
        if self.scaler is not None and self.scaler.is_enabled():
            skipped = moved(self.scaler.found_inf(self.optimizer), self._taken.device)
        self._taken.add_(1)
        if skipped is not None:
            self._taken.sub_(skipped)
        self._look_up()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group for the next step. The host waits."""
        return [float(lr.item()) for lr in self._lrs]

    @property
    def steps_taken(self) -> int:
        """The steps that were taken and not skipped. The host waits."""
        return int(self._taken.item())

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken. The host waits."""
        return {"steps_taken": self.steps_taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after a number of steps, with the functions of this schedule."""
        taken = state_dict["steps_taken"]
        if not (isinstance(taken, int) and taken >= 0):
            checks.refuse(f"{_OP}.load_state_dict", "steps_taken", "a number of steps >= 0", str(taken))
        self._check_groups()
        self._taken.fill_(taken)
        self._look_up()
