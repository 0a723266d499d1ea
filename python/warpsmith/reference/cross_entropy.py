"""The definition of cross_entropy in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, logsumexp and argmax of each row, and the share of rows that are predicted right."""
    z = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    counted = target != ignore_index
    label = target.where(counted, 0)
    weight = z.new_ones(z.shape[-1]) if class_weight is None else class_weight.to(z.dtype)
    log_p = torch.log_softmax(z, -1)
    lse = torch.logsumexp(z, -1)
    row = -(1 - label_smoothing) * weight[label] * log_p.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        row = row - label_smoothing / z.shape[-1] * (weight * log_p).sum(-1)
    if z_loss:
        row = row + z_loss * lse.square()
    row = row.where(counted, 0)

    loss = row if reduction == "none" else row.sum()
    if reduction == "mean":
        loss = loss / weight[label].where(counted, 0).sum()
    argmax = logits.argmax(-1)
    right = (argmax == target) & counted
    return loss, lse.detach(), argmax, right.sum().to(z.dtype) / counted.sum()
