"""The parts of transformers' models that ``patch`` replaces: for each a maker of its new ``forward`` from the old."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.pytorch_utils import Conv1D

from warpsmith.integrations._attention import Rows, attention, eps_of
from warpsmith.integrations._modules import Forward, StandIn, by_name, is_free, is_untouched, is_watched
from warpsmith.nn import Linear, functional
from warpsmith.ops import _activated_linear
from warpsmith.ops._norm_linears import fits, norm_linears
from warpsmith.ops.activation import bias_gelu, geglu, reglu, swiglu
from warpsmith.ops.linear_loss import linear_cross_entropy
from warpsmith.ops.norm import add_layer_norm, add_rms_norm, rms_norm


class Part(NamedTuple):
    """What stands in the place of a class's forward."""

    what: str  # for reports
    make: Callable[[Forward], Forward | None]  # from the old forward; None: it is not the one that we know
    why_not: Callable[[nn.Module], str | None] = lambda module: None  # of one module


# ---- norms


def _beside(weight: Tensor, x: Tensor) -> Tensor:
    """A 16-bit weight beside wider activations, as their product would cast it."""
    return weight if weight.dtype == x.dtype or x.element_size() == 2 else weight.to(x.dtype)


def _rms(offset: float) -> Callable[[Forward], Forward]:
    def make(old: Forward) -> Forward:
        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            y = rms_norm(hidden_states, _beside(self.weight, hidden_states), eps_of(self), offset)
            # A wider weight makes a wider product; where the weight is stored around zero, the input's dtype comes out.
            return y if offset else y.to(torch.promote_types(y.dtype, self.weight.dtype))

        return forward

    return make


def _layer(old: Forward) -> Forward:
    def forward(self: Any, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    return forward


def _is_plain(linear: nn.Module) -> bool:
    """Whether a module is a matrix product and no more."""
    if is_untouched(linear, Linear):
        return linear.bias is None and linear.activation is None and not linear.fuse_main_grad
    return is_untouched(linear, nn.Linear) and linear.bias is None


# ---- feed-forward layers

_SILU = ("SiLU", "SiLUActivation")
_TANH = ("NewGELUActivation", "GELUTanh", "PytorchGELUTanh")
_EXACT = ("GELUActivation", "GELU")


def _act(module: Any) -> Any:
    return module.act_fn if hasattr(module, "act_fn") else module.act


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


def _down(mlp: Any, gate: Tensor, up: Tensor, overwrite: bool = True) -> Tensor:
    """What a feed-forward layer makes of its first two products, over which its backward may write."""
    op, name, extra = _GATED_OPS[_activation(mlp)]
    if overwrite and _is_plain(mlp.down_proj) and _activated_linear.fits(gate, up, mlp.down_proj.weight):
        return _activated_linear.activated_linear(gate, up, mlp.down_proj.weight, name, *extra)
    alone = overwrite and not any(t.requires_grad and t.is_leaf for t in (gate, up))
    return mlp.down_proj(op(gate, up, inplace_backward=alone))


def _gated(old: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        if _why_not_gated(self) or _is_called(_act(self)):
            return old(self, x)
        kept = is_watched(self.gate_proj) or is_watched(self.up_proj)  # a hook may keep what it sees
        return _down(self, self.gate_proj(x), self.up_proj(x), overwrite=not kept)

    return forward


def _gelu_form(module: nn.Module) -> str | None:
    name = _activation(module)
    return "tanh" if name in (*_TANH, "GELU, tanh") else "none" if name in _EXACT else None


def _why_not_gpt2_mlp(module: nn.Module) -> str | None:
    return None if _gelu_form(module) else f"its activation, {_activation(module)}, is not fused"


def _gpt2_mlp(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        form, c_fc = _gelu_form(self), self.c_fc
        if form is None or _is_called(self.act) or not is_untouched(c_fc, Conv1D):
            return old(self, hidden_states)
        h = bias_gelu(hidden_states @ c_fc.weight, c_fc.bias, form)
        return self.dropout(self.c_proj(h))

    return forward


# ---- decoder layers: a residual sum and the norm behind it are one op


def _sum_and_rms(x: Tensor, residual: Tensor, norm: Any, offset: float) -> tuple[Tensor, Tensor]:
    fits = x.dtype == residual.dtype or (residual.dtype == torch.float32 and x.element_size() == 2)
    if not is_free(norm) or not fits:
        total = residual + x
        return norm(total), total
    return add_rms_norm(x, residual, _beside(norm.weight, x), eps_of(norm), offset)


def _normed(
    norm: Any, offset: float, layer: Any, names: Sequence[str], x: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, ...] | None:
    """(s, and the products of a layer's named projections with the norm of s), s = x or x + residual, as one op that
    does not keep the normed rows; None where a module is another's, has hooks or does not fit."""
    linears = [getattr(layer, name) for name in names]
    if not all(map(is_free, (norm, layer))) or not all(map(_is_plain, linears)):
        return None
    weights = [p.weight for p in linears]
    given = (x, norm.weight, *weights) if residual is None else (x, residual, norm.weight, *weights)
    return norm_linears(x, residual, norm.weight, eps_of(norm), offset, weights) if fits(*given) else None


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _self_attention(block: Any, offset: float, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, x) of a decoder layer's first norm and attention."""
    done = _normed(block.input_layernorm, offset, block.self_attn, _QKV, x)
    if done is None:
        return block.self_attn(hidden_states=block.input_layernorm(x), **options)[0], x
    return block.self_attn.forward(Rows(x.shape), products=done[1:], **options)[0], done[0]


def _feed_forward(block: Any, norm: Any, offset: float, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(out, x + residual) of a decoder layer's second sum, norm and feed-forward layer."""
    whole = _why_not_gated(block.mlp) or _is_called(_act(block.mlp))
    done = None if whole else _normed(norm, offset, block.mlp, _GATE_UP, x, residual)
    if done is None:
        y, residual = _sum_and_rms(x, residual, norm, offset)
        return block.mlp(y), residual
    return _down(block.mlp, done[1], done[2]), done[0]


def _decoder(old: Forward) -> Forward:
    given = by_name(old)

    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        options = given(arguments, options)
        x, residual = _self_attention(self, 0.0, options.pop("hidden_states"), options)
        x, residual = _feed_forward(self, self.post_attention_layernorm, 0.0, x, residual)
        return residual + x

    return forward


def _gemma2_decoder(old: Forward) -> Forward:
    given = by_name(old)

    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        options = given(arguments, options)
        x, residual = _self_attention(self, 1.0, options.pop("hidden_states"), options)
        x = self.post_attention_layernorm(x)
        x, residual = _feed_forward(self, self.pre_feedforward_layernorm, 1.0, x, residual)
        return residual + self.post_feedforward_layernorm(x)

    return forward


def _gpt2_block(old: Forward) -> Forward:
    given = by_name(old)

    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        ln, named = self.ln_2, given(arguments, options)
        if named.pop("encoder_hidden_states") is not None or not (is_free(ln) or is_untouched(ln, nn.LayerNorm)):
            return old(self, *arguments, **options)
        hidden_states, _ = named.pop("hidden_states"), named.pop("encoder_attention_mask")
        x, _ = self.attn(self.ln_1(hidden_states), **named)
        if x.dtype != hidden_states.dtype and hidden_states.dtype != torch.float32:
            total = x + hidden_states
            return total + self.mlp(ln(total))
        y, residual = add_layer_norm(x, hidden_states, _beside(ln.weight, x), _beside(ln.bias, x), ln.eps)
        return residual + self.mlp(y)

    return forward


# ---- the head and its loss


def _why_not_head(module: Any) -> str | None:
    if type(module.lm_head) is not nn.Linear:
        return f"its lm_head is a {type(module.lm_head).__name__} and not a torch.nn.Linear"
    if module.loss_function is not ForCausalLMLoss:
        return "its loss_function is not transformers' loss of causal models"
    return None


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    return nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


class _Config(StandIn):
    """The config of a model whose logits are never made. ``softcap`` is what its forward asks for to cap them."""

    softcap = 0.0

    @property
    def final_logit_softcapping(self) -> None:
        self.softcap = self._of.final_logit_softcapping or 0.0


class _Head(StandIn):
    """A causal model in its class's forward: its head makes no logits, its loss multiplies by the head's weight."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.config = _Config(model.config)
        self._hidden: Any = None

    def lm_head(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def loss_function(
        self,
        logits: None,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        hidden, head = self._hidden, self._of.lm_head
        target = (_shifted(labels, ignore_index) if shift_labels is None else shift_labels).to(hidden.device)
        loss: Any = linear_cross_entropy(
            hidden,
            head.weight,
            target.reshape(hidden.shape[:-1]),
            head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            softcap=self.config.softcap,
        )
        if num_items_in_batch is not None:
            count = num_items_in_batch
            loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
        return loss


def _causal_lm(old: Forward) -> Forward:
    given = by_name(old)

    @functools.wraps(old)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        named = given(arguments, options)
        keep = named["logits_to_keep"]
        whole = isinstance(keep, int) and keep == 0
        fused = named["labels"] is not None and self.training and whole
        if not fused or _why_not_head(self) or not is_untouched(self.lm_head, nn.Linear):
            return old(self, *arguments, **options)
        return old(_Head(self), *arguments, **options)

    return forward


# ---- which class gets which part

_RMS = Part("warpsmith.rms_norm", _rms(0.0))
_GATED = Part("warpsmith.swiglu, geglu or reglu", _gated, _why_not_gated)
_ROTARY = Part("warpsmith.rope", attention)
_QK = Part("warpsmith.qk_norm_rope", attention)
_LAYER = Part("warpsmith.add_rms_norm", _decoder)
_HEAD = Part("warpsmith.linear_cross_entropy", _causal_lm, _why_not_head)

PARTS: dict[str, dict[str, Part]] = {
    "llama": {"RMSNorm": _RMS, "MLP": _GATED, "Attention": _ROTARY, "DecoderLayer": _LAYER, "ForCausalLM": _HEAD},
    "mistral": {"RMSNorm": _RMS, "MLP": _GATED, "Attention": _ROTARY, "DecoderLayer": _LAYER, "ForCausalLM": _HEAD},
    "qwen3": {"RMSNorm": _RMS, "MLP": _GATED, "Attention": _QK, "DecoderLayer": _LAYER, "ForCausalLM": _HEAD},
    "gemma2": {
        "RMSNorm": Part("warpsmith.rms_norm", _rms(1.0)),
        "MLP": _GATED,
        "Attention": _ROTARY,
        "DecoderLayer": Part("warpsmith.add_rms_norm", _gemma2_decoder),
        "ForCausalLM": _HEAD,
    },
    "gpt2": {
        "MLP": Part("warpsmith.bias_gelu", _gpt2_mlp, _why_not_gpt2_mlp),
        "Block": Part("warpsmith.add_layer_norm", _gpt2_block),
        "LMHeadModel": _HEAD,
    },
}
PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3", "gemma2": "Gemma2", "gpt2": "GPT2"}
TORCHS_LAYER_NORM = Part("warpsmith.layer_norm", _layer)
