"""Three training steps that wait for their host: many small kernels and nothing that asks the device for a number.

Each function makes a model and a batch on a device and returns a :class:`Script`. The scripts are written as one would
write them without CUDA graphs; `CapturedStep(script.step, state=script.state)` is all that a graph needs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import warpsmith
from torch import Tensor, nn


class Script(NamedTuple):
    """``step(*batch)`` is a whole training step and returns its loss."""

    step: Callable[..., Tensor]
    state: list[Any]
    batch: tuple[Tensor, ...]


def half(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16)


def updates(model: nn.Module, lr: float) -> tuple[Callable[[Tensor], Tensor], list[Any]]:
    """What follows the loss: backward, a clipped step that bad gradients skip, a schedule."""
    optimizer = warpsmith.optim.AdamW(model.parameters(), lr=lr)
    guard = warpsmith.amp.StepGuard()
    schedule = warpsmith.amp.DeviceLR(optimizer, warpsmith.amp.schedules.cosine(10_000, 100), 10_000, guard)

    def update(loss: Tensor) -> Tensor:
        loss.backward()
        guard.clip_(optimizer, max_norm=1.0)
        guard.step(optimizer)
        guard.update()
        schedule.step()
        optimizer.zero_grad()
        return loss

    return update, [model, optimizer, guard, schedule]


# --------------------------------------------------------------------------------------------------- a detector


class Detector(nn.Module):
    """After DETR (Carion et al., 2020): a small backbone, a transformer, and queries that become classes and boxes."""

    def __init__(self, classes: int = 20, width: int = 128, queries: int = 50, layers: int = 4) -> None:
        super().__init__()
        widths = (3, 32, 64, width)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(widths, widths[1:], strict=False)
        ]
        self.backbone = nn.Sequential(*blocks, nn.Conv2d(width, width, 3, 2, 1))
        self.positions = nn.Parameter(torch.randn(1, 1024, width) * 0.02)
        self.queries = nn.Parameter(torch.randn(1, queries, width))
        options = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, **options) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, **options) for _ in range(layers))
        self.classes, self.boxes = nn.Linear(width, classes + 1), nn.Linear(width, 4)

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Class logits [batch, queries, classes + 1] and boxes [batch, queries, 4] of each layer of the decoder."""
        x = self.backbone(images).flatten(2).transpose(1, 2)
        x = x + self.positions[:, : x.shape[1]]
        for layer in self.encoder:
            x = layer(x)
        q, found = self.queries.expand(len(x), -1, -1), []
        for layer in self.decoder:
            q = layer(q, x)
            found.append((self.classes(q), self.boxes(q).sigmoid()))
        return found


@torch.no_grad()
def match(cost: Tensor) -> Tensor:
    """[batch, queries, targets] -> [batch, targets]: to each target in turn the cheapest query that is left."""
    cost, chosen = cost.clone(), []
    for t in range(cost.shape[2]):
        query = cost[:, :, t].argmin(dim=1, keepdim=True)
        chosen.append(query)
        cost.scatter_(1, query[:, :, None].expand(-1, 1, cost.shape[2]), torch.inf)
    return torch.cat(chosen, dim=1)


def area(sides: Tensor) -> Tensor:
    """Width times height. The backward of ``prod(-1)`` would ask the device how many factors are 0."""
    return sides[..., 0] * sides[..., 1]


def box_loss(a: Tensor, b: Tensor) -> Tensor:
    """1 - generalized IoU of boxes (centre, size), element by element."""
    (a0, a1), (b0, b1) = ((x[..., :2] - x[..., 2:] / 2, x[..., :2] + x[..., 2:] / 2) for x in (a, b))
    inner = area((torch.minimum(a1, b1) - torch.maximum(a0, b0)).clamp(min=0))
    outer = area(torch.maximum(a1, b1) - torch.minimum(a0, b0))
    union = area(a[..., 2:]) + area(b[..., 2:]) - inner
    return 1 - inner / union.clamp(min=1e-6) + (outer - union) / outer.clamp(min=1e-6)


def detector(device: str, tiny: bool = False) -> Script:
    batch, targets, size = (2, 3, 32) if tiny else (4, 10, 128)
    model = Detector(layers=1 if tiny else 4).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 20, (batch, targets), device=device)
    boxes = torch.rand(batch, targets, 4, device=device) * 0.4 + 0.1
    update, state = updates(model, 1e-4)

    def loss_of(logits: Tensor, predicted: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        with torch.no_grad():
            probability = logits.softmax(-1).gather(2, labels[:, None].expand(-1, logits.shape[1], -1))
            cost = 5 * torch.cdist(predicted, boxes, p=1) - probability
        chosen = match(cost)
        here = predicted.gather(1, chosen[:, :, None].expand(-1, -1, 4))
        nothing = torch.full(logits.shape[:2], 20, dtype=labels.dtype, device=labels.device)
        wanted = nothing.scatter(1, chosen, labels)
        classes = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return classes + 5 * (here - boxes).abs().mean() + 2 * box_loss(here, boxes).mean()

    def step(images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        with half(device):
            found = model(images)
        losses = [loss_of(logits.float(), predicted.float(), labels, boxes) for logits, predicted in found]
        return update(torch.stack(losses).sum())

    return Script(step, state, (images, labels, boxes))


# ------------------------------------------------------------------------------------------------ a diffusion UNet


class Residual(nn.Module):
    def __init__(self, width: int, out: int, embedding: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, width), nn.GroupNorm(8, out)])
        self.convs = nn.ModuleList([nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)])
        self.time, self.skip = nn.Linear(embedding, out), nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.convs[1](F.silu(self.norms[1](y)))


class Unet(nn.Module):
    """After DDPM (Ho et al., 2020), small."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), embedding: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(2 * 32, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.down = nn.ModuleList(
            nn.ModuleList([Residual(a, b, embedding), Residual(b, b, embedding)]) for a, b in pairs
        )
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, 2, 1) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:], strict=False))
        self.up = nn.ModuleList(Residual(2 * w, w, embedding) for w in widths[:-1])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(torch.arange(32, device=t.device) * -0.29)
        time, x, kept = self.embedding(torch.cat((angles.sin(), angles.cos()), dim=1)), self.first(x), []
        for i, pair in enumerate(self.down):
            for block in pair:
                x = block(x, time)
            if i < len(self.shrink):
                kept.append(x)
                x = self.shrink[i](x)
        for i in reversed(range(len(self.up))):
            x = self.up[i](torch.cat((self.grow[i](x), kept[i]), dim=1), time)
        return self.last(F.silu(x))


def diffusion(device: str, tiny: bool = False) -> Script:
    model = Unet((16, 32) if tiny else (32, 64, 128)).to(device)
    images = torch.randn(2 if tiny else 16, 3, 16 if tiny else 32, 16 if tiny else 32, device=device)
    kept = torch.cos(torch.linspace(0.0, 1.57, 1000, device=device)) ** 2  # of the image's variance, by time
    update, state = updates(model, 2e-4)

    def step(images: Tensor) -> Tensor:
        t = torch.randint(0, 1000, (len(images),), device=images.device)
        noise, share = torch.randn_like(images), kept[t][:, None, None, None]
        with half(device):
            predicted = model(share.sqrt() * images + (1 - share).sqrt() * noise, t)
        return update(F.mse_loss(predicted.float(), noise))

    return Script(step, state, (images,))


# ------------------------------------------------------------------------------------------------ policy gradients


def policy_gradient(device: str, tiny: bool = False) -> Script:
    """REINFORCE (Williams, 1992) on cart-poles that live on the device (Barto, Sutton and Anderson, 1983)."""
    horizon, poles = (4, 8) if tiny else (32, 512)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    start = torch.rand(poles, 4, device=device) * 0.4 - 0.2
    update, state = updates(model, 1e-3)

    @torch.no_grad()
    def move(s: Tensor, action: Tensor) -> Tensor:
        _, speed, angle, turn = s.unbind(1)
        force = 20.0 * action.float() - 10.0
        push = (force + 0.05 * turn**2 * angle.sin()) / 1.1
        turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        pushing = push - 0.05 * turning * angle.cos() / 1.1
        return s + 0.02 * torch.stack((speed, pushing, turn, turning), 1)

    def step(start: Tensor) -> Tensor:
        s, alive = start, torch.ones(len(start), device=start.device)
        chances, rewards = [], []
        for _ in range(horizon):
            chance = model(s).log_softmax(-1)
            action = (chance.detach() - torch.empty_like(chance).exponential_().log()).argmax(-1, keepdim=True)
            s = move(s, action[:, 0])
            alive = alive * ((s[:, 0].abs() < 2.4) & (s[:, 2].abs() < 0.21)).float()
            chances.append(chance.gather(1, action)[:, 0])
            rewards.append(alive)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantage = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
        return update(-(advantage * torch.stack(chances)).mean())

    return Script(step, state, (start,))


SCRIPTS: dict[str, Callable[..., Script]] = {
    "detector": detector,
    "diffusion": diffusion,
    "policy gradient": policy_gradient,
}
