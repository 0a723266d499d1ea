from __future__ import annotations

import torch
from torch import Tensor, nn

from warpsmith.ops._dropout import check_p
from warpsmith.ops.dropout_add import dropout_add

torch.fx.wrap("dropout_add")  # torch.fx.symbolic_trace keeps the call whole


class DropoutAdd(nn.Module):
    """Dropout and the addition to the residual stream: :func:`warpsmith.dropout_add`, in training mode alone.

    Args:
        p: the probability of dropping an element, 0 to 1.

    Shapes: x and residual of one shape, to the same. Dtypes, determinism and errors: as :func:`warpsmith.dropout_add`.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.DropoutAdd(0.1).eval()(torch.ones(3), torch.ones(3))
        tensor([2., 2., 2.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        check_p("DropoutAdd", p)
        self.p = p

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + dropout(x)``."""
        return dropout_add(x, residual, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
