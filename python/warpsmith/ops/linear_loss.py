"""Losses over a linear layer whose logits are never stored whole."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.main_grad import check_main_grad
from warpsmith.ops._cross_entropy import NONE, reduction_number, refuse_learned_class_weight
from warpsmith.ops._linear_loss import (
    bound_of_chunks,
    check_max_bytes,
    check_sum_dtype,
    log_prob,
    logits_stride,
    reduced_cross_entropy,
    rows_cross_entropy,
    sum_dtype,
    under_autocast,
    wants_gradient,
    within,
)
from warpsmith.ops.cross_entropy import CrossEntropyStats

_CROSS_ENTROPY = "linear_cross_entropy"


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
    check_labels: bool = False,
    return_stats: bool = False,
    max_chunk_bytes: int | None = None,
    max_bytes: int | None = None,
    dw_dtype: torch.dtype | None = None,
    main_grad: Tensor | None = None,
) -> Tensor | tuple[Tensor, CrossEntropyStats]:
    r"""Cross-entropy of a language-model head, without all logits in memory: a linear layer and :func:`cross_entropy`.

    With :math:`z = \mathrm{cap}(h W^T + b)`, where :math:`\mathrm{cap}(u) = s \tanh(u / s)` for a ``softcap``
    :math:`s > 0`, and for each row its target :math:`t`, class weights :math:`w` (ones) and label smoothing
    :math:`\epsilon` over :math:`V` classes:

    .. math::
        \mathrm{lse} = \log \sum_j e^{z_j}, \quad \mathrm{loss} = (1 - \epsilon) \, w_t (\mathrm{lse} - z_t)
        + \frac{\epsilon}{V} \sum_j w_j (\mathrm{lse} - z_j) + \lambda_z \mathrm{lse}^2

    Rows whose target is ``ignore_index`` have loss 0 and gradients of exact zeros. ``"mean"`` divides the sum by that
    of :math:`w_t` over the other rows, as torch does.

    The rows are taken in chunks: logits, loss and the chunk's part of all gradients, then the next. A reduced loss has
    its gradients computed in the forward, and the backward scales them by the incoming gradient, found on the device;
    where it is 1 they are not touched. With ``reduction="none"`` the backward makes the logits again.

    Args:
        hidden: shape (..., H), float32, float16, bfloat16, or float64 on the CPU.
        weight: shape (V, H), the dtype of ``hidden``.
        target: shape (...), int64 or uint8 classes in [0, V), or ``ignore_index``.
        bias: shape (V,), the dtype of ``hidden``, or None.
        class_weight: shape (V,), float32 or the dtype of ``hidden``, or None; it has no gradient.
        ignore_index: target of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: :math:`\epsilon`, in [0, 1].
        z_loss: :math:`\lambda_z`, >= 0, a number of float32 (float64 for float64).
        softcap: :math:`s`, 2^-126 to 2^126 (2^-1022 to 2^1022 for float64); 0 for none.
        check_labels: on CUDA, wait for the device and refuse targets out of range. On the CPU they always are refused.
        return_stats: also return logsumexp and argmax of each row, and the accuracy of the rows that count.
        max_chunk_bytes: logits in memory at a time; None: 1 GiB on CUDA, 64 MiB on the CPU. One row at least. Fewer
            bytes cost time: every chunk beyond the first reads and writes the weight's gradient once more. It bounds
            the logits alone: several chunks of a 16-bit model sum the weight's gradient in float32, which takes more.
        max_bytes: all that forward and backward may hold beyond their inputs. Chooses chunks and ``dw_dtype`` together,
            in this order, the first that fits: one chunk; several with float32 sums; several that are rounded once
            each. ``warpsmith.plan("linear_cross_entropy", ..., hidden_size=H, max_bytes=n)`` says which, and
            ``peak_bytes``. In the place of ``max_chunk_bytes`` and ``dw_dtype``. Not under ``torch.compile``, and
            without effect for float64.
        dw_dtype: dtype in which the weight's gradient is summed. None: float32 if there are several chunks or for
            float16, else that of ``weight``. The dtype of ``weight`` takes half the memory, and rounds once a chunk.
        main_grad: shape (V, H), float32 (float64 for float64), contiguous, in memory of its own and without a gradient:
            the backward adds the weight's gradient to it, and the weight gets a gradient of zeros, so that hooks run.
            Not under ``torch.compile``. Over ranks: as :func:`warpsmith.linear`.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or for ``"none"`` of the shape of ``target``. With
        ``return_stats`` the pair of loss and :class:`CrossEntropyStats`. Under autocast ``hidden``,
        ``weight`` and ``bias`` are cast to its dtype, as for a linear layer.

    Gradients for ``hidden``, ``weight`` and ``bias``. Second derivatives are refused. The gradients of a reduced loss
    are kept from the forward and given away by the backward; with ``retain_graph=True`` they are copied.

    Logits and their gradients are rounded to the dtype of ``hidden``; everything between is float32 (float64 for
    float64). float16 gradients are divided by the mean's denominator in the backward, together with the loss scale.

    Deterministic: sums have a fixed order, and the matrix products are torch's, on CUDA deterministic as cuBLAS is.
    The host does not wait, but for ``check_labels``.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit; on the CPU, or with ``check_labels``, a target
            that is neither a class nor ``ignore_index``. Otherwise on CUDA such a row makes the loss NaN, and nothing
            is read out of bounds. Nothing has changed.

    Source: gradients in the forward over chunks of rows are the idea of
    https://github.com/mgmalek/efficient_cross_entropy and Liger-Kernel.

    Example:
        >>> import torch, warpsmith
        >>> hidden, weight = torch.ones(2, 8, requires_grad=True), torch.zeros(4, 8, requires_grad=True)
        >>> loss = warpsmith.linear_cross_entropy(hidden, weight, torch.tensor([0, 3]))
        >>> loss.backward()
        >>> loss.item(), weight.grad[0, 0].item()
        (1.3862943649291992, -0.25)
    """
    if main_grad is not None:
        check_main_grad(_CROSS_ENTROPY, main_grad, weight, hidden=hidden, bias=bias, class_weight=class_weight)
    checks.flags(_CROSS_ENTROPY, check_labels=check_labels, return_stats=return_stats)
    hidden, weight, bias = under_autocast(_CROSS_ENTROPY, hidden, weight, target, bias)
    number, most_bytes = reduction_number(_CROSS_ENTROPY, reduction), bound_of_chunks(_CROSS_ENTROPY, max_chunk_bytes)
    check_max_bytes(_CROSS_ENTROPY, max_bytes, max_chunk_bytes, dw_dtype)
    if max_bytes is not None:
        most_bytes, dw_dtype = within(_CROSS_ENTROPY, hidden, weight, target, max_bytes)
    if dw_dtype is None and torch.compiler.is_compiling() and hidden.dtype.itemsize == 2 and weight.dim() == 2:
        # The traced op and its fake must agree, and a fake may not know the number of rows.
        dw_dtype = sum_dtype(hidden, weight.shape[0], target.numel(), most_bytes)
    if dw_dtype is not None:
        check_sum_dtype(hidden, dw_dtype)
    refuse_learned_class_weight(_CROSS_ENTROPY, class_weight)
    function = rows_cross_entropy if number == NONE else reduced_cross_entropy
    loss, lse, argmax, accuracy = function(
        *(hidden, weight, target, bias, class_weight),
        *(ignore_index, number, label_smoothing, z_loss, softcap),
        *(check_labels, return_stats, most_bytes, dw_dtype, main_grad),
        *(wants_gradient(hidden), wants_gradient(weight), wants_gradient(bias)),
    )
    return (loss, CrossEntropyStats(lse.detach(), argmax, accuracy.detach())) if return_stats else loss


_LOG_PROB = "linear_log_prob"
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
    checks.refuse_non_number(_LOG_PROB, "temperature", temperature, "a finite number > 0")
    if isinstance(temperature, int):  # which the backward divides by: 2**70 is no int64
        temperature = float(temperature)
    if save_logits is not None:
        checks.flags(_LOG_PROB, save_logits=save_logits)
    hidden, weight, bias = under_autocast(_LOG_PROB, hidden, weight, target, bias)
    most_bytes = bound_of_chunks(_LOG_PROB, max_chunk_bytes)
    if save_logits is None:
        save_logits = _pays_to_save(hidden, weight, target, bias, max_chunk_bytes)
    return log_prob(hidden, weight, target, bias, temperature, save_logits, most_bytes)
