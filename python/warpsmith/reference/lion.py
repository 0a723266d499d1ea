from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def lion(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> None:
    """One Lion step, in place."""
    for p, grad, m in zip(params, grads, exp_avgs, strict=True):
        g = -grad if maximize else grad
        update = beta1 * m + (1 - beta1) * g
        p.mul_(1 - lr * weight_decay).sub_(lr * torch.where(update.isnan(), update, update.sign()))
        m.lerp_(g, 1 - beta2)
