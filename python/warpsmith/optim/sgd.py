from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpsmith.optim._multi_tensor import A_NUMBER, AT_LEAST_0, Group, MultiTensorOptimizer


class SGD(MultiTensorOptimizer):
    r"""Stochastic gradient descent with momentum: all parameters of all groups in one launch.

    .. math::
        g &\leftarrow g + \lambda p \\
        b &\leftarrow \mu b + (1 - \tau) g \quad (\text{first step: } b \leftarrow g) \\
        p &\leftarrow p - \gamma \, (g + \mu b \text{ with Nesterov, else } b \text{, or } g \text{ where } \mu = 0)

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.SGD``; each loads the other's state.
    With dampening :math:`\tau \ne 0` the state has a counter ``step`` beside ``momentum_buffer``, since only then does
    the first step differ from the others; torch ignores it.

    Args:
        params, lr, foreach, fused, differentiable, precision, seed, keep_fp32: as for :class:`warpsmith.optim.AdamW`.
        momentum, weight_decay: numbers >= 0. dampening: a number.
        nesterov: look ahead; wants momentum, and no dampening.
        maximize: go up the gradient.

    Gradient scaling, skipped steps, DTensors, CUDA graphs, the watch of addresses and errors: as for
    :class:`warpsmith.optim.AdamW`. Deterministic. The host never waits for the device.
    Moves 20 bytes of memory a float32 parameter, 12 without momentum.

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, 2013; formula and order
    of operations as torch.optim.SGD.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op, _row = "SGD", "sgd"
    _needed = ("momentum_buffer",)
    _checks = {"momentum": AT_LEAST_0, "dampening": A_NUMBER, "weight_decay": AT_LEAST_0}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: str | None = None,
        seed: int = 0,
        keep_fp32: Sequence[str] = (),
    ) -> None:
        super().__init__(params, locals())

    def _check_hyperparameters(self, group: Group) -> None:
        super()._check_hyperparameters(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            got = f"momentum {group['momentum']}, dampening {group['dampening']}"
            self._refuse("nesterov", "momentum > 0 and no dampening", got)

    def _states_of(self, group: Group) -> tuple[str, ...]:
        if group["momentum"] == 0:
            return ()
        return ("momentum_buffer", "step") if group["dampening"] != 0 else ("momentum_buffer",)

    def _adopt(self, state: dict[str, Any]) -> None:
        if state.get("momentum_buffer", 0) is None:
            state.clear()

    def _takes_8bit(self, group: Group) -> bool:
        return True
