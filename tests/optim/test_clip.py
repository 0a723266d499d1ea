"""warpsmith.optim.clip_grad_norm_ and grad_norm beside torch's, and beside sums in float64."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from warpsmith.optim import clip_grad_norm_, grad_norm
from warpsmith.testing import bitwise_equal, run_ranks
from warpsmith.testing.checks.cuda import no_waits

SHAPES = [(7, 5), (), (0,), (3,), (2049,), (33, 129), (40_000,)]
ORDERS = [1, 2, math.inf, 2.0, "inf"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(dtypes=(torch.float32,), device="cpu", shapes=SHAPES, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    params = []
    for i, shape in enumerate(shapes):
        p = nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)], device=device))
        p.grad = (torch.randn(shape, generator=generator) * scale).to(p)
        params.append(p)
    return [nn.Parameter(torch.ones(4)), *params]  # the first has no gradient


def exact(params, order):
    return torch.linalg.vector_norm(torch.cat([p.grad.double().flatten().cpu() for p in params[1:]]), float(order))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtypes", [(d,) for d in FLOATS] + [tuple(FLOATS[:3]), tuple(FLOATS)], ids=str)
def test_the_norm_is_that_of_one_vector(dtypes, order):
    params = make(dtypes)
    norm, expected = grad_norm(params, order), exact(params, order)
    wide = torch.float64 in dtypes
    assert norm.dtype == (torch.float64 if wide else torch.float32)
    assert norm.shape == ()
    only_wide = set(dtypes) == {torch.float64}
    assert_close(norm.double(), expected, rtol=1e-14 if only_wide else 3e-7, atol=0)


@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e5])
def test_clips_as_torch(max_norm, order):
    """Beside torch's function in float64: in float32 its own sum of magnitudes is off by 1e-6 with one thread."""
    shapes = [s for s in SHAPES if s != (0,)]  # of which torch has no largest element
    ours, theirs = make(shapes=shapes), make(shapes=shapes)
    for p in theirs[1:]:
        p.data, p.grad = p.double(), p.grad.double()
    a = clip_grad_norm_(ours, max_norm, order)
    b = torch.nn.utils.clip_grad_norm_(theirs, max_norm, order)
    assert_close(a.double(), b, rtol=3e-7, atol=0)
    assert_close([p.grad.double() for p in ours[1:]], [p.grad for p in theirs[1:]], rtol=3e-7, atol=0)
    assert ours[0].grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_are_scaled_by_a_float32_factor(dtype):
    params = make((dtype,))
    expected = [(p.grad.float() * float(0.5 / (exact(params, 2) + 1e-6))).to(dtype) for p in params[1:]]
    clip_grad_norm_(params, 0.5)
    for p, e in zip(params[1:], expected, strict=True):
        assert_close(p.grad, e, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_takes_a_tensor_a_generator_and_nothing():
    params = make()
    whole = grad_norm(iter(params))
    assert bitwise_equal(whole, grad_norm(params))
    assert_close(clip_grad_norm_(params[1], 1.0), torch.linalg.vector_norm(make()[1].grad))
    for nothing in ([], [nn.Parameter(torch.ones(2))], iter(())):
        assert clip_grad_norm_(nothing, 1.0) == 0
    zeros = nn.Parameter(torch.ones(3))
    zeros.grad = torch._efficientzerotensor(3)
    assert clip_grad_norm_([zeros], 1.0) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
def test_what_is_not_finite_is_seen_or_raised(order, bad):
    params = make()
    params[5].grad[2000] = bad
    before = copy.deepcopy([p.grad for p in params[1:]])
    assert_close(grad_norm(params, order), torch.tensor(bad), equal_nan=True)
    with pytest.raises(RuntimeError, match=r"^clip_grad_norm_: expected a finite norm of the gradients, got (nan|inf)"):
        clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
    assert all(bitwise_equal(p.grad, b) for p, b in zip(params[1:], before, strict=True))
    clip_grad_norm_(params, 1.0, order)
    assert params[5].grad[2000].isnan()
    assert params[5].grad[0].isnan() if math.isnan(bad) else params[5].grad[0] == 0


def test_a_sum_that_float32_steps_would_lose():
    """2^24 ones in bfloat16: one running sum in float32 would stop at 2^24, one in bfloat16 at 256."""
    p = nn.Parameter(torch.zeros((1 << 24) + 4096, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    assert grad_norm([p], 1) == float((1 << 24) + 4096)


def test_another_order_is_refused():
    with pytest.raises(ValueError, match="^clip_grad_norm_: norm_type: expected 1, 2 or inf, got 3"):
        clip_grad_norm_(make(), 1.0, 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (torch.Tensor.to_sparse, "expected a dense tensor, got sparse_coo"),
        (lambda g: g.to(torch.complex64), "expected a floating dtype, got complex64"),
        (lambda g: g.to(torch.int32), "expected a floating dtype, got int32"),
    ],
    ids=["sparse", "complex", "integer"],
)
def test_bad_gradients_are_refused_and_nothing_is_scaled(spoil, message):
    params = make()
    bad = torch.nn.Parameter(spoil(torch.ones(3)), requires_grad=False)
    bad.grad = spoil(torch.ones(3))
    before = [p.grad.clone() for p in params[1:]]
    with pytest.raises(ValueError, match=f"^clip_grad_norm_: gradient 7: {message}"):
        clip_grad_norm_([*params, bad], 0.5)
    with pytest.raises(ValueError, match=f"^grad_norm: gradient 7: {message}"):
        grad_norm([*params, bad])
    assert all(bitwise_equal(p.grad, b) for p, b in zip(params[1:], before, strict=True))


def test_the_ops_are_checked_by_torch():
    tensors = [torch.randn(5), torch.randn(3, 2).bfloat16()]
    torch.library.opcheck(torch.ops.warpsmith.grad_norm.default, (tensors, 2.0))
    torch.library.opcheck(torch.ops.warpsmith.clip_grads.default, (tensors, torch.tensor(3.0), 1.0))


def sharded(rank, world_size):
    """Shards, replicas, summands and plain tensors in one list: {order: (norm, gradients are those of the whole)}."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for order in (1, 2, math.inf):
        whole = make(shapes=[(6, 4), (3,), (1,), (5,), (2,), (8,)])[1:]
        params = []
        for p, placement in zip(whole, [Shard(0), Shard(0), Shard(0), Replicate(), None, Partial()], strict=True):
            q = nn.Parameter(p.detach().clone())
            if isinstance(placement, Partial):  # each rank has a part of the sum
                q = nn.Parameter(DTensor.from_local(q.detach() / world_size, mesh, [placement]))
                q.grad = DTensor.from_local(p.grad / world_size, mesh, [placement])
            elif placement is not None:
                q = nn.Parameter(distribute_tensor(q.detach(), mesh, [placement]))
                q.grad = distribute_tensor(p.grad.clone(), mesh, [placement])  # a share may be a view
            else:
                q.grad = p.grad.clone()
            params.append(q)
        norm, expected = clip_grad_norm_(params, 0.5, order), clip_grad_norm_(whole, 0.5, order)
        close = all(
            torch.allclose(q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad, p.grad, rtol=1e-5)
            for p, q in zip(whole, params, strict=True)
        )
        found[order] = (float(norm) / float(expected), close)
    return found


@pytest.mark.not_on_sim(reason="ranks load the library of the package")
def test_dtensors_have_the_norm_of_the_whole():
    results = run_ranks(sharded, 2, timeout_s=120)
    assert results[0] == results[1]
    for ratio, close in results[0].values():
        assert ratio == pytest.approx(1, rel=1e-6)
        assert close


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
def test_on_cuda_without_waiting(order):
    here, there = make(tuple(FLOATS[:3])), make(tuple(FLOATS[:3]), device="cuda")
    with no_waits():
        norm = clip_grad_norm_(there, 0.5, order)
    expected = clip_grad_norm_(here, 0.5, order)
    assert_close(norm.cpu(), expected, rtol=1e-6, atol=0)
    for p, q in zip(here[1:], there[1:], strict=True):
        assert_close(q.grad.cpu(), p.grad, rtol=2 * torch.finfo(p.dtype).eps, atol=1e-7)


@pytest.mark.gpu
def test_a_captured_clip_follows_the_gradients():
    params = make(device="cuda")
    clip_grad_norm_(params, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 0.5)
    for scale in (1.0, 3.0):
        for p in params[1:]:
            p.grad.fill_(scale)
        expected = exact(params, 2)
        graph.replay()
        assert_close(norm.double().cpu(), expected, rtol=3e-7, atol=0)
        assert_close(exact(params, 2), torch.tensor(0.5, dtype=torch.float64), rtol=1e-5, atol=0)
