"""The gradient hook: bits equal to its formula, error independent of the number of ranks, DDP's ways of calling it."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import accurate_hook
from warpsmith.distributed.gradients.hook import mean_in_rank_order
from warpsmith.testing import run_ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float64]


class Mixed(torch.nn.Module):
    """Parameters of several dtypes and odd sizes, one of them unused in some steps."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
        sizes = [(1001,), (77,), (129,), (33,), (5,)]
        kinds = [*self.dtypes, torch.float32]
        self.weights = torch.nn.ParameterList(
            [torch.randn(size, generator=draw).to(kind) for size, kind in zip(sizes, kinds, strict=True)]
        )

    def forward(self, inputs, use_last=True):
        used = self.weights if use_last else self.weights[:-1]
        return sum((w.double() * x[: w.numel()].double()).sum() for w, x in zip(used, inputs, strict=False))


def inputs_of(rank, micro=0):
    draw = torch.Generator().manual_seed(100 * rank + micro)
    return [torch.randn(1001, generator=draw) * 3 for _ in range(5)]


def local_gradients(rank, micros, use_last=True):
    model = Mixed()
    for micro in micros:
        model(inputs_of(rank, micro), use_last).backward()
    return [w.grad for w in model.weights]


def expected(world_size, wire, micros=(0,), use_last=True):
    """The formula, from the gradients of all ranks."""
    found = []
    for grads in zip(*(local_gradients(r, micros, use_last) for r in range(world_size)), strict=True):
        if grads[0] is None:
            found.append(None)
            continue
        sent_as = wire if grads[0].dtype == torch.float32 else grads[0].dtype
        wide = torch.float64 if sent_as == torch.float64 else torch.float32
        total = torch.zeros_like(grads[0], dtype=wide)
        for g in grads:
            total = total + g.to(sent_as).to(wide)
        found.append((total / world_size).to(sent_as).to(grads[0].dtype))
    return found


def wrapped(hook, **options):
    ddp = DistributedDataParallel(Mixed(), bucket_cap_mb=0.002, **options)  # several buckets
    ddp.register_comm_hook(None, hook)
    return ddp


def check(ddp, want):
    for weight, grad in zip(ddp.module.weights, want, strict=True):
        if grad is not None:
            assert weight.grad.dtype == grad.dtype
            assert torch.equal(weight.grad, grad), (weight.dtype, (weight.grad - grad).abs().max())


def on_ranks(rank, world_size):
    passed = []
    for wire, hook in ((torch.bfloat16, accurate_hook), (torch.float16, accurate_hook(wire=torch.float16))):
        ddp, want = wrapped(hook), expected(world_size, wire)
        for _ in range(4):  # DDP rebuilds its buckets after the first step
            ddp.zero_grad()
            ddp(inputs_of(rank)).backward()
            check(ddp, want)
        passed.append(f"formula {wire}")

        ddp = wrapped(hook)
        for _ in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                for micro in (0, 1):
                    ddp(inputs_of(rank, micro)).backward()
            ddp(inputs_of(rank, 2)).backward()
            check(ddp, expected(world_size, wire, (0, 1, 2)))
        passed.append(f"accumulation {wire}")

    ddp = wrapped(accurate_hook, find_unused_parameters=True)
    for use_last in (True, False, True):
        ddp.zero_grad()
        ddp(inputs_of(rank), use_last).backward()
        check(ddp, expected(world_size, torch.bfloat16, use_last=use_last))
    passed.append("unused parameters")

    ddp = wrapped(accurate_hook)
    poisoned = [x.clone() for x in inputs_of(rank)]
    if rank == world_size - 1:
        poisoned[0][3] = float("nan")
        poisoned[0][4] = float("inf")
    ddp(poisoned).backward()
    grad = ddp.module.weights[0].grad
    assert grad[3].isnan() and grad[4].isinf() and grad[5:].isfinite().all()
    passed.append("nan and inf reach every rank")

    half = dist.new_group(list(range(world_size // 2 or 1)))
    if rank < (world_size // 2 or 1):
        ddp = DistributedDataParallel(Mixed(), process_group=half)
        ddp.register_comm_hook(half, accurate_hook)
        ddp(inputs_of(rank)).backward()
        check(ddp, expected(world_size // 2 or 1, torch.bfloat16))
    passed.append("a group")
    return passed


@pytest.mark.parametrize("world_size", [2, 3])
def test_under_ddp_on_gloo(world_size):
    for passed in run_ranks(on_ranks, world_size, timeout_s=200):
        assert len(passed) == 7  # nothing was left out


@pytest.mark.gpu
def test_under_ddp_on_nccl():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("one GPU: NCCL takes one rank for each")
    assert run_ranks(on_gpus, count, backend="nccl", timeout_s=200) == [True] * count


def on_gpus(rank, world_size):
    torch.cuda.set_device(rank)
    model = Mixed().cuda()
    ddp = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=0.002)
    ddp.register_comm_hook(None, accurate_hook)
    want = expected(world_size, torch.bfloat16)
    for _ in range(4):
        ddp.zero_grad()
        ddp([x.cuda() for x in inputs_of(rank)]).backward()
        for weight, grad in zip(model.weights, want, strict=True):
            assert torch.equal(weight.grad.cpu(), grad)
    return True


@pytest.mark.parametrize("ranks", [1, 2, 7, 64, 4096])
@pytest.mark.parametrize("wire", DTYPES)
def test_the_error_does_not_grow_with_the_ranks(ranks, wire):
    """Within one rounding of the exact mean of what was sent, and float32's own error of the sum."""
    draw = torch.Generator().manual_seed(ranks)
    parts = torch.randn(ranks, 512, generator=draw, dtype=torch.float64).to(wire)
    exact = parts.double().mean(0)
    error = (mean_in_rank_order(parts).double() - exact).abs()
    rounding = exact.abs() * torch.finfo(wire).eps / 2 + torch.finfo(wire).smallest_normal
    wide = torch.finfo(torch.float64 if wire == torch.float64 else torch.float32).eps
    of_sum = wide * ranks * parts.double().abs().mean(0)
    assert (error <= rounding * (1 + 1e-3) + of_sum).all()


def test_sums_in_bfloat16_would_fail_that_bound():
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(4096, 512, generator=draw, dtype=torch.float64).bfloat16()
    exact = parts.double().mean(0)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    error = ((total / 4096).double() - exact).abs()
    bound = exact.abs() * torch.finfo(torch.bfloat16).eps / 2 + 4096 * torch.finfo(torch.float32).eps
    assert (error > bound).float().mean() > 0.5


def test_the_sum_is_in_rank_order():
    """2^24 + 1 is 2^24 in float32: the order shows in the result."""
    big = torch.tensor([[2.0**24], [1.0], [1.0], [-(2.0**24)]], dtype=torch.bfloat16)
    assert mean_in_rank_order(big).item() == 0
    assert mean_in_rank_order(big[[0, 3, 1, 2]]).item() == 0.5


@pytest.mark.parametrize("wire", [torch.float32, torch.int8, torch.float64])
def test_another_wire_is_refused(wire):
    with pytest.raises(ValueError, match="wire: expected torch.bfloat16 or torch.float16, got"):
        accurate_hook(wire=wire)
