"""SyncBatchNorm on 1 to 4 ranks: the law of one rank's whole batch, and conversion from and to torch's modules."""

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from torch import nn
from warpsmith.testing import measure, run_ranks

from tests.dispatched import Beside

SHARES = {1: [7], 2: [5, 2], 3: [3, 0, 4], 4: [1, 2, 1, 3]}  # samples of each rank
DTYPES = [torch.float32, torch.bfloat16]
NAMES = ["y", "grad_x", "grad_residual", "grad_weight", "grad_bias", "running_mean", "running_var"]


def whole_batch(dtype):
    g = torch.Generator().manual_seed(3)
    x, residual, dy = (torch.randn(7, 16, 5, 3, generator=g) for _ in range(3))
    x = x * torch.rand(16, 1, 1, generator=g) + 3
    parameters = [torch.rand(16, generator=g) + 0.5, torch.randn(16, generator=g)]
    return [t.to(dtype).to(memory_format=torch.channels_last) for t in (x, residual, dy)], parameters


def step(module, x, residual, dy):
    leaves = [x.detach().requires_grad_(), residual.detach().requires_grad_(), *module.parameters()]
    with Beside(240) as beside:  # a sample
        y = module(leaves[0], residual=leaves[1])
        grads = torch.autograd.grad(y, leaves, dy)
    assert beside.found == [], "a copy, or a wait of the host"
    return [y.detach(), *grads, module.running_mean, module.running_var]


def own_share(rank, world_size, device):
    found = []
    for dtype in DTYPES:
        pixels, parameters = whole_batch(dtype)
        module = warpsmith.nn.SyncBatchNorm(16, activation="relu").to(device)
        module.weight.data, module.bias.data = (t.to(device) for t in parameters)
        mine = (t.split(SHARES[world_size])[rank].to(device) for t in pixels)
        found.append([t.cpu() for t in step(module, *mine)])
        module.eval()
        alone = module(pixels[0][:1].to(device))  # evaluation meets no other rank
        assert torch.equal(alone, F.relu(alone))
    return found


@pytest.mark.parametrize(
    ("ranks", "device"), [*((n, "cpu") for n in SHARES), pytest.param(2, "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.not_on_sim("processes of their own")
def test_ranks_together_obey_the_law_of_one(ranks, device):
    obeys(run_ranks(own_share, ranks, device, backend="nccl" if device == "cuda" else "gloo", timeout_s=200))


@pytest.mark.parametrize("ranks", SHARES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_of_ranks_obey_the_law_of_one(ranks, device):
    """The ranks' calls in one process, in turn."""
    raw, found = torch.ops.warpsmith, [[] for _ in range(ranks)]
    for dtype in DTYPES:
        (x, residual, dy), pair = whole_batch(dtype)
        pair = [t.to(device) for t in pair]
        shares = [
            [t.to(device) for t in share]
            for share in zip(*(t.split(SHARES[ranks]) for t in (x, residual, dy)), strict=True)
        ]
        statistics = torch.stack([raw.batch_norm_statistics(x) for x, _, _ in shares])
        running = [[torch.zeros(16, device=device), torch.ones(16, device=device)] for _ in shares]
        forward = [
            raw.batch_norm_forward_of_ranks(x, residual, *pair, *own, statistics, 0.1, 1e-5, True)
            for (x, residual, _), own in zip(shares, running, strict=True)
        ]
        given = [(dy, x, *pair, *kept[1:]) for (x, _, dy), kept in zip(shares, forward, strict=True)]
        own = [raw.batch_norm_sums(*g, True, True, True) for g in given]
        sums = torch.stack([s for s, _, _ in own])
        for i, g in enumerate(given):
            gradients = raw.batch_norm_backward_of_ranks(*g, sums, statistics, True, True, True)
            found[i].append([t.cpu() for t in (forward[i][0], *gradients, *own[i][1:], *running[i])])
    obeys(found)


def obeys(results):
    ranks = len(results)
    for i, dtype in enumerate(DTYPES):
        (x, residual, dy), (weight, bias) = whole_batch(dtype)

        def plain(to, kind, given=(x, residual, weight, bias), dy=dy):
            leaves = [t.to(to if j < 2 else kind).detach().requires_grad_() for j, t in enumerate(given)]
            running = [torch.zeros(16, dtype=kind), torch.ones(16, dtype=kind)]
            y = torch.relu(F.batch_norm(leaves[0], *running, *leaves[2:], True) + leaves[1])
            return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(to)), *running]

        of_ranks = [r[i] for r in results]
        ours = [torch.cat([r[j] for r in of_ranks]) for j in range(3)]
        ours += [sum(r[j] for r in of_ranks) for j in (3, 4)] + of_ranks[0][5:]
        exact, baseline = plain(torch.float64, torch.float64), plain(dtype, torch.float32)
        for name, found, oracle, theirs in zip(NAMES, ours, exact, baseline, strict=True):
            error = measure(name, found, oracle, theirs)
            assert error.ok, f"{dtype} on {ranks} ranks: {error}"
        for r in of_ranks:
            assert all(torch.equal(a, b) for a, b in zip(r[5:], of_ranks[0][5:], strict=True))


def test_one_process_is_batch_norm():
    (x, residual, dy), parameters = whole_batch(torch.float32)
    modules = [cls(16, activation="relu") for cls in (warpsmith.nn.SyncBatchNorm, warpsmith.nn.BatchNorm2d)]
    for module in modules:
        module.weight.data, module.bias.data = (t.clone() for t in parameters)
    for a, b in zip(*(step(m, x, residual, dy) for m in modules), strict=True):
        assert torch.equal(a, b)
    assert "activation=relu" in repr(modules[0])


def test_conversion_shares_parameters_and_statistics():
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Sequential(nn.BatchNorm2d(6, affine=False)),
                          warpsmith.nn.BatchNorm2d(6, bias=False, activation="relu"),
                          nn.SyncBatchNorm(6, track_running_stats=False).eval(), nn.Linear(6, 6))  # fmt: skip
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    ours = warpsmith.nn.SyncBatchNorm.convert_sync_batchnorm(model, "ranks")
    after = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert list(before) == list(after) and all(after[n] is t for n, t in before.items())
    norms = [m for m in ours.modules() if isinstance(m, warpsmith.nn.SyncBatchNorm)]
    assert len(norms) == 4 and all(m.process_group == "ranks" for m in norms) and norms[0].momentum is None
    assert norms[2].activation == "relu" and not norms[3].training and norms[0].training
    back = nn.SyncBatchNorm.convert_sync_batchnorm(ours)
    assert not any(isinstance(m, warpsmith.nn.SyncBatchNorm) for m in back.modules())
    assert list(back.state_dict()) == list(ours.state_dict())
