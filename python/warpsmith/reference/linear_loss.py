from typing import Any

import torch
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_stats: bool = False,
    **how: Any,
) -> Any:
    """Cross-entropy of ``hidden @ weight^T + bias``; the arguments in ``how`` say how and have no meaning here."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    z = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    w = (
        torch.ones(weight.shape[0], dtype=z.dtype, device=z.device)
        if class_weight is None
        else class_weight.to(z.dtype)
    )
    counted = target != ignore_index
    label = torch.where(counted, target, 0)
    all_rows, z = (
        z,
        torch.where(counted.unsqueeze(-1), z, 0.0),
    )  # the gradient of other rows is zero, whatever is in them
    surprise = -z.log_softmax(-1)
    picked = w[label] * surprise.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    loss = picked
    if label_smoothing:  # else an infinite surprise of another class would count, times zero
        loss = (1 - label_smoothing) * picked + label_smoothing / z.shape[-1] * (w * surprise).sum(-1)
    if z_loss:
        loss = loss + z_loss * z.logsumexp(-1).square()
    rows = torch.where(counted, loss, 0.0)
    total = rows if reduction == "none" else rows.sum()
    if reduction == "mean":
        total = total / torch.where(counted, w[label], 0.0).sum()
    if not return_stats:
        return total
    argmax = all_rows.argmax(-1)
    accuracy = (argmax == target)[counted].to(z.dtype).mean()
    return total, all_rows.logsumexp(-1).detach(), argmax, accuracy


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    save_logits: bool | None = None,
    max_chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, logsumexp and entropy of ``softmax((hidden @ weight^T + bias) / temperature)``.

    ``save_logits`` and ``max_chunk_bytes`` say how, not what: they have no meaning here.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = wide.log_softmax(-1)
    possible = log_probs.masked_fill(log_probs == -torch.inf, 0.0)  # 0 * log 0 is 0, and so is its gradient
    entropy = -(log_probs.exp() * possible).sum(-1)
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1), wide.logsumexp(-1), entropy
