"""cross_entropy: loss and gradient, and loss alone, beside torch, torch.compile, Liger and QuACK where installed.

Floor: each logit read once, and each gradient written once ("loss + gradient", 2 elements a logit); the loss alone
reads (1). Torch's contenders take the logits in float32, as training scripts have it; "torch, no cast" leaves them as
they are. Liger always writes over the logits; so do rows "in place".
"""

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing.rows import OURS, YARDSTICK

from benchmarks.cells import cell_of, timed, torch_contenders
from benchmarks.rivals import liger_cute, optional

GPU_SHAPES = ((4096, 128256), (8192, 50304), (8192, 50257), (65536, 1024))
CPU_SHAPES = ((256, 50304), (4096, 1000))


def rivals():
    """Installed rivals, each a function of (logits, target)."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_cross_entropy

        found["liger"] = lambda x, t: first(liger_cross_entropy(x, t))
    for name, fn in liger_cute("cross_entropy").items():
        found[name] = lambda x, t, fn=fn: first(fn(x, t))
    with optional():
        from quack.cross_entropy import cross_entropy

        found["quack"] = lambda x, t: cross_entropy(x, t, reduction="mean")
        found["quack in place"] = lambda x, t: cross_entropy(x, t, reduction="mean", inplace_backward=True)
    return found


OURS_IN_PLACE = OURS + " in place"
OVERWRITING = (OURS_IN_PLACE, "liger", "liger cutedsl", "quack in place")


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


class NoLeaf(torch.autograd.Function):
    """The same memory as the result of a function: leaves and their views are refused in place."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_place(logits, target):
    return warpsmith.cross_entropy(NoLeaf.apply(logits), target, inplace_backward=True)


def loss_and_gradient(contenders, logits, target):
    """One call for each. Those that overwrite have logits of their own, which are gradients from the second call on."""
    own = logits.detach().clone().requires_grad_()
    inputs = {name: own if name in OVERWRITING else logits for name in contenders}

    def call(fn, x):
        return lambda: torch.autograd.grad(fn(x, target), x)

    return {name: call(fn, inputs[name]) for name, fn in contenders.items()}


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (16, 300))
    rows = []
    for count, classes in shapes:
        logits = torch.randn(count, classes, device=device).to(dtype).requires_grad_()
        target = torch.randint(0, classes, (count,), device=device)
        contenders = torch_contenders(warpsmith.cross_entropy, lambda x, t: F.cross_entropy(x.float(), t), options)
        if device == "cuda":
            contenders["torch, no cast"] = F.cross_entropy
            contenders.update(rivals())
        unit = logits.numel() * logits.element_size()
        both = loss_and_gradient({**contenders, OURS_IN_PLACE: in_place}, logits, target)
        values = logits.detach()
        alone = {n: (lambda fn=fn: fn(values, target)) for n, fn in contenders.items()}  # noqa: B023
        for direction, calls, floor in (("loss", alone, unit), ("loss + gradient", both, 2 * unit)):
            cell = cell_of("cross_entropy", logits.shape, logits, direction)
            rows += timed(cell, calls, device, options, floor, not_rivals=(YARDSTICK, OURS_IN_PLACE))
    return rows
