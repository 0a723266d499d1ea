from __future__ import annotations

from typing import Any

from torch import Tensor

from warpsmith.optim._multi_tensor import AT_LEAST_0, Group, MultiTensorOptimizer


class Adagrad(MultiTensorOptimizer):
    r"""Adagrad: all parameters of all groups in one launch.

    .. math::
        g &\leftarrow g + \lambda p, \qquad s \leftarrow s + g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 + (t - 1) \eta} \, \frac{g}{\sqrt{s} + \epsilon}

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.Adagrad``; each loads the other's state.
    Other than torch's, the states are made in the first step, as those of all other optimizers.

    Args:
        params, lr, foreach, fused, differentiable, precision, seed: as for :class:`warpsmith.optim.AdamW`.
        lr_decay, weight_decay, initial_accumulator_value, eps: numbers >= 0.
        maximize: go up the gradient.

    Gradient scaling, skipped steps, DTensors, CUDA graphs, the watch of addresses and errors: as for
    :class:`warpsmith.optim.AdamW`. Deterministic. The host never waits for the device.
    Moves 20 bytes of memory a float32 parameter.

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011;
    formula and order of operations as torch.optim.Adagrad.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.Adagrad(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op, _row = "Adagrad", "adagrad"
    _needed = ("step", "sum")
    _checks = dict.fromkeys(("lr_decay", "weight_decay", "initial_accumulator_value", "eps"), AT_LEAST_0)
    # Step counters lie beside the parameters, so torch must take them for those of its fused step.
    _of_every_group = {"foreach": None, "fused": True}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, locals())

    def _initial(self, group: Group, name: str) -> float:
        return group["initial_accumulator_value"]
