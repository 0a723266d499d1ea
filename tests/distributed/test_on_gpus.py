"""What needs several GPUs and NCCL: the sharded optimizer's bits, context parallel attention. One job for all of it."""

import pytest
import torch
import warpsmith
from sharding import LONGEST, PARAMS, Pair
from warpsmith.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from warpsmith.reference.attention import attention as reference
from warpsmith.testing import run_ranks

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


def on_gpus(rank, world_size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    done = []
    for stage in (1, 2):
        check_sharded(rank, device, stage)
        done.append(f"stage {stage}")
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
        run_ranks(on_gpus, 2, backend="nccl", timeout_s=300)
        == [["stage 1", "stage 2", "all_gather", "ring", "ulysses"]] * 2
    )
