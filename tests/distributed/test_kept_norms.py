"""Norms that the reduction keeps: the bits of a norm that reads the gradients, no read, and nothing stale."""

import math

import pytest
import torch
import torch.distributed as dist
import warpsmith
from test_accurate_hook import Mixed, inputs_of
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import ShardedOptimizer, accurate_hook
from warpsmith.optim import clip_grad_norm_, grad_norm
from warpsmith.testing import bitwise_equal, run_ranks
from warpsmith.testing.checks.cuda import no_waits
from warpsmith.testing.distributed import multirank


def copies(params):
    """Parameters of which nothing is known, with equal gradients."""
    found = []
    for p in params:
        found.append(torch.nn.Parameter(p.detach().clone()))
        found[-1].grad = None if p.grad is None else p.grad.detach().clone()
    return found


def hide(params, first=256):
    """Zeros in gradients but for the first elements, in a way that torch does not count: a read would show. Returns
    what undoes it."""
    kept = [(p.grad.view(-1), p.grad.clone().view(-1)) for p in params if p.grad is not None]
    assert any(grad[first:].any() for grad, _ in kept)
    for grad, _ in kept:
        grad.data[first:].zero_()

    def show():
        for grad, values in kept:
            grad.data.copy_(values)

    return show


def is_known(params, norm_type=2.0):
    """Whether the norm has the bits of a read, without one."""
    want = grad_norm(copies(params), norm_type)
    show = hide(params)
    got = grad_norm(params, norm_type)
    show()
    return bitwise_equal(got, want)


def is_fresh(params):
    """Whether the norm is read, and right."""
    return not is_known(params) and bitwise_equal(grad_norm(params), grad_norm(copies(params)))


def ddp_of(**options):
    ddp = DistributedDataParallel(Mixed(), bucket_cap_mb=0.002, **options)  # several buckets
    ddp.register_comm_hook(None, accurate_hook(keep_norm=True))
    return ddp


def backward(ddp, rank, micro=0, **more):
    ddp.zero_grad()
    ddp(inputs_of(rank, micro), **more).backward()


@multirank(2, timeout_s=200)
def test_the_norm_of_buckets(rank, world_size):
    for views in (False, True):
        ddp = ddp_of(gradient_as_bucket_view=views)
        params = list(ddp.parameters())
        for micro in range(3):  # DDP makes its buckets anew after the first step
            backward(ddp, rank, micro)
            assert is_known(params) and is_known(params[::-1])
            assert bitwise_equal(grad_norm(params[:3]), grad_norm(copies(params[:3])))
            assert not is_known(params, 1)  # nobody has kept the sum of absolute values
            for order in (1, math.inf):
                assert bitwise_equal(grad_norm(params, order), grad_norm(copies(params), order))
            of_all = [torch.empty(()).double() for _ in range(world_size)]
            dist.all_gather(of_all, grad_norm(params))
            assert bitwise_equal(*of_all)
        assert not is_known([*params, *copies(params[:1])])
        for order in (2, 1, math.inf):
            other = copies(params)
            assert bitwise_equal(clip_grad_norm_(params, 1e-3, order), clip_grad_norm_(other, 1e-3, order))
            assert all(bitwise_equal(p.grad, o.grad) for p, o in zip(params, other, strict=True))
            assert is_fresh(params)  # it was clipped
            backward(ddp, rank)


@multirank(2, timeout_s=200)
def test_nothing_is_stale(rank, world_size):
    for views in (False, True):
        ddp = ddp_of(gradient_as_bucket_view=views)
        params = list(ddp.parameters())

        def written(change, ddp=ddp, params=params):
            backward(ddp, rank)
            assert is_known(params)
            change()
            return is_fresh(params)

        def replace(params=params):
            params[1].grad = params[1].grad * 2

        def accumulate(ddp=ddp):
            with ddp.no_sync():
                ddp(inputs_of(rank, 1)).backward()

        assert written(lambda params=params: params[0].grad.mul_(3))
        assert written(lambda params=params: params[2].grad.detach()[5:].zero_())
        assert written(replace)
        assert written(accumulate)
        assert written(lambda params=params: torch.nn.utils.clip_grad_norm_(params, 1e-3))
        assert written(lambda params=params: [dist.all_reduce(p.grad) for p in params])
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD([p for p in params if p.dtype != torch.float16])  # which it refuses
        scaler.scale(torch.ones(()))
        assert written(lambda scaler=scaler, optimizer=optimizer: scaler.unscale_(optimizer))
        backward(ddp, rank)
        hide(params, 0)
        assert grad_norm(params) == 0
        ddp(inputs_of(rank, 2)).backward()  # on top of what is there, reduced anew
        assert is_known(params)
    ddp = ddp_of(find_unused_parameters=True)
    params = list(ddp.parameters())
    backward(ddp, rank)
    ddp(inputs_of(rank), use_last=False).backward()  # the last keeps its gradient and the sums of before
    assert is_known(params)
    params[-1].grad.zero_()
    ddp(inputs_of(rank), use_last=False).backward()
    assert is_fresh(params)
    ddp.zero_grad()
    ddp(inputs_of(rank), use_last=False).backward()
    assert params[-1].grad is None and is_known(params)


@multirank(2, timeout_s=200)
def test_a_hook_without_the_option_keeps_nothing(rank, world_size):
    ddp = DistributedDataParallel(Mixed())
    ddp.register_comm_hook(None, accurate_hook)
    backward(ddp, rank)
    assert is_fresh(list(ddp.parameters()))


class Wide(torch.nn.Module):
    """Gradients are the inputs."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(20_000), torch.zeros(300), torch.zeros(7)])

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def scaled_step(scaler, params, clip):
    """A step of scaled gradients that are there: what the scaler found, and the parameters."""
    optimizer = warpsmith.optim.SGD(params, lr=1.0)
    scaler.scale(torch.ones(()))
    norm = scaler.clip_(optimizer, 0.5) if clip else torch.zeros(())
    scaler.step(optimizer)
    scaler.update()
    return (norm.item(), scaler.get_scale(), scaler.last_skipped, scaler.overflow(optimizer)), copies(params)


def reduced(gradients):
    ddp = DistributedDataParallel(Wide())
    ddp.register_comm_hook(None, accurate_hook(keep_norm=True))
    ddp(gradients).backward()
    return list(ddp.parameters())


@multirank(2, timeout_s=200)
def test_scalers_and_guards(rank, world_size):
    makers = [
        lambda: warpsmith.amp.GradScaler("cpu", init_scale=3000.0),
        lambda: warpsmith.amp.GradScaler("cpu", init_scale=0.25),
        lambda: warpsmith.amp.StepGuard(),
    ]
    skips = []
    # Finite on all ranks; NaN and infinite on one; finite, but the squares are not until the scale is divided out.
    for planted in (None, math.nan, math.inf, 1e20):
        draw = torch.Generator().manual_seed(rank)
        gradients = [torch.randn(n, generator=draw) for n in (20_000, 300, 7)]
        if planted is not None and rank == 1:
            gradients[0][[3, 17_000]] = planted
        for make_scaler in makers:
            for clip in (False, True):
                params = reduced(gradients)
                want, stepped = scaled_step(make_scaler(), copies(params), clip)
                if planted is None:
                    hide(params)
                    found, _ = scaled_step(make_scaler(), params, clip)
                    assert found == want
                    params = reduced(gradients)
                found, ours = scaled_step(make_scaler(), params, clip)
                assert str(found) == str(want), (planted, clip)  # a NaN is no NaN's equal
                assert all(bitwise_equal(a.detach(), b.detach()) for a, b in zip(ours, stepped, strict=True))
                skips.append(want[2])
    # Elements of 1e20 alone are no reason to skip, but their norm is where the scale does not help.
    assert skips == [False] * 6 + [True] * 12 + [False, False, False, True, False, True]


@multirank(2, timeout_s=200)
def test_a_sharded_optimizer_reads_no_gradients(rank, world_size):
    for stage in (1, 2):
        model = Wide()
        optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, stage=stage, lr=1.0)
        draw = torch.Generator().manual_seed(rank)
        model([torch.randn(n, generator=draw) for n in (20_000, 300, 7)]).backward()
        own = [p for group in optimizer.param_groups for p in group["params"]]
        want = optimizer.grad_norm(1), optimizer.grad_norm(2)
        show = hide(own)
        assert not bitwise_equal(optimizer.grad_norm(1), want[0])  # which is read
        assert bitwise_equal(optimizer.grad_norm(2), want[1])
        assert bitwise_equal(optimizer.clip_grad_norm_(0.5), want[1])
        show()
        optimizer.clip_grad_norm_(0.5)
        clipped = optimizer.grad_norm(2)
        assert abs(clipped.item() - 0.5) < 1e-5  # was written to, and so is read


def on_a_gpu(rank, world_size):
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300, device="cuda") for _ in range(4)])
    ddp = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.5)
    ddp.register_comm_hook(None, accurate_hook(keep_norm=True))
    params = list(ddp.parameters())
    for _ in range(4):  # the first does not know how many elements there are; DDP makes its buckets anew
        ddp.zero_grad()
        ddp(torch.randn(64, 300, device="cuda")).square().mean().backward()
        want = grad_norm(copies(params))
        with no_waits():
            got = grad_norm(params)
        assert bitwise_equal(got, want)
    return is_known(params)


@pytest.mark.gpu
def test_on_a_gpu():
    assert run_ranks(on_a_gpu, 1, backend="nccl", timeout_s=200) == [True]


def test_sums_that_do_not_fit_are_refused():
    partial_power_sums = torch.ops.warpsmith.grad_norm_partials
    tensors = [torch.ones(20_000), torch.ones(3)]
    known = partial_power_sums(tensors, 2.0, 20_003)
    assert bitwise_equal(partial_power_sums(tensors, 2.0, 20_003, None, known), known)
    for wrong, expected in (
        (known[:2], r"known: expected shape \(3\), got \(2\)"),
        (known.float(), "known: expected float64, got float32"),
        (torch.stack([known, known], 1)[:, 0], "known: expected adjacent elements"),
    ):
        with pytest.raises(ValueError, match=expected):
            partial_power_sums(tensors, 2.0, 20_003, None, wrong)
