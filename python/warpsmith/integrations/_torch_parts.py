"""The parts of torch's own modules that ``patch`` replaces. What an op does not take, a call leaves to torch."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from warpsmith._core.modules import is_untouched, stock
from warpsmith.integrations._modules import Forward, Part, beside
from warpsmith.nn import functional
from warpsmith.nn._linear import is_product
from warpsmith.ops._shared_casts import with_cast
from warpsmith.ops.linear import linear
from warpsmith.ops.norm import add_layer_norm

Block = Callable[[Tensor], Tensor]
_PLAIN = (Tensor, nn.Parameter)

# ---- norms


def _layer(self: Any, input: Tensor) -> Tensor:
    return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _rms(self: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _sum_and_norm(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total), total


def sum_and_layer(x: Tensor, residual: Tensor, norm: Any, casts: bool = False) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), as one op where that is the same. ``casts``: which leaves the cast of y."""
    fits = x.dtype == residual.dtype or residual.dtype == torch.float32
    fits = fits and x.shape == residual.shape and type(x) in _PLAIN and type(residual) in _PLAIN
    if not fits or not is_untouched(norm, nn.LayerNorm) or norm.weight is None or len(norm.normalized_shape) > 1:
        return _sum_and_norm(x, residual, norm)
    bias = None if norm.bias is None else beside(norm.bias, x)
    op = with_cast("add_layer_norm") if casts else add_layer_norm
    return op(x, residual, beside(norm.weight, x), bias, norm.eps)


def _strictly(x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """With torch's dtypes, which are others than the op's where two meet."""
    same = x.dtype == residual.dtype and not functional.is_autocast(x)
    return (sum_and_layer if same else _sum_and_norm)(x, residual, norm)


# ---- linear layers


def _linear(self: Any, input: Tensor) -> Tensor:
    return functional.linear(input, self.weight, self.bias)


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _activation(act: Any) -> str | None:
    """The name that :func:`warpsmith.linear` has for a module or a function."""
    if act in (nn.functional.relu, torch.relu):
        return "relu"
    if act is nn.functional.gelu:
        return "gelu"
    cls = type(act)
    if cls not in (nn.ReLU, nn.GELU, nn.SiLU) or not is_untouched(act, cls):
        return None
    return _GELU.get(act.approximate) if cls is nn.GELU else cls.__name__.lower()


def _activated(layer: Any, act: Any, x: Tensor) -> Tensor:
    """A linear layer and its activation."""
    name = _activation(act) if is_product(layer) else None
    if name is not None and functional.linear_fits(x, layer.weight, layer.bias):
        return linear(x, layer.weight, layer.bias, name)
    return act(layer(x))


def _is_pair(first: Any, second: Any) -> bool:
    return is_product(first) and _activation(second) is not None


def pair_of(sequence: Any) -> nn.Sequential | None:
    """A linear layer of a sequence and the activation behind it."""
    layers = list(sequence)
    return next((nn.Sequential(*two) for two in zip(layers, layers[1:], strict=False) if _is_pair(*two)), None)


def _sequence(self: Any, input: Any) -> Any:
    layers, i = list(self), 0
    while i < len(layers):
        pair = i + 1 < len(layers) and isinstance(input, Tensor) and _is_pair(*layers[i : i + 2])
        input = _activated(layers[i], layers[i + 1], input) if pair else layers[i](input)
        i += 2 if pair else 1
    return input


# ---- attention


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Dropout is left to torch: its mask belongs to torch's generator."""
    attend = nn.functional if dropout_p else functional
    return attend.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)


def with_names(function: Any, needed: str, **names: Any) -> Any:
    """A function with the code of another, in which names mean something else. None: the needed one is not in it."""
    if not isinstance(function, types.FunctionType) or needed not in function.__code__.co_names:
        return None
    known = {**function.__globals__, **names}
    del known["__name__"]  # torch.compile would look the names up in the module of this name
    copied = types.FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_mha, _SDPA = nn.functional.multi_head_attention_forward, "scaled_dot_product_attention"


def _check_padding(*arguments: Any) -> None:
    if not torch.compiler.is_compiling():  # which does not trace the check's message
        nn.functional._check_key_padding_mask(*arguments)  # type: ignore[attr-defined]


def _multihead(old: Any) -> Forward | None:
    """torch's code, in which :func:`warpsmith.attention` attends where weights are not asked for."""
    functions = {n: getattr(nn.functional, n) for n in old.__code__.co_names if hasattr(nn.functional, n)}
    functions[_mha.__name__] = with_names(_mha, _SDPA, **{_SDPA: _attend}, _check_key_padding_mask=_check_padding)
    if None in functions.values():
        return None
    return with_names(old, _mha.__name__, F=type("F", (), {n: staticmethod(f) for n, f in functions.items()}))


# ---- layers


class _Sums(NamedTuple):
    """Which sums and products of a transformer layer are ours."""

    norms: bool
    mlp: bool

    def feed_forward(self, layer: Any, x: Tensor, dropout: nn.Module) -> Tensor:
        h = _activated(layer.linear1, layer.activation, x) if self.mlp else layer.activation(layer.linear1(x))
        return dropout(layer.linear2(layer.dropout(h)))

    def through(self, layer: Any, x: Tensor, blocks: Sequence[Block], norms: Sequence[nn.Module]) -> Tensor:
        """Blocks with a residual sum around each, and norms before the blocks or behind the sums."""
        add = _strictly if self.norms else _sum_and_norm
        if not layer.norm_first:
            for block, norm in zip(blocks, norms, strict=True):
                x = add(block(x), x, norm)[0]
            return x
        y = norms[0](x)
        for block, norm in zip(blocks, norms[1:], strict=False):
            y, x = add(block(y), x, norm)
        return x + blocks[-1](y)


_masks = nn.functional._canonical_mask


def _encoder_layer(old: Forward, sums: _Sums) -> Forward:
    def forward(
        self: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not self.training or src.is_nested:  # torch has a kernel of the whole layer
            return old(self, src, src_mask, src_key_padding_mask, is_causal)
        other = None if src_mask is None else src_mask.dtype
        padding = _masks(src_key_padding_mask, "src_key_padding_mask", other, "src_mask", src.dtype)
        mask = _masks(src_mask, "src_mask", None, "", src.dtype, False)
        blocks = (
            lambda x: self._sa_block(x, mask, padding, is_causal=is_causal),
            lambda x: sums.feed_forward(self, x, self.dropout2),
        )
        return sums.through(self, src, blocks, (self.norm1, self.norm2))

    return forward


def _decoder_layer(old: Forward, sums: _Sums) -> Forward:
    def forward(
        self: Any,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        blocks = (
            lambda x: self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            lambda x: self._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal),
            lambda x: sums.feed_forward(self, x, self.dropout3),
        )
        return sums.through(self, tgt, blocks, (self.norm1, self.norm2, self.norm3))

    return forward


def _why_not_layer(layer: Any) -> str | None:
    base = nn.TransformerEncoderLayer if isinstance(layer, nn.TransformerEncoderLayer) else nn.TransformerDecoderLayer
    for name in ("_sa_block", "_mha_block", "_ff_block"):
        if getattr(type(layer), name, None) is not getattr(base, name, None):
            return f"its {name} is not torch's"
    return None


# ---- the loss


def _cross_entropy(self: Any, input: Tensor, target: Tensor) -> Tensor:
    options = {n: getattr(self, n) for n in ("ignore_index", "reduction", "label_smoothing")}
    return functional.cross_entropy(input, target, self.weight, **options)


def _why_not_product(layer: Any) -> str | None:
    # MultiheadAttention reads the parameters of its own alone.
    return "" if stock(type(layer)) is nn.modules.linear.NonDynamicallyQuantizableLinear else None


def table(norms: bool, mlp: bool, **_: bool) -> Callable[[type], Part | None]:
    """The part of each class of torch."""
    layer, sums = "warpsmith.add_layer_norm and linear", _Sums(norms, mlp)
    switch = "norms" if norms else "mlp"
    encoder, decoder = (functools.partial(make, sums=sums) for make in (_encoder_layer, _decoder_layer))
    return {
        nn.LayerNorm: Part("norms", "warpsmith.layer_norm", lambda old: _layer),
        nn.RMSNorm: Part("norms", "warpsmith.rms_norm", lambda old: _rms),
        nn.Linear: Part("linear", "warpsmith.linear", lambda old: _linear, _why_not_product),
        nn.Sequential: Part("mlp", "warpsmith.linear", lambda old: _sequence, lambda s: None if pair_of(s) else ""),
        nn.MultiheadAttention: Part("attention", "warpsmith.attention", _multihead),
        nn.TransformerEncoderLayer: Part(switch, layer, encoder, _why_not_layer),
        nn.TransformerDecoderLayer: Part(switch, layer, decoder, _why_not_layer),
        nn.CrossEntropyLoss: Part("loss", "warpsmith.cross_entropy", lambda old: _cross_entropy),
    }.get
