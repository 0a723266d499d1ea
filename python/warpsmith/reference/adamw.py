from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW step, in place; an empty ``max_exp_avg_sqs`` means no amsgrad."""
    if found_inf is not None and found_inf.item() != 0:
        return
    for i, (p, grad, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        step += 1
        g = grad if grad_scale is None else grad / grad_scale.to(grad.dtype)
        g = -g if maximize else g
        p.mul_(1 - lr * weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        second = v
        if max_exp_avg_sqs:
            second = max_exp_avg_sqs[i].copy_(torch.maximum(max_exp_avg_sqs[i], v))
        t = step.item()
        p.sub_(lr / (1 - beta1**t) * m / (second.sqrt() / (1 - beta2**t) ** 0.5 + eps))
