"""attention: forward and backward, beside the back ends of torch's scaled_dot_product_attention, FlexAttention, and
flash-attn (2 and 4) where installed.

Products bind, not memory: rows have times, and a cell's FLOPs are 4 B H Sq Sk D forward and 2.5 times that backward,
half of it with a causal mask. All contenders get tensors in bshd; torch's functions see them transposed, not copied.
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import warpsmith
from torch.nn.attention import SDPBackend, sdpa_kernel
from warpsmith.testing.op_timing import timer_of
from warpsmith.testing.rows import OURS, make_rows

from benchmarks.cells import compiled, forget_compiled
from benchmarks.rivals import optional

MEAN_DOCUMENT = 1024
PORTABLE = f"{OURS}, portable"  # the kernels of other GPUs, where the Hopper kernels would run


@dataclass(frozen=True)
class Cell:
    """One problem: the shape of q in bshd, heads of k, and one of the options."""

    batch: int
    tokens: int
    heads: int
    dim: int
    k_heads: int = 0
    causal: bool = False
    window: int = 0
    documents: bool = False
    extra: str = ""  # dropout, bias, frozen bias, padding, alibi or sink

    def __str__(self):
        names = [n for n in ("causal", "documents") if getattr(self, n)]
        names += [f"window {self.window}"] if self.window else []
        names += [self.extra] if self.extra else []
        heads = f"{self.heads}:{self.k_heads}" if self.k_heads else str(self.heads)
        return " ".join([f"{self.batch}x{self.tokens}x{heads}x{self.dim}", *names])


LENGTHS = ((16, 1024), (4, 4096), (1, 16384))
MASKS = (False, True)
GPU_CELLS = (
    *(Cell(b, s, h, d, causal=c) for d, h in ((128, 16), (64, 32)) for b, s in reversed(LENGTHS) for c in MASKS),
    Cell(64, 1024, 12, 64, causal=True),
    *(Cell(1, 16384, 8, 256, causal=c) for c in MASKS),
    Cell(1, 32768, 16, 128, causal=True, documents=True),
    Cell(1, 32768, 64, 64, 8, causal=True, window=1024),
    Cell(1, 8192, 64, 128, 8, causal=True),
    *(Cell(4, 4096, 16, 128, causal=True, extra=e) for e in ("", "dropout", "bias", "frozen bias", "alibi", "sink")),
    Cell(4, 4096, 16, 128, extra="padding"),
    *(Cell(4, 4096, 32, 64, causal=True, extra=e) for e in ("bias", "frozen bias", "alibi")),
)
CPU_CELLS = (Cell(2, 1024, 8, 64), Cell(2, 1024, 8, 64, causal=True))


def document_lengths(tokens):
    """Lengths around the mean, the same at every run."""
    g, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < tokens:
        length = int(torch.randint(1, 2 * MEAN_DOCUMENT, (), generator=g))
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def extras(cell, device, dtype):
    """The optional tensors of a cell, as keywords of ours."""
    if cell.extra == "dropout":
        return {"dropout_p": 0.1}
    if cell.extra in ("bias", "frozen bias"):
        shape = (1, cell.heads, cell.tokens, cell.tokens)
        return {"bias": torch.randn(shape, device=device, dtype=dtype, requires_grad=cell.extra == "bias")}
    if cell.extra == "padding":  # a sixteenth of each sequence
        seen = torch.arange(cell.tokens, device=device) < cell.tokens - cell.tokens // 16
        return {"bias": seen.expand(cell.batch, 1, 1, cell.tokens).contiguous()}
    if cell.extra == "alibi":
        return {"alibi_slopes": 2.0 ** -torch.arange(1, cell.heads + 1, device=device, dtype=torch.float32)}
    if cell.extra == "sink":
        return {"sink": torch.randn(cell.heads, device=device, requires_grad=True)}
    return {}


def tokens(*tensors):
    """Without the batch dimension, as views. The gradient of ``q[0]`` would be cleared and copied as a whole."""
    return [t.squeeze(0) for t in tensors]


@contextlib.contextmanager
def portable_alone():
    torch.ops.warpsmith._attention_portable_alone(True)
    try:
        yield
    finally:
        torch.ops.warpsmith._attention_portable_alone(False)


def kernels_of(name):
    """In which a contender's forward and its backward run."""
    return portable_alone() if name == PORTABLE else contextlib.nullcontext()


def ours(cell, options, cu_seqlens, longest, **more):
    window = (cell.window - 1, 0) if cell.window else None
    options = {**options, **more, "causal": cell.causal, "window_size": window}
    if cell.documents:
        return lambda q, k, v: warpsmith.attention_varlen(*tokens(q, k, v), cu_seqlens, max_seqlen_q=longest, **options)
    return lambda q, k, v: warpsmith.attention(q, k, v, **options)


def torch_backends(cell, options):
    """scaled_dot_product_attention with each back end alone."""
    if cell.window or cell.documents or cell.extra in ("sink", "alibi"):
        return {}
    bias = options.get("bias")
    known = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    known["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    arguments = {"is_causal": cell.causal, "enable_gqa": bool(cell.k_heads), "dropout_p": options.get("dropout_p", 0.0)}
    if bias is not None and cell.causal:
        causal = torch.ones(cell.tokens, cell.tokens, dtype=torch.bool, device=bias.device).tril()
        mask = torch.where(causal, 0.0, float("-inf")).to(bias.dtype)
        arguments.update(is_causal=False)

    def function(backend):
        def call(q, k, v):
            with sdpa_kernel(backend):
                more = {"attn_mask": bias + mask if cell.causal else bias} if bias is not None else {}
                return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), **arguments, **more)

        return call

    return {f"torch {name}": function(backend) for name, backend in known.items()}


def flex(cell, document_of):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b, h, i, j):
        seen = i >= j if cell.causal else i >= 0
        if cell.window:
            seen = seen & (i - j < cell.window)
        return seen & (document_of[i] == document_of[j]) if cell.documents else seen

    plain = not (cell.causal or cell.window or cell.documents)
    mask = None if plain else create_block_mask(visible, None, None, cell.tokens, cell.tokens, device="cuda")
    call = compiled(flex_attention)
    return lambda q, k, v: call(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask, enable_gqa=bool(cell.k_heads))


def flash_attn(cell, cu_seqlens, longest):
    """FlashAttention 2 and 4, where installed."""
    found = {}
    window = (cell.window - 1, 0) if cell.window else (-1, -1)
    with optional():
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        if cell.documents:
            found["flash-attn 2"] = lambda q, k, v: flash_attn_varlen_func(
                *tokens(q, k, v), cu_seqlens, cu_seqlens, longest, longest, causal=cell.causal
            )
        else:
            found["flash-attn 2"] = lambda q, k, v: flash_attn_func(q, k, v, causal=cell.causal, window_size=window)
    with optional():
        from flash_attn.cute import flash_attn_func as cute_func
        from flash_attn.cute import flash_attn_varlen_func as cute_varlen_func

        sides = tuple(None if w < 0 else w for w in window)
        if cell.documents:
            found["flash-attn 4"] = lambda q, k, v: cute_varlen_func(
                *tokens(q, k, v), cu_seqlens, cu_seqlens, longest, longest, causal=cell.causal
            )[0]
        else:
            found["flash-attn 4"] = lambda q, k, v: cute_func(q, k, v, causal=cell.causal, window_size=sides)[0]
    return found


def contenders_of(cell, device, dtype, settings):
    lengths = document_lengths(cell.tokens) if cell.documents else [cell.tokens]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    options = extras(cell, device, dtype)
    found = {OURS: ours(cell, options, cu_seqlens, max(lengths))}
    if device == "cpu":
        found["torch"] = lambda q, k, v: F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=cell.causal
        )
        return found, options
    found["warpsmith, any order"] = ours(cell, options, cu_seqlens, max(lengths), deterministic=False)
    if cell.dim <= 128 and cell.extra in ("", "sink", "bias", "frozen bias", "padding", "alibi"):
        found[PORTABLE] = found[OURS]
    found.update(torch_backends(cell, options))
    if not cell.extra:
        found.update(flash_attn(cell, cu_seqlens, max(lengths)))
        if settings.compile and not settings.quick:
            forget_compiled()
            document_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
            found["FlexAttention"] = flex(cell, document_of)
    return found, options


def backward(fn, leaves):
    """The gradients of all leaves, on a graph that stays."""
    y = fn(*leaves[:3])
    upstream = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, upstream, retain_graph=True)


def rows_of(cell, device, settings):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    k_shape = (cell.batch, cell.tokens, cell.k_heads or cell.heads, cell.dim)
    inputs = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        for shape in ((cell.batch, cell.tokens, cell.heads, cell.dim), k_shape, k_shape)
    ]
    contenders, options = contenders_of(cell, device, dtype, settings)
    leaves = inputs + [t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    measure = timer_of(device, settings.samples)

    def within(name, call):
        def run():
            with kernels_of(name):
                return call()

        return run if name == PORTABLE else call

    forward = {name: within(name, lambda fn=fn: fn(*inputs)) for name, fn in contenders.items()}
    backwards = {}
    for name, fn in contenders.items():
        try:
            with kernels_of(name):
                backwards[name] = within(name, backward(fn, leaves))
        except Exception:
            continue  # its forward row says why
    name = str(dtype).removeprefix("torch.")
    return [
        row
        for direction, calls in (("forward", forward), ("backward", backwards))
        for row in make_rows("attention", str(cell), name, direction, measure(calls))
    ]


def run(device, options):
    cells = options.shapes(device, GPU_CELLS, CPU_CELLS, Cell(1, 64, 2, 32, causal=True))
    return [row for cell in cells for row in rows_of(cell, device, options)]


OPS = {"attention": run, "attention_varlen": run}
