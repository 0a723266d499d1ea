from __future__ import annotations

from torch import Tensor

from warpsmith.ops._gated import documented, gated
from warpsmith.ops._gelu import gelu, is_tanh

_geglu = gated("geglu", gelu)


@documented(
    argument='approximate: "none" for the first, "tanh" for the second, as in ``torch.nn.functional.gelu``.',
    error="another ``approximate``",
)
def geglu(
    gate: Tensor, up: Tensor | None = None, approximate: str = "none", *, inplace_backward: bool = False
) -> Tensor:
    r"""The gated linear unit with a Gaussian error linear unit.

    .. math:: y = \operatorname{gelu}(\text{gate}) \cdot \text{up}, \qquad \operatorname{gelu}(x) = x \, \Phi(x)
        \quad\text{or}\quad \tfrac{x}{2} \left(1 + \tanh\left(\sqrt{2 / \pi} \, (x + 0.044715 \, x^3)\right)\right)

    Arguments, result, gradients and errors are those of every gated activation.

    Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.geglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0.0000, 5.8635])
        >>> warpsmith.geglu(torch.tensor([0.0, 2.0, 1.0, 3.0]), approximate="tanh")
        tensor([0.0000, 5.8638])
    """
    return _geglu(gate, up, inplace_backward, is_tanh("geglu", approximate))
