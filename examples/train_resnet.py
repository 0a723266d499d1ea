"""Train a ResNet: channels_last, mixed precision, norms by warpsmith, the step captured, any number of ranks.

    python examples/train_resnet.py                                   digits of scikit-learn, half a minute on 2 cores
    python examples/train_resnet.py --preset resnet50 --data noise    ResNet-50 on random bytes: its speed
    torchrun --nproc-per-node 8 examples/train_resnet.py --preset resnet50 --data ~/imagenet --captured

The model is plain torch, with torchvision's names in its state_dict; `patch` puts warpsmith's ops in. A run goes on
from the newest checkpoint in `--out`, and writes `log.jsonl` and `curves.png` there.
"""

import argparse
import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import warpsmith
from image_data import batches, dataset, forever, pixels, sampler_of  # beside this file
from torch import Tensor, nn
from warpsmith.integrations.vision import patch

PRESETS = {
    "digits": {"data": "digits", "depths": (1, 1, 1), "width": 16, "batch": 50, "steps": 150, "lr": 0.1, "workers": 0},
    "resnet50": {
        "data": "noise", "depths": (3, 4, 6, 3), "width": 64, "batch": 256, "steps": 450_000, "lr": 0.1, "workers": 8,
    },
}  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu, self.downsample = nn.ReLU(inplace=True), None

        if given != 4 * width or stride != 1:
            conv = nn.Conv2d(given, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """``small`` begins without the stride of 4 that large images want."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int, small: bool) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        given, self.layers = width, len(depths)
        for i, depth in enumerate(depths):
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(given, width << i, 2 if i > 0 and j == 0 else 1))
                given = 4 * (width << i)
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(given, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.layers):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))


class Run:
    """A model, its optimizer, and one update of it; with ``captured`` that is one CUDA graph."""

    def __init__(self, args: argparse.Namespace, ctx: Any, classes: int, small: bool) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, ctx.device
        self.model = ResNet(args.depths, args.width, classes, small).to(ctx.device, memory_format=torch.channels_last)
        self.patched = patch(self.model) if args.modules == "warpsmith" else None
        self.called: nn.Module = self.model
        if ctx.world_size > 1:
            ids = [ctx.device.index] if ctx.device.type == "cuda" else None
            # A step in training does not read the running statistics: `validate` takes those of rank 0. A graph cannot
            # wait for the stream on which DDP is made where that is the default one.
            with torch.cuda.stream(torch.cuda.Stream()) if args.captured and ids else contextlib.nullcontext():
                self.called = nn.parallel.DistributedDataParallel(
                    self.model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
                )
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 5e-5}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = warpsmith.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
        self.scaler = warpsmith.amp.GradScaler(ctx.device.type, enabled=ctx.device.type == "cuda")
        self.update: Any = self.update_once
        if args.captured:
            self.update = warpsmith.train.CapturedStep(
                self.update_once,
                state=[self.model, self.optimizer, self.scaler],
                **({"warmup": 11, "self_test": 0} if ctx.world_size > 1 else {}),  # DDP times its first ten steps
            )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.float16, enabled=self.device.type == "cuda")

    def learning_rate(self, step: int) -> float:
        warmup = max(1, self.args.steps // 20)
        falling = 0.5 * (1 + math.cos(math.pi * step / self.args.steps))
        return self.args.lr * min(1.0, (step + 1) / warmup) * falling

    def step(self, step: int, batch: dict[str, Tensor]) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        return self.update(batch["images"], batch["labels"])

    def update_once(self, images: Tensor, labels: Tensor) -> Tensor:
        with self.autocast():
            logits = self.called(images)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def validate(self, loader: Any) -> tuple[float, Tensor, Tensor]:
        """Accuracy over all ranks; the last images, and what they are taken for."""
        self.model.eval()
        if torch.distributed.is_initialized():
            for statistics in self.model.buffers():
                torch.distributed.broadcast(statistics, 0)
        right, x, found = torch.zeros(2, device=self.device), torch.empty(0), torch.empty(0)
        for batch in loader:
            x = batch["images"]
            with self.autocast():
                found = self.model(x).argmax(1)
            right += torch.stack([(found == batch["labels"]).sum(), torch.tensor(len(x), device=self.device)])
        self.model.train()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(right)
        return float(right[0] / right[1]), x[:24], found[:24]


def picture(path: Path, losses: list[float], accuracies: list[tuple[int, float]], x: Tensor, found: Tensor) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    axes = left.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="0.6", label="loss")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    other = axes.twinx()
    other.plot(*zip(*accuracies, strict=True), "o-", color="tab:green", label="accuracy")
    other.set(ylim=(0, 1.02), ylabel="accuracy on unseen images")
    figure.legend(loc="outside upper left", ncols=2)
    for axes, image, label in zip(right.subplots(4, 6).flat, pixels(x), found.tolist(), strict=False):
        axes.imshow(image, interpolation="nearest")
        axes.set_title(str(label), fontsize=8, pad=1)
        axes.axis("off")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="digits")
    add("--data", help="digits, noise, or a folder with train/CLASS and val/CLASS (default: the preset's)")
    add("--out", type=Path, help="the run's folder (default: runs/PRESET)")
    add("--captured", action="store_true", help="the step as one CUDA graph (docs/step.md)")
    add("--modules", choices=("warpsmith", "torch"), default="warpsmith", help="torch: the model as it is")
    add("--device", choices=("cpu", "cuda"))
    for name in ("steps", "batch", "workers", "width"):
        add(f"--{name}", type=int, help="default: the preset's" + ", of each rank" * (name == "batch"))
    add("--lr", type=float)
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=50, metavar="N", help="steps between validations and checkpoints")
    args = parser.parse_args(argv)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.out = args.out or Path("runs") / args.preset
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with (
        warpsmith.distributed.init(device=args.device, seed=args.seed) as ctx,
        warpsmith.train.Checkpointer(args.out / "checkpoints") as saved,
    ):
        log, train, unseen = ctx.logger("train_resnet"), dataset(args.data, True), dataset(args.data, False)
        sampler, mirror = sampler_of(train, ctx), args.data != "digits"  # which a mirror changes
        loader = batches(train, sampler, ctx.device, args.batch, args.workers, mirror)
        part = range(ctx.rank, len(unseen), ctx.world_size)
        held_out = batches(unseen, part, ctx.device, args.batch, args.workers, False)
        run = Run(args, ctx, train.classes, train.size < 64)
        parts: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "sampler": sampler}
        parts |= {"scaler": run.scaler} if run.scaler.is_enabled() else {}
        done = saved.load(**parts) or 0
        log.info("%d ranks on %s, from step %d", ctx.world_size, ctx.device.type, done)
        if run.patched is not None:
            log.info("patched:\n%s", run.patched)
        losses, accuracies, lines = [], [], []
        pending: list[Tensor] = []
        began, of_lap = time.perf_counter(), done
        for batch in forever(loader):
            if done >= args.steps:
                break
            pending.append(run.step(done, batch))
            done += 1
            sampler.advance(args.batch)
            if done % args.eval_every == 0 or done == args.steps:
                losses += torch.stack(pending).tolist()  # here alone the host waits for the device
                pending = []
                rate = (done - of_lap) * args.batch * ctx.world_size / (time.perf_counter() - began)
                accuracy, x, found = run.validate(held_out)
                accuracies.append((done, accuracy))
                log.info("step %d loss %.4f accuracy %.4f, %.0f images/s", done, losses[-1], accuracy, rate)
                if ctx.device.type == "cuda":
                    log.info("%s", loader.stats())
                lines.append({"step": done, "loss": losses[-1], "accuracy": accuracy, "images_per_s": round(rate, 1)})
                saved.save(done, **parts)
                began, of_lap = time.perf_counter(), done
        if ctx.rank == 0 and losses:
            with open(args.out / "log.jsonl", "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            picture(args.out / "curves.png", losses, accuracies, x, found)
    return {"losses": losses, "accuracies": accuracies}


if __name__ == "__main__":
    main()
