"""Attention where windows, shifts and lengths end beside the end of a block, against a mask written out key by key.

With equal logits the weights are one over the number of visible keys: ``lse`` counts them, ``out`` says which they are,
and ``dv`` which queries see a key, exactly enough in every dtype."""

import math
import random

import pytest
import torch
import warpsmith
from warpsmith.testing.sim import is_loaded

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EDGES = [block * k + d for block, k in ((64, 1), (64, 2)) for d in range(-3, 2)]
RIGHT = (-1, 0, 1, 2, 62, 63, 64)


def problems(count):
    """(queries, keys, window, causal, align): lengths and windows at edges, and queries three times the keys."""
    draw = random.Random(0)
    for sq in EDGES:
        for sk in EDGES:
            for _ in range(count):
                yield sq, sk, (draw.choice(EDGES), draw.choice(RIGHT)), draw.random() < 0.3, draw.random() < 0.7
                yield sq, sk, (draw.choice(RIGHT), draw.choice(EDGES)), False, draw.random() < 0.7
    for sk in (1, 21, 43, 64):
        for left in sorted({sk - 1, sk, sk + 1, 2 * sk - 1, 2 * sk, 2 * sk + 1, 3 * sk, 4 * sk - 1, 4 * sk}):
            for window in ((left, left), (left, -1), (-1, left), (0, left)):
                yield 3 * sk, sk, window, False, draw.random() < 0.7


def visible(sq, sk, window, causal, bottom_right):
    shift = sk - sq if bottom_right else 0
    left, right = window
    d = torch.arange(sk)[None] - torch.arange(sq)[:, None] - shift
    return ((d >= -left) | (left < 0)) & ((d <= right) | (right < 0)) & ((d <= 0) | (not causal))


def ones_at(n, width, device, dtype):
    """Row i is 1 at i modulo the width."""
    return torch.nn.functional.one_hot(torch.arange(n) % width, width).to(device, dtype)


def check(problem, device, dtype, width):
    sq, sk, window, causal, bottom_right = problem
    mask = visible(*problem).double()
    q, k = (torch.zeros(1, n, 1, width, device=device, dtype=dtype) for n in (sq, sk))
    v = ones_at(sk, width, device, dtype)[None, :, None].requires_grad_()
    options = {"causal": causal, "causal_align": "bottom_right" if bottom_right else "top_left", "window_size": window}
    calls = {"attention": lambda: warpsmith.attention(q, k, v, return_lse=True, **options)}
    if bottom_right:
        offsets = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (sq, sk)]
        lengths = {"max_seqlen_q": sq, "max_seqlen_k": sk, "return_lse": True, **options}
        calls["attention_varlen"] = lambda: warpsmith.attention_varlen(q[0], k[0], v[0], *offsets, **lengths)
    seen = mask.sum(1)
    weights = mask / seen.clamp(min=1)[:, None]
    of_queries, of_keys = (ones_at(n, width, "cpu", torch.float64) for n in (sq, sk))
    for name, call in calls.items():
        out, lse = call()
        found = torch.autograd.grad(out, v, of_queries.to(device, dtype).view(out.shape))[0]
        expected = {"lse": seen.log(), "out": weights @ of_keys, "dv": weights.T @ of_queries}
        for what, t in {"lse": lse, "out": out.detach(), "dv": found}.items():
            t, exact = t.double().cpu().view(expected[what].shape), expected[what]
            if what != "lse":  # a zero is a zero
                assert torch.equal(t != 0, exact != 0), f"{name} {problem}: {what}: other keys"
            torch.testing.assert_close(t, exact, rtol=1e-2, atol=1e-4, msg=lambda m, n=name: f"{n} {problem}: {m}")


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_windows_and_lengths_at_the_edges_of_blocks(device):
    simulated = is_loaded()
    found = list(problems(1))
    for i, problem in enumerate(found):
        if simulated and i % 20:
            continue
        for dtype, width in ((torch.bfloat16, 64), (torch.bfloat16, 128))[: 1 + (device == "cuda")]:
            check(problem, device, dtype, width)
        if device == "cpu" and not simulated and i % 3 == 0:
            check(problem, device, torch.float32, 8)
    assert len(found) > 250 and math.isinf(visible(3, 1, (-1, -1), True, True).double().sum(1).log()[0])
