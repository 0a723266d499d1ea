"""A model whose gradients overflow in chosen steps, and what is trained with it."""

import torch
import warpsmith
from torch import nn

OPTIMIZERS = {
    "AdamW": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5},
}


def make_model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator).to(dtype)
    return model


def backward(model, scaler, step, bad=False, weight=1.0):
    """The gradients of a loss of this step; with an infinite one if it is bad."""
    model.zero_grad()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 + step)).to(next(model.parameters()).dtype)
    loss = (model(x).float().square().mean()) * weight
    scaler.scale(loss).backward()
    if bad:
        list(model.parameters())[-1].grad.view(-1)[1] = [torch.inf, -torch.inf, torch.nan][step % 3]


def torchs_scaler(**more):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **more})


def ours(**more):
    return warpsmith.amp.GradScaler("cpu", **{"init_scale": 1024.0, **more})


def train(model, optimizer, scaler, steps, bad=(), clip=None, unscale=False):
    """Scales after each step. ``clip``: called with the scaler, the model and the optimizer."""
    scales = []
    for step in range(steps):
        backward(model, scaler, step, step in bad)
        if unscale:
            scaler.unscale_(optimizer)
        if clip is not None:
            clip(scaler, model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def by_torch(max_norm):
    """torch's recipe."""

    def clip(scaler, model, optimizer):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    return clip


def by_scaler(max_norm):
    return lambda scaler, model, optimizer: scaler.clip_(optimizer, max_norm)
