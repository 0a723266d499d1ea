"""attention on what users reported of other libraries, each report a test.

FA is Dao-AILab/flash-attention, cuDNN is NVIDIA/cudnn-frontend, PyTorch is pytorch/pytorch; numbers are those of their
issues. Further edges are in test_attention_edges.py.
"""

import itertools
import threading

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention as reference
from warpsmith.testing import bitwise_equal
from warpsmith.testing.sim import is_loaded

# Of a device's tensors: those that its kernels take.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPE = {"cpu": torch.bfloat16 if is_loaded() else torch.float32, "cuda": torch.bfloat16}


def leaves(device, *shapes, std=1.0):
    g = torch.Generator().manual_seed(0)
    return [(std * torch.randn(shape, generator=g)).to(device, DTYPE[device]).requires_grad_() for shape in shapes]


def run(op, tensors, dout, **options):
    """out, lse and the gradients of all tensors, of which the fourth is the sink."""
    sink = {"sink": tensors[3]} if len(tensors) > 3 else {}
    out, lse = op(*tensors[:3], return_lse=True, **sink, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, tensors, dout)]


def check_law(tensors, dout=None, **options):
    """Twice plain PyTorch's error against float64, and two rounding steps. Returns ours."""
    if dout is None:
        shape = (*tensors[0].shape[:-1], tensors[2].shape[-1])
        dout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(tensors[0])
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}
    ours = run(warpsmith.attention, tensors, dout, **options)
    plain = run(reference, tensors, dout, **options, products=tensors[0].dtype)
    exact = run(reference, [t.detach().double().requires_grad_() for t in tensors], dout.double(), **wide)
    for name, a, b, e in zip(("out", "lse", "dq", "dk", "dv", "dsink"), ours, plain, exact, strict=False):
        assert torch.equal(a.isinf(), e.isinf()), name
        seen = e.isfinite()
        error, baseline = (float((t.double() - e)[seen].abs().max()) for t in (a, b))
        step = float(e[seen].abs().max()) * torch.finfo(a.dtype).eps
        assert error <= max(2 * baseline + step, 2e-4 if name == "lse" else 0), (name, error, baseline)
    return ours


@pytest.mark.parametrize("length", [64, 192, 320])
@pytest.mark.parametrize("kind", ["boolean mask", "bias"])
def test_a_mask_and_very_negative_logits(length, kind):
    """PyTorch 196678: NaN in dq where a mask is given, S mod 128 is 64 and lse is below -88.7."""
    q, k, v = leaves("cpu", *[(1, length, 2, 32)] * 3)
    visible = torch.rand(length, length, generator=torch.Generator().manual_seed(2)) < 0.7
    if kind == "bias":
        options = {"bias": torch.where(visible, -300.0, float("-inf"))}
    else:
        with torch.no_grad():
            q.abs_()
            k.abs_().mul_(-100)
        options = {"bias": visible}
    ours = check_law((q, k, v), **options)
    assert float(ours[1].max()) < -88.7
    assert all(bool(t.isfinite().all()) for t in ours)


@pytest.mark.parametrize("device", DEVICES)
def test_one_query_far_from_all_keys(device):
    """cuDNN 1072: NaN in dk and dv at Sq = 1 with lse near -122."""
    q, k, v = leaves(device, (2, 1, 4, 64), (2, 1000, 4, 64), (2, 1000, 4, 64))
    with torch.no_grad():
        q.abs_()
        k.abs_().mul_(-60)
    ours = check_law((q, k, v), causal=True)
    assert float(ours[1].max()) < -88
    assert all(bool(t.isfinite().all()) for t in ours)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_strides_beyond_32_bits(name, device):
    """FA 2611: gradients of tensors whose strides exceed int32 were corrupt. What lies between is never touched."""
    near = dict(zip(("q", "k", "v", "dout"), leaves(device, *[(2, 40, 2, 32)] * 4), strict=True))
    near = {n: t.detach().to(torch.bfloat16) for n, t in near.items()}
    apart = 2**31 + 64
    room = torch.empty(apart + near[name][0].numel(), dtype=torch.bfloat16, device=device)
    far = {**near, name: room.as_strided((2, 40, 2, 32), (apart, *near[name].stride()[1:])).copy_(near[name])}
    found, expected = (
        run(warpsmith.attention, [t[n].detach().requires_grad_() for n in "qkv"], t["dout"], causal=True)
        for t in (far, near)
    )
    for a, b in zip(found, expected, strict=True):
        assert bitwise_equal(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("hidden", [slice(0, 192), slice(64, 128), slice(128, 300), slice(10, 290)])
def test_tiles_in_which_nobody_sees_a_key(hidden):
    """A running maximum of -inf after the first tiles, or in between, must not become NaN."""
    tensors = leaves("cpu", *[(1, 150, 2, 32), (1, 300, 2, 32), (1, 300, 2, 32)])
    bias = torch.zeros(300)
    bias[hidden] = float("-inf")
    ours = check_law(tensors, bias=bias)
    same = run(warpsmith.attention, tensors, torch.ones_like(tensors[0]), bias=bias == 0)
    assert bitwise_equal(same[0], ours[0])
    assert bool((ours[3][:, hidden] == 0).all()) and bool((ours[4][:, hidden] == 0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_maximum_that_grows_with_every_tile(device):
    tensors = leaves(device, *[(1, 130, 2, 64), (1, 1000, 2, 64), (1, 1000, 2, 64)])
    with torch.no_grad():
        tensors[0].abs_()
        tensors[1].abs_().mul_(torch.linspace(0.02, 3, 1000, device=device)[:, None, None])
    check_law(tensors)
    check_law(tensors, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sinks_gradient_where_values_are_narrower(device):
    """TransformerEngine 3249: the sink's gradient was wrong, or an illegal access, with heads of 192 and 128."""
    dim, dim_v = (192, 128) if device == "cpu" else (128, 64)
    heads = 8 if is_loaded() else 32  # the largest of a few sinks' errors is chance, ours and plain PyTorch's
    q, k, v = leaves(device, (2, 70, heads, dim), (2, 90, 4, dim), (2, 90, 4, dim_v))
    sink = torch.linspace(-2, 3, heads, device=device, dtype=DTYPE[device]).requires_grad_()
    check_law((q, k, v, sink), causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_documents_without_tokens(device):
    """Empty on one side or both: out 0 and lse -inf where there are no keys, no gradient where there are no queries."""
    lengths_q, lengths_k = (5, 0, 7, 0, 30), (9, 4, 0, 0, 30)
    q, k, v = leaves(device, (42, 2, 32), (43, 2, 32), (43, 2, 32))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (lengths_q, lengths_k))
    out, lse = warpsmith.attention_varlen(q, k, v, cu_q, cu_k, 30, 30, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert bool((out[5:12] == 0).all()) and bool((lse[:, 5:12] == float("-inf")).all())
    assert bool((dq[5:12] == 0).all()) and bool((dk[9:13] == 0).all()) and bool((dv[9:13] == 0).all())
    for of_q, of_k in ((slice(0, 5), slice(0, 9)), (slice(12, 42), slice(13, 43))):
        alone = warpsmith.attention(q[of_q], k[of_k], v[of_k], layout="thd")
        assert bitwise_equal(alone, out[of_q])
    assert all(bool(t.isfinite().all()) for t in (out, dq, dk, dv))


@pytest.mark.not_on_sim(reason="too many blocks; tests/sim/sim_attention.cpp runs the last ones alone")
@pytest.mark.parametrize("device", DEVICES)
def test_more_sequences_than_a_grid_has_blocks_in_y(device):
    """A batch above 65,535, as many short sequences give it."""
    batch = 65_536 + 3
    tensors = leaves(device, *[(batch, 2, 1, 8)] * 3)
    ours = run(warpsmith.attention, tensors, torch.ones_like(tensors[0]), causal=True)
    for some in (slice(0, 3), slice(65_534, batch)):
        few = [t[some].detach().requires_grad_() for t in tensors]
        for a, b in zip(run(warpsmith.attention, few, torch.ones_like(few[0]), causal=True), ours, strict=True):
            assert bitwise_equal(a, b[some].contiguous())


@pytest.mark.parametrize("device", DEVICES)
def test_a_query_that_sees_itself_alone(device):
    """Gradients of a weight that is always 1 are 0 to the last bit, not rounding."""
    tensors = leaves(device, *[(2, 200, 4, 64)] * 3)
    dout = torch.randn(2, 200, 4, 64, generator=torch.Generator().manual_seed(1)).to(tensors[0])
    out, _, dq, dk, dv = run(warpsmith.attention, tensors, dout, causal=True, window_size=(0, 0))
    assert bitwise_equal(out, tensors[2].detach())
    assert bitwise_equal(dv, dout)
    if DTYPE[device] == torch.float32:
        assert not dq.any() and not dk.any()


def test_repeats_have_the_same_bits_under_load():
    """FA 2244: with the flag for determinism dq still differed from run to run. Other threads keep the cores busy."""
    tensors = leaves("cpu", *[(1, 300, 2, 32)] * 3)
    dout = torch.ones_like(tensors[0])
    first = run(warpsmith.attention, tensors, dout, causal=True)
    done = threading.Event()

    def keep_busy():
        x = torch.ones(256, 256)
        while not done.is_set():
            x = (x @ x).clamp(0, 1)

    other = threading.Thread(target=keep_busy)
    other.start()
    try:
        for _ in range(100):
            for a, b in zip(run(warpsmith.attention, tensors, dout, causal=True), first, strict=True):
                assert bitwise_equal(a, b)
    finally:
        done.set()
        other.join()


def bytes_held(device, step):
    """The most memory that a step holds at a time, beyond what there was before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = itertools.accumulate(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(held, default=0)


@pytest.mark.not_on_sim(reason="the memory of the simulated device is not PyTorch's")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", ["plain", "softcap", "dropout", "alibi", "bias of the keys"])
def test_memory_grows_with_the_length_and_not_with_its_square(device, option):
    """Forward and backward together. At shorter lengths the CPU has fewer partial sums of dk and dv."""
    dim, length = (8, 4096) if device == "cpu" else (64, 16384)

    def held(length):
        options = {
            "plain": {"causal": True, "sink": torch.zeros(1, device=device, dtype=DTYPE[device])},
            "softcap": {"softcap": 5.0},
            "dropout": {"dropout_p": 0.1},
            "alibi": {"alibi_slopes": torch.ones(1, device=device)},
            "bias of the keys": {"bias": torch.zeros(length, device=device, dtype=DTYPE[device]).requires_grad_()},
        }[option]
        q, k, v = tensors = leaves(device, *[(1, length, 1, dim)] * 3)
        dout = torch.ones_like(q)
        return bytes_held(device, lambda: torch.autograd.grad(warpsmith.attention(q, k, v, **options), tensors, dout))

    once, twice = held(length), held(2 * length)
    assert 3 * 2 * length * dim * DTYPE[device].itemsize < twice < 2.2 * once
