"""Optimizers with the constructors and state of their counterparts in ``torch.optim``, the norm of gradients, and the
moving average of weights."""

from warpsmith.optim._eight_bit import float32_states
from warpsmith.optim.adagrad import Adagrad
from warpsmith.optim.adam import Adam
from warpsmith.optim.adamw import AdamW
from warpsmith.optim.clip import clip_grad_norm_, grad_norm
from warpsmith.optim.ema import EMA
from warpsmith.optim.lamb import LAMB
from warpsmith.optim.lion import Lion
from warpsmith.optim.muon import Muon
from warpsmith.optim.rmsprop import RMSprop
from warpsmith.optim.sgd import SGD

__all__ = [
    "EMA",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "RMSprop",
    "clip_grad_norm_",
    "float32_states",
    "grad_norm",
]
