"""Optimizers with the constructors and state of their counterparts in ``torch.optim``."""
