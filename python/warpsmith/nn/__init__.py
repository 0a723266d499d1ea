"""Modules with the constructors and state_dict keys of their counterparts in ``torch.nn``."""

from warpsmith.nn.rms_norm import RMSNorm

__all__ = ["RMSNorm"]
