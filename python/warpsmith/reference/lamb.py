from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def lamb(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    maximize: bool = False,
) -> None:
    """One LAMB step, in place."""
    for p, grad, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        g = -grad if maximize else grad
        step += 1
        t = step.item()
        m.mul_(beta1).add_(g, alpha=1 - beta1 if grad_averaging else 1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + weight_decay * p
        adapts = (weight_decay != 0 or use_nvlamb) and bool(p.norm() != 0) and bool(u.norm() != 0)
        p.sub_(lr * (p.norm() / u.norm() if adapts else 1) * u)
