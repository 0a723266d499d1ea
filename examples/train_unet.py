"""Train a small diffusion model: a UNet that turns noise into digits, and samples of it.

    python examples/train_unet.py                               digits of scikit-learn, a minute on 2 cores
    torchrun --nproc-per-node 2 examples/train_unet.py --captured --data FOLDER --width 128

The model is plain torch; `patch` puts warpsmith's norms in. It learns the velocity that carries noise to images on
straight lines (rectified flow, Liu et al., 2022). A run goes on from the newest checkpoint in `--out`, and writes
`samples.png` there: the loss, images of the data, and what the model draws.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import warpsmith
from image_data import batches, dataset, forever, pixels, sampler_of  # beside this file
from torch import Tensor, nn
from warpsmith.integrations.vision import patch

GROUPS, OF_TIME = 8, 64


class Block(nn.Module):
    def __init__(self, given: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, given), nn.Conv2d(given, channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(OF_TIME, channels)
        self.shortcut = nn.Conv2d(given, channels, 1) if given != channels else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Two resolutions, with the finer one's features beside the coarser one's at the end; of classes as well."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.classes = nn.Conv2d(3, width, 3, padding=1), nn.Embedding(classes, OF_TIME)
        self.time = nn.Sequential(nn.Linear(OF_TIME, OF_TIME), nn.SiLU(), nn.Linear(OF_TIME, OF_TIME))
        self.fine, self.down = Block(width, width), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.coarse, self.middle = Block(2 * width, 2 * width), Block(2 * width, 2 * width)
        self.up, self.end = nn.Conv2d(2 * width, width, 3, padding=1), Block(2 * width, width)
        self.last = nn.Sequential(nn.GroupNorm(GROUPS, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(OF_TIME // 2, device=x.device) * (-math.log(1000) / (OF_TIME // 2)))
        angles = 100 * t[:, None] * frequencies
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.classes(labels)
        fine = self.fine(self.first(x), t)
        x = self.middle(self.coarse(self.down(fine), t), t)
        x = self.up(F.interpolate(x, size=fine.shape[2:], mode="nearest"))
        return self.last(self.end(torch.cat([x, fine], 1), t))


class Run:
    """A model, its optimizer, and one update of it; with ``captured`` that is one CUDA graph."""

    def __init__(self, args: argparse.Namespace, ctx: Any, classes: int) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device, self.classes = args, ctx.device, classes
        self.model = UNet(args.width, classes).to(ctx.device, memory_format=torch.channels_last)
        self.patched = patch(self.model)
        self.called: nn.Module = self.model
        if ctx.world_size > 1:
            ids = [ctx.device.index] if ctx.device.type == "cuda" else None
            self.called = nn.parallel.DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        self.optimizer = warpsmith.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        self.average = warpsmith.optim.EMA(self.model.parameters(), decay=0.98)
        self.update: Any = self.update_once
        if args.captured:
            state = [self.model, self.optimizer, self.average]
            self.update = warpsmith.train.CapturedStep(self.update_once, state=state)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def update_once(self, images: Tensor, labels: Tensor) -> Tensor:
        noise, t = torch.randn_like(images), torch.rand(len(images), device=images.device)
        at = t.view(-1, 1, 1, 1)
        with self.autocast():
            velocity = self.called(torch.lerp(noise, images, at), t, labels)
        loss = F.mse_loss(velocity.float(), images - noise)
        loss.backward()
        self.optimizer.step()
        self.average.update()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def sample(self, shape: tuple[int, ...], steps: int = 40) -> Tensor:
        """An image of each class in turn, by Euler's steps along the averaged model's velocity."""
        generator = torch.Generator(self.device).manual_seed(self.args.seed)
        x = torch.randn(shape, generator=generator, device=self.device).to(memory_format=torch.channels_last)
        labels = torch.arange(shape[0], device=self.device) % self.classes
        with self.average.applied(), self.autocast():
            for i in range(steps):
                t = torch.full((shape[0],), i / steps, device=self.device)
                x = x + self.model(x, t, labels).float() / steps
        return x


def picture(path: Path, losses: list[float], real: Tensor, drawn: Tensor) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10, 3), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(3, 2, 2))
    axes = left.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="0.6")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    for part, title, images in ((middle, "data", real), (right, "drawn, by class", drawn)):
        part.suptitle(title)
        for axes, image in zip(part.subplots(4, 5).flat, pixels(images), strict=False):
            axes.imshow(image, interpolation="nearest")
            axes.axis("off")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="digits", help="digits, noise, or a folder with train/CLASS")
    add("--out", type=Path, default=Path("runs/unet"))
    add("--captured", action="store_true", help="the step as one CUDA graph (docs/step.md)")
    add("--device", choices=("cpu", "cuda"))
    for name, value in (("steps", 600), ("batch", 50), ("width", 32), ("workers", 0), ("seed", 0), ("save-every", 100)):
        add(f"--{name}", type=int, default=value)
    add("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with (
        warpsmith.distributed.init(device=args.device, seed=args.seed) as ctx,
        warpsmith.train.Checkpointer(args.out / "checkpoints") as saved,
    ):
        log, train = ctx.logger("train_unet"), dataset(args.data, True)
        sampler = sampler_of(train, ctx)
        loader = batches(train, sampler, ctx.device, args.batch, args.workers, mirror=args.data != "digits")
        run = Run(args, ctx, train.classes)
        parts: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "sampler": sampler}
        parts["scheduler"] = run.average  # the place for whatever else has a state
        done = saved.load(**parts) or 0
        log.info("%d ranks on %s, from step %d", ctx.world_size, ctx.device.type, done)
        log.info("patched:\n%s", run.patched)
        losses, pending = [], []
        for batch in forever(loader):
            if done >= args.steps:
                break
            pending.append(run.update(batch["images"].float(), batch["labels"]))
            done += 1
            sampler.advance(args.batch)
            if done % args.save_every == 0 or done == args.steps:
                losses += torch.stack(pending).tolist()  # here alone the host waits for the device
                pending = []
                log.info("step %d loss %.4f", done, sum(losses[-20:]) / len(losses[-20:]))
                saved.save(done, **parts)
        drawn = run.sample((20, 3, train.size, train.size))
        if ctx.rank == 0 and losses:
            picture(args.out / "samples.png", losses, batch["images"][:20], drawn)
    return {"losses": losses, "drawn": drawn}


if __name__ == "__main__":
    main()
