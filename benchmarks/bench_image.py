"""normalize_image beside torch and torch.compile, at ImageNet's batches; of every second sample mirrored, and of none.

Floor: a byte read and an element of float16 written for each value.
"""

import functools

import torch
import warpsmith
from warpsmith.reference.image import normalize_image as plain

from benchmarks.cells import timed, torch_contenders

GPU_SHAPES, CPU_SHAPES, TINY = ((256, 224, 224, 3), (1024, 224, 224, 3)), ((32, 224, 224, 3),), (2, 16, 16, 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def chain(x, flip):
    return plain(x, MEAN, STD, flip=flip)


def run(device, options):
    rows = []
    for shape in options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY):
        x = torch.randint(256, shape, dtype=torch.uint8, device=device)
        for direction, flip in (
            ("forward", None),
            ("forward, mirrored", torch.arange(shape[0], device=device) % 2 == 0),
        ):
            ours = functools.partial(warpsmith.normalize_image, mean=MEAN, std=STD)
            contenders = torch_contenders(lambda x, flip, ours=ours: ours(x, flip=flip), chain, options)
            calls = {name: functools.partial(fn, x, flip) for name, fn in contenders.items()}
            cell = "normalize_image", "x".join(map(str, shape)), "float16", direction
            rows += timed(cell, calls, device, options, floor=3 * x.numel())
    return rows


OPS = {"normalize_image": run}
