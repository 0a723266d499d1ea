from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from warpsmith._core import checks
from warpsmith._core.tensor_list import all_params
from warpsmith.amp import _gradients
from warpsmith.amp.grad_scaler import GradScaler

_OP = "StepGuard"


class StepGuard(GradScaler):
    r"""Skips steps whose gradients have infinite or NaN elements, without scaling the loss.

    For bfloat16 and float32, whose range needs no scale, but where one bad batch would write NaN to parameters and
    states for good. It has all methods of :class:`GradScaler`, so that it takes the place of a scaler in a training
    loop; its scale is always 1. ``scale`` returns what it gets and may be left out; ``unscale_`` only checks.

    Args:
        device: accepted for the signature of scalers, without effect: all devices are.
        enabled: if False, steps are taken without a check.

    A check reads the gradients once; :meth:`GradScaler.clip_` checks and clips in one. Deterministic. The host never
    waits, as for :class:`GradScaler`. ``state_dict`` has the entries of ``torch.amp.GradScaler`` with a scale of 1;
    loading any scaler's leaves it so.

    Raises:
        ValueError: ``update`` with another scale than 1; a gradient's dtype.
        AssertionError: ``step`` or ``clip_`` without a gradient.

    Source: the rule for skipping is that of torch.amp.GradScaler.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
        >>> guard = warpsmith.amp.StepGuard()
        >>> model(torch.full((1, 4), torch.inf)).sum().backward()
        >>> guard.step(optimizer)
        >>> guard.update()
        >>> guard.last_skipped, guard.overflow(optimizer).bad_values
        (True, 8)
    """

    def __init__(self, device: str = "cuda", enabled: bool = True) -> None:
        if not isinstance(device, str):
            checks.refuse_type(_OP, "device", "the name of a device", device)
        checks.flags(_OP, enabled=enabled)
        super().__init__("cpu", init_scale=1.0, enabled=enabled)  # torch's disables itself without CUDA

    def scale(self, outputs: Any) -> Any:
        """Returns ``outputs``."""
        return list(outputs) if isinstance(outputs, Iterable) and not isinstance(outputs, (Tensor, tuple)) else outputs

    def _begin(self, optimizer: Optimizer) -> None:
        if self._enabled and self._scale is None:
            params = all_params(optimizer.param_groups)
            self._lazy_init_scale_growth_tracker(params[0].device if params else torch.device("cpu"))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Checks the gradients."""
        self._begin(optimizer)
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        grads = _gradients.gradients(f"{_OP}.unscale_", optimizer)
        if not grads:
            return {}
        verdict = _gradients.check_elements(grads, inv_scale)
        return self._note(optimizer, verdict.found_inf, verdict.bad)

    def clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """:meth:`GradScaler.clip_` of gradients that are not scaled."""
        self._begin(optimizer)
        return super().clip_(optimizer, max_norm, norm_type)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Takes the optimizer's step unless a gradient is not finite; arguments and result are the optimizer's."""
        self._begin(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration. The scale stays 1."""
        if new_scale is not None and not (isinstance(new_scale, (int, float)) and new_scale == 1):
            checks.refuse(f"{_OP}.update", "new_scale", "None or 1", str(new_scale))
        if self._enabled:
            self._begin_iteration()

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """:meth:`GradScaler.found_inf`, also before the first step."""
        self._begin(optimizer)
        return super().found_inf(optimizer)

    def get_scale(self) -> float:
        """1.0."""
        return 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Forgets a step that was begun. There is no state but the scale, which is 1."""
        self._begin_iteration()
