from __future__ import annotations

import inspect
import math
from collections import defaultdict
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from warpsmith._core import checks
from warpsmith._core.captures import capturing
from warpsmith._core.grad_norm import largest_norm, norm_order, refuse_unfit
from warpsmith._core.tensor_list import all_params, describe, moved
from warpsmith.amp import _gradients
from warpsmith.amp._record import Overflow, Record
from warpsmith.amp._scale_rule import adapt, check_factors, check_loaded, check_settings
from warpsmith.optim._multi_tensor import MultiTensorOptimizer
from warpsmith.optim.clip import clip_grad_norm_

_OP = "GradScaler"
_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _takes_scale(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step divides by its attribute ``grad_scale`` and skips by its ``found_inf``."""
    if isinstance(optimizer, MultiTensorOptimizer):
        return True
    takes = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(takes) and "grad_scaler" not in inspect.signature(optimizer.step).parameters


class GradScaler(torch.amp.GradScaler):
    r"""Dynamic loss scaling of ``torch.amp.GradScaler`` without a wait of the host, with clipping in the step.

    Constructor, methods and ``state_dict`` are those of ``torch.amp.GradScaler``, of which this is a subclass. With
    the optimizers of :mod:`warpsmith.optim` and torch's ``fused=True`` ones no method reads device memory on the host,
    except those that return Python numbers: :meth:`get_scale`, :meth:`state_dict`, :attr:`skipped_steps`,
    :attr:`last_skipped`, :meth:`overflow`. Other optimizers are stepped as torch steps them: :meth:`unscale_` divides
    their gradients, and the host waits for ``found_inf``.

    With scale :math:`s` and gradients :math:`\tilde g = s g` of the scaled loss, a step is skipped if an element of
    :math:`\tilde g / s` is not finite. :meth:`update` then multiplies :math:`s` by ``backoff_factor``, and by
    ``growth_factor`` after ``growth_interval`` good steps in a row:

    .. math::
        s \leftarrow \max(s \cdot \text{backoff}, \text{min\_scale}), \qquad
        s \leftarrow \min(s \cdot \text{growth}, \text{max\_scale})

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's. With ``device="cpu"``
            everything works on the CPU.
        min_scale, max_scale: the floor and the ceiling of the scale; none by default.
        hysteresis: the scale shrinks from this many overflows in a row on, with every one of them. By default 1: at
            once, as torch. An overflow that is forgiven skips its step and starts the count of good steps anew.

    Gradients: float32, float16, bfloat16, float64 on the CPU, dense or sparse; DTensors, whose ranks decide alike.
    float16 gradients are not unscaled in place, where they would underflow, but by :meth:`step` and :meth:`clip_`.
    Deterministic.

    ``state_dict`` has torch's five entries, and ``min_scale``, ``max_scale``, ``hysteresis`` and
    ``_hysteresis_tracker`` if one of the three arguments is not at its default. torch's scaler loads it, and this one
    torch's.

    Raises:
        ValueError: bounds that do not hold the initial scale; a gradient's dtype; float16 gradients at
            :meth:`unscale_`.
        AssertionError, RuntimeError: where torch's scaler raises them. ``step`` without a gradient names the optimizer.

    Source: Micikevicius et al., Mixed Precision Training, 2018; rules and interface as torch.amp.GradScaler; hysteresis
    as NVIDIA Apex.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scaler = warpsmith.amp.GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        >>> norm = scaler.clip_(optimizer, max_norm=1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.skipped_steps
        0
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
    ) -> None:
        if not isinstance(device, str):
            checks.refuse_type(_OP, "device", "the name of a device", device)
        checks.flags(_OP, enabled=enabled)
        check_factors(_OP, init_scale, growth_factor, backoff_factor, growth_interval)
        check_settings(_OP, min_scale, max_scale, hysteresis)
        if not min_scale <= init_scale <= max_scale:
            checks.refuse(_OP, "init_scale", f"a number from {min_scale} to {max_scale}", str(init_scale))
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale, self._max_scale, self._hysteresis = float(min_scale), float(max_scale), int(hysteresis)
        self._init_hysteresis_tracker = self._hysteresis  # overflows until the scale shrinks
        self._hysteresis_tracker: Tensor | None = None
        self._records: WeakKeyDictionary[Optimizer, Record] = WeakKeyDictionary()

    # Gradients.

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if capturing():
            raise RuntimeError(f"{_OP}: take one step before the capture: a replay would begin with the first scale")
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)

    def _state_of(self, optimizer: Optimizer, method: str) -> dict[str, Any]:
        if self._scale is None:
            raise AssertionError(
                f"{_OP}.{method}: {type(optimizer).__name__}: expected scaler.scale(loss).backward() before, got no "
                "call of scale(). (torch: _scale is None.)"
            )
        return self._per_optimizer_states[id(optimizer)]

    def _record(self, optimizer: Optimizer) -> Record:
        record = self._records.get(optimizer)
        if record is None:
            if capturing():
                raise RuntimeError(f"{_OP}: take one step before the capture: a replay would count from 0")
            assert self._scale is not None
            record = self._records[optimizer] = Record(self._scale.device)
        return record

    def _note(
        self,
        optimizer: Optimizer,
        found_inf: Tensor,
        bad: dict[torch.device, list[_gradients.BadCounts]],
    ) -> dict[torch.device, Tensor]:
        """Keeps the counts of a step that will be skipped. Returns ``found_inf`` by device, as torch's scaler does."""
        record, flags = self._record(optimizer), {}
        for device, parts in bad.items():
            flags[device] = here = moved(found_inf, device)
            known = record.bad.get(device, [])
            if [part.indices for part in known] != [part.indices for part in parts]:
                known = record.bad[device] = [_gradients.BadCounts(i, torch.zeros_like(n)) for i, n in parts]
            for kept, part in zip(known, parts, strict=True):
                kept.counts.copy_(torch.where(here > 0, part.counts, kept.counts))
        return flags

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if "grad_scale" in self._per_optimizer_states[id(optimizer)]:
            raise RuntimeError(f"{_OP}.unscale_: called after clip_(), which leaves unscaling to step()")
        grads = _gradients.gradients(f"{_OP}.unscale_", optimizer)
        for g in grads:
            if g.values.dtype == torch.float16 and not allow_fp16:
                where = describe(optimizer.param_groups, g.number)
                raise ValueError(
                    f"Attempting to unscale FP16 gradients. {_OP}.unscale_: {where}.grad: expected a dtype in which "
                    "small gradients do not underflow, got float16; leave unscaling to step(), and clip by clip_()"
                )
        if not grads:
            return {}
        return self._note(optimizer, *_gradients.unscale(grads, inv_scale))

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        state = self._state_of(optimizer, "_check_inf_per_device")
        scale = self._scale_of(state)
        verdict = self._record(optimizer).kept.check(f"{_OP}.step", optimizer, scale, math.inf, math.inf)
        if verdict is not None:
            state["found_inf_per_device"] = {scale.device: verdict.found_inf}
        elif grads := _gradients.gradients(f"{_OP}.step", optimizer):
            verdict = _gradients.check_elements(grads, scale)
            state["found_inf_per_device"] = self._note(optimizer, verdict.found_inf, verdict.bad)
        return state["found_inf_per_device"]

    def _scale_of(self, state: dict[str, Any]) -> Tensor:
        """By what the gradients are multiplied."""
        assert self._scale is not None
        return torch.ones_like(self._scale) if state["stage"] is OptState.UNSCALED else self._scale

    def clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        r"""Clips the norm of all gradients of an optimizer in its next :meth:`step`.

        .. math::
            g \leftarrow \frac{\tilde g}{s} \min\Big(1, \frac{\text{max\_norm}}{\|\tilde g / s\| + 10^{-6}}\Big)

        The norm and the check for infinite and NaN elements read the gradients once (not at all where the reduction has
        kept their sums: :func:`warpsmith.distributed.accurate_hook`); unscaling and clipping happen in
        the registers of the optimizer's kernel, so that ``step`` is the second and last pass over them. The gradients
        stay scaled. Call it between backward and ``step``, without :meth:`unscale_` before or with it, once a step.
        Optimizers that do not divide by ``grad_scale`` themselves get unscaled and clipped gradients at once.
        With :class:`warpsmith.distributed.ShardedOptimizer` the norm is that of all ranks, and every rank must call;
        the check is then a read of its own.

        Args:
            optimizer: one whose gradients were computed from a scaled loss.
            max_norm: a number >= 0.
            norm_type: 1, 2 or ``inf``.

        Returns:
            the norm of the unscaled gradients before clipping: a scalar tensor on the scale's device, float32, or
            float64 if a gradient is. If it is not finite the step will be skipped. That includes finite gradients
            whose squares, once unscaled, overflow the float32 sums of at most 65,536 of them: elements of 1e17 do.

        Raises:
            ValueError: a negative or NaN ``max_norm``, another ``norm_type``, a gradient's dtype; a sparse gradient of
                an optimizer that does not divide by ``grad_scale`` itself. Gradients are then as they were.
            RuntimeError: a second call, or one after ``step``.
            AssertionError: no gradient.
        """
        p, max_norm = norm_order(f"{_OP}.clip_", norm_type), largest_norm(f"{_OP}.clip_", max_norm)
        if not self._enabled:
            if (of_all_ranks := getattr(optimizer, "clip_grad_norm_", None)) is not None:  # this one has a part of each
                return of_all_ranks(max_norm, p)
            return clip_grad_norm_(all_params(optimizer.param_groups), max_norm, p)
        state = self._state_of(optimizer, "clip_")
        if state["stage"] is OptState.STEPPED or "grad_scale" in state:
            raise RuntimeError(f"{_OP}.clip_: expected one call before step(), got one after it or a second one")
        op, known = f"{_OP}.clip_", state["found_inf_per_device"]
        scale = self._scale_of(state)
        verdict = None if known else self._record(optimizer).kept.check(op, optimizer, scale, p, max_norm)
        if verdict is not None:
            state["found_inf_per_device"] = {scale.device: verdict.found_inf}
        else:
            if not _takes_scale(optimizer):  # before they are unscaled
                refuse_unfit(op, [p.grad for p in all_params(optimizer.param_groups) if p.grad is not None])
            grads = _gradients.gradients(op, optimizer)
            if not grads:
                self._refuse_no_gradient("clip_", optimizer)
            if not _takes_scale(optimizer):
                if state["stage"] is OptState.READY:
                    self.unscale_(optimizer)
                return clip_grad_norm_(all_params(optimizer.param_groups), max_norm, p)
            verdict = _gradients.check_to_clip(optimizer, grads, scale, p, max_norm)
            found_inf = _gradients.largest([verdict.found_inf, *known.values()], scale.device)
            state["found_inf_per_device"] = self._note(optimizer, found_inf, verdict.bad)
        state["grad_scale"] = verdict.grad_scale
        return verdict.norm

    # The step.

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales, clips if :meth:`clip_` was called, and takes the optimizer's step unless a gradient overflowed.

        Arguments and result are those of ``optimizer.step``. An optimizer of :mod:`warpsmith.optim` is always called:
        where the step is skipped its kernel returns at once, and no state changes, not even a step counter.
        """
        if not self._enabled or "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)
        state = self._state_of(optimizer, "step")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if not _takes_scale(optimizer):
            return self._step_as_torch(optimizer, state, *args, **kwargs)
        if state["stage"] is OptState.READY and not state["found_inf_per_device"]:
            self._check_inf_per_device(optimizer)
        record = self._judged(optimizer, state)
        scale = state.get("grad_scale", self._scale if state["stage"] is OptState.READY else None)
        own = getattr(optimizer, "grad_scale", None)  # set by whoever divides gradients further
        optimizer.grad_scale = own if scale is None else scale if own is None else scale * own  # type: ignore[attr-defined]
        optimizer.found_inf = record.found_inf  # type: ignore[attr-defined]
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        state["stage"] = OptState.STEPPED
        record.tally.add_(record.now)
        return result

    def _step_as_torch(self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # it asks this scaler by itself
            return super().step(optimizer, *args, **kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        record = self._judged(optimizer, state)
        result = super().step(optimizer, *args, **kwargs)
        record.tally.add_(record.now)
        return result

    def _judged(self, optimizer: Optimizer, state: dict[str, Any]) -> Record:
        """The record of an optimizer, with what the checks of this step found, also where others reduced them."""
        flags = state["found_inf_per_device"].values()
        if not flags:
            self._refuse_no_gradient("step", optimizer)
        record = self._record(optimizer)
        torch.clamp(_gradients.largest(flags, record.found_inf.device), max=1.0, out=record.found_inf)
        return record

    def _refuse_no_gradient(self, method: str, optimizer: Optimizer) -> NoReturn:
        raise AssertionError(
            f"{_OP}.{method}: {type(optimizer).__name__}: expected a gradient of one of its "
            f"{len(all_params(optimizer.param_groups))} parameters, got none. Check that scaler.scale(loss).backward() "
            "ran since the last zero_grad(), that the loss depends on these parameters and that they require "
            "gradients. (torch: No inf checks were recorded for this optimizer.)"
        )

    # The scale.

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last call found, or sets it. Call it once an iteration."""
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is None:
            states = self._per_optimizer_states.values()
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            if not flags:
                raise AssertionError(
                    f"{_OP}.update: expected step() of an optimizer since the last update(), got none. "
                    "(torch: No inf checks were recorded prior to update.)"
                )
            factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
            left = self._hysteresis_tracker if self._hysteresis > 1 else None
            adapt(scale, growth_tracker, _gradients.largest(flags, scale.device), factors, left, self._hysteresis)
            self._begin_iteration()
        else:
            super().update(new_scale)
        if self._min_scale > 0 or self._max_scale < math.inf:
            scale.clamp_(self._min_scale, self._max_scale)

    def _begin_iteration(self) -> None:
        """Forgets what was found and done in the steps of the last one."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    # What the host may ask.

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped, of all living optimizers, since this scaler was made. The host waits."""
        return sum(int(record.tally[1].item()) for record in self._records.values())

    @property
    def last_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped. The host waits."""
        return any(bool(record.found_inf.item()) for record in self._records.values())

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """One float32 element on the device: 1 if the optimizer's last step was skipped, else 0. It keeps its address,
        also in CUDA graphs; only for reading."""
        if self._scale is None:
            raise AssertionError(f"{_OP}.found_inf: expected a call of scale() before, got none")
        return self._record(optimizer).found_inf

    def overflow(self, optimizer: Optimizer) -> Overflow | None:
        """Which gradients made the optimizer skip its last skipped step; None if none was skipped. The host waits."""
        record = self._records.get(optimizer)
        return None if record is None else record.overflow(optimizer)

    # States.

    def _settings(self) -> dict[str, Any]:
        settings = {"min_scale": self._min_scale, "max_scale": self._max_scale, "hysteresis": self._hysteresis}
        return {} if settings == {"min_scale": 0.0, "max_scale": math.inf, "hysteresis": 1} else settings

    def _hysteresis_left(self) -> int:
        return int(self._init_hysteresis_tracker if (left := self._hysteresis_tracker) is None else left.item())

    def state_dict(self) -> dict[str, Any]:
        """The state as Python numbers; empty if the scaler is not enabled. The host waits."""
        state, settings = super().state_dict(), self._settings()
        return {**state, **settings, "_hysteresis_tracker": self._hysteresis_left()} if state and settings else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch's, whose scale is brought between the bounds. A step that was begun
        by :meth:`unscale_` or :meth:`clip_` is forgotten.

        Raises:
            ValueError: settings that the constructor refuses, or a scale that is none. Nothing has changed then.
        """
        if not self._enabled:
            return
        missing = [key for key in _KEYS if key not in state_dict]
        if state_dict and missing:
            raise KeyError(f"{_OP}.load_state_dict: expected {', '.join(_KEYS)}, got a state without {missing[0]}")
        if state_dict:
            low, high = (state_dict.get(name, getattr(self, f"_{name}")) for name in ("min_scale", "max_scale"))
            hysteresis = state_dict.get("hysteresis", self._hysteresis)
            left = state_dict.get("_hysteresis_tracker", hysteresis)
            check_loaded(f"{_OP}.load_state_dict", state_dict["scale"], low, high, hysteresis, left)
            state_dict = {**state_dict, "scale": min(max(state_dict["scale"], low), high)}
        super().load_state_dict(state_dict)
        self._begin_iteration()
        self._min_scale, self._max_scale = float(low), float(high)
        self._hysteresis, self._init_hysteresis_tracker = hysteresis, left
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.update(_init_hysteresis_tracker=self._hysteresis_left(), _hysteresis_tracker=None)
        del state["_records"]  # of optimizers of this process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._records = WeakKeyDictionary()
