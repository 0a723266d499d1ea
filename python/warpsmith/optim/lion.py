from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpsmith.optim._multi_tensor import AT_LEAST_0, TWO_PARTS, Group, MultiTensorOptimizer


class Lion(MultiTensorOptimizer):
    r"""Lion, the sign of an interpolated momentum: all parameters of all groups in one launch.

    .. math::
        p &\leftarrow p \, (1 - \gamma \lambda) - \gamma \operatorname{sign}(\beta_1 m + (1 - \beta_1) g) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    The sign of 0 is 0, and of NaN NaN. torch has no Lion; the state is ``exp_avg`` alone, as in the authors' code.

    Args:
        params, lr, precision, seed, keep_fp32: as for :class:`warpsmith.optim.AdamW`. Learning rates are
            three to ten times smaller than there, weight decay that much larger.
        betas: two numbers in [0, 1). weight_decay: a number >= 0.
        maximize: go up the gradient.

    Gradient scaling, skipped steps, DTensors, CUDA graphs, the watch of addresses and errors: as for
    :class:`warpsmith.optim.AdamW`. Deterministic. The host never waits for the device.
    Moves 20 bytes of memory a float32 parameter.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op, _row = "Lion", "lion"
    _needed = ("exp_avg",)
    _checks = {"betas": TWO_PARTS, "weight_decay": AT_LEAST_0}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        precision: str | None = None,
        seed: int = 0,
        keep_fp32: Sequence[str] = (),
    ) -> None:
        super().__init__(params, locals())

    def _takes_8bit(self, group: Group) -> bool:
        return True
