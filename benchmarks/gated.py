"""What the benchmarks of the gated activations share.

Floor: gate and up read, y written forward (3 elements for each of y); dy, gate and up read, both gradients written
backward (5).
"""

import torch
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders

GPU_SHAPES = ((8192, 14336), (65536, 768), (16384, 4096), (1024, 12288))
CPU_SHAPES = ((2048, 4096),)


def liger(module_name, forward_name, backward_name):
    """Liger's kernels as a function of (gate, up), or None where it is not installed.

    Its backward writes over the forward's inputs, so it works on tensors of its own, and what it reads changes from
    call to call.
    """
    try:
        module = __import__(f"liger_kernel.ops.{module_name}", fromlist=[forward_name])
        forward, backward = getattr(module, forward_name), getattr(module, backward_name)
    except (ImportError, AttributeError):
        return None
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
    shapes = ((64, 128),) if options.quick else GPU_SHAPES if device == "cuda" else CPU_SHAPES
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for shape in shapes:
            gate, up = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
            contenders = torch_contenders(ours, eager, options)
            if device == "cuda":
                contenders.update({rival: fn for rival, fn in rivals.items() if fn is not None})
            unit = gate.numel() * gate.element_size()
            floor = {"forward": 3 * unit, "backward": 5 * unit}
            rows += time_forward_backward(name, contenders, (gate, up), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
