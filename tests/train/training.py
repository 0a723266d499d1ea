"""A small training run in which everything that a checkpoint holds matters: dropout, schedule, scaler, data order."""

import random

import numpy
import torch
import warpsmith
from warpsmith.distributed import ResumableSampler

LENGTH, BATCH = 24, 4
X = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))

OPTIMIZERS = {
    "warpsmith AdamW": lambda p: warpsmith.optim.AdamW(p, lr=0.05),
    "torch AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=200),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 9], gamma=0.5),
    "a sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s)], [4]
    ),
}


class Run:
    """Model and all that belongs to it. ``train`` takes steps until ``step`` is reached."""

    def __init__(self, optimizer="warpsmith AdamW", scheduler="cosine"):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), warpsmith.nn.RMSNorm(8), torch.nn.Linear(8, 6, bias=False)
        )
        model[3].weight = torch.nn.Parameter(model[0].weight.detach().T.contiguous())
        self.step = 0
        opt = OPTIMIZERS[optimizer](model.parameters())
        self.parts = {
            "model": model,
            "optimizer": opt,
            "scheduler": SCHEDULERS[scheduler](opt),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3),
            "sampler": ResumableSampler(LENGTH, seed=2, rank=0, world_size=1),
        }

    def load(self, checkpoints):
        self.step = checkpoints.load(**self.parts) or 0
        return self.step

    def train(self, step, after=None):
        model, optimizer, scheduler, scaler, sampler = self.parts.values()
        while self.step < step:
            batch = []
            while len(batch) < BATCH:
                batch += [i for i, _ in zip(sampler, range(BATCH - len(batch)), strict=False)]
            x = X[batch] * (1 + random.random() + numpy.random.rand())
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            self.step += 1
            if after:
                after(self)

    def state(self):
        """Everything, flattened to tensors and plain values, for a comparison without tolerance."""
        found = [self.step, torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()]

        def walk(value):
            if isinstance(value, dict):
                for key, inner in value.items():
                    found.append(key)
                    walk(inner)
            elif isinstance(value, (list, tuple)):
                for inner in value:
                    walk(inner)
            elif not callable(value):
                found.append(value.clone() if isinstance(value, torch.Tensor) else value)

        for part in self.parts.values():
            walk(part.state_dict())
        return found


def same(a, b):
    """Whether two states are equal, tensors in every bit."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return False
        if not (torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y):
            return False
    return True
