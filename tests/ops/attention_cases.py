"""What the tests of attention and attention_varlen share: inputs, plain PyTorch in the same dtype."""

import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Rounding steps in float32 on the simulated kernels. With one to three keys a gradient is all cancellation: dP and
# delta are sums of the same products in two orders, and what remains of them is a rounding of dP (grad_k of 1x3x2x32
# with one key: 12.6 steps). Logits of 30 round their exponential (softmax_scale 1: 5.7).
SIM_STEPS = 14
OF_BOTH = {  # what both specs say
    "differentiable": ("q", "k", "v", "bias", "sink"),
    "outputs": ("out", "lse"),
    "laid_out": ("q", "k", "v"),
    "zero_sizes": False,
    "one_element": False,
    "edges_beside_options": (),  # an infinite q gives NaN to keys of its sequence that it does not see, as in torch
    "edge_steps": 2,  # a huge element of q multiplies every addition that follows it
    "sim_float32_steps": SIM_STEPS,
    "traced": "warpsmith::attention",
    "devices": ("cpu",),  # a GPU takes no float64, and has test_attention_cuda.py
    "autocast": lambda inputs, dtype: (dtype, FP32),
}
SEED = torch.tensor([5**25, 7**20])
PASSED_ON = (
    "causal", "causal_align", "window_size", "softmax_scale", "softcap", "dropout_p", "layout", "deterministic",
)  # fmt: skip


def with_mask(op):
    """The op with a boolean bias as an input of its own: the harness asks for gradients of what is named ``bias``."""

    def call(*, mask=None, bias=None, **options):
        return op(**options, bias=bias if mask is None else mask)

    return call


def same_dtype(op):
    """Plain PyTorch: products in the dtype of q, softmax in float32, as models write it."""

    def call(*, q, **options):
        return op(q=q, **options, products=q.dtype)

    return with_mask(call)


SLOPES = {"alibi_slopes": FP32}  # the dtype of slopes, whatever that of a case


def shown(shape, which):
    """A mask of this shape: keys up to the end of each batch entry, or ("stairs") more for each query, to some none."""
    keys = torch.arange(shape[3])
    if which == "stairs":
        queries = torch.arange(shape[2])[:, None]
        return ((queries % 5 != 0) & (keys < 20 * (queries % 35))).expand(shape).clone()
    ends = [which[i % len(which)] for i in range(shape[0])]
    return (keys < torch.tensor(ends)[:, None, None, None]).expand(shape).clone()


def parameters(case, rng, batch, heads, seqlen_q, seqlen_k):
    """The optional tensors and numbers of a case; ``bias`` and ``mask`` say which dimensions are not broadcast."""
    o = case.options
    full = (batch, heads, seqlen_q, seqlen_k)
    made = {name: o[name] for name in PASSED_ON if name in o}
    shape = [size if kept == "1" else 1 for size, kept in zip(full, o.get("bias", o.get("mask", "")), strict=False)]
    if "bias" in o:
        made["bias"] = rng.normal(shape)
        if "shown" in o:
            made["bias"].masked_fill_(~shown(shape, o["shown"]), -torch.inf)
        if "slope" in o:  # of logits that grow from the last keys to the first
            made["bias"] += o["slope"] * torch.arange(shape[3], 0, -1).to(made["bias"].dtype)
    elif "mask" in o:  # which the op takes in the place of a bias; random cases may draw both
        made["mask"] = shown(shape, o["shown"]) if "shown" in o else rng.uniform(shape) < 0.6
    if "sink" in o:
        made["sink"] = rng.normal((heads,), mean=o["sink"])
    if "alibi" in o:
        made["alibi_slopes"] = (rng.uniform((batch, heads) if o["alibi"] == 2 else (heads,)) / 4).float()
    if "dropout_p" in o:
        made["seed"] = SEED
    return made
