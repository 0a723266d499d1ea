"""The moving average of weights beside its formula in float64, and beside torch's."""

import math

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.optim import EMA
from warpsmith.testing import bitwise_equal
from warpsmith.testing.checks.cuda import no_waits
from warpsmith.testing.distributed import multirank

from tests.dispatched import Copies

from .adamw_runs import ORDERS, STEPS, in_order

SHAPES = [(), (1,), (0,), (7, 33), (16385,), (40, 1000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def make(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
    params.append(torch.randn(5, 9, generator=generator).to(device, dtype).t())
    params.append(torch.randn(4098, generator=generator).to(device, dtype)[1:])  # not at a multiple of 16 bytes
    return [nn.Parameter(p) for p in params]


@torch.no_grad()
def change(params, step):
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        p.copy_(torch.randn(p.shape, generator=generator))


def follow(dtype, device, decays):
    """The largest error of the averages after so many updates, relative to values of size 1."""
    params = make(dtype, device)
    ema, expected = EMA(params, 0.9), [p.detach().cpu().double().clone() for p in params]
    for step, decay in enumerate(decays):
        change(params, step)
        ema.update(decay=decay)
        for a, p in zip(expected, params, strict=True):
            a.mul_(decay).add_(p.detach().cpu().double(), alpha=1 - decay)
    assert [a.dtype for a in ema.averages] == [torch.float64 if dtype == torch.float64 else torch.float32] * len(params)
    errors = [(a.cpu().double() - b).abs().max() for a, b in zip(ema.averages, expected, strict=True) if b.numel()]
    return max(errors).item()


@pytest.mark.parametrize(
    ("dtype", "device"),
    [*((d, "cpu") for d in DTYPES), *(pytest.param(d, "cuda", marks=pytest.mark.gpu) for d in DTYPES[:3])],
)
def test_updates_beside_the_formula(dtype, device):
    decays = [0.9, 0.999, 0.3, 1.0, 0.5] * (STEPS // 5)
    assert follow(dtype, device, decays) < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_copies_no_dense_parameter(dtype):
    ema = EMA(make(dtype), 0.9)
    with Copies(1000) as copies:
        ema.update()
    assert copies.found == []


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "master"])
def test_the_host_never_waits(precision):
    """With and without the flag of a scaler, from parameters or masters, and around an evaluation."""
    params = make(torch.float32 if precision is None else torch.bfloat16, "cuda")
    optimizer = warpsmith.optim.AdamW(params, lr=1e-2, precision=precision)
    guard, ema = warpsmith.amp.StepGuard(), EMA(params, 0.9, optimizer=optimizer)

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        guard.step(optimizer)
        guard.update()
        ema.update(guard.found_inf(optimizer))
        ema.update(decay=0.5)
        with ema.applied():
            sums = [p.sum() for p in params]
        return sums

    step()
    torch.cuda.synchronize()
    with no_waits():
        for _ in range(3):
            step()


@pytest.mark.gpu
def test_a_graph_of_step_and_average():
    finals = []
    for captured in (False, True):
        params = make(torch.float32, "cuda")
        optimizer = warpsmith.optim.AdamW(params, lr=0.01)
        ema = EMA(params, 0.9, optimizer=optimizer)
        for p in params:
            p.grad = torch.ones_like(p)

        def both(optimizer=optimizer, ema=ema):
            optimizer.step()
            ema.update()

        both()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both()
        for _ in range(4):
            graph.replay() if captured else both()
        finals.append(ema.averages)
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_decay_0_is_the_weights_and_decay_1_keeps_the_averages():
    params = make(torch.bfloat16)
    ema = EMA(params)
    change(params, 0)
    before = [a.clone() for a in ema.averages]
    ema.update(decay=1.0)
    assert all(bitwise_equal(a, b) for a, b in zip(ema.averages, before, strict=True))
    ema.update(decay=0.0)
    assert all(bitwise_equal(a, p.detach().float()) for a, p in zip(ema.averages, params, strict=True))


def test_the_average_of_torch():
    model = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20))
    theirs = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
    )
    theirs.update_parameters(model)  # which only copies, the first time
    ours = EMA(model.named_parameters(), 0.9)
    for step in range(5):
        change(list(model.parameters()), step)
        theirs.update_parameters(model)
        ours.update()
    assert_close(ours.averages, [p.detach() for p in theirs.parameters()], rtol=1e-6, atol=1e-7)


def test_masters_are_averaged_and_skipped_steps_are_not():
    params = make(torch.bfloat16)
    optimizer = warpsmith.optim.AdamW(params, lr=1e-4, precision="master")
    ema = EMA(params, 0.0, optimizer=optimizer)
    for step, found in enumerate((0.0, 1.0, 0.0)):
        for p in params:
            p.grad = torch.full_like(p, 1.0 + step)
        optimizer.found_inf = torch.tensor(found)
        before = [a.clone() for a in ema.averages]
        optimizer.step()
        for a in ema.averages[: 1 if found else 0]:
            a.add_(1.0)  # what is not to be overwritten
        ema.update(optimizer.found_inf)
        if found:
            assert torch.equal(ema.averages[0], before[0] + 1.0)
            continue
        masters = [optimizer.state[p]["master"] for p in params]
        assert all(bitwise_equal(a, m) for a, m in zip(ema.averages, masters, strict=True))
    assert not torch.equal(ema.averages[3], params[3].detach().float())  # the rounded ones


def test_applied_gives_the_averages_and_takes_them_back():
    params = make(torch.float16)
    ema = EMA(params, 0.5)
    before = [p.detach().clone() for p in params]
    change(params, 0)
    after = [p.detach().clone() for p in params]
    with pytest.raises(KeyError), ema.applied():
        assert all(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))
        raise KeyError
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, after, strict=True))
    ema.copy_to_params()
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))


def test_bits_do_not_depend_on_order_and_survive_a_checkpoint():
    finals = []
    for order in ORDERS:
        with in_order(order):
            params = make(torch.float32)
            ema = EMA(params, 0.75)
            for step in range(4):
                if step == 2:
                    state = ema.state_dict()
                    ema = EMA(params, 0.1)
                    ema.load_state_dict(state)
                change(params, step)
                ema.update()
            finals.append(ema.averages)
    for other in finals[1:]:
        assert all(torch.equal(a, b) for a, b in zip(finals[0], other, strict=True))


@pytest.mark.not_on_sim(reason="ranks load the library of the package")
@multirank(2, timeout_s=300)
def test_a_dtensor_is_averaged_shard_by_shard(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    p = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
    ema = EMA([p], 0.75)
    with torch.no_grad():
        p.copy_(distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)]))
    ema.update()
    assert torch.equal(ema.averages[0].full_tensor(), torch.arange(15.0).view(5, 3) / 4)
    with ema.applied():
        assert torch.equal(p.detach().full_tensor(), torch.arange(15.0).view(5, 3) / 4)


@pytest.mark.not_on_sim(reason="ranks load the library of the package")
@multirank(2)
def test_an_optimizer_of_other_tensors_is_refused(rank, world_size):
    """Otherwise its masters would silently be left out of the average."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^EMA: optimizer: expected an optimizer of params, got the AdamW of other"):
        EMA(model.parameters(), optimizer=warpsmith.optim.AdamW(other.parameters()))
    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    sharded = warpsmith.distributed.ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW, precision="master")
    with pytest.raises(ValueError, match="ShardedOptimizer of other tensors: leave it out, or average those of its"):
        EMA(model.parameters(), optimizer=sharded)
    own = [p for group in sharded.param_groups for p in group["params"]]
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    sharded.step()
    ema = EMA(own, decay=0.0, optimizer=sharded)
    for average, p in zip(ema.averages, own, strict=True):
        assert torch.equal(average, sharded.state[p]["master"] if p in sharded.state else p)


def test_what_is_refused():
    p = nn.Parameter(torch.zeros(4, 4))
    for decay in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="^EMA: decay: expected a number from 0 to 1"):
            EMA([p], decay)
    ema = EMA([p])
    with pytest.raises(ValueError, match=r"^EMA.update: decay: expected a number from 0 to 1, got 2"):
        ema.update(decay=2)
    with pytest.raises(ValueError, match="params: expected at least one tensor, got none"):
        EMA([])
    with pytest.raises(ValueError, match=r"params\[1\]: expected float32, .*, got int64"):
        EMA([p, torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"params\[0\]: expected a dense tensor"):
        EMA([p[:, :1].expand_as(p)])
    with pytest.raises(ValueError, match=r"params\[0\]: expected a tensor on the CPU or on CUDA, got meta"):
        EMA([torch.zeros(2, device="meta")])
    with pytest.raises(ValueError, match=r"load_state_dict: averages\[0\]: expected shape \(4, 4\), got \(2\)"):
        ema.load_state_dict({"decay": 0.5, "averages": {0: torch.zeros(2)}})
    with pytest.raises(ValueError, match="load_state_dict: averages: expected 1 tensors, got 0"):
        ema.load_state_dict({"decay": 0.5, "averages": {}})
    p.data = torch.ones(4, 4).t()[:, :2].contiguous()
    with pytest.raises(ValueError, match=r"average_weights: averages\[0\]: expected shape \(4, 2\), got \(4, 4\)"):
        ema.update()
    p.data = torch.ones(4, 4).t()
    with pytest.raises(ValueError, match=r"average_weights: averages\[0\]: expected the strides of its value"):
        ema.update()
    with pytest.raises(ValueError, match="found_inf: expected float32, got float64"):
        EMA([p]).update(torch.zeros((), dtype=torch.float64))
    assert ema.decay == 0.999 and not ema.averages[0].any()
