"""The fused operators: a file a family, and beside it a private one with fakes and gradients.

The public export is here: ``warpsmith`` has all of these names."""

from warpsmith.ops._flops import register_formulas
from warpsmith.ops._quantize import Fp8Tensor
from warpsmith.ops.activation import bias_gelu, bias_relu, bias_silu, dropout_add, geglu, reglu, relu_squared, swiglu
from warpsmith.ops.attention import attention, attention_varlen
from warpsmith.ops.batch_norm import batch_norm
from warpsmith.ops.conv2d import conv2d
from warpsmith.ops.cross_entropy import CrossEntropyStats, cross_entropy
from warpsmith.ops.group_norm import group_norm
from warpsmith.ops.image import normalize_image
from warpsmith.ops.linear import gated_linear, linear, matmul_symmetric, mlp, scaled_linear
from warpsmith.ops.linear_loss import linear_cross_entropy, linear_log_prob
from warpsmith.ops.max_pool import max_pool2d
from warpsmith.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)
from warpsmith.ops.optim import adamw
from warpsmith.ops.quantize import dequantize_fp8, quantize_fp8
from warpsmith.ops.rope import qk_norm_rope, rope
from warpsmith.ops.softmax import log_softmax, softmax

__all__ = [
    "CrossEntropyStats",
    "Fp8Tensor",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_varlen",
    "batch_norm",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "conv2d",
    "cross_entropy",
    "dequantize_fp8",
    "dropout_add",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "gated_linear",
    "geglu",
    "group_norm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_log_prob",
    "log_softmax",
    "matmul_symmetric",
    "max_pool2d",
    "mlp",
    "normalize_image",
    "qk_norm_rope",
    "quantize_fp8",
    "reglu",
    "relu_squared",
    "rms_norm",
    "rope",
    "scaled_linear",
    "softmax",
    "swiglu",
]

register_formulas()
