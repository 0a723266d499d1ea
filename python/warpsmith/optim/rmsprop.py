from __future__ import annotations

from typing import Any

from torch import Tensor

from warpsmith.optim._multi_tensor import AT_LEAST_0, Check, Group, MultiTensorOptimizer

_FROM_0_TO_1: Check = ("a number in [0, 1]", lambda x: 0 <= x <= 1)


class RMSprop(MultiTensorOptimizer):
    r"""RMSprop, centered or not, with or without momentum: all parameters of all groups in one launch.

    .. math::
        g &\leftarrow g + \lambda p, \qquad v \leftarrow \alpha v + (1 - \alpha) g^2 \\
        u &= g / (\sqrt{v} + \epsilon), \quad \text{or centered} \quad a \leftarrow \alpha a + (1 - \alpha) g, \quad
        u = g / (\sqrt{v - a^2} + \epsilon) \\
        p &\leftarrow p - \gamma u, \quad \text{or with momentum} \quad b \leftarrow \mu b + u, \quad
        p \leftarrow p - \gamma b

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.RMSprop``; each loads the other's state.

    Args:
        params, lr, capturable, foreach, differentiable, precision, seed: as for :class:`warpsmith.optim.AdamW`.
        alpha: a number in [0, 1]. eps, weight_decay, momentum: numbers >= 0.
        centered: divide by the root of the variance in place of the second moment.
        maximize: go up the gradient.

    Gradient scaling, skipped steps, DTensors, CUDA graphs, the watch of addresses and errors: as for
    :class:`warpsmith.optim.AdamW`. Deterministic. The host never waits for the device.
    Moves 20 bytes of memory a float32 parameter, and 8 more with momentum and when centered.

    Source: Tieleman and Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012; centered as in Graves,
    Generating Sequences With Recurrent Neural Networks, 2013; formula and order of operations as torch.optim.RMSprop.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op, _row = "RMSprop", "rmsprop"
    _needed = ("step", "square_avg")
    _checks = {"alpha": _FROM_0_TO_1, **dict.fromkeys(("eps", "weight_decay", "momentum"), AT_LEAST_0)}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        precision: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, locals())

    def _states_of(self, group: Group) -> tuple[str, ...]:
        momentum, centered = ("momentum_buffer",) * (group["momentum"] > 0), ("grad_avg",) * bool(group["centered"])
        return (*self._needed, *momentum, *centered)
