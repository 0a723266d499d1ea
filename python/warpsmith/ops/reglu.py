from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops._gated import documented, gated


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), (x > 0).to(x.dtype)


_reglu = gated("reglu", _relu)


@documented()
def reglu(gate: Tensor, up: Tensor | None = None, *, inplace_backward: bool = False) -> Tensor:
    r"""The gated linear unit with a rectifier.

    .. math:: y = \max(\text{gate}, 0) \cdot \text{up}

    Arguments, result, gradients and errors are those of every gated activation.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.reglu(torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0., 6.])
        >>> warpsmith.reglu(torch.tensor([-1.0, 2.0, 1.0, 3.0]))
        tensor([0., 6.])
    """
    return _reglu(gate, up, inplace_backward)
