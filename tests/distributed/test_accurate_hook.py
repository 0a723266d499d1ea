"""The gradient hook: bits equal to its formula, DDP's ways of calling it; it and the rest on several GPUs."""

import pytest
import torch
import torch.distributed as dist
import warpsmith
from sharding import LONGEST, PARAMS, Pair
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import (
    ShardedOptimizer,
    accurate_hook,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)
from warpsmith.distributed.gradients.hook import mean_in_rank_order
from warpsmith.reference.attention import attention as reference
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


# float64 has no optimizer on CUDA. Some are longer than what is cut at there, 65,536.
ON_GPUS = [(dtype, shape, precision) for dtype, shape, precision in PARAMS if dtype != torch.float64] + [
    (torch.float32, (LONGEST,), None),
    (torch.bfloat16, (70_000,), "bf16"),
]


def check_sharded(rank, device, stage):
    pair = Pair(rank, None, stage=stage, params=ON_GPUS, device=device, bucket_cap_mb=0.3, lr=1e-2)
    for step in range(12):
        pair.backward(step, micros=2 if step % 3 == 0 else 1)
        if step % 2:
            pair.clip(0.5)
        pair.step(**({"found_inf": 1.0} if step == 5 else {}))
        pair.check(step)
    pair.check_state()


def exact(q, k, v, upstream, **options):
    """Causal attention in float64: out and the gradients."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    out = reference(q, k, v, causal=True, **options)
    return out, *torch.autograd.grad(out, (q, k, v), upstream.double())


def check_context(rank, device, mode, dropout_p):
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(1, 768, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    torch.manual_seed(7)
    seed = torch.randint(2**63 - 1, (2,), device=device)  # what rank 0 will draw for all
    options = {"dropout_p": dropout_p, "seed": seed}
    want = exact(q, k, v, upstream, **options)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    one = warpsmith.attention(*whole, causal=True, **options)
    one = one, *torch.autograd.grad(one, whole, upstream)
    own = [shard_sequence(t).requires_grad_() for t in (q, k, v)]
    torch.manual_seed(7 + rank)
    out = context_parallel_attention(*own, mode=mode, causal=True, dropout_p=dropout_p)
    found = out, *torch.autograd.grad(out, own, shard_sequence(upstream))
    for name, a, b, e in zip(("out", "dq", "dk", "dv"), found, one, want, strict=True):
        error, allowed = ((t.double() - e).abs().max() for t in (unshard_sequence(a.detach()), b))
        told = mode, dropout_p, name, error, allowed
        assert error <= 1.1 * allowed + e.abs().max() * 2**-8, told


def check_main_grad(rank, device, stage):
    """What a rank reads is the mean, in the order of the ranks, of all main_grads in 16 bits; and so is the step."""
    torch.manual_seed(rank)
    layer = warpsmith.nn.Linear(512, 384, device=device, dtype=torch.bfloat16, fuse_main_grad=True)
    layer.weight.main_grad = torch.zeros(384, 512, device=device)
    dist.broadcast(layer.weight.detach(), 0)
    dist.broadcast(layer.bias.detach(), 0)
    batches = [torch.randn(64, 512, device=device).bfloat16() for _ in range(3)]
    upstream = torch.randn(64, 384, device=device).bfloat16()
    own = torch.zeros(384, 512, device=device)
    for x in batches:
        (warpsmith.linear(x, layer.weight, layer.bias, main_grad=own) * upstream).sum().backward()
    layer.zero_grad()
    sent = [torch.empty_like(own, dtype=torch.bfloat16) for _ in range(dist.get_world_size())]
    dist.all_gather(sent, own.bfloat16())
    mean = mean_in_rank_order(torch.stack(sent).flatten(1)).view_as(own)
    before = layer.weight.detach().clone()
    if stage is None:
        model = DistributedDataParallel(layer, device_ids=[device.index] if device.type == "cuda" else None)
        model.register_comm_hook(None, accurate_hook)
        no_sync = model.no_sync
    else:
        optimizer = ShardedOptimizer(layer.parameters(), warpsmith.optim.SGD, stage=stage, lr=1.0)
        model, no_sync = layer, optimizer.no_sync
    with no_sync():
        for x in batches[:-1]:
            (model(x) * upstream).sum().backward()
    (model(batches[-1]) * upstream).sum().backward()
    if stage is None:
        assert torch.equal(layer.weight.main_grad, mean.float())
        return
    optimizer.step()
    assert torch.equal(layer.weight.detach(), (before.float() - mean.float()).bfloat16())
    optimizer.zero_grad()
    assert not layer.weight.main_grad.any()


def all_on_gpus(rank, world_size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    done = []
    for stage in (1, 2):
        check_sharded(rank, device, stage)
        done.append(f"stage {stage}")
    for stage in (None, 1, 2):
        check_main_grad(rank, device, stage)
    done.append("main_grad")
    for mode in ("all_gather", "ring", "ulysses"):
        for dropout_p in (0.0, 0.3):
            check_context(rank, device, mode, dropout_p)
        done.append(mode)
    return done


@pytest.mark.gpu
def test_on_two_gpus_and_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert (
        run_ranks(all_on_gpus, 2, backend="nccl", timeout_s=300)
        == [["stage 1", "stage 2", "main_grad", "all_gather", "ring", "ulysses"]] * 2
    )
