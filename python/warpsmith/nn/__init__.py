"""Modules with the constructors and state_dict keys of their counterparts in ``torch.nn``, where there are such."""

from warpsmith.nn import functional
from warpsmith.nn._add_layer_norm import AddLayerNorm
from warpsmith.nn._add_rms_norm import AddRMSNorm
from warpsmith.nn._attention import Attention
from warpsmith.nn._bias_gelu import BiasGELU
from warpsmith.nn._cross_entropy import CrossEntropyLoss
from warpsmith.nn._dropout_add import DropoutAdd
from warpsmith.nn._dropout_add_layer_norm import DropoutAddLayerNorm
from warpsmith.nn._dropout_add_rms_norm import DropoutAddRMSNorm
from warpsmith.nn._layer_norm import LayerNorm
from warpsmith.nn._linear_cross_entropy_head import LinearCrossEntropyHead
from warpsmith.nn._qk_norm_rope import QKNormRoPE
from warpsmith.nn._rms_norm import RMSNorm
from warpsmith.nn._rotary_embedding import RotaryEmbedding
from warpsmith.nn._swiglu_mlp import SwiGLUMLP

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BiasGELU",
    "CrossEntropyLoss",
    "DropoutAdd",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "LayerNorm",
    "LinearCrossEntropyHead",
    "QKNormRoPE",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "functional",
]
