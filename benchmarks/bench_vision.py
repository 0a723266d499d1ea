"""Whole training steps of models of images, in NHWC: bf16 autocast on a GPU, float32 on the CPU. Rows as bench_train's.

resnet50: torchvision's, where it is installed, else transformers', batch 256 of random 224 x 224 images, torch's fused
SGD. unet: 83 M parameters, 16 x 4 x 64 x 64, torch's fused AdamW. Patched by this package, "warpsmith, captured" also
as one CUDA graph (CapturedStep), "warpsmith, compiled" also under torch.compile; as it is; and under torch.compile.
"warpsmith, 16 bits": bfloat16 weights beside float32 norms in place of autocast; this package's optimizer keeps the
other 16 bits of each weight (precision="remainder").
"""

import copy
import functools
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from warpsmith import optim
from warpsmith.integrations.vision import patch
from warpsmith.testing.rows import OURS
from warpsmith.train import CapturedStep

from benchmarks import rivals
from benchmarks.bench_train import FIRST_STEPS, rows_of_runs
from benchmarks.cells import compiled, forget_compiled

IN_A_ROW = {"cuda": 5, "cpu": 1}
BUDGET_S = {"cuda": 15.0, "cpu": 5.0}
LAST = {"memory_format": torch.channels_last}


class Run:
    """A model and its optimizer; ``loss(output, target)``."""

    def __init__(self, model, loss, optimizer, patched=False, compile=False):
        self.model, self.criterion, self.called = model, loss, model
        if patched:
            patch(model)
        if compile:
            forget_compiled()
            self.called = compiled(model, donate=True)
        self.optimizer = optimizer(model.parameters())

    def step(self, batch):
        *inputs, target = batch
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.is_cuda):
            loss = self.criterion(self.called(*inputs).float(), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class SixteenBits(Run):
    """A step without autocast."""

    def __init__(self, model, loss, optimizer):
        model.to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
                module.float()
        super().__init__(model, loss, functools.partial(optimizer, precision="remainder"), patched=True)

    def step(self, batch):
        *inputs, target = batch
        loss = self.criterion(self.called(*(t.bfloat16() for t in inputs)).float(), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Captured:
    """A run whose step is one CUDA graph. Refuses where no graph came of it."""

    def __init__(self, run, batch):
        self.model, self.optimizer = run.model, run.optimizer
        for group in self.optimizer.param_groups:  # torch's AdamW asks for it in a graph
            group.update({"capturable": True} if "capturable" in group else {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is raised below
            captured = CapturedStep(run.step, state=[self.model, self.optimizer])
            for _ in range(FIRST_STEPS):
                captured(batch)
        if captured.fallback_reason is not None:
            raise RuntimeError(captured.fallback_reason)
        self.step = captured


def runs_of(model, loss, torchs, ours, batch, device, options):
    """{contender: Run}. ``torchs``, ``ours``: optimizers of parameters."""
    patched, bits = functools.partial(Run, optimizer=torchs, patched=True), f"{OURS}, 16 bits"
    makers = {OURS: patched, "torch": functools.partial(Run, optimizer=torchs)} if options.samples else {}
    if options.samples and device == "cuda":
        makers[bits] = functools.partial(SixteenBits, optimizer=ours)
        for name in (OURS, bits):
            makers[f"{name}, captured"] = lambda *given, make=makers[name]: Captured(make(*given), batch)
    if options.compile and not options.quick and device == "cuda":
        makers["torch.compile"] = functools.partial(Run, optimizer=torchs, compile=True)
        makers[f"{OURS}, compiled"] = functools.partial(patched, compile=True)
    runs = {}
    for name, make in makers.items():
        with rivals.optional():
            runs[name] = make(copy.deepcopy(model), loss)
    return runs


def steps_of(name, shape, model, loss, optimizers, draw, device, options):
    torch.manual_seed(0)
    model = model.to(device, **LAST).train()
    batches = [draw() for _ in range(1 if options.quick else IN_A_ROW[device])]
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        runs = runs_of(model, loss, *optimizers, batches[0], device, options)
        cell = (name, "x".join(map(str, shape)), "bfloat16" if device == "cuda" else "float32")
        return rows_of_runs(cell, runs, batches, device, options, BUDGET_S[device])
    finally:
        torch.backends.cudnn.benchmark = before


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).logits


def resnet50(tiny):
    try:
        import torchvision
    except Exception:  # also one that does not fit this torch
        import transformers

        sizes = {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1]} if tiny else {}
        return Logits(transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000, **sizes)))
    return torchvision.models.resnet18() if tiny else torchvision.models.resnet50()


def run_resnet(device, options):
    shapes = options.shapes(device, [(256, 3, 224, 224)], [(4, 3, 64, 64)], (2, 3, 32, 32))
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    optimizers = functools.partial(torch.optim.SGD, fused=True, **given), functools.partial(optim.SGD, **given)
    rows = []
    for shape in shapes:

        def draw(shape=shape):
            return torch.randn(shape, device=device).to(**LAST), torch.randint(1000, shape[:1], device=device)

        model = resnet50(tiny=options.quick)
        rows += steps_of("resnet50", shape, model, F.cross_entropy, optimizers, draw, device, options)
    return rows


class Block(nn.Module):
    """Two convolutions, each behind a group norm and SiLU, with the time added between."""

    def __init__(self, given, channels):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, given), nn.Conv2d(given, channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time, self.act = nn.Linear(512, channels), nn.SiLU()
        self.shortcut = nn.Conv2d(given, channels, 1) if given != channels else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(self.act(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.act(self.norm2(h)))


class UNet(nn.Module):
    """Three resolutions of two blocks down and three up, as diffusion models have."""

    def __init__(self, width=192):
        super().__init__()
        widths = [width, 2 * width, 3 * width]
        self.first, self.act = nn.Conv2d(4, width, 3, padding=1), nn.SiLU()
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.down, self.up, now, kept = nn.ModuleList(), nn.ModuleList(), width, [width]
        for i, channels in enumerate(widths):
            for _ in range(2):
                self.down.append(Block(now, channels))
                now = channels
                kept.append(now)
            if i < 2:
                self.down.append(nn.Conv2d(now, now, 3, 2, 1))
                kept.append(now)
        self.middle = nn.ModuleList([Block(now, now), Block(now, now)])
        for i, channels in reversed([*enumerate(widths)]):
            for _ in range(3):
                self.up.append(Block(now + kept.pop(), channels))
                now = channels
            if i:
                self.up.append(nn.Conv2d(now, now, 3, padding=1))
        self.last = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 4, 3, padding=1))

    def forward(self, x, t):
        t, x = self.time(t), self.first(x)
        kept = [x]
        for layer in self.down:
            x = layer(x, t) if isinstance(layer, Block) else layer(x)
            kept.append(x)
        for layer in self.middle:
            x = layer(x, t)
        for layer in self.up:
            block = isinstance(layer, Block)
            x = layer(torch.cat([x, kept.pop()], 1), t) if block else layer(F.interpolate(x, scale_factor=2))
        return self.last(x)


def run_unet(device, options):
    rows = []
    optimizers = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True), functools.partial(optim.AdamW, lr=1e-4)
    for shape in options.shapes(device, [(16, 4, 64, 64)], [(1, 4, 16, 16)], (1, 4, 8, 8)):

        def draw(shape=shape):
            x, y = (torch.randn(shape, device=device).to(**LAST) for _ in range(2))
            return x, torch.randn(shape[0], 128, device=device), y

        model = UNet(192 if device == "cuda" and not options.quick else 32)
        rows += steps_of("unet", shape, model, F.mse_loss, optimizers, draw, device, options)
    return rows


OPS = {"resnet50": run_resnet, "unet": run_unet}
