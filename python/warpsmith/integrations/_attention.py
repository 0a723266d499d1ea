"""The attention layers of transformers' models: their own forward, in which our ops rotate queries and keys."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from warpsmith.integrations._modules import Forward, StandIn, is_free
from warpsmith.ops.rope import qk_norm_rope, rope

_ROTATION = "apply_rotary_pos_emb"


def eps_of(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps  # type: ignore[return-value]


class Rows(NamedTuple):
    """Stands for rows that are not in memory. The forward of an attention layer reads their shape."""

    shape: torch.Size


class _BeforeNorm(NamedTuple):
    """The heads of queries or keys, whose norm the rotation does too."""

    heads: Tensor  # (B, S, H, D)
    norm: nn.Module

    def transpose(self, *_: int) -> _BeforeNorm:
        return self


class _Layer(StandIn):
    """An attention layer in its class's forward. Its products may be made already."""

    def __init__(self, layer: Any, products: Sequence[Tensor] | None) -> None:
        super().__init__(layer)
        self._products = products

    def q_proj(self, x: Any) -> Tensor:
        return self._of.q_proj(x) if self._products is None else self._products[0]

    def k_proj(self, x: Any) -> Tensor:
        return self._of.k_proj(x) if self._products is None else self._products[1]

    def v_proj(self, x: Any) -> Tensor:
        return self._of.v_proj(x) if self._products is None else self._products[2]

    def q_norm(self, heads: Tensor) -> Tensor | _BeforeNorm:
        return self._before(self._of.q_norm, heads)

    def k_norm(self, heads: Tensor) -> Tensor | _BeforeNorm:
        return self._before(self._of.k_norm, heads)

    def _before(self, norm: nn.Module, heads: Tensor) -> Tensor | _BeforeNorm:
        both = is_free(self._of.q_norm) and is_free(self._of.k_norm)
        return _BeforeNorm(heads, norm) if both else norm(heads)


def _rotate(q: Any, k: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What the models call ``apply_rotary_pos_emb``. q and k: (B, H, S, D), in memory tokens come before heads."""
    if isinstance(q, _BeforeNorm):
        weights = q.norm.weight, k.norm.weight
        q, k = qk_norm_rope(q.heads, k.heads, *weights, cos, sin, eps=eps_of(q.norm))  # type: ignore[arg-type]
    else:
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


class _Interfaces:
    """``ALL_ATTENTION_FUNCTIONS`` whose functions get the layer and not its stand-in."""

    @staticmethod
    def get_interface(implementation: str, default: Forward) -> Forward:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)

        def of_layer(layer: _Layer, *arguments: Any, **options: Any) -> Any:
            return attend(layer._of, *arguments, **options)

        return of_layer


def attention(old: Forward) -> Forward | None:
    """A forward with the code of ``old``, in which two names mean something else. So the attention function gets the
    arguments that the code of transformers hands it. None: code that does not rotate by that name.

    ``products``: the layer's first three, where they are made already. Then ``hidden_states`` may be :class:`Rows`.
    """
    function = inspect.unwrap(old)
    if not isinstance(function, types.FunctionType) or _ROTATION not in function.__code__.co_names:
        return None
    names = {**function.__globals__, _ROTATION: _rotate, "ALL_ATTENTION_FUNCTIONS": _Interfaces}
    del names["__name__"]  # torch.compile would look the names up in the module of this name
    theirs = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    theirs.__kwdefaults__ = function.__kwdefaults__

    def forward(self: Any, *arguments: Any, products: Sequence[Tensor] | None = None, **options: Any) -> Any:
        return theirs(_Layer(self, products), *arguments, **options)

    return forward
