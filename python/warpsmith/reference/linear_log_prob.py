import torch
from torch import Tensor


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
