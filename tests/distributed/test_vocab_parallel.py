"""Losses over classes on several ranks: within the law of one rank's, the same bits on all, and no rank left alone."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import warpsmith
from warpsmith.distributed import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from warpsmith.testing.distributed import multirank

ROWS, WIDTH = (5, 7), 24
OPTIONS = [
    {},
    {"reduction": "sum", "z_loss": 0.01},
    {"reduction": "none", "softcap": 3.0, "z_loss": 0.1},
    {"reduction": "mean", "softcap": 20.0, "ignore_index": 0},
]


def exact(logits, target, ignore_index=-100, reduction="mean", z_loss=0.0, softcap=0.0):
    """The loss by torch's own operations."""
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = z.logsumexp(-1)
    counts = target != ignore_index
    rows = lse - z.gather(-1, target.where(counts, 0).unsqueeze(-1)).squeeze(-1) + z_loss * lse.square()
    rows = rows.where(counts, 0.0)
    return rows if reduction == "none" else rows.sum() / (counts.sum() if reduction == "mean" else 1)


def draw(dtype, world_size, scale=3.0):
    generator = torch.Generator().manual_seed(7)
    classes = 50 * world_size
    logits = (torch.randn(*ROWS, classes, generator=generator) * scale).to(dtype)
    target = torch.randint(classes, ROWS, generator=generator)
    target[0, :3] = -100
    target[1] = torch.arange(7) * (classes - 1) // 6  # first and last classes of shards too
    target[2] = 4
    return logits, target, torch.randn(ROWS, generator=generator)


def check(name, ours, theirs, oracle, dtype, mine=None):
    """The law of the whole tensor, of which ``mine`` is this rank's part: at most twice torch's error, and two rounding
    steps of the largest value."""
    own, part = (oracle, theirs) if mine is None else (oracle[mine], theirs[mine])
    if dtype == torch.float64:  # the oracle is torch's result
        torch.testing.assert_close(ours, part, rtol=1e-12, atol=1e-15)
        return
    error, allowed = (ours.double() - own).abs().max(), (theirs.double() - oracle).abs().max()
    step = oracle.abs().max() * torch.finfo(dtype).eps / 2
    assert error <= 2 * allowed + 2 * step, (name, float(error), float(allowed), float(step))


def results(loss_of, inputs, upstream):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    loss = loss_of(*inputs)
    grads = torch.autograd.grad(loss, inputs, upstream.expand(loss.shape).to(loss.dtype))
    return [loss.detach(), *grads]


def upstream_of(options, draws):
    return draws if options.get("reduction") == "none" else torch.tensor(1.7)


def same_on_all(t):
    every = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(every, t)
    return all(torch.equal(t, other) for other in every)


@multirank(3, timeout_s=200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_cross_entropy_is_within_the_law(rank, world_size, dtype):
    for options in OPTIONS:
        logits, target, draws = draw(dtype, world_size)
        if "ignore_index" in options:
            target = target.where(target >= 0, 0)
        upstream, mine = upstream_of(options, draws), slice(rank * 50, rank * 50 + 50)
        oracle = results(lambda x, o=options, t=target: exact(x, t, **o), [logits.double()], upstream)
        theirs = results(lambda x, o=options, t=target: exact(x, t, **o), [logits], upstream)
        ours = results(
            lambda x, o=options, t=target: vocab_parallel_cross_entropy(x, t, **o), [logits[..., mine]], upstream
        )
        assert same_on_all(ours[0])
        check(f"loss {options}", ours[0], theirs[0], oracle[0], ours[0].dtype)
        check(f"dlogits {options}", ours[1], theirs[1], oracle[1], dtype, (..., mine))
        assert (ours[1][target == options.get("ignore_index", -100)] == 0).all()
        assert ours[1].dtype == dtype and ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@multirank(3, timeout_s=200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [64 << 20, 1000])
def test_linear_cross_entropy_is_within_the_law(rank, world_size, dtype, chunk_bytes):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*ROWS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(50 * world_size, WIDTH, generator=generator).to(dtype)
    bias = torch.randn(50 * world_size, generator=generator).to(dtype)
    mine = slice(rank * 50, rank * 50 + 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warpsmith.distributed.vocab_parallel._CHUNK_BYTES", chunk_bytes)
        for options in OPTIONS:
            _, target, draws = draw(dtype, world_size)
            if "ignore_index" in options:
                target = target.where(target >= 0, 0)
            upstream = upstream_of(options, draws)

            def whole(h, w, b, o=options, t=target):
                return exact(F.linear(h, w, b), t, **o)

            def parallel(h, w, b, o=options, t=target):
                return vocab_parallel_linear_cross_entropy(h, w, t, bias=b, **o)

            oracle = results(whole, [hidden.double(), weight.double(), bias.double()], upstream)
            theirs = results(whole, [hidden, weight, bias], upstream)
            ours = results(parallel, [hidden, weight[mine], bias[mine]], upstream)
            assert same_on_all(ours[0]) and same_on_all(ours[1])
            for name, a, b, e in zip(("loss", "dh", "dw", "db"), ours, theirs, oracle, strict=True):
                part = mine if name in ("dw", "db") else None
                check(f"{name} {options}", a, b, e, dtype, part)


@multirank(2, timeout_s=200)
def test_large_logits_and_what_lies_outside(rank, world_size):
    logits, target, _ = draw(torch.float32, world_size, scale=3000.0)
    own = logits[..., rank * 50 : rank * 50 + 50]
    loss = vocab_parallel_cross_entropy(own, target, reduction="none")
    torch.testing.assert_close(loss, warpsmith.cross_entropy(logits, target, reduction="none"), rtol=1e-6, atol=1e-3)
    minus = torch.full((2, 4), -torch.inf)
    minus[:, 0] = 1.0
    loss = vocab_parallel_cross_entropy(minus if rank == 0 else minus - torch.inf, torch.tensor([0, 0]))
    assert loss == 0  # the other rank's classes are impossible
    with pytest.raises(ValueError, match=r"target: expected classes in \[0, 100\) or ignore_index -100, got 100"):
        vocab_parallel_cross_entropy(own, target.where(target != 4, 100))
    with pytest.raises(ValueError, match=r"rank 1 of 2: logits: expected .* 50 classes.*, as on rank 0, got .* 49 cl"):
        vocab_parallel_cross_entropy(own[..., : 50 - rank], target, z_loss=0.5)
    with pytest.raises(ValueError, match="weight: expected shape \\(classes, 50\\), got"):
        vocab_parallel_linear_cross_entropy(own, torch.zeros(3, 4), target)


@multirank(2, timeout_s=200)
def test_second_derivatives_are_refused(rank, world_size):
    """Also of a loss whose upstream gradient is a constant: a penalty on its gradient would lack the loss's part."""
    logits, target, _ = draw(torch.float32, world_size)
    own = logits[..., rank * 50 : rank * 50 + 50]
    weight = torch.ones(50, own.shape[-1])
    losses = vocab_parallel_cross_entropy, lambda x, t: vocab_parallel_linear_cross_entropy(x, weight, t)
    for loss in losses:
        for upstream in (torch.ones(()), torch.ones((), requires_grad=True)):
            x = own.clone().requires_grad_()
            (grad,) = torch.autograd.grad(loss(x.sin(), target), x, upstream, create_graph=True)
            with pytest.raises(RuntimeError, match="vocab_parallel_.*expected one derivative, got a second"):
                grad.square().sum().backward()


def test_a_world_of_one_is_the_plain_loss():
    logits, target, draws = draw(torch.float32, 2)
    plain = results(lambda x: warpsmith.cross_entropy(x, target, reduction="none"), [logits], draws)
    ours = results(lambda x: vocab_parallel_cross_entropy(x, target, reduction="none"), [logits], draws)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
