from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.raw_step import average_in_place
from warpsmith._core.tensor_list import has_overlap, is_dense, local, moved

_OP = "EMA"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _weight(op: str, decay: float) -> float:
    checks.number(op, "decay", decay, "a number from 0 to 1", lambda d: 0 <= d <= 1)
    return 1 - float(decay)


class EMA:
    r"""The exponential moving average of a model's weights, in float32: all tensors of a device in one launch.

    .. math::
        a \leftarrow a + (1 - d) (p - a)

    Averages begin as the parameters. Those of 16-bit parameters are float32 too: a step of ``1 - d = 0.001`` would be
    lost in 8 or 11 significant bits.

    Args:
        params: tensors, or (name, tensor) pairs: float32, float16, bfloat16, or float64 on the CPU, whose averages are
            float64. Any devices and strides without overlap; DTensors shard by shard.
        decay: a number from 0 to 1.
        optimizer: of ``params``. Where its state has a float32 ``master`` of a parameter, that is averaged.

    Averages are in :attr:`averages`, one a parameter. Elementwise and deterministic. The host never waits for the
    device: :meth:`update` can be captured in a CUDA graph, in which ``decay`` is fixed. Moves 12 bytes of memory a
    float32 parameter or master, 10 of a 16-bit one.

    Raises:
        ValueError: a decay out of range; a parameter's dtype, device or strides, by its index; an optimizer that has
            none of ``params``, as one whose states are sharded.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; formula as
    ``torch.optim.swa_utils.get_ema_multi_avg_fn``.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> ema = warpsmith.optim.EMA(model.parameters(), decay=0.5)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0), ema.averages[0].zero_()
        >>> ema.update()
        >>> with ema.applied():
        ...     print(model.weight[0, 0].item())
        0.5
    """

    @torch.no_grad()
    def __init__(
        self, params: Iterable[Any], decay: float = 0.999, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        _weight(_OP, decay)
        self.decay, self._optimizer = float(decay), optimizer
        self._params: list[Tensor] = [p[1] if isinstance(p, tuple) else p for p in params]
        if not self._params:
            checks.refuse(_OP, "params", "at least one tensor", "none")
        for i, p in enumerate(self._params):
            self._check_param(f"params[{i}]", p)
        if optimizer is not None:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            if own.isdisjoint(self._params):
                got = f"the {type(optimizer).__name__} of other tensors"
                if hasattr(optimizer, "consolidate_state_dict"):  # a sharded one, whose groups have fragments
                    got += ": leave it out, or average those of its param_groups"
                checks.refuse(_OP, "optimizer", "an optimizer of params", got)
        self._gaps = {i for i, p in enumerate(self._params) if not is_dense(local(p))}
        self.averages = [
            value.detach().to(
                torch.float64 if value.dtype == torch.float64 else torch.float32,
                memory_format=torch.preserve_format,
                copy=True,
            )
            for value in self._values()
        ]

    @staticmethod
    def _check_param(argument: str, p: Tensor) -> None:
        if p.dtype not in _FLOATS or (p.dtype == torch.float64 and p.device.type != "cpu"):
            checks.refuse(
                _OP, argument, "float32, float16, bfloat16, or float64 on the CPU", checks.dtype_text(p.dtype)
            )
        if p.device.type not in ("cpu", "cuda"):
            checks.refuse(_OP, argument, "a tensor on the CPU or on CUDA", str(p.device))
        if p.layout != torch.strided or has_overlap(local(p)):
            checks.refuse(_OP, argument, "a dense tensor, elements without overlap", "another")

    def _values(self) -> list[Tensor]:
        """What is averaged: masters, and parameters without one."""
        if self._optimizer is None:
            return self._params
        return [self._optimizer.state.get(p, {}).get("master", p) for p in self._params]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # addresses cannot be traced
    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None, *, decay: float | None = None) -> None:
        """Takes the weights as they are now into the averages. Call it after each step of the optimizer.

        Args:
            found_inf: one float32 element: where it is not 0, nothing changes. For steps that a scaler skips:
                ``scaler.found_inf(optimizer)``.
            decay: for this call alone, such as ``min(0.999, (1 + n) / (10 + n))`` in the n-th.

        Raises:
            ValueError: a decay out of range; a parameter that changed its dtype, shape, strides or device.
        """
        weight = _weight(f"{_OP}.update", self.decay if decay is None else decay)
        self._move(range(len(self._params)), weight, found_inf)

    def _move(self, indices: Iterable[int], weight: float, found_inf: Tensor | None) -> None:
        by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        all_values = self._values()
        for i in indices:
            average, value = local(self.averages[i]), local(all_values[i]).detach()
            averages, values = by_device.setdefault(value.device, ([], []))
            averages.append(average)
            values.append(torch.empty_like(average).copy_(value) if i in self._gaps else value)
        for device, (averages, values) in by_device.items():
            flag = None if found_inf is None else moved(local(found_inf).detach(), device)
            average_in_place(averages, values, weight, flag)

    @torch.no_grad()
    def copy_to_params(self) -> None:
        """Writes the averages to the parameters, rounded to their dtypes. Masters of an optimizer stay as they are."""
        for average, p in zip(self.averages, self._params, strict=True):
            p.copy_(average)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the parameters are the averages, as for an evaluation; then they are what they were."""
        kept = [p.detach().clone(memory_format=torch.preserve_format) for p in self._params]
        self.copy_to_params()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in zip(self._params, kept, strict=True):
                    p.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """The decay, and the averages by the index of their parameter. Not copies."""
        return {"decay": self.decay, "averages": dict(enumerate(self.averages))}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the averages of a ``state_dict``, of the same parameters.

        Raises:
            ValueError: another number of averages, or one of another shape; a decay out of range. Nothing has changed
                then.
        """
        op, loaded = f"{_OP}.load_state_dict", state_dict["averages"]
        _weight(op, state_dict["decay"])
        if set(loaded) != set(range(len(self.averages))):
            checks.refuse(op, "averages", f"{len(self.averages)} tensors", str(len(loaded)))
        for i, average in enumerate(self.averages):
            checks.same_shape(op, f"averages[{i}]", loaded[i], average.shape)
        for i, average in enumerate(self.averages):
            average.copy_(loaded[i])
        self.decay = float(state_dict["decay"])
