from __future__ import annotations

import torch
from torch import Tensor, nn

from warpsmith.ops import _check
from warpsmith.ops.swiglu import swiglu

torch.fx.wrap("swiglu")  # torch.fx.symbolic_trace keeps the call whole


class SwiGLUMLP(nn.Module):
    """The feed-forward layer of Llama: ``down_proj(silu(gate_proj(x)) * up_proj(x))`` with :func:`warpsmith.swiglu`.

    Its ``state_dict`` has the keys of transformers' ``LlamaMLP``: ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        hidden_size: features of the input and the output.
        intermediate_size: features in between.
        bias: whether the three linear layers have one.
        device, dtype: of the parameters.
        inplace_backward: lets the backward write the gradients of the two projections over their values, which saves
            two tensors of ``intermediate_size`` a token. A second backward over the same graph is then refused.

    Shapes: x ``(..., hidden_size)`` to the same. Dtypes, determinism and errors: those of ``torch.nn.Linear`` and
    :func:`warpsmith.swiglu`; under autocast the linear layers cast.

    Example:
        >>> import torch, warpsmith
        >>> mlp = warpsmith.nn.SwiGLUMLP(8, 24)
        >>> mlp(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__()
        _check.sizes("SwiGLUMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        _check.flags("SwiGLUMLP", inplace_backward=inplace_backward)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.inplace_backward = inplace_backward

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for ``x``."""
        hidden = swiglu(self.gate_proj(x), self.up_proj(x), inplace_backward=self.inplace_backward)
        return self.down_proj(hidden)

    def extra_repr(self) -> str:
        return f"inplace_backward={self.inplace_backward}"
