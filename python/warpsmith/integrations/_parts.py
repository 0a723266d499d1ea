"""The parts of transformers' models that ``patch`` replaces: for each a maker of its new ``forward`` from the old."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

from warpsmith.nn import functional
from warpsmith.ops import _gated_linear
from warpsmith.ops._norm_linears import fits, norm_linears
from warpsmith.ops.add_layer_norm import add_layer_norm
from warpsmith.ops.add_rms_norm import add_rms_norm
from warpsmith.ops.bias_gelu import bias_gelu
from warpsmith.ops.geglu import geglu
from warpsmith.ops.linear_cross_entropy import linear_cross_entropy
from warpsmith.ops.qk_norm_rope import qk_norm_rope
from warpsmith.ops.reglu import reglu
from warpsmith.ops.rms_norm import rms_norm
from warpsmith.ops.rope import rope
from warpsmith.ops.swiglu import swiglu

Forward = Callable[..., Any]


class Part(NamedTuple):
    """What stands in the place of a class's forward."""

    what: str  # for reports
    make: Callable[[Forward], Forward]  # from the old forward
    why_not: Callable[[nn.Module], str | None] = lambda module: None  # of one module


# ---- norms


def _eps(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps  # type: ignore[return-value]


def _beside(weight: Tensor, x: Tensor) -> Tensor:
    """A 16-bit weight beside wider activations, as their product would cast it."""
    return weight if weight.dtype == x.dtype or x.element_size() == 2 else weight.to(x.dtype)


def _rms(offset: float) -> Callable[[Forward], Forward]:
    def make(old: Forward) -> Forward:
        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            y = rms_norm(hidden_states, _beside(self.weight, hidden_states), _eps(self), offset)
            # A wider weight makes a wider product; where the weight is stored around zero, the input's dtype comes out.
            return y if offset else y.to(torch.promote_types(y.dtype, self.weight.dtype))

        return forward

    return make


def _layer(old: Forward) -> Forward:
    def forward(self: Any, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    return forward


def _watched(module: nn.Module) -> bool:
    """Whether somebody hangs on the calls of a module (hooks: ZeRO, recorders): then it is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _is_plain(linear: nn.Module) -> bool:
    """Whether a module is a matrix product and no more."""
    plain = type(linear) is nn.Linear and linear.bias is None
    return plain and "forward" not in linear.__dict__ and not _watched(linear)


# ---- feed-forward layers

_SILU = ("SiLU", "SiLUActivation")
_TANH = ("NewGELUActivation", "GELUTanh", "PytorchGELUTanh")
_EXACT = ("GELUActivation", "GELU")


def _activation(module: Any) -> str:
    act = module.act_fn if hasattr(module, "act_fn") else module.act
    name = type(act).__name__
    return name + ", tanh" if name == "GELU" and act.approximate == "tanh" else name


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


def _down(mlp: Any, gate: Tensor, up: Tensor) -> Tensor:
    """What a feed-forward layer makes of its first two products."""
    op, name, extra = _GATED_OPS[_activation(mlp)]
    if _is_plain(mlp.down_proj) and _gated_linear.fits(gate, up, mlp.down_proj.weight):
        return _gated_linear.gated_linear(gate, up, mlp.down_proj.weight, name, *extra)
    alone = not any(t.requires_grad and t.is_leaf for t in (gate, up))
    return mlp.down_proj(op(gate, up, inplace_backward=alone))


def _gated(old: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        return old(self, x) if _why_not_gated(self) else _down(self, self.gate_proj(x), self.up_proj(x))

    return forward


def _gelu_form(module: nn.Module) -> str | None:
    name = _activation(module)
    return "tanh" if name in (*_TANH, "GELU, tanh") else "none" if name in _EXACT else None


def _why_not_gpt2_mlp(module: nn.Module) -> str | None:
    return None if _gelu_form(module) else f"its activation, {_activation(module)}, is not fused"


def _gpt2_mlp(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        form, c_fc = _gelu_form(self), self.c_fc
        if form is None or type(c_fc).__name__ != "Conv1D" or _watched(c_fc):
            return old(self, hidden_states)
        h = bias_gelu(hidden_states @ c_fc.weight, c_fc.bias, form)
        return self.dropout(self.c_proj(h))

    return forward


# ---- attention: its rotation


def _attend(
    layer: Any,
    qkv: Sequence[Tensor],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What an attention layer makes of its first three products, (..., heads * head_dim)."""
    shape = qkv[0].shape[:-1]
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)) for t in qkv)
    cos, sin = position_embeddings  # type: ignore[misc]
    norms = getattr(layer, "q_norm", None), getattr(layer, "k_norm", None)
    if norms[0] is None or norms[1] is None:
        q, k = rope(q, k, cos, sin)
    elif any(map(_watched, norms)):  # type: ignore[arg-type]
        q, k = rope(norms[0](q), norms[1](k), cos, sin)
    else:
        q, k = qk_norm_rope(q, k, norms[0].weight, norms[1].weight, cos, sin, eps=_eps(norms[0]))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, layer.layer_idx)
    eager = sys.modules[type(layer).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager)
    for name, attribute in (("sliding_window", "sliding_window"), ("softcap", "attn_logit_softcapping")):
        if hasattr(layer, attribute):
            options[name] = getattr(layer, attribute)
    dropout = layer.attention_dropout if layer.training else 0.0
    out, weights = attend(layer, q, k, v, attention_mask, dropout=dropout, scaling=layer.scaling, **options)
    return layer.o_proj(out.reshape(*shape, -1)), weights


def _attention(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        qkv = [p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj)]
        return _attend(self, qkv, *arguments, **options)

    return forward


# ---- decoder layers: a residual sum and the norm behind it are one op


def _sum_and_rms(x: Tensor, residual: Tensor, norm: Any, offset: float) -> tuple[Tensor, Tensor]:
    fits = x.dtype == residual.dtype or (residual.dtype == torch.float32 and x.element_size() == 2)
    if _watched(norm) or not fits:
        total = residual + x
        return norm(total), total
    return add_rms_norm(x, residual, _beside(norm.weight, x), _eps(norm), offset)


def _normed(
    norm: Any, offset: float, layer: Any, names: Sequence[str], x: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, ...] | None:
    """(s, and the products of a layer's named projections with the norm of s), s = x or x + residual, as one op that
    does not keep the normed rows; None where a module is another's, has hooks or does not fit."""
    linears = [getattr(layer, name) for name in names]
    ours = all(getattr(m.forward, "of_warpsmith", False) and not _watched(m) for m in (norm, layer))
    if not ours or not all(map(_is_plain, linears)):
        return None
    weights = [p.weight for p in linears]
    given = (x, norm.weight, *weights) if residual is None else (x, residual, norm.weight, *weights)
    return norm_linears(x, residual, norm.weight, _eps(norm), offset, weights) if fits(*given) else None


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _self_attention(block: Any, offset: float, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, x) of a decoder layer's first norm and attention."""
    done = _normed(block.input_layernorm, offset, block.self_attn, _QKV, x)
    if done is None:
        return block.self_attn(hidden_states=block.input_layernorm(x), **options)[0], x
    return _attend(block.self_attn, done[1:], **options)[0], done[0]


def _feed_forward(block: Any, norm: Any, offset: float, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(out, x + residual) of a decoder layer's second sum, norm and feed-forward layer."""
    done = None if _why_not_gated(block.mlp) else _normed(norm, offset, block.mlp, _GATE_UP, x, residual)
    if done is None:
        y, residual = _sum_and_rms(x, residual, norm, offset)
        return block.mlp(y), residual
    return _down(block.mlp, *done[1:]), done[0]


def _decoder(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if arguments:
            return old(self, hidden_states, *arguments, **options)
        x, residual = _self_attention(self, 0.0, hidden_states, options)
        x, residual = _feed_forward(self, self.post_attention_layernorm, 0.0, x, residual)
        return residual + x

    return forward


def _gemma2_decoder(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if arguments:
            return old(self, hidden_states, *arguments, **options)
        x, residual = _self_attention(self, 1.0, hidden_states, options)
        x = self.post_attention_layernorm(x)
        x, residual = _feed_forward(self, self.pre_feedforward_layernorm, 1.0, x, residual)
        return residual + self.post_feedforward_layernorm(x)

    return forward


def _gpt2_block(old: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        ln = self.ln_2
        if arguments or options.get("encoder_hidden_states") is not None or _watched(ln):
            return old(self, hidden_states, *arguments, **options)
        options = {k: v for k, v in options.items() if not k.startswith("encoder_")}
        x, _ = self.attn(self.ln_1(hidden_states), **options)
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


def _causal_lm(old: Forward) -> Forward:
    names = list(inspect.signature(old).parameters)[1:]

    @can_return_tuple
    def fused(self: Any, **given: Any) -> Any:
        labels, count = given.pop("labels"), given.pop("num_items_in_batch", None)
        target, ignore_index = given.pop("shift_labels", None), given.pop("ignore_index", -100)
        given.pop("logits_to_keep", None)
        out = getattr(self, self.base_model_prefix)(**given)
        hidden = out.last_hidden_state
        target = (_shifted(labels, ignore_index) if target is None else target).to(hidden.device)
        loss: Any = linear_cross_entropy(
            hidden,
            self.lm_head.weight,
            target.reshape(hidden.shape[:-1]),
            self.lm_head.bias,
            ignore_index=ignore_index,
            reduction="mean" if count is None else "sum",
            softcap=getattr(self.config, "final_logit_softcapping", None) or 0.0,
        )
        if count is not None:
            loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
        fields = {k: out.get(k) for k in ("past_key_values", "hidden_states", "attentions")}
        if hasattr(out, "cross_attentions"):
            return CausalLMOutputWithCrossAttentions(loss=loss, **fields, cross_attentions=out.cross_attentions)
        return CausalLMOutputWithPast(loss=loss, **fields)

    @functools.wraps(old)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **options}
        keep = given.get("logits_to_keep", 0)
        whole = isinstance(keep, int) and keep == 0
        if (
            given.get("labels") is None
            or not self.training
            or not whole
            or _why_not_head(self)
            or _watched(self.lm_head)
        ):
            return old(self, *arguments, **options)
        return fused(self, **given)

    return forward


# ---- which class gets which part

_RMS = Part("warpsmith.rms_norm", _rms(0.0))
_GATED = Part("warpsmith.swiglu, geglu or reglu", _gated, _why_not_gated)
_ROTARY = Part("warpsmith.rope", _attention)
_QK = Part("warpsmith.qk_norm_rope", _attention)
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
