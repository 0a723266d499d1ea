"""Images for train_resnet.py and train_unet.py: scikit-learn's digits, a folder of pictures, or random bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import warpsmith
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from warpsmith.distributed import ResumableSampler
from warpsmith.train import Prefetcher

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Digits(Dataset):
    """The 1,797 digits of 8 x 8 pixels, as bytes in NHWC. The last 297 are for validation."""

    classes, size = 10, 8

    def __init__(self, train: bool) -> None:
        from sklearn.datasets import load_digits

        part = slice(0, 1500) if train else slice(1500, None)
        found = load_digits()
        pixels = torch.from_numpy(found.images[part] * (255 / 16)).to(torch.uint8)
        self.images, self.labels = pixels[..., None].expand(-1, -1, -1, 3), torch.from_numpy(found.target[part])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"images": self.images[i], "labels": self.labels[i]}


class Noise(Dataset):
    """Random bytes and labels: the work of ImageNet without its data."""

    classes, size = 1000, 224

    def __init__(self, train: bool) -> None:
        self.count = 1 << 17 if train else 1024
        self.image = torch.randint(256, (self.size, self.size, 3), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"images": self.image, "labels": torch.tensor(i % self.classes)}


class Folder(Dataset):
    """Pictures in ``FOLDER/train/CLASS/*`` and ``FOLDER/val/CLASS/*``, cut to a square of 224 pixels."""

    size = 224

    def __init__(self, folder: Path, train: bool) -> None:
        place = folder / ("train" if train else "val")
        names = sorted(path.name for path in place.iterdir() if path.is_dir())
        self.files = [(path, i) for i, name in enumerate(names) for path in sorted((place / name).iterdir())]
        self.classes, self.train = len(names), train

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        import numpy
        from PIL import Image

        path, label = self.files[i]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
            side = min(image.size)
            if self.train:  # of the worker's generator, which the loader seeds
                side = int(side * (0.3 + 0.7 * float(torch.rand(())) ** 0.5))
            left, top = (int(float(torch.rand(())) * (n - side)) if self.train else (n - side) // 2 for n in image.size)
            image = image.resize((self.size, self.size), box=(left, top, left + side, top + side))
        return {"images": torch.from_numpy(numpy.array(image)), "labels": torch.tensor(label)}


def dataset(name: str, train: bool) -> Any:
    return Digits(train) if name == "digits" else Noise(train) if name == "noise" else Folder(Path(name), train)


def sampler_of(data: Any, ctx: Any) -> ResumableSampler:
    """A random order without an end, the same on any number of ranks."""
    return ResumableSampler(len(data), seed=0, rank=ctx.rank, world_size=ctx.world_size)


def batches(data: Any, sampler: Any, device: Any, batch: int, workers: int, mirror: bool) -> Prefetcher:
    """Batches on the device, normalised; with ``mirror`` each image by a coin."""
    cuda, train = device.type == "cuda", isinstance(sampler, ResumableSampler)
    own = torch.Generator().manual_seed(0)  # else each pass would draw from the model's
    loader = DataLoader(
        data, batch, sampler=sampler, num_workers=workers, pin_memory=cuda, drop_last=train, generator=own
    )
    dtype = torch.float16 if cuda else torch.float32

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["images"]
        flip = torch.rand(len(x), device=x.device) < 0.5 if mirror else None
        return {**batch, "images": warpsmith.normalize_image(x, MEAN, STD, flip=flip, dtype=dtype)}

    return Prefetcher(loader, device, transform=prepare)


def forever(loader: Any) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader


def pixels(x: Tensor) -> Tensor:
    """Normalised images as (N, H, W, 3) from 0 to 1."""
    mean, std = (torch.tensor(values, device=x.device).view(3, 1, 1) for values in (MEAN, STD))
    return (x.float() * std + mean).clamp(0, 1).permute(0, 2, 3, 1).cpu()
