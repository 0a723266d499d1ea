"""The attention layers of transformers' models: their own forward, in which our ops rotate queries and keys."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from warpsmith.integrations._modules import Forward, StandIn, beside, is_free, joined
from warpsmith.integrations._torch_parts import with_names
from warpsmith.ops.rope import qk_norm_rope, rope

_ROTATION = "apply_rotary_pos_emb"


_SIBLINGS = ("q_proj", "k_proj", "v_proj")

Products = Mapping[str, Tensor]
NONE: Products = {}


def eps_of(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps  # type: ignore[return-value]


def offset_of(norm: Any) -> float | None:
    """What is added to the weight of an RMS norm that we have patched. None: the norm is another."""
    return getattr(norm.forward, "offset", None)


class Rows(NamedTuple):
    """Stands for rows that are not in memory. The forward of an attention layer reads their shape."""

    shape: torch.Size


class _BeforeNorm(NamedTuple):
    """The heads of queries or keys, whose norm the rotation does too."""

    heads: Tensor
    norm: nn.Module

    def transpose(self, *dims: int) -> _BeforeNorm:
        return _BeforeNorm(self.heads.transpose(*dims), self.norm)


class _Layer(StandIn):
    """An attention layer in its class's forward. Its first products, by the name of their projection, may be made; else
    the first of queries, keys and values makes those of all where that may pay, which the others take if they read the
    same tensor."""

    def __init__(self, layer: Any, products: Products) -> None:
        super().__init__(layer)
        self._products = products
        self._read: Any = None  # by the first, and what the others get
        self._left: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        product = self._products.get(name)
        if product is not None:
            return lambda x: product
        found = getattr(self._of, name)
        shared = name in _SIBLINGS and not torch.compiler.is_compiling()
        return functools.partial(self._project, name, found) if shared else found

    def _project(self, name: str, layer: Any, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            return layer(x)
        read = x, None if x.is_inference() else x._version
        if self._read is None:
            self._read = read
            names = [n for n in _SIBLINGS if hasattr(self._of, n)]
            made = joined([getattr(self._of, n) for n in names], x)
            self._left = {} if made is None else dict(zip(names, made, strict=True))
        same = self._read[0] is x and self._read[1] == read[1]
        product = self._left.pop(name, None) if same else None
        return layer(x) if product is None else product

    def q_norm(self, heads: Tensor) -> Tensor | _BeforeNorm:
        return self._before(self._of.q_norm, heads)

    def k_norm(self, heads: Tensor) -> Tensor | _BeforeNorm:
        return self._before(self._of.k_norm, heads)

    def _before(self, norm: nn.Module, heads: Tensor) -> Tensor | _BeforeNorm:
        both = self._of.q_norm, self._of.k_norm
        # A norm of three dimensions is one of all heads together.
        fused = heads.dim() == 4 and all(is_free(n) and offset_of(n) is not None for n in both)
        return _BeforeNorm(heads, norm) if fused and eps_of(both[0]) == eps_of(both[1]) else norm(heads)


def _weight(norm: nn.Module, x: Tensor) -> Tensor:
    """What a norm multiplies by. A sum with the offset keeps the bits of a 16-bit weight."""
    offset: Any = offset_of(norm)
    weight: Any = norm.weight
    return offset + (weight.float() if weight.element_size() == 2 else weight) if offset else beside(weight, x)


def _rotation(interleaved: bool, halves: bool) -> Forward:
    def rotate(q: Any, k: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """What the models call ``apply_rotary_pos_emb``. q and k: (B, H, S, D)."""
        if unsqueeze_dim != 1:
            raise ValueError("apply_rotary_pos_emb: unsqueeze_dim: expected 1")
        if halves:
            cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        wide = torch.promote_types(cos.dtype, q.heads.dtype if isinstance(q, _BeforeNorm) else q.dtype)
        cos, sin = cos.to(wide), sin.to(wide)  # some models leave their tables in float32
        if isinstance(q, _BeforeNorm):
            heads = q.heads.transpose(1, 2), k.heads.transpose(1, 2)
            weights = _weight(q.norm, heads[0]), _weight(k.norm, heads[1])
            q, k = qk_norm_rope(*heads, *weights, cos, sin, eps=eps_of(q.norm), interleaved=interleaved)
        else:
            q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotate


class _Interfaces:
    """``ALL_ATTENTION_FUNCTIONS`` whose functions get the layer and not its stand-in."""

    @staticmethod
    def get_interface(implementation: str, default: Forward) -> Forward:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)

        def of_layer(layer: _Layer, *arguments: Any, **options: Any) -> Any:
            return attend(layer._of, *arguments, **options)

        return of_layer


def attention(old: Forward, *, interleaved: bool = False, halves: bool = False) -> Forward | None:
    """A forward with the code of ``old``, in which two names mean something else. So the attention function gets the
    arguments that the code of transformers hands it. None: code that does not rotate by that name.

    ``interleaved``: pairs are neighbours; ``halves``: the tables have a column a pair. ``products`` of a call: the
    layer's first, where they are made already. Then ``hidden_states`` may be :class:`Rows`.
    """
    names = {_ROTATION: _rotation(interleaved, halves), "ALL_ATTENTION_FUNCTIONS": _Interfaces}
    theirs = with_names(inspect.unwrap(old), _ROTATION, **names)
    if theirs is None:
        return None

    def forward(self: Any, *arguments: Any, products: Products = NONE, **options: Any) -> Any:
        return theirs(_Layer(self, products), *arguments, **options)

    return forward
