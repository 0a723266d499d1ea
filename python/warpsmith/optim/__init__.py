"""Optimizers with the constructors and state of their counterparts in ``torch.optim``."""

from warpsmith.optim.adamw import AdamW

__all__ = ["AdamW"]
