from __future__ import annotations

from torch import Tensor

from warpsmith.ops._gated import gated
from warpsmith.ops._silu import silu

_swiglu = gated("swiglu", silu)


def swiglu(gate: Tensor, up: Tensor | None = None, *, inplace_backward: bool = False) -> Tensor:
    r"""The gated activation of Llama's feed-forward layer.

    .. math:: y = \operatorname{silu}(\text{gate}) \cdot \text{up}, \qquad \operatorname{silu}(x) = \frac{x}{1 + e^{-x}}

    Args:
        gate: shape (..., F), float32, float16, bfloat16, or float64 on the CPU; without ``up`` of shape (..., 2F) and
            holding ``[gate, up]`` along the last dimension, as one matrix product gives them. Any strides: rows that
            lie at one stride with adjacent columns are read where they are, others are copied once.
        up: of the shape, dtype and device of ``gate``, or None.
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
        ValueError: a dtype, shape or device that does not fit, an odd last dimension without ``up``, or a leaf with
            ``inplace_backward``.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.swiglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0.0000, 5.2848])
        >>> warpsmith.swiglu(torch.tensor([0.0, 2.0, 1.0, 3.0]))
        tensor([0.0000, 5.2848])
    """
    return _swiglu(gate, up, inplace_backward)
