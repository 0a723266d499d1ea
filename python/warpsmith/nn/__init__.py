"""Modules with the constructors and state_dict keys of their counterparts in ``torch.nn``, where there are such."""

from warpsmith.nn.add_layer_norm import AddLayerNorm
from warpsmith.nn.add_rms_norm import AddRMSNorm
from warpsmith.nn.bias_gelu import BiasGELU
from warpsmith.nn.cross_entropy import CrossEntropyLoss
from warpsmith.nn.dropout_add import DropoutAdd
from warpsmith.nn.dropout_add_layer_norm import DropoutAddLayerNorm
from warpsmith.nn.dropout_add_rms_norm import DropoutAddRMSNorm
from warpsmith.nn.layer_norm import LayerNorm
from warpsmith.nn.linear_cross_entropy import LinearCrossEntropyLoss
from warpsmith.nn.qk_norm_rope import QKNormRoPE
from warpsmith.nn.rms_norm import RMSNorm
from warpsmith.nn.rotary_embedding import RotaryEmbedding
from warpsmith.nn.swiglu_mlp import SwiGLUMLP

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BiasGELU",
    "CrossEntropyLoss",
    "DropoutAdd",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "QKNormRoPE",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLUMLP",
]
