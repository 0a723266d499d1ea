"""rope: forward and backward, beside torch, torch.compile, Liger and QuACK where installed.

Floor: q and k read and written once in each direction (2 elements for each of theirs). cos and sin are not counted.
In place the bytes are the same, but half as many lines of the L2 cache, which ends with more of them unwritten: Liger's
Triton kernels, which always work so, in the backward over the incoming gradients too, are rivals of "in place".
"""

import torch
import warpsmith
from warpsmith.testing import time_forward_backward

from benchmarks.cells import CPU_THREADS, torch_contenders
from benchmarks.rivals import liger_cute, optional

# batch, tokens, heads of q and k, head dimension
GPU_SHAPES = ((4, 4096, 32, 8, 128), (1, 8192, 64, 8, 128), (8, 2048, 16, 16, 64), (8, 1024, 12, 12, 64))
CPU_SHAPES = ((1, 1024, 16, 4, 64),)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def ours(cos, sin):
    return lambda q, k: warpsmith.rope(q, k, cos, sin)


def in_place(cos, sin):
    """Ours over q and k, and over the incoming gradients; on tensors of its own, because leaves are refused."""
    own = {}
    negative = -sin

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k):
            if own.get("key") != (q.data_ptr(), q.shape):
                own.update(key=(q.data_ptr(), q.shape), tensors=(q.detach().clone(), k.detach().clone()))
            q, k = warpsmith.rope(*own["tensors"], cos, sin, inplace=True)
            return q.detach(), k.detach()

        @staticmethod
        def backward(ctx, grad_q, grad_k):
            return warpsmith.rope(grad_q, grad_k, cos, negative, inplace=True)

    return InPlace.apply


def eager(cos, sin):
    """As transformers writes it, in the dtype of the activations."""
    cos, sin = (torch.cat((t, t), -1)[None, :, None] for t in (cos, sin))
    return lambda q, k: (q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)


def rivals(cos, sin):
    """Installed rivals, each a function of (q, k). Liger's Triton kernel rotates in place."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_rope

        wide_cos, wide_sin = (torch.cat((t, t), -1)[None] for t in (cos, sin))

        def liger(fn):
            def call(q, k):
                q, k = fn(q.transpose(1, 2), k.transpose(1, 2), wide_cos, wide_sin)
                return q.transpose(1, 2), k.transpose(1, 2)

            return call

        functions = {"liger": liger_rope, **liger_cute("rope")}
        found.update({name: liger(fn) for name, fn in functions.items()})
    with optional():
        from quack.rotary import apply_rotary_emb

        found["quack"] = lambda q, k: (apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin))
    return found


def run(device, options):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = options.shapes(device, GPU_SHAPES, CPU_SHAPES, (1, 16, 4, 2, 32))
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    rows = []
    try:
        for batch, tokens, q_heads, k_heads, dim in shapes:
            q, k = (
                torch.randn(batch, tokens, heads, dim, device=device).to(dtype).requires_grad_()
                for heads in (q_heads, k_heads)
            )
            angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, dim, 2) / dim)).to(device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            contenders = torch_contenders(ours(cos, sin), eager(cos, sin), options)
            if device == "cuda":
                contenders["warpsmith, in place"] = in_place(cos, sin)
                contenders.update(rivals(cos, sin))
            moved = 2 * (q.numel() + k.numel()) * q.element_size()
            floor = {"forward": moved, "backward": moved}
            rows += time_forward_backward("rope", contenders, (q, k), floor, rounds=options.samples)
    finally:
        torch.set_num_threads(threads)
    return rows
