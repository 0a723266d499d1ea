"""The activations, forward and backward, beside torch, torch.compile and, where installed, Liger.

Floors, in elements for each of y: gated 3 (gate and up read, y written) and 5 (dy, gate and up read, both gradients
written); biased and unary 2 and 3; dropout_add 3 and 2, where torch also writes and reads a mask of one byte an
element. The bias, its gradient and the partial sums are not counted.
"""

import functools
import importlib

import torch
import torch.nn.functional as F
import warpsmith

from benchmarks.cells import time_shapes
from benchmarks.rivals import liger_cute, optional
from tools.families import rows

GATED_SHAPES = ((8192, 14336), (65536, 768), (16384, 4096), (1024, 12288))
GPU_SHAPES = ((16384, 4096), (65536, 768), (4096, 8192), (1024, 12288))
CPU_SHAPES, TINY = ((2048, 4096),), (64, 128)
P = 0.1


def function_of(row):
    """torch's, with the options that a flag gives: by the name of the row's function, if torch has it."""
    lacking = {"ReluSquared": lambda x: torch.relu(x).square()}
    return lacking.get(row.arguments[0]) or getattr(F, row.arguments[0].lower())


def liger(op):
    """{"liger": its Triton kernels, "liger cutedsl": its others} as functions of (gate, up), where installed.

    The Triton backward writes over the forward's inputs, so it works on tensors of its own, and what it reads changes
    from call to call.
    """
    found = liger_cute(op)
    with optional():
        module = importlib.import_module(f"liger_kernel.ops.{op}")
        found["liger"] = on_its_own_tensors(getattr(module, f"{op}_forward"), getattr(module, f"{op}_backward"))
    return found


def on_its_own_tensors(forward, backward):
    own = {}

    class OnItsOwnTensors(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            if own.get("key") != (gate.data_ptr(), gate.shape):
                own.update(key=(gate.data_ptr(), gate.shape), tensors=(gate.detach().clone(), up.detach().clone()))
            return forward(*own["tensors"])[-1]

        @staticmethod
        def backward(ctx, dy):
            return backward(*own["tensors"], dy)

    return OnItsOwnTensors.apply


def gated(op, suffix, ours, function, device, options):
    def rivals():
        return liger(op) if op == "swiglu" or suffix else {}

    floor = {"forward": 3, "backward": 5}
    both = (op + suffix, ours, lambda gate, up: function(gate) * up, rivals, lambda shape: (shape, shape))
    return time_shapes(*both, floor, (GATED_SHAPES, CPU_SHAPES, TINY), device, options)


def biased(op, suffix, ours, function, device, options):
    floor = {"forward": 2, "backward": 3}
    both = (op, ours, lambda x, bias: function(x + bias), dict, lambda shape: (shape, shape[-1:]))
    return time_shapes(*both, floor, (GPU_SHAPES, CPU_SHAPES, TINY), device, options)


def unary(op, suffix, ours, function, device, options):
    def rivals():
        found = {}
        with optional():
            functional = importlib.import_module("liger_kernel.transformers.functional")
            found["liger"] = getattr(functional, f"liger_{op}")
        return found

    floor = {"forward": 2, "backward": 3}
    shapes = GPU_SHAPES[:2], CPU_SHAPES, TINY
    return time_shapes(op, ours, function, rivals, lambda shape: (shape,), floor, shapes, device, options)


def dropout_add(device, options):
    return time_shapes(
        "dropout_add",
        lambda x, residual: warpsmith.dropout_add(x, residual, P),
        lambda x, residual: F.dropout(x, P) + residual,
        dict,
        lambda shape: (shape, shape),
        {"forward": 3, "backward": 2},
        (GPU_SHAPES[:2], CPU_SHAPES, TINY),
        device,
        options,
    )


def of_row(row, device, options):
    """A row's op. One with a flag is timed by tanh too, if it is gated; a biased one by tanh alone."""
    flag = row.arguments[1]
    time = {"GATED": gated, "BIASED": biased, "UNARY": unary}[row.body]
    forms = {"plain": (None,), "tanh": ("none", "tanh") if row.body == "GATED" else ("tanh",)}[flag]
    found = []
    for form in forms:
        choice = {} if form is None else {"approximate": form}
        ours = functools.partial(getattr(warpsmith, row.name), **choice)
        suffix = " tanh" if form == "tanh" else ""
        found += time(row.name, suffix, ours, functools.partial(function_of(row), **choice), device, options)
    return found


OPS = {row.name: functools.partial(of_row, row) for row in rows("GATED", "BIASED", "UNARY")}
OPS["dropout_add"] = dropout_add
