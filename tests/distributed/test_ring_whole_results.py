"""The ring's backward where kernels take out and lse of the whole sequence. Those of the CPU do not: the formula in
float64 stands for them. The kernels are held to it by tests/ops/test_attention_parts.py."""

import itertools

import pytest
import torch
from context_cases import Problem
from test_context_parallel import SHARDINGS, check_exact
from warpsmith.distributed.context import blocks as context_blocks
from warpsmith.distributed.context import modes as context_modes
from warpsmith.reference.attention import window_of
from warpsmith.testing.distributed import multirank

raw = torch.ops.warpsmith


def gradients(dout, dlse, q, k, v, *rest):
    """The raw op's, as csrc/kernels/attention/attention.h states them: from the out and lse that are given."""
    sink, layout, left, right, scale = (rest[i] for i in (4, 8, 11, 12, 13))
    out, lse, _, want_dsink, _, lse_rest = rest[-6:]
    lse = lse if lse_rest is None else lse + lse_rest
    heads_first = [t if layout == 1 else t.transpose(1, 2) for t in (q, k, v, out, dout)]
    q, k, v, out, dout = heads_first
    shared = q.shape[1] // k.shape[1]
    every_k, every_v = (t.repeat_interleave(shared, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, visible = window_of(q.shape[2], k.shape[2], False, "bottom_right", (left, right))
    visible = visible.to(q.device)
    p = torch.where(visible, torch.exp(q @ every_k.mT * scale - lse[..., None]), 0.0).nan_to_num(nan=0.0)
    delta = (dout * out).sum(-1, keepdim=True) - (0.0 if dlse is None else dlse[..., None])
    ds = p * (dout @ every_v.mT - delta) * scale
    found = [ds @ every_k, *((t.mT @ x).unflatten(1, (-1, shared)).sum(2) for t, x in ((ds, q), (p, dout)))]
    dq, dk, dv = (t if layout == 1 else t.transpose(1, 2) for t in found)
    none = q.new_empty(0)
    dsink = -(torch.exp(sink[:, None, None] - lse[..., None]) * delta).sum((0, 2, 3)) if want_dsink else none
    return dq, dk, dv, none, dsink


def check_ring():
    forwards, call_raw = [], context_blocks.call_raw

    def call(op, *inputs):
        if op is raw.attention_backward.default:
            return gradients(*inputs)
        forwards.append(torch._C._current_graph_task_id() != -1)
        return call_raw(op, *inputs)

    masks = (
        "all",
        "causal",
        "causal window",
        "narrow causal window",
        "far window",
        "window",
        "sink",
        "sink in a window",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_blocks, "call_raw", call)
        patch.setattr(context_modes, "accepts_whole_results", lambda *_: True)
        for (i, name), sharding in itertools.product(enumerate(masks), SHARDINGS):
            check_exact(Problem(name, torch.float64, layout=("bshd", "bhsd")[i % 2], batch=2), "ring", sharding)
    assert forwards
    assert not any(forwards), "the backward made a block's results again"


@multirank(2, timeout_s=300)
def test_two_ranks(rank, world_size):
    check_ring()


@multirank(4, timeout_s=300)
def test_four_ranks(rank, world_size):
    check_ring()


def test_the_formula_stays_on_the_device_of_its_tensors():
    """Meta tensors stand for a GPU's: torch refuses to mix either with tensors of the CPU."""
    tensors = [torch.empty(2, 6, 4, 8, device="meta") for _ in range(5)]
    lse, sink = torch.empty(2, 4, 6, device="meta"), torch.empty(4, device="meta")
    rest = *[None] * 4, sink, None, 0, 0, 0, 0, True, 2, 0, None, 0.0, 0.0, True
    found = gradients(tensors[0], lse, *tensors[1:4], *rest, tensors[4], lse, False, True, None, None)
    assert {t.device.type for t in found} == {"meta"}


def options(softcap=0.0):
    return context_blocks.Options(0, -1, 0, None, softcap, True, 0, 0.0, 2)


def test_which_problems_have_such_kernels():
    """On the CPU none; on a GPU those of 16 bits without what extends a kernel."""

    def takes(dtype=torch.bfloat16, dim=128, dim_v=128, softcap=0.0, **given):
        class OnGpu(torch.Tensor):
            is_cuda = True

        q, v = (torch.empty(1, 4, 2, d, dtype=dtype).as_subclass(OnGpu) for d in (dim, dim_v))
        all_given = dict.fromkeys(("cu_seqlens", "alibi_slopes", "sink", "seed")) | given
        return context_blocks.accepts_whole_results(options(softcap), q, v, context_blocks.Given(**all_given))

    some = torch.zeros(2)
    assert takes()
    assert takes(torch.float16, 64, 64, sink=some, cu_seqlens=some)
    assert not takes(torch.float32)
    assert not takes(dim_v=136)
    assert not takes(dim=256)
    assert not takes(softcap=1.0)
    assert not takes(alibi_slopes=some)
    assert not takes(seed=some)
    q = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16)
    assert not context_blocks.accepts_whole_results(options(), q, q, context_blocks.Given(None, None, None, None))
