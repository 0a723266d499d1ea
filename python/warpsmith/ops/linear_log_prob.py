from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._linear_loss import bound_of_chunks, log_prob, logits_stride, under_autocast, wants_gradient

_OP = "linear_log_prob"
_CPU_SAVED_BYTES = 1 << 30  # logits and their gradient, without a bound of the caller's


def _pays_to_save(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, max_chunk_bytes: int | None
) -> bool:
    """Whether logits are kept by default: matrix products bind a CPU, while its memory seldom lacks. What is traced is
    not bound to the sizes it was traced with."""
    if torch.compiler.is_compiling() or hidden.device.type != "cpu" or weight.dim() != 2:
        return False
    if not any(wants_gradient(t) for t in (hidden, weight, bias)):
        return False
    both = 2 * target.numel() * logits_stride(hidden, weight.shape[0]) * hidden.dtype.itemsize
    return both <= (max_chunk_bytes or _CPU_SAVED_BYTES)


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
    r"""Log-probabilities of tokens under a language-model head, without all logits in memory.

    With :math:`z = (h W^T + b) / T`, and for each row of ``hidden`` its target :math:`t`:

    .. math::
        \mathrm{logsumexp} = \log \sum_j e^{z_j}, \quad
        \mathrm{log\_prob} = z_t - \mathrm{logsumexp}, \quad
        \mathrm{entropy} = -\sum_j p_j \log p_j, \; p_j = e^{z_j - \mathrm{logsumexp}}

    DPO, KTO, GRPO, PPO and distillation losses are made of these; all three have gradients.

    Args:
        hidden: shape (..., H), float32, float16, bfloat16, or float64 on the CPU.
        weight: shape (V, H), the dtype of ``hidden``.
        target: shape (...), int64 or uint8 classes in [0, V).
        bias: shape (V,), the dtype of ``hidden``, or None.
        temperature: :math:`T`, from 2^-126 to 2^126 (2^-1022 to 2^1022 for float64). Logits divided by it must be
            finite too.
        save_logits: keep all logits (V elements a row) for the backward, which makes them again otherwise: a quarter of
            all arithmetic. None: no, but on the CPU, where products bind, in eager calls that record gradients yes, if
            logits and their gradient together take at most ``max_chunk_bytes``, or 1 GiB if that is None; plain PyTorch
            keeps as much.
        max_chunk_bytes: logits in memory at a time; None: 1 GiB on CUDA, 64 MiB on the CPU. One row at least.

    Returns:
        ``(log_prob, logsumexp, entropy)``, each of the shape of ``target``, float32 (float64 for float64). Under
        autocast ``hidden``, ``weight`` and ``bias`` are cast to its dtype, as for a linear layer.

    Gradients for ``hidden``, ``weight`` and ``bias``. Second derivatives are refused.

    Logits are rounded to the dtype of ``hidden``; everything behind them is float32 (float64 for float64). With several
    chunks the weight's gradient is summed in float32 and rounded once.

    Deterministic: sums have a fixed order, and the matrix products are torch's, on CUDA deterministic as cuBLAS is.
    The host does not wait.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit; on the CPU a target that is not a class. On CUDA
            such a row has log_prob NaN, and nothing is read out of bounds.

    Source: the chunked, fused head is that of https://github.com/mgmalek/efficient_cross_entropy and Liger-Kernel.

    Example:
        >>> import torch, warpsmith
        >>> log_prob, logsumexp, entropy = warpsmith.linear_log_prob(
        ...     torch.zeros(2, 8), torch.zeros(4, 8), torch.tensor([0, 3])
        ... )
        >>> log_prob
        tensor([-1.3863, -1.3863])
    """
    _check.refuse_non_number(_OP, "temperature", temperature, "a finite number > 0")
    if isinstance(temperature, int):  # which the backward divides by: 2**70 is no int64
        temperature = float(temperature)
    if save_logits is not None:
        _check.flags(_OP, save_logits=save_logits)
    hidden, weight, bias = under_autocast(_OP, hidden, weight, target, bias)
    most_bytes = bound_of_chunks(_OP, max_chunk_bytes)
    if save_logits is None:
        save_logits = _pays_to_save(hidden, weight, target, bias, max_chunk_bytes)
    return log_prob(hidden, weight, target, bias, temperature, save_logits, most_bytes)
