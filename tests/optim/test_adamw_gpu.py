"""warpsmith.optim.AdamW on CUDA: one launch, no synchronisation, graph capture and replay."""

import copy
import functools

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import bitwise_equal

from benchmarks.bench_optim import launches

from . import adamw_runs
from .adamw_runs import run

pytestmark = pytest.mark.gpu

SHAPES = [(7, 5), (), (0,), (3,), (2049,), (300, 129), (100_003,)]
make_params = functools.partial(adamw_runs.make_params, device="cuda", shapes=SHAPES)


def set_grads(params, seed, keep=False):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        new = torch.randn(p.shape, generator=generator).cuda()
        if keep and p.grad is not None:
            p.grad.copy_(new)
        else:
            p.grad = new


def test_a_thousand_steps_twice_have_the_same_bits():
    kinds = make_params(), make_params()
    for params in kinds:
        set_grads(params, 0)
    optimizers = [warpsmith.optim.AdamW(params, lr=1e-2, amsgrad=True) for params in kinds]
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(*kinds, strict=True):
            differ += torch.ne(a.detach().view(torch.int32), b.detach().view(torch.int32)).any()
    assert int(differ) == 0
    states = [[t for p in params for t in o.state[p].values()] for params, o in zip(kinds, optimizers, strict=True)]
    assert all(bitwise_equal(a, b) for a, b in zip(*states, strict=True))


def test_one_launch_for_all_parameters_of_all_groups():
    params = make_params(shapes=[(4096,)] * 2000)
    set_grads(params, 0)
    optimizer = warpsmith.optim.AdamW([{"params": params[:1000]}, {"params": params[1000:], "lr": 0.1}])
    optimizer.step()
    assert launches(optimizer.step) == 1


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_captured_steps_go_on_in_a_graph(tensor_lr):
    def lr():
        return torch.tensor(1e-2, device="cuda") if tensor_lr else 1e-2

    eager_params, params = make_params(), make_params()
    eager, optimizer = warpsmith.optim.AdamW(eager_params, lr=lr()), warpsmith.optim.AdamW(params, lr=lr())
    run(eager, eager_params, 2)
    run(optimizer, params, 2)

    set_grads(params, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for i in range(2, 5):
        set_grads(params, i, keep=True)
        graph.replay()
    held = [p.grad for p in params]
    run(optimizer, params, 1, first=5)  # an eager step with gradients elsewhere
    for p, g in zip(params, held, strict=True):
        p.grad = g
    set_grads(params, 6, keep=True)
    if tensor_lr:
        optimizer.param_groups[0]["lr"].fill_(0.5)
    graph.replay()

    run(eager, eager_params, 4, first=2)
    if tensor_lr:
        eager.param_groups[0]["lr"].fill_(0.5)
    run(eager, eager_params, 1, first=6)
    assert all(bitwise_equal(a.detach(), b.detach()) for a, b in zip(params, eager_params, strict=True))
    assert float(optimizer.state[params[0]]["step"]) == 7


def test_an_eager_step_after_a_capture_sees_the_same_gradients():
    params, plain_params = make_params(), make_params()
    optimizer, plain = warpsmith.optim.AdamW(params, lr=1e-2), warpsmith.optim.AdamW(plain_params, lr=1e-2)
    run(optimizer, params, 1)
    run(plain, plain_params, 2)
    elsewhere = [p.grad for p in params]  # still there, where the first step found them
    set_grads(params, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.step()
    assert all(bitwise_equal(a.detach(), b.detach()) for a, b in zip(params, plain_params, strict=True))
    assert len(elsewhere) == len(params)


def test_a_graph_survives_a_new_table():
    params = make_params()
    optimizer = warpsmith.optim.AdamW(params, lr=1e-2)
    run(optimizer, params, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, device="cuda"))]})
    optimizer.param_groups[1]["params"][0].grad = torch.ones(4, device="cuda")
    optimizer.step()  # a table that the graph does not know
    torch.cuda.empty_cache()
    before = params[4].detach().clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(before, params[4])
    assert float(optimizer.state[params[4]]["step"]) == 3


def test_a_first_step_cannot_be_captured():
    params = make_params()
    optimizer = warpsmith.optim.AdamW(params)
    set_grads(params, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="take one step before the capture"), torch.cuda.graph(graph):
        optimizer.step()
    assert not optimizer.state


def test_parameters_on_cpu_and_cuda():
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, device="cuda"))]
    optimizer = warpsmith.optim.AdamW(params, lr=1e-2)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert_close(params[0].detach(), params[1].detach().cpu())


def test_state_of_an_unfused_torch_optimizer_moves_to_the_device():
    params = make_params()
    theirs = torch.optim.AdamW(params, foreach=True)
    run(theirs, params, 2)
    ours_params = copy.deepcopy(params)
    ours = warpsmith.optim.AdamW(ours_params)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    run(ours, ours_params, 1, first=2)
    assert all(ours.state[p]["step"].is_cuda and float(ours.state[p]["step"]) == 3 for p in ours_params)


def test_float64_is_refused_by_name():
    p = nn.Parameter(torch.ones(3, dtype=torch.float64, device="cuda"))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[0\]: expected float32, .*got float64"):
        warpsmith.optim.AdamW([p]).step()


@pytest.mark.alone
def test_more_than_2_to_the_31_elements():
    elems = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 5 * 4 * elems:
        pytest.skip("needs 43 GB of GPU memory")
    p = nn.Parameter(torch.zeros(elems, device="cuda"))
    p.grad = torch.ones_like(p)
    warpsmith.optim.AdamW([p], lr=0.5).step()
    assert_close(p.detach()[[0, 2**31 - 1, 2**31, -1]].cpu(), torch.full((4,), -0.5))
