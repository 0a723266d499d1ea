"""Host cost of one eager call of a small op: dispatcher, autograd and our own Python, beside torch's native ops.

On a GPU this is the host's part alone; on the CPU the (tiny) computation is part of it. The goals are set against
`layer_norm`: our rows state its time over ours under "vs best rival".
"""

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import host_time_us
from warpsmith.testing.rows import OURS, make_rows

SHAPE = (4, 64)


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls, rounds = (20, 3) if options.quick else (500, 15)
    rows = []
    for grad in (False, True):
        x = torch.randn(SHAPE, device=device).to(dtype).requires_grad_(grad)
        w = torch.randn(SHAPE[-1], device=device).to(dtype).requires_grad_(grad)
        b = torch.zeros(SHAPE[-1], device=device).to(dtype).requires_grad_(grad)
        dy = torch.randn(SHAPE, device=device).to(dtype)
        forward = {
            OURS: lambda x=x, w=w: warpsmith.rms_norm(x, w, 1e-6),
            "torch layer_norm": lambda x=x, w=w, b=b: F.layer_norm(x, (SHAPE[-1],), w, b),
            "torch rms_norm": lambda x=x, w=w: F.rms_norm(x, (SHAPE[-1],), w, 1e-6),
        }
        label = "grad" if grad else "no grad"
        rows += _host_rows(f"forward, {label}", dtype, forward, calls, rounds)
        if grad:
            both = {name: _backward(fn, (x, w), dy) for name, fn in forward.items()}
            rows += _host_rows("forward + backward", dtype, both, calls, rounds)
    return rows


def _backward(forward, inputs, grad):
    return lambda: torch.autograd.grad(forward(), inputs, grad)


def _host_rows(direction, dtype, contenders, calls, rounds):
    timings = host_time_us(contenders, calls=calls, rounds=rounds)
    names = {"shape": "x".join(map(str, SHAPE)), "dtype": str(dtype).removeprefix("torch.")}
    not_rivals = ("torch rms_norm",)
    return make_rows(
        "rms_norm", **names, direction=f"host {direction}", timings=timings, unit="us", not_rivals=not_rivals
    )
