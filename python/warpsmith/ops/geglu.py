from __future__ import annotations

from torch import Tensor

from warpsmith.ops._gated import gated
from warpsmith.ops._gelu import gelu, is_tanh

_geglu = gated("geglu", gelu)


def geglu(
    gate: Tensor, up: Tensor | None = None, approximate: str = "none", *, inplace_backward: bool = False
) -> Tensor:
    r"""The gated linear unit with a Gaussian error linear unit.

    .. math:: y = \operatorname{gelu}(\text{gate}) \cdot \text{up}, \qquad \operatorname{gelu}(x) = x \, \Phi(x)
        \quad\text{or}\quad \tfrac{x}{2} \left(1 + \tanh\left(\sqrt{2 / \pi} \, (x + 0.044715 \, x^3)\right)\right)

    Args:
        gate: shape (..., F), float32, float16, bfloat16, or float64 on the CPU; without ``up`` of shape (..., 2F) and
            holding ``[gate, up]`` along the last dimension, as one matrix product gives them. Any strides: rows that
            lie at one stride with adjacent columns are read where they are, others are copied once.
        up: of the shape, dtype and device of ``gate``, or None.
        approximate: "none" for the first, "tanh" for the second, as in ``torch.nn.functional.gelu``.
        inplace_backward: lets the backward write the gradients over ``gate`` and ``up``, whose values are lost by then.
            That saves their memory. Where they are not contiguous or share memory, and under ``torch.compile``, new
            tensors are made all the same. A second backward, and that of any other operation that kept those tensors,
            is refused by autograd. No tensor may be a leaf that requires a gradient.

    Returns:
        A contiguous tensor of shape (..., F) and the dtype of ``gate``. Arithmetic is float32 (float64 for float64) and
        rounds once. Under autocast nothing is cast.

    Gradients for both inputs, and theirs in turn (composed of plain torch operations). The backward recomputes the
    activation: nothing but the inputs is kept, and the gradient of a packed input is written as one tensor.

    Deterministic. Moves 3 elements of memory for each of ``y`` forward and 5 backward.

    Raises:
        ValueError: a dtype, shape or device that does not fit, an odd last dimension without ``up``, another
            ``approximate``, or a leaf with ``inplace_backward``.

    Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.geglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0.0000, 5.8635])
        >>> warpsmith.geglu(torch.tensor([0.0, 2.0, 1.0, 3.0]), approximate="tanh")
        tensor([0.0000, 5.8638])
    """
    return _geglu(gate, up, inplace_backward, is_tanh("geglu", approximate))
