"""The fused operators. Each has a file; the attribute of its name is the public function. Families have private files.

The public export is here: ``warpsmith`` has all of these names."""

from warpsmith.ops._flops import register_formulas
from warpsmith.ops.adamw import adamw
from warpsmith.ops.add_layer_norm import add_layer_norm
from warpsmith.ops.add_rms_norm import add_rms_norm
from warpsmith.ops.attention import attention
from warpsmith.ops.attention_varlen import attention_varlen
from warpsmith.ops.bias_gelu import bias_gelu
from warpsmith.ops.bias_relu import bias_relu
from warpsmith.ops.bias_silu import bias_silu
from warpsmith.ops.cross_entropy import CrossEntropyStats, cross_entropy
from warpsmith.ops.dropout_add import dropout_add
from warpsmith.ops.dropout_add_layer_norm import dropout_add_layer_norm
from warpsmith.ops.dropout_add_rms_norm import dropout_add_rms_norm
from warpsmith.ops.geglu import geglu
from warpsmith.ops.layer_norm import layer_norm
from warpsmith.ops.linear_cross_entropy import linear_cross_entropy
from warpsmith.ops.linear_log_prob import linear_log_prob
from warpsmith.ops.qk_norm_rope import qk_norm_rope
from warpsmith.ops.reglu import reglu
from warpsmith.ops.relu_squared import relu_squared
from warpsmith.ops.rms_norm import rms_norm
from warpsmith.ops.rope import rope
from warpsmith.ops.swiglu import swiglu

__all__ = [
    "CrossEntropyStats",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_varlen",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "cross_entropy",
    "dropout_add",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_log_prob",
    "qk_norm_rope",
    "reglu",
    "relu_squared",
    "rms_norm",
    "rope",
    "swiglu",
]

register_formulas()
