"""Context parallel attention under torch.compile: the bits of the uncompiled call, whatever the length."""

import pytest
import torch
from context_cases import HEAD_DIM
from warpsmith.distributed import context_parallel_attention, shard_sequence
from warpsmith.testing.distributed import multirank

CALLS = {
    "all_gather": {"causal": True, "softcap": 2.0},
    "ring": {"window_size": (5, 0), "softmax_scale": 0.3},
    "ulysses": {"causal": True, "dropout_p": 0.2},
}


def same_bits(compiled, mode, tokens):
    """Out and gradients, of this rank's part of a sequence."""
    found = []
    for attend in (compiled, lambda q, k, v: context_parallel_attention(q, k, v, mode=mode, **CALLS[mode]) * 2):
        torch.manual_seed(tokens)
        whole = torch.randn(3, 1, tokens, 4, HEAD_DIM)
        q, k, v = (shard_sequence(t).requires_grad_() for t in whole)
        out = attend(q, k, v)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(map(torch.equal, *found)), (mode, tokens)


@pytest.mark.parametrize("mode", CALLS)
def test_one_rank_in_one_graph_for_every_length(mode):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def attend(q, k, v):
        return context_parallel_attention(q, k, v, mode=mode, **CALLS[mode]) * 2

    for tokens in (16, 24, 7):
        same_bits(attend, mode, tokens)


@multirank(2, timeout_s=300)
def test_two_ranks_with_changing_lengths(rank, world_size):
    for mode in CALLS:
        torch._dynamo.reset()

        @torch.compile(dynamic=True, backend="aot_eager")
        def attend(q, k, v, mode=mode):
            return context_parallel_attention(q, k, v, mode=mode, **CALLS[mode]) * 2

        for tokens in (64, 96, 128):
            same_bits(attend, mode, tokens)
        q = torch.zeros(1, 8, 4, HEAD_DIM)
        traced = torch._dynamo.explain(attend)(q, q, q)
        assert traced.op_count == 1, traced  # the doubling: the call runs as it is
