"""Casts to 8-bit floats beside torch eager and torch.compile, at the activations and gradients of Llama models.

    quantize_fp8          rows, a given tensor scale, blocks ("forward", and named so)
    cast_transpose_dbias  bytes, transposed bytes and column sums of a gradient, by a given scale: a power of two, as
                          recipes have it, and any other
    swiglu_fp8            silu(gate) * up, and the cast of its rows, as a producer in front of an 8-bit layer
    dequantize_fp8        back to the dtype

The yardstick is a copy of the floor's bytes: what is given read once, each kind of bytes written once.
"""

import functools

import torch
import warpsmith

from benchmarks.cells import cell_of, leaves, timed, torch_contenders

GPU_SHAPES = ((16384, 4096), (8192, 2048), (8192, 14336), (65536, 768))
CPU_SHAPES = ((1024, 4096),)
TINY = (16, 256)
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
POWER_OF_TWO, ANY_SCALE = 2.0**-6, 0.01


def plain_cast(x, scale):
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def plain_rows(x):
    scale = x.float().abs().amax(-1, keepdim=True) / LARGEST
    return plain_cast(x, torch.exp2(torch.ceil(torch.log2(scale)))), scale


def plain_blocks(x):
    blocks = x.view(x.shape[0], -1, 128)
    data, scale = plain_rows(blocks)
    return data.view(x.shape), scale[..., 0]


def plain_cast_transpose_dbias(x, scale):
    data = plain_cast(x, scale)
    return data, data.t().contiguous(), x.float().sum(0)


def inputs(device, options):
    for shape in options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY):
        yield leaves(device, shape)[0].detach()


def timed_call(op, direction, x, ours, plain, arguments, floor, device, options):
    contenders = torch_contenders(ours, plain, options)
    calls = {name: functools.partial(fn, *arguments) for name, fn in contenders.items()}
    return timed(cell_of(op, x.shape, x, direction), calls, device, options, floor=floor)


def quantize(device, options):
    rows, given = [], torch.tensor(POWER_OF_TWO, device=device)
    for x in inputs(device, options):
        floor = x.nbytes + x.numel()
        for direction, ours, plain, arguments in (
            ("forward, rows", warpsmith.quantize_fp8, plain_rows, (x,)),
            ("forward, blocks", functools.partial(warpsmith.quantize_fp8, scaling="block"), plain_blocks, (x,)),
            ("forward, given", lambda x, s: warpsmith.quantize_fp8(x, "tensor", scale=s), plain_cast, (x, given)),
        ):
            rows += timed_call("quantize_fp8", direction, x, ours, plain, arguments, floor, device, options)
    return rows


def cast_transpose_dbias(device, options):
    rows, raw = [], torch.ops.warpsmith.quantize_fp8.default

    def ours(x, scale):
        return raw(x, scale, 1, 1, E4M3, True, True)

    for x in inputs(device, options):
        floor = x.nbytes + 2 * x.numel()
        for direction, scale in (("forward", POWER_OF_TWO), ("forward, any scale", ANY_SCALE)):
            rows += timed_call(
                "cast_transpose_dbias", direction, x, ours, plain_cast_transpose_dbias,
                (x, torch.tensor(scale, device=device)), floor, device, options
            )  # fmt: skip
    return rows


def swiglu(device, options):
    rows, raw = [], torch.ops.warpsmith.swiglu_fp8.default

    def plain(gate, up):
        y = torch.nn.functional.silu(gate) * up
        return y, plain_rows(y)

    for gate in inputs(device, options):
        up, floor = torch.randn_like(gate), 3 * gate.nbytes + gate.numel()
        ours = functools.partial(raw, inplace_backward=False)
        rows += timed_call("swiglu_fp8", "forward", gate, ours, plain, (gate, up), floor, device, options)
    return rows


def dequantize(device, options):
    rows = []
    for x in inputs(device, options):
        t, to = warpsmith.quantize_fp8(x), x.dtype
        ours = functools.partial(warpsmith.dequantize_fp8, dtype=to)
        floor = x.nbytes + x.numel()

        def plain(t, to=to):
            return (t.data.float() * t.scale).to(to)

        rows += timed_call("dequantize_fp8", "forward", x, ours, plain, (t,), floor, device, options)
    return rows


OPS = {
    "quantize_fp8": quantize,
    "cast_transpose_dbias": cast_transpose_dbias,
    "swiglu_fp8": swiglu,
    "dequantize_fp8": dequantize,
}
