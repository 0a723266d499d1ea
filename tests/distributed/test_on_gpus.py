"""What needs several GPUs and NCCL: the sharded optimizer's bits, context parallel attention. One job for all of it."""

import pytest
import torch
import warpsmith
from sharding import LONGEST, PARAMS, Pair
from warpsmith.distributed import context_parallel_attention, shard_sequence, unshard_sequence
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


def exact(q, k, v, upstream):
    """Causal attention in float64: out and the gradients."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    return out, *torch.autograd.grad(out, (q, k, v), upstream.double())


def check_context(device, mode):
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(1, 768, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    want = exact(q, k, v, upstream)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    one = warpsmith.attention(*whole, causal=True)
    one = one, *torch.autograd.grad(one, whole, upstream)
    own = [shard_sequence(t).requires_grad_() for t in (q, k, v)]
    out = context_parallel_attention(*own, mode=mode, causal=True)
    found = out, *torch.autograd.grad(out, own, shard_sequence(upstream))
    for name, a, b, e in zip(("out", "dq", "dk", "dv"), found, one, want, strict=True):
        error, allowed = ((t.double() - e).abs().max() for t in (unshard_sequence(a.detach()), b))
        assert error <= 1.1 * allowed + e.abs().max() * 2**-8, (mode, name, float(error), float(allowed))


def on_gpus(rank, world_size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    done = []
    for stage in (1, 2):
        check_sharded(rank, device, stage)
        done.append(f"stage {stage}")
    for mode in ("all_gather", "ring", "ulysses"):
        check_context(device, mode)
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
