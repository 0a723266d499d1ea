"""What the tests of the biased activations share."""

import torch
import warpsmith
from warpsmith.testing import BadInput, Case, OpSpec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIXED = {"bias": FP32}

# Columns around a vector, a tile of a warp and of a block; rows below and above those of a block.
CASES = [
    *(Case((5, width), dtype) for width in (1, 7, 8, 33, 256, 264) for dtype in (BF16, FP32)),
    *(Case((3, 2, 96), dtype) for dtype in (FP16, FP64)),
    *(Case((6, 64), dtype, dtypes=MIXED) for dtype in (BF16, FP16)),
    Case((300, 24), BF16),
    Case((70, 1000), FP32),
    Case((70, 2056), BF16),
    Case((768,), FP32),
]


def but(**changes):
    return lambda good: {**good, **{k: change(good) for k, change in changes.items()}}


BAD_INPUTS = [
    BadInput("integers", but(x=lambda g: g["x"].int()), r"x: expected float32.*got int32"),
    BadInput("integer bias", but(bias=lambda g: g["bias"].int()), r"bias: expected float32.*got int32"),
    BadInput("bias dtype", but(bias=lambda g: g["bias"].half()), "bias: expected bfloat16 or float32, got float16"),
    BadInput("short bias", but(bias=lambda g: g["bias"][:-1]), r"bias: expected shape \(\d+\), got"),
    BadInput("matrix bias", but(bias=lambda g: g["bias"][None]), r"bias: expected shape \(\d+\), got"),
    BadInput("scalar", but(x=lambda g: g["x"].sum()), "x: expected at least one dimension"),
    BadInput("meta bias", but(bias=lambda g: g["bias"].to("meta")), "bias: expected a", fake=False),
    BadInput("float64", but(x=lambda g: g["x"].double(), bias=lambda g: g["bias"].double()),
             "x: expected float32, float16 or bfloat16 on CUDA, got float64", fake=False, devices=("cuda",)),
]  # fmt: skip


def biased_spec(name, reference, baseline, extra=None, cases=CASES, bad_inputs=BAD_INPUTS):
    """``extra``: the op's further argument by name, its default, and what its raw ops take for it."""
    argument, default, raw_value = extra or (None, None, None)
    raw = {suffix: getattr(torch.ops.warpsmith, name + suffix).default for suffix in ("", "_forward", "_backward")}

    def inputs(case, rng):
        made = {"x": rng.normal(case.shape, std=2.0), "bias": rng.normal(case.shape[-1:])}
        return made if argument is None else {**made, argument: case.options.get(argument, default)}

    def raw_extra(good):
        return () if argument is None else (raw_value(good[argument]),)

    def forward(good):
        return good["x"], good["bias"], *raw_extra(good)

    def backward(good):
        return torch.ones_like(good["x"]), good["x"], good["bias"], True, True, *raw_extra(good)

    return OpSpec(
        name=name,
        op=getattr(warpsmith, name),
        reference=reference,
        baseline=baseline,
        inputs=inputs,
        cases=cases,
        differentiable=("x", "bias"),
        outputs=("y",),
        laid_out=("x",),
        batched=("x",),
        gradcheck_cases=[Case((3, 5), FP64)],
        double_backward=True,
        func_transforms=True,
        traced=f"warpsmith::{name}",
        opcheck={raw[""]: forward, raw["_forward"]: forward, raw["_backward"]: backward},
        bad_inputs=bad_inputs,
        floor_bytes=lambda case: {
            "forward": 2 * case.dtype.itemsize * torch.Size(case.shape).numel(),
            "backward": 3 * case.dtype.itemsize * torch.Size(case.shape).numel(),
        },
    )


def check_thread_counts(op):
    """The bits of values and gradients for one and two threads."""
    torch.manual_seed(0)
    x, bias, dy = torch.randn(4096, 50), torch.randn(50), torch.randn(4096, 50)

    def run():
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = op(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(2)
        two = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def check_gradients_alone(backward, device, *options):
    """The bits of each gradient do not depend on whether the other is wanted. `backward`: the raw op."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, 37, 40, device=device).bfloat16()
    for bias in (torch.randn(40, device=device), torch.randn(40, device=device).bfloat16()):
        both = backward(dy, x, bias, True, True, *options)
        assert torch.equal(backward(dy, x, bias, True, False, *options)[0], both[0])
        assert torch.equal(backward(dy, x, bias, False, True, *options)[1], both[1])
