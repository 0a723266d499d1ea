"""rope and qk_norm_rope, forward and backward, beside torch and torch.compile.

Rivals of rope: Liger and QuACK where they are installed; of qk_norm_rope: rms_norm and rope one after the other.

Floors, in elements for each of q and k: rope 2 (read and written once) in each direction; qk_norm_rope 2 forward and 3
backward (they and their incoming gradients read, their gradients written). Weights, their gradients, cos and sin are
not counted. In place the bytes are the same, but half as many lines of the L2 cache, which ends with more of them
unwritten: Liger's Triton kernels, which always work so, in the backward over the incoming gradients too, are rivals of
"in place".
"""

import torch
import torch.nn.functional as F
import warpsmith

from benchmarks.cells import leaves, time_cells, torch_contenders
from benchmarks.rivals import liger_cute, optional

EPS = 1e-6
# batch, tokens, heads of q and k, head dimension
GPU_SHAPES = ((4, 4096, 32, 8, 128), (1, 8192, 64, 8, 128), (8, 2048, 16, 16, 64), (8, 1024, 12, 12, 64))
CPU_SHAPES, TINY = ((1, 1024, 16, 4, 64),), (1, 16, 4, 2, 32)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


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


def eager_rope(cos, sin):
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


def heads(shape, device):
    """q, k, cos and sin."""
    batch, tokens, q_heads, k_heads, dim = shape
    q, k = leaves(device, (batch, tokens, q_heads, dim), (batch, tokens, k_heads, dim))
    angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, dim, 2) / dim)).to(device)
    return q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype)


def rope(device, options):
    def cell(shape):
        q, k, cos, sin = heads(shape, device)
        contenders = torch_contenders(lambda q, k: warpsmith.rope(q, k, cos, sin), eager_rope(cos, sin), options)
        if device == "cuda":
            contenders["warpsmith, in place"] = in_place(cos, sin)
            contenders.update(rivals(cos, sin))
        return contenders, (q, k), {"forward": 2, "backward": 2}

    return time_cells("rope", cell, options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY), options, counted=2)


def qk_norm_rope(device, options):
    def cell(shape):
        q, k, cos, sin = heads(shape, device)
        rotate = eager_rope(cos, sin)

        def ours(q, k, q_weight, k_weight):
            return warpsmith.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=EPS)

        def eager(q, k, q_weight, k_weight):
            return rotate(F.rms_norm(q, q_weight.shape, q_weight, EPS), F.rms_norm(k, k_weight.shape, k_weight, EPS))

        def our_two_ops(q, k, q_weight, k_weight):
            return warpsmith.rope(warpsmith.rms_norm(q, q_weight, EPS), warpsmith.rms_norm(k, k_weight, EPS), cos, sin)

        contenders = torch_contenders(ours, eager, options)
        contenders["rms_norm, rope"] = our_two_ops
        return contenders, (q, k, *leaves(device, shape[-1:], shape[-1:])), {"forward": 2, "backward": 3}

    shapes = options.shapes(device, GPU_SHAPES[:3], CPU_SHAPES, TINY)
    return time_cells("qk_norm_rope", cell, shapes, options, counted=2)


OPS = {"rope": rope, "qk_norm_rope": qk_norm_rope}
