from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpsmith.optim._multi_tensor import AT_LEAST_0, TWO_PARTS, Group, MultiTensorOptimizer


class Adam(MultiTensorOptimizer):
    r"""Adam: all parameters of all groups in one launch.

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t} \, \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.Adam``; each loads the other's state.

    Args:
        params, lr, foreach, fused, capturable, differentiable, precision, seed, keep_fp32: as for
            :class:`warpsmith.optim.AdamW`.
        betas: two numbers in [0, 1). eps, weight_decay: numbers >= 0.
        amsgrad: divide by the root of the largest ``v`` so far.
        maximize: go up the gradient.
        decoupled_weight_decay: decay the parameters and not the gradients, as AdamW does.

    Gradient scaling, skipped steps, DTensors, CUDA graphs, the watch of addresses and errors: as for
    :class:`warpsmith.optim.AdamW`. Deterministic. The host never waits for the device.
    Moves 28 bytes of memory a float32 parameter, 36 with amsgrad.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; order of operations as torch's fused step.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.Adam(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op = "Adam"
    _needed = ("step", "exp_avg", "exp_avg_sq")
    _checks = {"betas": TWO_PARTS, "eps": AT_LEAST_0, "weight_decay": AT_LEAST_0}
    # Step counters lie beside the parameters, so torch must take them for those of its fused step.
    _of_every_group = {"foreach": None, "fused": True}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        precision: str | None = None,
        seed: int = 0,
        keep_fp32: Sequence[str] = (),
    ) -> None:
        super().__init__(params, locals())

    def _row_of(self, group: Group) -> str:
        return "adamw" if group["decoupled_weight_decay"] else "adam"

    def _states_of(self, group: Group) -> tuple[str, ...]:
        return (*self._needed, "max_exp_avg_sq") if group["amsgrad"] else self._needed

    def _takes_8bit(self, group: Group) -> bool:
        return not group["amsgrad"]
