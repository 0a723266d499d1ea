"""The optimizers' steps and the block-wise quantisation of their states, in plain torch operations."""

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


BLOCK = 256


def dynamic_map(signed: bool) -> Tensor:
    """The values of the 256 codes of 8-bit optimizer states, ascending, float32.

    0, 1, and in each of seven decades below 1 the middles of n equal parts of [0.1, 1] of the decade; n doubles from 1
    to 64 for each sign, or from 2 to 128. Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        n = 2**decade * (1 if signed else 2)
        middles = [(2 * n + 18 * k + 9) / (20 * n * 10 ** (6 - decade)) for k in range(n)]
        values += middles + ([-m for m in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def quantize_blockwise(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """The codes (uint8) of a contiguous float32 tensor, and the scale of each block of 256 elements.

    A scale is the largest magnitude of its block; a code is that of the value nearest to element / scale, of two at
    the same distance the lower one. Without sign, 0 alone has code 0.
    """
    values = dynamic_map(signed)
    blocks = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)
    x = torch.where(scales[:, None] == 0, torch.zeros_like(blocks), blocks / scales[:, None])
    codes = torch.bucketize(x, (values[:-1] + values[1:]) * 0.5)
    codes = codes if signed else torch.where((codes == 0) & (x > 0), 1, codes)
    return codes.flatten()[: value.numel()].view(value.shape).to(torch.uint8), scales


def dequantize_blockwise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The float32 values of codes: that of the map times the scale of the block."""
    of_elements = scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)
    return dynamic_map(signed)[codes.long()] * of_elements
