"""dropout_add under the law for given seeds, and where the seeds come from."""

import pytest
import torch
import warpsmith
from warpsmith.reference.dropout import dropout_mask
from warpsmith.testing import BadInput, Case, bitwise_equal, op_tests, sim

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, floor_bytes, op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.warpsmith


def inputs(case, rng):
    p = case.options.get("p", 0.3)
    x, residual = rng.normal(case.shape), rng.normal(case.shape)
    return {"x": x, "residual": residual, "p": p, "seed": rng.integers((2,), -(2**62), 2**62)}


def bytes_beside(case, _):
    """The seed, 16 bytes, once for each vector and for each element behind the last one. Where nothing is dropped, the
    gradient is handed on."""
    elements = torch.Size(case.shape).numel()
    if case.options.get("p") == 0.0:
        return {"backward": (-2 * elements * case.dtype.itemsize, 0)}
    dtype = str(case.dtype).removeprefix("torch.")
    vector = sim.plan("dropout_add", rows=1, columns=elements, dtype=dtype)["vector_elems"]
    seeds = 16 * (elements // vector + elements % vector)
    return {"forward": (seeds, 0), "backward": (seeds, 0)}


SPEC = op_spec(
    name="dropout_add",
    inputs=inputs,
    # Around a vector, a Philox call and the CPU's 128 lanes; rows that begin inside a call.
    cases=[
        *(Case((5, width), dtype) for width in (7, 8, 33, 256) for dtype in (BF16, FP32)),
        *(Case((3, 2, 96), dtype) for dtype in (FP16, FP64)),
        *(Case((3, 130), dtype, options={"p": p}) for p in (0.0, 0.1, 1.0) for dtype in (BF16, FP32)),
        Case((20, 1001), BF16),
        Case((768,), FP32),
    ],
    differentiable=("x", "residual"),
    outputs=("y",),
    gradcheck_cases=[Case((3, 5), FP64)],
    repeated_cases=[Case((700, 96), FP32)],
    double_backward=True,
    func_transforms=False,
    bad_inputs=[
        BadInput("scalar", but(x=lambda g: g["x"].sum(), residual=lambda g: g["x"].sum()), "x: expected at least one"),
        NO_FLOAT64_ON_CUDA,
    ],
    floor_bytes=floor_bytes(3, 2),
    bytes_beside=bytes_beside,
)  # fmt: skip

TestDropoutAdd = op_tests(SPEC)


def mask_of(y):
    return y != 0


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_a_gradient_that_is_differentiated_has_the_same_bits(dtype):
    x, seed = torch.randn(50, 37).to(dtype).requires_grad_(), torch.tensor([5, 6])
    y, dy = warpsmith.dropout_add(x, torch.zeros_like(x), 0.3, seed=seed), torch.randn(50, 37).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (again,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert bitwise_equal(dx.abs(), again.abs())


def test_the_mask_of_the_seed_given():
    seed = torch.tensor([2**63 - 1, -3])
    y = warpsmith.dropout_add(torch.ones(999), torch.zeros(999), 0.25, seed=seed)
    assert torch.equal(mask_of(y), dropout_mask(seed, (999,), 0.25))


def test_dropped_infinities_are_gone():
    x = torch.full((1000,), torch.inf, requires_grad=True)
    y = warpsmith.dropout_add(x, torch.ones(1000), 0.5)
    assert set(y.tolist()) == {1.0, torch.inf}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_draws_masks_and_keeps_them_for_backward(backend):
    torch._dynamo.reset()
    compiled = torch.compile(warpsmith.dropout_add, fullgraph=True, backend=backend)
    x = torch.ones(64, 64, requires_grad=True)
    masks = []
    for _ in range(2):
        y = compiled(x, torch.zeros(64, 64), 0.5)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y)
        masks.append(mask_of(y))
    assert 0.4 < (masks[0] == masks[1]).float().mean() < 0.6
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_replayed_graph_draws_anew_and_follows_the_seed():
    x, residual = torch.ones(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    warpsmith.dropout_add(x, residual, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = warpsmith.dropout_add(x, residual, 0.5)
    masks = []
    for seed in (7, None, 7):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        masks.append(mask_of(y).clone())
    assert torch.equal(masks[0], masks[2])
    assert 0.4 < (masks[0] == masks[1]).float().mean() < 0.6
