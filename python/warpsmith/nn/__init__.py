"""Modules with the constructors and state_dict keys of their counterparts in ``torch.nn``, where there are such."""

from warpsmith.nn.cross_entropy import CrossEntropyLoss
from warpsmith.nn.linear_cross_entropy import LinearCrossEntropyLoss
from warpsmith.nn.rms_norm import RMSNorm
from warpsmith.nn.rotary_embedding import RotaryEmbedding

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss", "RMSNorm", "RotaryEmbedding"]
