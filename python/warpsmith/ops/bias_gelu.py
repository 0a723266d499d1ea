from __future__ import annotations

from torch import Tensor

from warpsmith.ops._biased import biased
from warpsmith.ops._gelu import gelu, is_tanh

_bias_gelu = biased("bias_gelu", gelu)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    r"""A bias and a Gaussian error linear unit in one pass, for what a matrix product without bias gives.

    .. math:: y = \operatorname{gelu}(x + b), \qquad \operatorname{gelu}(z) = z \, \Phi(z)
        \quad\text{or}\quad \tfrac{z}{2} \left(1 + \tanh\left(\sqrt{2 / \pi} \, (z + 0.044715 \, z^3)\right)\right)

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        bias: shape (F,), the dtype of ``x``, or float32 beside a 16-bit ``x``.
        approximate: "none" for the first, "tanh" (GPT-2's) for the second, as in ``torch.nn.functional.gelu``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. The sum and all arithmetic are float32 (float64 for
        float64), rounded once. Under autocast nothing is cast.

    Gradients for both inputs, and theirs in turn (composed of plain torch operations). The backward recomputes the
    activation: nothing but the inputs is kept.

    Deterministic: the sum over rows that is the gradient of the bias has a fixed order. Moves 2 elements of memory for
    each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape or device that does not fit, or another ``approximate``.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.bias_gelu(torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0]))
        tensor([[0.0000, 1.9545]])
    """
    return _bias_gelu(x, bias, is_tanh("bias_gelu", approximate))
