"""The parts of transformers' models that ``patch`` replaces: for each a maker of its new ``forward`` from the old."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.pytorch_utils import Conv1D

from warpsmith._core.modules import is_untouched, is_watched, stock
from warpsmith.amp.fp8 import reads_rows
from warpsmith.integrations._attention import Products, Rows, attention, eps_of, offset_of
from warpsmith.integrations._modules import (
    Forward,
    Part,
    StandIn,
    beside,
    by_name,
    is_free,
    is_ours,
    joined,
)
from warpsmith.integrations._torch_parts import sum_and_layer
from warpsmith.nn import Linear, functional
from warpsmith.nn._linear import is_product
from warpsmith.ops import _activated_linear
from warpsmith.ops._norm_linears import fits, norm_linears
from warpsmith.ops._scaled_linear import may_keep_rows
from warpsmith.ops._shared_casts import with_cast
from warpsmith.ops.activation import bias_gelu, geglu, reglu, swiglu
from warpsmith.ops.linear_loss import linear_cross_entropy
from warpsmith.ops.norm import add_rms_norm, rms_norm

# ---- norms


def _rms(offset: float = 0.0, *, widens: bool = False) -> Part:
    """``widens``: the weight multiplies what is rounded already, so that a wider weight makes a wider product."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        y = rms_norm(hidden_states, beside(self.weight, hidden_states), eps_of(self), offset)
        return y.to(torch.promote_types(y.dtype, self.weight.dtype)) if widens else y

    forward.offset = offset  # type: ignore[attr-defined]
    return Part("norms", "warpsmith.rms_norm", lambda old: forward)


def _layer_of_weight(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if self.weight.dim() > 1:  # a weight for each head
            return old(self, hidden_states)
        return functional.layer_norm(hidden_states, self.weight.shape, self.weight, None, eps_of(self))

    return forward


def _why_not_layer_of_weight(norm: Any) -> str | None:
    return "it has a weight for each head" if norm.weight.dim() > 1 else None


def _is_plain(linear: Any) -> bool:
    """Whether a module is a matrix product and no more."""
    return is_product(linear) and linear.bias is None


# ---- feed-forward layers

_ACTS = ("act_fn", "act", "activation_fn", "intermediate_act_fn", "transform_act_fn")
_SILU = ("SiLU", "SiLUActivation")
_TANH = ("NewGELUActivation", "GELUTanh", "PytorchGELUTanh")
_EXACT = ("GELUActivation", "GELU")


def _act(module: Any) -> Any:
    return next((getattr(module, name) for name in _ACTS if hasattr(module, name)), None)


def _activation(module: Any) -> str:
    act = _act(module)
    name = type(act).__name__
    return name + ", tanh" if name == "GELU" and act.approximate == "tanh" else name


def _is_called(act: Any) -> bool:
    """Whether somebody sees the calls of an activation, of those that are fused."""
    return not is_untouched(act, type(act))


# By activation: the op, and name and last arguments of its raw ops.
_GATED_OPS: dict[str, tuple[Callable[..., Tensor], str, tuple[bool, ...]]] = {
    **dict.fromkeys(_SILU, (swiglu, "swiglu", ())),
    **dict.fromkeys(_EXACT, (geglu, "geglu", (False,))),
    **dict.fromkeys((*_TANH, "GELU, tanh"), (functools.partial(geglu, approximate="tanh"), "geglu", (True,))),
    "ReLU": (reglu, "reglu", ()),
}


def _why_not_gated(module: nn.Module) -> str | None:
    name = _activation(module)
    return None if name in _GATED_OPS else f"its activation, {name}, is not fused"


def _activated(mlp: Any, *products: Tensor, overwrite: bool = True, reader: Any = None) -> Tensor:
    """What the activation makes of gate and up, apart or packed. The backward may write over them. ``reader``: the
    layer that reads the result."""
    alone = overwrite and not any(t.requires_grad and t.is_leaf for t in products)
    if reader is not None and may_keep_rows(products[0]) and _activation(mlp) in _SILU and reads_rows(reader):
        return with_cast("swiglu")(*products, *(None,) * (2 - len(products)), alone)
    return _GATED_OPS[_activation(mlp)][0](*products, inplace_backward=alone)


def _down(mlp: Any, *products: Tensor, overwrite: bool = True) -> Tensor:
    """What a feed-forward layer makes of its first products."""
    _, name, extra = _GATED_OPS[_activation(mlp)]
    if overwrite and len(products) == 2 and _is_plain(mlp.down_proj):
        if _activated_linear.fits(*products, mlp.down_proj.weight):
            return _activated_linear.activated_linear(*products, mlp.down_proj.weight, name, *extra)
    return mlp.down_proj(_activated(mlp, *products, overwrite=overwrite, reader=mlp.down_proj))


def _gated(*names: str, rest: Sequence[str] = ()) -> Callable[[Forward], Forward]:
    """Named first products, and what follows the activation; without names of its own it is ``down_proj``."""

    def make(old: Forward) -> Forward:
        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            if _why_not_gated(self) or _is_called(_act(self)):
                return old(self, hidden_states)
            first = [getattr(self, name) for name in names]
            overwrite = not any(map(is_watched, first))  # a hook may keep what it sees
            products = joined(first, hidden_states) or [linear(hidden_states) for linear in first]
            if not rest:
                return _down(self, *products, overwrite=overwrite)
            return _through(self, rest, _activated(self, *products, overwrite=overwrite))

        return forward

    return make


def _through(module: Any, names: Sequence[str], x: Tensor) -> Tensor:
    for name in names:
        x = getattr(module, name)(x)
    return x


def _gelu_form(module: nn.Module) -> str | None:
    name = _activation(module)
    return "tanh" if name in (*_TANH, "GELU, tanh") else "none" if name in _EXACT else None


def _why_not_gelu(module: nn.Module) -> str | None:
    return None if _gelu_form(module) else f"its activation, {_activation(module)}, is not fused"


def _gelu(first: str, *rest: str) -> Callable[[Forward], Forward]:
    """A named linear layer with bias, its activation, and what follows."""

    def make(old: Forward) -> Forward:
        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            form, linear = _gelu_form(self), getattr(self, first)
            known = is_untouched(linear, Conv1D) or is_product(linear) and linear.bias is not None
            if form is None or _is_called(_act(self)) or not known:
                return old(self, hidden_states)
            weight = linear.weight if type(linear) is Conv1D else linear.weight.t()
            return _through(self, rest, bias_gelu(hidden_states @ weight, linear.bias, form))

        return forward

    return make


# ---- decoder layers: a residual sum and the norm behind it are one op


def _feeds_fp8(layer: Any, names: Sequence[str], x: Tensor) -> bool:
    """Whether a norm of x, read by a layer's projections, of those named, may leave its cast to them."""
    return may_keep_rows(x) and any(reads_rows(getattr(layer, n)) for n in names if hasattr(layer, n))


def _rms_for(layer: Any, names: Sequence[str], x: Tensor, norm: Any) -> Tensor:
    """The norm of x, for a layer's projections, of those named."""
    offset = offset_of(norm)
    if offset is None or not is_free(norm) or norm.weight.dtype != x.dtype or not _feeds_fp8(layer, names, x):
        return norm(x)
    return with_cast("rms_norm")(x, norm.weight, eps_of(norm), offset)


def _sum_and_rms_for(layer: Any, names: Sequence[str], x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """The same of x + residual, and that sum."""
    offset = offset_of(norm)
    fits = x.dtype == residual.dtype or (residual.dtype == torch.float32 and x.element_size() == 2)
    if offset is None or not is_free(norm) or not fits:
        total = residual + x
        return norm(total), total
    op = with_cast("add_rms_norm") if _feeds_fp8(layer, names, x) else add_rms_norm
    return op(x, residual, beside(norm.weight, x), eps_of(norm), offset)


def _normed(
    norm: Any, layer: Any, names: Sequence[str], x: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Products] | None:
    """(s, the products of a layer's projections, of those named, with the norm of s), s = x or x + residual, as one op
    that does not keep the normed rows; None where a module is another's, has hooks or does not fit."""
    linears = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    offset = offset_of(norm)
    if offset is None or not all(map(is_free, (norm, layer))) or not all(map(_is_plain, linears.values())):
        return None
    weights = [p.weight for p in linears.values()]
    given = (x, norm.weight, *weights) if residual is None else (x, residual, norm.weight, *weights)
    if not fits(*given):
        return None
    s, *products = norm_linears(x, residual, norm.weight, eps_of(norm), offset, weights)
    return s, dict(zip(linears, products, strict=True))


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj")


def _added(block: Any, x: Tensor, dropout: str) -> Tensor:
    """What a decoder layer adds to its stream: dropped out by some (Phi-3), times a number in others (Granite)."""
    x = getattr(block, dropout)(x) if hasattr(block, dropout) else x
    multiplier = getattr(block, "residual_multiplier", None)
    return x if multiplier is None else x * multiplier


def _self_attention(block: Any, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, x) of a decoder layer's first norm and attention."""
    done = _normed(block.input_layernorm, block.self_attn, _QKV, x)
    if done is None:
        y = _rms_for(block.self_attn, _QKV, x, block.input_layernorm)
        return block.self_attn(hidden_states=y, **options)[0], x
    return block.self_attn.forward(Rows(x.shape), products=done[1], **options)[0], done[0]


def _feed_forward(block: Any, norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(out, x + residual) of a decoder layer's second sum, norm and feed-forward layer, or experts."""
    whole = not is_ours(block.mlp) or _why_not_gated(block.mlp) or _is_called(_act(block.mlp))
    done = None if whole else _normed(norm, block.mlp, _GATE_UP, x, residual)
    if done is not None:
        return _down(block.mlp, *done[1].values()), done[0]
    y, residual = _sum_and_rms_for(block.mlp, _GATE_UP, x, residual, norm)
    y = block.mlp(y)
    return (y[0] if isinstance(y, tuple) else y), residual  # gpt-oss also gives the router's scores


def _decoder(old: Forward) -> Forward:
    given = by_name(old)

    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        options = given(arguments, options)
        x, residual = _self_attention(self, options.pop("hidden_states"), options)
        x = _added(self, x, "resid_attn_dropout")
        x, residual = _feed_forward(self, self.post_attention_layernorm, x, residual)
        return residual + _added(self, x, "resid_mlp_dropout")

    return forward


def _gemma_decoder(old: Forward) -> Forward:
    given = by_name(old)

    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        options = given(arguments, options)
        x, residual = _self_attention(self, options.pop("hidden_states"), options)
        x = self.post_attention_layernorm(x)
        x, residual = _feed_forward(self, self.pre_feedforward_layernorm, x, residual)
        return residual + self.post_feedforward_layernorm(x)

    return forward


def _block(first_norm: str, attention: str, norm: str, dropout: str = "") -> Callable[[Forward], Forward]:
    """Layer norm, attention, sum, layer norm, feed-forward layer ``mlp``, sum. Named: its modules."""

    def make(old: Forward) -> Forward:
        given = by_name(old)

        def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
            named, drop = given(arguments, options), (dropout,) if dropout else ()
            if named.pop("encoder_hidden_states", None) is not None:
                return old(self, *arguments, **options)
            hidden_states, _ = named.pop("hidden_states"), named.pop("encoder_attention_mask", None)
            x, _ = getattr(self, attention)(getattr(self, first_norm)(hidden_states), **named)
            x, casts = _through(self, drop, x), _feeds_fp8(self.mlp, ("fc1", "Wi"), hidden_states)
            y, residual = sum_and_layer(x, hidden_states, getattr(self, norm), casts)
            return residual + _through(self, drop, self.mlp(y))

        return forward

    return make


def _parallel(old: Forward) -> Forward:
    """Cohere's decoder layer: attention and the feed-forward layer read one norm."""
    given = by_name(old)

    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        options, norm = given(arguments, options), self.input_layernorm
        x = options.pop("hidden_states")
        fed = _feeds_fp8(self.self_attn, _QKV, x) or _feeds_fp8(self.mlp, _GATE_UP, x)
        if fed and is_free(norm) and norm.weight.dtype == x.dtype and norm.weight.dim() == 1:
            y = with_cast("layer_norm")(x, norm.weight, None, eps_of(norm))
        else:
            y = norm(x)
        return x + self.self_attn(hidden_states=y, **options)[0] + self.mlp(y)

    return forward


def _sum_behind(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """The end of BERT's layers: the norm of the sum is what goes on."""
    return sum_and_layer(self.dropout(self.dense(hidden_states)), input_tensor, self.LayerNorm)[0]


# ---- the head and its loss


def _why_not_head(module: Any, name: str, loss: Callable[..., Tensor]) -> str | None:
    head = getattr(module, name)
    if stock(type(head)) not in (nn.Linear, Linear):
        return f"its {name} is a {type(head).__name__} and not a torch.nn.Linear"
    if module.loss_function is not loss:
        return "its loss_function is not transformers' loss of its kind"
    return None


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    return nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


class _Config(StandIn):
    """The config of a model whose logits are never made. ``softcap`` is what its forward asks for to cap them."""

    softcap = 0.0

    @property
    def final_logit_softcapping(self) -> None:
        self.softcap = self._of.final_logit_softcapping or 0.0


class NoLogits:
    """The logits of outputs that have none: who uses them gets an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AttributeError("logits: none in training with labels; patch(model, logits=True) keeps them")

    __getattr__ = __getitem__ = __len__ = __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __matmul__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        cls()._refuse()


class _Logits(NoLogits):
    """Stands for logits of hidden states, which are never made. A forward may multiply and divide them; all else
    raises."""

    def __init__(self, hidden: Tensor, scale: Any = 1.0) -> None:
        self.hidden, self.scale = hidden, scale

    def __mul__(self, factor: Any) -> _Logits:
        return _Logits(self.hidden, self.scale * factor)

    def __truediv__(self, factor: Any) -> _Logits:
        return _Logits(self.hidden, self.scale / factor)


def _without_logits(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(t for t in out if not isinstance(t, _Logits))
    found = type(out)(**{name: t for name, t in out.items() if not isinstance(t, _Logits)})
    if not torch.compiler.is_compiling():
        vars(found)["logits"] = NoLogits()  # an attribute, and no item
    return found


class _Head(StandIn):
    """A model in its class's forward: its head makes no logits, its loss multiplies by the head's weight. It refers to
    no tensor of a step, and not to itself: a cycle would keep the step's graph until Python collects."""

    def __init__(self, model: Any, name: str, shifts: bool) -> None:
        super().__init__(model)
        self.config = _Config(model.config)
        self._head, self._shifts = getattr(model, name), shifts
        setattr(self, name, _Logits)

    def loss_function(
        self,
        logits: _Logits,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        hidden, bias = logits.hidden, self._head.bias
        if logits.scale != 1:
            hidden, bias = hidden * logits.scale, None if bias is None else bias * logits.scale
        if self._shifts:
            labels = _shifted(labels, ignore_index) if shift_labels is None else shift_labels
        loss: Any = linear_cross_entropy(
            hidden,
            self._head.weight,
            labels.to(hidden.device).reshape(hidden.shape[:-1]),
            bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            softcap=self.config.softcap,
        )
        if num_items_in_batch is not None:
            count = num_items_in_batch
            loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
        return loss


def _head(name: str = "lm_head", loss: Callable[..., Tensor] = ForCausalLMLoss) -> Part:
    def make(old: Forward) -> Forward:
        given = by_name(old)

        @functools.wraps(old)
        def forward(self: Any, *arguments: Any, **options: Any) -> Any:
            named = given(arguments, options)
            keep = named.get("logits_to_keep", 0)
            whole = isinstance(keep, int) and keep == 0
            fused = named["labels"] is not None and self.training and whole
            if not fused or _why_not_head(self, name, loss) or not is_product(getattr(self, name)):
                return old(self, *arguments, **options)
            stand_in = _Head(self, name, shifts=loss is ForCausalLMLoss)
            return _without_logits(old(stand_in, *arguments, **options))

        forward.head = name  # type: ignore[attr-defined]
        return forward

    return Part("loss", "warpsmith.linear_cross_entropy", make, functools.partial(_why_not_head, name=name, loss=loss))


# ---- the parts, by what they compute

RMS, RMS_AROUND_ZERO, RMS_WIDENS = _rms(), _rms(1.0), _rms(widens=True)
LAYER_NORM_OF_WEIGHT = Part("norms", "warpsmith.layer_norm", _layer_of_weight, _why_not_layer_of_weight)
GATED = Part("mlp", "warpsmith.swiglu, geglu or reglu", _gated("gate_proj", "up_proj"), _why_not_gated)
GATED_PACKED = Part("mlp", "warpsmith.swiglu, geglu or reglu", _gated("gate_up_proj"), _why_not_gated)
GATED_WI = Part("mlp", "warpsmith.swiglu, geglu or reglu", _gated("Wi", rest=("drop", "Wo")), _why_not_gated)
ROTARY = Part("rope", "warpsmith.rope", attention)
ROTARY_HALVES = Part("rope", "warpsmith.rope", functools.partial(attention, halves=True))
ROTARY_INTERLEAVED = Part("rope", "warpsmith.rope", functools.partial(attention, interleaved=True))
QK_ROTARY = Part("rope", "warpsmith.qk_norm_rope", attention)
DECODER = Part("norms", "warpsmith.add_rms_norm", _decoder)
PARALLEL_DECODER = Part("norms", "warpsmith.layer_norm", _parallel)
GEMMA_DECODER = Part("norms", "warpsmith.add_rms_norm", _gemma_decoder)
SUM_BEHIND = Part("norms", "warpsmith.add_layer_norm", lambda old: _sum_behind)
CAUSAL_HEAD = _head()
MASKED_HEAD = _head("decoder", ForMaskedLMLoss)


def gelu(*names: str) -> Part:
    return Part("mlp", "warpsmith.bias_gelu", _gelu(*names), _why_not_gelu)


def block(*names: str) -> Part:
    return Part("norms", "warpsmith.add_layer_norm", _block(*names))
