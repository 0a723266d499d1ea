from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core import tensor_list as lists
from warpsmith.optim._multi_tensor import AT_LEAST_0, TWO_PARTS, Group, MultiTensorOptimizer

_PRECISIONS = (None, "fp32", "master")


class LAMB(MultiTensorOptimizer):
    r"""LAMB: Adam's direction, with a step that is in proportion to the norm of each tensor. All parameters of all
    groups in two launches.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda p, \qquad
        p \leftarrow p - \gamma \, \frac{\|p\|}{\|u\|} \, u

    The norms are those of the whole tensor. The ratio is 1 where one of them is 0, and in groups without weight decay
    unless ``use_nvlamb``.

    Args:
        params: tensors, (name, tensor) pairs or dicts of groups, as for :class:`warpsmith.optim.AdamW`; no DTensors, of
            which a rank has only a part. float32, float64 on the CPU, and with ``precision="master"`` bfloat16 and
            float16.
        lr: a number, or a tensor of one float32 or float64 element; one on the device is read by the kernel.
        betas: two numbers in [0, 1). eps, weight_decay: numbers >= 0.
        grad_averaging: False: :math:`m \leftarrow \beta_1 m + g`.
        use_nvlamb: take the ratio in groups without weight decay too.
        maximize: go up the gradient.
        precision: None, ``"fp32"`` or ``"master"``, as for :class:`warpsmith.optim.AdamW`; also an option of a group.

    Names and defaults are those of apex's ``FusedLAMB``, whose ``bias_correction`` and ``adam_w_mode`` are always on
    here. Its ``max_grad_norm=1.0`` is :func:`warpsmith.optim.clip_grad_norm_` before the step, or
    ``warpsmith.amp.GradScaler.clip_``.

    Gradient scaling, skipped steps, CUDA graphs, the watch of addresses and errors: as for
    :class:`warpsmith.optim.AdamW`. Deterministic: squares are added in a fixed order, within pieces of tensors in
    float32 on CUDA and in float64 otherwise. On CUDA the order depends on the number of multiprocessors and on
    alignment. The host never waits for the device. Moves 40 bytes of memory a float32 parameter.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020; options as in
    NVIDIA Apex, ``apex.optimizers.FusedLAMB``.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.LAMB(model.parameters(), lr=2e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op, _row = "LAMB", "lamb"
    _needed = ("step", "exp_avg", "exp_avg_sq")
    _checks = {"betas": TWO_PARTS, "eps": AT_LEAST_0, "weight_decay": AT_LEAST_0}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        grad_averaging: bool = True,
        use_nvlamb: bool = False,
        maximize: bool = False,
        precision: str | None = None,
    ) -> None:
        super().__init__(params, locals())

    def _values_of(self, group: Group) -> dict[str, float]:
        return {**super()._values_of(group), "beta3": 1 - group["betas"][0] if group["grad_averaging"] else 1.0}

    def _check_hyperparameters(self, group: Group) -> None:
        super()._check_hyperparameters(group)
        checks.one_of(self._op, "precision", group.get("precision"), _PRECISIONS)

    def _check_param(self, index: int, param: Tensor, group: Group) -> None:
        argument = lists.describe(self.param_groups, index)
        if hasattr(param, "to_local"):
            self._refuse(argument, "a plain tensor, whose norm is that of the whole", "a DTensor")
        if group.get("precision") is None and param.dtype in (torch.float16, torch.bfloat16):
            got = checks.dtype_text(param.dtype)
            self._refuse(argument, "float32, or precision master for 16-bit parameters", got)
        super()._check_param(index, param, group)
