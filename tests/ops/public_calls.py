"""One valid call of every public op, as its keyword arguments: for tests of what all ops have in common."""

import torch
import warpsmith
from warpsmith.testing import BadInput, OpSpec
from warpsmith.testing.run import FirstCalls

from tools import families

NAMES = [name for name in warpsmith.ops.__all__ if name[0].islower()]
NOT_DIFFERENTIABLE = ("adamw", "dequantize_fp8", "normalize_image", "quantize_fp8")
TOKENS, WIDTH, CLASSES = 6, 8, 5


def arguments_of(name: str) -> dict:
    """New tensors in float64 (float32 for casts to 8 bits), from a fixed seed. The first dimension counts tokens
    wherever an op allows it."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rows() -> torch.Tensor:
        return make(TOKENS, WIDTH)

    def heads(count: int) -> torch.Tensor:
        return make(TOKENS, count, WIDTH)

    angles = make(TOKENS, WIDTH // 2)
    tables = {"cos": angles.cos(), "sin": angles.sin()}
    target = torch.arange(TOKENS) % CLASSES
    offsets = torch.tensor([0, 2, TOKENS], dtype=torch.int32)
    of_norm = {"x": rows(), "weight": make(WIDTH)}
    residual, bias, seed = {"residual": rows()}, {"bias": make(WIDTH)}, {"seed": torch.tensor([1, 2])}
    of_head = {"hidden": rows(), "weight": make(CLASSES, WIDTH), "target": target, "bias": make(CLASSES)}
    of_layer = {"x": rows(), "weight": make(CLASSES, WIDTH), "bias": make(CLASSES)}
    of_adam = {k: [rows()] for k in ("params", "grads", "exp_avgs")}
    calls = {
        "adamw": {
            **of_adam,
            "exp_avg_sqs": [rows().square()],
            "max_exp_avg_sqs": [],
            "steps": [torch.zeros(())],
            "lr": 0.1,
        },
        "add_layer_norm": of_norm | residual | bias,
        "add_rms_norm": of_norm | residual,
        "attention": {"q": heads(2), "k": heads(1), "v": heads(1), "layout": "thd"},
        "attention_varlen": {
            "q": heads(2),
            "k": heads(1),
            "v": heads(1),
            "cu_seqlens_q": offsets,
            "max_seqlen_q": TOKENS,
            "max_seqlen_k": TOKENS,
        },
        "batch_norm": {"running_mean": make(WIDTH), "running_var": make(WIDTH).square()} | of_norm | bias | residual,
        "conv2d": {
            "x": make(TOKENS, 2, 4, 4),
            "weight": make(CLASSES, 2, 3, 3),
            "residual": make(TOKENS, CLASSES, 2, 2),
        }
        | {"bias": make(CLASSES)},
        "cross_entropy": {"logits": make(TOKENS, CLASSES), "target": target},
        "dequantize_fp8": {"t": warpsmith.quantize_fp8(rows().float())},
        "dropout_add": {"x": rows(), "p": 0.5} | residual | seed,
        "dropout_add_layer_norm": of_norm | residual | bias | seed | {"p": 0.5},
        "dropout_add_rms_norm": of_norm | residual | seed | {"p": 0.5},
        "gated_linear": {"x": rows(), "gate_weight": make(CLASSES, WIDTH), "up_weight": make(CLASSES, WIDTH)},
        "group_norm": of_norm | bias | {"num_groups": 1},
        "layer_norm": of_norm | bias,
        "linear": of_layer | {"activation": "silu", "residual": make(TOKENS, CLASSES)},
        "linear_cross_entropy": of_head,
        "linear_log_prob": of_head,
        "matmul_symmetric": {"x": rows()},
        "max_pool2d": {"x": make(TOKENS, 4, 4, 2).movedim(-1, 1), "kernel_size": 3, "stride": 2, "padding": 1},
        "mlp": {
            "x": rows(),
            "w1": make(CLASSES, WIDTH),
            "b1": make(CLASSES),
            "w2": make(WIDTH, CLASSES),
            "b2": make(WIDTH),
        },
        "normalize_image": {"x": torch.zeros(2, 4, 4, 3, dtype=torch.uint8), "mean": (0.5,) * 3, "std": (0.2,) * 3},
        "qk_norm_rope": {"q": heads(2), "k": heads(1), "q_weight": make(WIDTH), "k_weight": make(WIDTH)} | tables,
        "quantize_fp8": {"x": rows().float()},
        "rms_norm": of_norm,
        "scaled_linear": {"x": make(TOKENS, 16).float(), "weight": make(32, 16).float(), "bias": make(32).float()},
        "rope": {"q": heads(2), "k": heads(1)} | tables,
    }
    calls |= {row.name: {"x": rows()} | bias for row in families.rows("BIASED")}
    calls |= {row.name: {"gate": rows(), "up": rows()} for row in families.rows("GATED")}
    calls |= {row.name: {"x": rows()} for row in families.rows("UNARY", "SOFTMAX")}
    return calls[name]


def raw_ops(name, *more):
    """For ``opcheck``: the raw ops of a name, with the arguments that its calls give them."""
    made = (getattr(torch.ops.warpsmith, name + ending, None) for ending in ("", "_forward", "_inference", "_backward"))
    others = (getattr(torch.ops.warpsmith, name + ending) for ending in more)
    return dict.fromkeys(op.default for op in (*made, *others) if op is not None)


def op_spec(name, **more):
    """The spec of a public op: what follows from its name, and ``more``."""
    own = {"op": getattr(warpsmith, name), "reference": getattr(warpsmith.reference, name)}
    return OpSpec(name=name, **own | {"traced": f"warpsmith::{name}", "opcheck": raw_ops(name)} | more)


def in_call(call, op, *alike):
    """For ``opcheck``: a raw op, and others, with the arguments that it gets in a call of the public arguments, or in
    the backward of that."""

    def arguments(good):
        leaves = {n: t.detach().requires_grad_() for n, t in floating_of(good).items()}
        with FirstCalls() as calls:
            call(**{**good, **leaves}).sum().backward()
        return calls.arguments[op.default]

    return dict.fromkeys((o.default for o in (op, *alike)), arguments)


def but(**changes):
    """For a BadInput: the good arguments with some of them changed, each by a function of the good ones."""
    return lambda good: {**good, **{k: change(good) for k, change in changes.items()}}


NO_FLOAT64_ON_CUDA = BadInput(
    "float64",
    lambda good: {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in good.items()
    },
    "expected float32, float16 or bfloat16 on CUDA, got float64",
    fake=False,
    devices=("cuda",),
)


def floor_bytes(forward, backward):
    """Bytes of ops that move so many elements of the dtype for each of the case."""
    return lambda case: {
        direction: elements * case.dtype.itemsize * torch.Size(case.shape).numel()
        for direction, elements in (("forward", forward), ("backward", backward))
    }


def floating_of(arguments: dict) -> dict:
    """The arguments that may have a gradient."""
    without = ("alibi_slopes", "class_weight", "cos", "found_inf", "grad_scale", "running_mean", "running_var", "sin")
    return {
        name: t
        for name, t in arguments.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point() and name not in without
    }
