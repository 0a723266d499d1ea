"""What the benchmarks of the gated activations share.

Floor: gate and up read, y written forward (3 elements for each of y); dy, gate and up read, both gradients written
backward (5).
"""

import importlib

import torch
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders
from benchmarks.rivals import liger_cute, optional

GPU_SHAPES = ((8192, 14336), (65536, 768), (16384, 4096), (1024, 12288))
CPU_SHAPES = ((2048, 4096),)


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


def run_gated(name, ours, eager, rivals, device, options):
    """Rows of one gated activation: two tensors, functions of (gate, up)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (64, 128))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            gate, up = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
            contenders = torch_contenders(ours, eager, options)
            if device == "cuda":
                contenders.update(rivals)
            unit = gate.numel() * gate.element_size()
            floor = {"forward": 3 * unit, "backward": 5 * unit}
            rows += time_forward_backward(name, contenders, (gate, up), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
