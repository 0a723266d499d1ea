"""attention in CUDA graphs: nothing is read by the host, so a captured step follows what its tensors hold."""

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal
from warpsmith.testing.checks.cuda import no_waits

pytestmark = pytest.mark.gpu
TOKENS, LONGEST = 400, 300


def step(q, k, v, cu_seqlens, dout):
    out = warpsmith.attention_varlen(q, k, v, cu_seqlens, max_seqlen_q=LONGEST, causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def test_a_captured_step_follows_new_offsets():
    """The documents of every replay are those of the offsets at that time, as many and as long as was captured."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(TOKENS, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2))
    dout = torch.randn(TOKENS, 4, 64, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 100, 100, 400], dtype=torch.int32, device="cuda")
    with no_waits():
        step(q, k, v, cu_seqlens, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(q, k, v, cu_seqlens, dout)
    for offsets in ((0, 100, 100, 400), (0, 300, 301, 400), (0, 0, 128, 300)):
        cu_seqlens.copy_(torch.tensor(offsets, dtype=torch.int32))
        graph.replay()
        assert all(map(bitwise_equal, captured, step(q, k, v, cu_seqlens, dout)))


def test_a_captured_module_is_checkpointed():
    """With activation checkpointing, whose second forward is part of the graph."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = warpsmith.nn.Attention(256, num_heads=4, num_kv_heads=2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def gradient(call):
        y = call(x)
        return (*torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y)),)

    expected = gradient(layer)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradient(lambda x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient(lambda x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False))
    graph.replay()
    assert all(map(bitwise_equal, captured, expected))
