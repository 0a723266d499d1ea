"""LAMB beside its definition in float64: ratios of whole tensors, precisions, skipped steps, what is refused."""

import math

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.reference.optim import lamb as reference
from warpsmith.testing import bitwise_equal

from .adamw_runs import ON_SIM, STEPS, on_each_device

SHAPES = [(), (1,), (7, 33), (0,), (16385,), (40, 1000), (64,)]
OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"grad_averaging": False, "betas": (0.5, 0.9), "eps": 1e-3},
    {"maximize": True, "lr": 1e-2},
]


def make(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator) for s in SHAPES]
    params[-1].zero_()  # without a norm
    return [nn.Parameter(p.to(device, dtype)) for p in params]


def gradients(params, step):
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


class Definition:
    """The reference in float64, fed with the gradients of `params`."""

    def __init__(self, params):
        self.params = params
        self.values = [p.detach().cpu().double() for p in params]
        self.m, self.v = ([torch.zeros_like(p) for p in self.values] for _ in range(2))
        self.steps = [torch.zeros((), dtype=torch.float64) for _ in params]

    def step(self, lr=1e-3, betas=(0.9, 0.999), **options):
        grads = [p.grad.cpu().double() for p in self.params]
        reference(self.values, grads, self.m, self.v, self.steps, lr, *betas, **options)


def follow(device, steps, dtype=torch.float32, precision=None, **options):
    """The largest error after so many steps, of parameters (masters) and moments, relative to the largest value."""
    params = make(dtype, device)
    optimizer, definition = warpsmith.optim.LAMB(params, precision=precision, **options), Definition(params)
    for step in range(steps):
        gradients(params, step)
        definition.step(**options)
        optimizer.step()
    worst = 0.0
    for i, p in enumerate(params):
        state = optimizer.state[p]
        assert state["step"] == steps
        if "master" in state:
            assert bitwise_equal(p.detach(), state["master"].to(p.dtype))
        ours = (state.get("master", p.detach()), state["exp_avg"], state["exp_avg_sq"])
        for a, b in zip(ours, (definition.values[i], definition.m[i], definition.v[i]), strict=True):
            if b.numel():
                worst = max(worst, ((a.cpu().double() - b).abs().max() / b.abs().max().clamp(min=1e-30)).item())
    return worst


@on_each_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_trajectories_beside_the_definition(options, device):
    assert follow(device, STEPS, **options) < 5e-6
    if device == "cpu" and not ON_SIM:
        assert follow("cpu", STEPS, torch.float64, **options) < 1e-11


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_trajectories_of_masters(dtype, device):
    assert follow(device, STEPS, dtype, "master") < 5e-6


@pytest.mark.gpu
def test_the_same_bits_run_to_run_and_in_a_graph_on_cuda():
    finals = []
    for way in ("eager", "eager", "graph"):
        params = make(device="cuda")
        optimizer = warpsmith.optim.LAMB(params, lr=torch.tensor(1e-2, device="cuda"))
        gradients(params, 0)
        optimizer.step()
        if way == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(5):
            graph.replay() if way == "graph" else optimizer.step()
        finals.append([p.detach().clone() for p in params])
        assert {s["step"].item() for s in optimizer.state.values()} == {6.0}
    for other in finals[1:]:
        assert all(torch.equal(a, b) for a, b in zip(finals[0], other, strict=True))


def test_each_tensor_moves_in_proportion_to_its_norm():
    params = make()
    before = [p.detach().clone() for p in params]
    gradients(params, 0)
    warpsmith.optim.LAMB(params, lr=0.25).step()
    for p, was in zip(params[:-1], before, strict=False):
        if p.numel():
            assert_close((p.detach() - was).norm(), 0.25 * was.norm(), rtol=1e-5, atol=0)
    assert params[-1].any()  # of norm 0: the ratio is 1


def test_groups_and_gradients_that_are_missing():
    params = make()
    groups = [{"params": params[:3], "weight_decay": 0.0}, {"params": params[3:], "lr": 0.5, "use_nvlamb": True}]
    optimizer = warpsmith.optim.LAMB(groups, lr=0.1)
    definitions = [Definition(params[:3]), Definition(params[3:])]
    for step in range(3):
        gradients(params, step)
        definitions[0].step(0.1, weight_decay=0.0)
        definitions[1].step(0.5, use_nvlamb=True)
        optimizer.step()
    for definition in definitions:
        for p, q in zip(definition.params, definition.values, strict=True):
            assert_close(p.detach().double(), q, rtol=1e-5, atol=1e-6)
    gradients(params, 9)
    params[2].grad = None
    before = params[2].detach().clone()
    optimizer.step()
    assert torch.equal(before, params[2].detach()) and optimizer.state[params[2]]["step"] == 3
    assert optimizer.state[params[0]]["step"] == 4


@pytest.mark.parametrize("where", ["param", "grad"])
def test_a_nan_stays_visible(where):
    p = nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    (p.detach() if where == "param" else p.grad)[2] = math.nan
    warpsmith.optim.LAMB([p]).step()
    assert p.isnan().all()


def test_what_a_step_refuses():
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match=r"LAMB: .*\[0\]: expected float32, or precision master .*, got bfloat16"):
        warpsmith.optim.LAMB([half]).step()
    with pytest.raises(ValueError, match="float32 or float64 for precision fp32, got bfloat16"):
        warpsmith.optim.LAMB([half], precision="fp32").step()
    assert torch.equal(half.detach(), torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="expected a process group"):
        warpsmith.distributed.ShardedOptimizer([half], warpsmith.optim.LAMB)
