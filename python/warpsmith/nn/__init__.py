"""Modules with the constructors and state_dict keys of their counterparts in ``torch.nn``, where there are such."""

from warpsmith.nn import functional
from warpsmith.nn._activation import BiasGELU, DropoutAdd
from warpsmith.nn._attention import Attention
from warpsmith.nn._batch_norm import BatchNorm2d, SyncBatchNorm
from warpsmith.nn._conv import ConvBNReLU
from warpsmith.nn._cross_entropy import CrossEntropyLoss
from warpsmith.nn._group_norm import GroupNorm
from warpsmith.nn._linear import MLP, GatedMLP, Linear, NormLinear
from warpsmith.nn._linear_loss import LinearCrossEntropyHead
from warpsmith.nn._norm import AddLayerNorm, AddRMSNorm, DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm
from warpsmith.nn._rope import QKNormRoPE, RotaryEmbedding

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BatchNorm2d",
    "BiasGELU",
    "ConvBNReLU",
    "CrossEntropyLoss",
    "DropoutAdd",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "GatedMLP",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyHead",
    "MLP",
    "NormLinear",
    "QKNormRoPE",
    "RMSNorm",
    "RotaryEmbedding",
    "SyncBatchNorm",
    "functional",
]
