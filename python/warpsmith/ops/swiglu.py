from __future__ import annotations

from torch import Tensor

from warpsmith.ops._gated import documented, gated
from warpsmith.ops._silu import silu

_swiglu = gated("swiglu", silu)


@documented()
def swiglu(gate: Tensor, up: Tensor | None = None, *, inplace_backward: bool = False) -> Tensor:
    r"""The gated activation of Llama's feed-forward layer.

    .. math:: y = \operatorname{silu}(\text{gate}) \cdot \text{up}, \qquad \operatorname{silu}(x) = \frac{x}{1 + e^{-x}}

    Arguments, result, gradients and errors are those of every gated activation.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.swiglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0.0000, 5.2848])
        >>> warpsmith.swiglu(torch.tensor([0.0, 2.0, 1.0, 3.0]))
        tensor([0.0000, 5.2848])
    """
    return _swiglu(gate, up, inplace_backward)
