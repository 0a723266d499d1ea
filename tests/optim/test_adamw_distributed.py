"""warpsmith.optim.AdamW on DTensor parameters: each rank updates its own shards, as torch's does."""

import warnings

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import run_ranks

STEPS = 4


def sharded_model(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(0)
    # The bias of three elements is shared out unevenly; of the single element one rank has nothing.
    placements = [((6, 4), Shard(0)), ((3,), Shard(0)), ((1,), Shard(0)), ((5,), Replicate())]
    whole = [torch.randn(shape, generator=generator) for shape, _ in placements]
    params = [
        nn.Parameter(distribute_tensor(t, mesh, [placement]))
        for t, (_, placement) in zip(whole, placements, strict=True)
    ]
    return mesh, params, [nn.Parameter(t.clone()) for t in whole]


def set_grads(params, whole, mesh, seed):
    from torch.distributed.tensor import distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    for p, w in zip(params, whole, strict=True):
        w.grad = torch.randn(w.shape, generator=generator).to(w.dtype)
        p.grad = distribute_tensor(w.grad, mesh, p.placements)


def trained(rank, world_size, before=None, after=None, dtype=torch.float32, **options):
    """Our optimizer, its parameters on the ranks, and whole ones after the same steps. ``before(ours, plain, params,
    whole)`` and ``after(ours, params, step)`` are called beside each step."""
    warnings.simplefilter("ignore")
    mesh, *both = sharded_model(rank, world_size)
    params, whole = ([nn.Parameter(p.detach().to(dtype)) for p in tensors] for tensors in both)
    ours, plain = (warpsmith.optim.AdamW(tensors, lr=1e-2, **options) for tensors in (params, whole))
    for step in range(STEPS):
        set_grads(params, whole, mesh, step)
        if before is not None:
            before(ours, plain, params, whole)
        ours.step()
        plain.step()
        if after is not None:
            after(ours, params, step)
    return ours, params, whole


def equal(params, whole):
    return all(torch.equal(p.full_tensor(), w) for p, w in zip(params, whole, strict=True))


def train_sharded(rank, world_size):
    ours, params, whole = trained(rank, world_size)
    moments = [ours.state[p]["exp_avg"] for p in params]
    sharded = all(m.placements == p.placements for m, p in zip(moments, params, strict=True))
    return equal(params, whole), sharded, [float(ours.state[p]["step"]) for p in params]


def train_sharded_in_bfloat16(rank, world_size):
    """Rounding at random, by the elements' indices in the whole."""
    _, params, whole = trained(rank, world_size, dtype=torch.bfloat16, precision="bf16_sr", seed=3)
    return equal(params, whole)


def moved_local_states(rank, world_size):
    def move(ours, params, step):
        moved = ours.state[params[0]][("exp_avg", "exp_avg_sq", "step")[step % 3]]
        with torch.no_grad():  # otherwise it is a view of the local part
            part = moved.to_local() if hasattr(moved, "to_local") else moved
        old = part.data
        part.data = old.clone()
        old.fill_(torch.nan)

    _, params, whole = trained(rank, world_size, after=move)
    return equal(params, whole)


def refuse_other_placements(rank, world_size):
    from torch.distributed.tensor import Replicate

    mesh, params, whole = sharded_model(rank, world_size)
    optimizer = warpsmith.optim.AdamW(params, lr=1e-2)
    set_grads(params, whole, mesh, 0)
    params[0].grad = params[0].grad.redistribute(mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"params'\]\[0\]\.grad: expected placements .*Shard.*, got .*Replicate"):
        optimizer.step()
    return not optimizer.state


def train_fsdp(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(optim, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(4, 6) * (rank + 1)).square().sum().backward()
            optimizer.step()
        return [p.full_tensor().detach() for p in model.parameters()]

    ours, theirs = trained(warpsmith.optim), trained(torch.optim, foreach=False)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def clip_by_grad_scale(rank, world_size):
    """The norm of a sharded gradient is a DTensor, of which a rank's part is not the norm."""

    def scale(ours, plain, params, whole):
        ours.grad_scale, plain.grad_scale = (torch.linalg.vector_norm(p[0].grad) for p in (params, whole))

    _, params, whole = trained(rank, world_size, scale, eps=1.0)  # else one scale for all gradients changes little
    return max(float((p.full_tensor() - w).abs().max()) for p, w in zip(params, whole, strict=True))


def all_parts(rank, world_size):
    parts = (
        train_sharded,
        refuse_other_placements,
        train_fsdp,
        moved_local_states,
        clip_by_grad_scale,
        train_sharded_in_bfloat16,
    )
    return tuple(part(rank, world_size) for part in parts)


@pytest.fixture(scope="module")
def results():
    return run_ranks(all_parts, 2, timeout_s=120)


def test_shards_are_updated_like_whole_tensors(results):
    for (same, sharded, steps), *_ in results:
        assert same
        assert sharded
        assert steps == [STEPS] * 4


def test_local_states_moved_by_data_are_seen(results):
    assert [same for _, _, _, same, *_ in results] == [True, True]


def test_gradients_must_be_sharded_like_their_parameters(results):
    assert [refused for _, refused, *_ in results] == [True, True]


def test_fsdp_trains_as_with_torch(results):
    assert max(difference for _, _, difference, *_ in results) < 1e-6


def test_the_norm_of_a_sharded_gradient_is_a_grad_scale(results):
    assert max(difference for *_, difference, _ in results) < 1e-6


def test_shards_are_rounded_at_random_like_whole_tensors(results):
    assert [same for *_, same in results] == [True, True]
