"""The norms, forward and backward, beside torch, torch.compile, Liger, QuACK, cuDNN's frontend, Apex and flash-attn's
Triton kernel where installed.

Floors, in elements for each of x. Without a residual 2 (x read, y written) and 3 (x and dy read, dx written). With a
residual 4 (x and residual read, y and residual_out written) and 4 (residual_out and both incoming gradients read, one
gradient for both summands written); 5 with dropout, where each summand has its own gradient. The weights, their
gradients, the row statistics and the seed are not counted.
"""

import functools

import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing.rows import OURS

from benchmarks.cells import host_rows, time_shapes
from benchmarks.rivals import liger_cute, optional
from tools.families import rows

LAYER_EPS, RMS_EPS, P = 1e-5, 1e-6, 0.1
ADD_SHAPES = ((16384, 4096), (4096, 8192), (1024, 12288), (65536, 768))
GPU_SHAPES = {
    "rms_norm": (*ADD_SHAPES, (131072, 128), (24576, 2560)),
    "layer_norm": (*ADD_SHAPES, (24576, 2560)),
    "add_rms_norm": (*ADD_SHAPES, (24576, 2560)),
    "add_layer_norm": ADD_SHAPES,
}
CPU_SHAPES = ((4096, 1024),)


def rms_norm_rivals():
    """Installed rivals, each a function of (x, weight)."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_rms_norm  # the Triton kernels

        found["liger"] = lambda x, w: liger_rms_norm(x, w, RMS_EPS)
    found.update(liger_cute("rms_norm", RMS_EPS))
    with optional():
        from quack.rmsnorm import rmsnorm

        found["quack"] = lambda x, w: rmsnorm(x, w, eps=RMS_EPS)
    with optional():
        from cudnn.ops.norm import rms_norm

        found["cudnn"] = lambda x, w: rms_norm(x, w, None, RMS_EPS)
    with optional():
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        found["apex"] = lambda x, w: fused_rms_norm_affine(x, w, w.shape, RMS_EPS)
    return found


def layer_norm_rivals():
    """Installed rivals, each a function of (x, weight, bias)."""
    found = {}
    with optional():
        from liger_kernel.transformers.functional import liger_layer_norm  # the Triton kernels

        found["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, LAYER_EPS)
    with optional():
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        wide = {}

        class Quack(torch.autograd.Function):
            """QuACK's two kernels. They take weights in float32 alone, so it has its own, and the gradients of those
            are returned as the upper halves of float32, which are bfloat16: no cast is timed."""

            @staticmethod
            def forward(ctx, x, w, b):
                if wide.get("of") != w.data_ptr():
                    wide.update(of=w.data_ptr(), tensors=(w.detach().float(), b.detach().float()))
                w, b = wide["tensors"]
                y, rstd, mean = layernorm_fwd(x, w, b, eps=LAYER_EPS, return_rstd=True, return_mean=True)
                ctx.save_for_backward(x, w, rstd, mean)
                return y

            @staticmethod
            def backward(ctx, dy):
                x, w, rstd, mean = ctx.saved_tensors
                dx, dw, db = layernorm_bwd(x, w, dy, rstd, mean, has_bias=True)
                return dx, dw.view(torch.bfloat16)[1::2], db.view(torch.bfloat16)[1::2]

        found["quack"] = Quack.apply
    found.update(liger_cute("layer_norm", LAYER_EPS))
    with optional():
        from cudnn.ops.norm import layer_norm

        found["cudnn"] = lambda x, w, b: layer_norm(x, tuple(w.shape), w, b, LAYER_EPS)
    with optional():
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        found["apex"] = lambda x, w, b: fused_layer_norm_affine(x, w, b, w.shape, LAYER_EPS)
    return found


def add_rms_norm_rivals():
    """Installed rivals, each a function of (x, residual, weight)."""
    found = flash_attn(dropout=0.0, rms=True)
    with optional():
        from liger_kernel.transformers.functional import liger_fused_add_rms_norm

        found["liger"] = lambda x, r, w: liger_fused_add_rms_norm(x, r, w, RMS_EPS)
    found.update(liger_cute("fused_add_rms_norm", RMS_EPS))
    with optional():
        from quack.rmsnorm import rmsnorm

        found["quack"] = lambda x, r, w: rmsnorm(x, w, residual=r, eps=RMS_EPS, prenorm=True)
    return found


def flash_attn(dropout, rms):
    """The Triton norm with residual and dropout of flash-attn, where it is installed: {name: function}."""
    found = {}
    with optional():
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        def call(x, residual, weight, bias=None):
            eps = RMS_EPS if rms else LAYER_EPS
            return layer_norm_fn(
                x, weight, bias, residual=residual, eps=eps, dropout_p=dropout, prenorm=True, is_rms_norm=rms
            )

        found["flash-attn"] = call
    return found


RIVALS = {"rms_norm": rms_norm_rivals, "layer_norm": layer_norm_rivals, "add_rms_norm": add_rms_norm_rivals}


def of_row(row, device, options):
    """A row's op."""
    layer, residual, dropout = (flag == "true" for flag in row.arguments)
    eps = LAYER_EPS if layer else RMS_EPS
    op = getattr(warpsmith, row.name)

    def ours(*tensors):
        return op(*tensors, P, eps) if dropout else op(*tensors, eps)

    def norm(s, weight, *bias):
        return F.layer_norm(s, weight.shape, weight, *bias, eps) if layer else F.rms_norm(s, weight.shape, weight, eps)

    def eager(x, *others):
        if not residual:
            return norm(x, *others)
        s = others[0] + (F.dropout(x, P) if dropout else x)
        return norm(s, *others[1:]), s

    rivals = RIVALS.get(row.name, lambda: flash_attn(P if dropout else 0.0, rms=not layer))
    elements = {"forward": 4 if residual else 2, "backward": 5 if dropout else 4 if residual else 3}

    def arguments(shape):
        return [shape] * (2 if residual else 1) + [shape[-1:]] * (2 if layer else 1)

    shapes = GPU_SHAPES.get(row.name, ADD_SHAPES[:2]), CPU_SHAPES, (64, 128)
    return time_shapes(row.name, ours, eager, rivals, arguments, elements, shapes, device, options)


HOST_SHAPE = (4, 64)


def host(device, options):
    """Host cost of one eager call of a small op: dispatcher, autograd and our own Python, beside torch's native ops.

    On a GPU this is the host's part alone; on the CPU the (tiny) computation is part of it. The goals are set against
    `layer_norm`: our rows state its time over ours under "vs best rival".
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    cell = ("rms_norm", "x".join(map(str, HOST_SHAPE)), str(dtype).removeprefix("torch."))
    for grad in (False, True):
        x = torch.randn(HOST_SHAPE, device=device).to(dtype).requires_grad_(grad)
        w = torch.randn(HOST_SHAPE[-1], device=device).to(dtype).requires_grad_(grad)
        b = torch.zeros(HOST_SHAPE[-1], device=device).to(dtype).requires_grad_(grad)
        dy = torch.randn(HOST_SHAPE, device=device).to(dtype)
        forward = {
            OURS: lambda x=x, w=w: warpsmith.rms_norm(x, w, 1e-6),
            "torch layer_norm": lambda x=x, w=w, b=b: F.layer_norm(x, (HOST_SHAPE[-1],), w, b),
            "torch rms_norm": lambda x=x, w=w: F.rms_norm(x, (HOST_SHAPE[-1],), w, 1e-6),
        }
        rows += host_rows(cell, forward, (x, w) if grad else (), dy, options, not_rivals=("torch rms_norm",))
    return rows


OPS = {row.name: functools.partial(of_row, row) for row in rows() if row.family == "norm"}
OPS["host"] = host
