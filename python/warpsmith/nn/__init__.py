"""Modules with the constructors and state_dict keys of their counterparts in ``torch.nn``, where there are such."""

from warpsmith.nn.rms_norm import RMSNorm
from warpsmith.nn.rotary_embedding import RotaryEmbedding

__all__ = ["RMSNorm", "RotaryEmbedding"]
