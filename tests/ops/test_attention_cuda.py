"""attention on a GPU: the Hopper and the portable kernels against the reference in float64, and what none serves."""

import threading

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention as reference
from warpsmith.reference.attention import dropout_mask
from warpsmith.testing import bitwise_equal
from warpsmith.testing.checks.cuda import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no CUDA device of sm_80 or newer",
    ),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def made(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()


def leaves(b, sq, sk, hq, hk, d, dv=None, dtype=BF16):
    torch.manual_seed(0)
    return made(b, sq, hq, d, dtype=dtype), made(b, sk, hk, d, dtype=dtype), made(b, sk, hk, dv or d, dtype=dtype)


def run(op, tensors, dout, **options):
    out, lse = op(*tensors, return_lse=True, **options)
    # Outputs that hold no graph: a graph kept alive ties the leaves to its stream, which a capture then may not join.
    learned = [t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (*tensors, *learned), dout)


def widened(t):
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


def check_law(tensors, **options):
    """Twice plain torch's error and two rounding steps, of out and every gradient; the lse within 2e-4. Tensors among
    the options that ask for a gradient have one, within 2% of its largest element: it sums up rounded weights."""
    dout = torch.randn_like(warpsmith.attention(*tensors, **options))
    ours = run(warpsmith.attention, tensors, dout, **options)
    plain = run(reference, tensors, dout, **options)
    wide = {name: widened(o) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    exact = run(reference, [widened(t) for t in tensors], dout.double(), **wide)
    learned = [name for name, o in options.items() if isinstance(o, torch.Tensor) and o.requires_grad]
    for name, a, b, e in zip(("out", "lse", "dq", "dk", "dv", *learned), ours, plain, exact, strict=True):
        assert torch.equal(a.isinf(), e.isinf()), name
        seen = e.isfinite()
        error, baseline = ((t.double() - e)[seen].abs().max().item() for t in (a, b))
        if name == "lse":
            assert error <= max(2e-4, 2 * baseline), (name, error, baseline)
            continue
        if name in learned:
            assert error <= 0.02 * e.abs().max().item() + 1e-3, (name, error, baseline)
            continue
        step = e.abs().max().item() * torch.finfo(a.dtype).eps
        assert error <= 2 * baseline + step, (name, error, baseline, step)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 128, 128, 4, 4, 128, None),
        (2, 113, 203, 4, 2, 128, None),
        (1, 203, 113, 6, 1, 64, None),
        (3, 1, 517, 8, 2, 64, None),
        (1, 64, 192, 2, 2, 128, 64),
        (2, 300, 300, 3, 3, 40, 72),
        (1, 1024, 1024, 2, 2, 96, None),
        (1, 33, 31, 2, 2, 8, None),
        (2, 203, 330, 4, 2, 256, None),
        (1, 300, 140, 2, 2, 136, 200),
    ],
)
def test_the_law(shape, dtype, causal):
    check_law(leaves(*shape, dtype=dtype), causal=causal)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (17, 0)},
        {"window_size": (64, 33)},
        {"causal": True, "causal_align": "top_left"},
        {"softmax_scale": 0.3},
        {"causal": True, "window_size": (100, 0)},
    ],
)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_options_under_the_law(options, d):
    check_law(leaves(2, 260, 330, 4, 2, d), **options)


def test_a_sink_and_its_gradient():
    tensors = leaves(2, 130, 130, 4, 2, 64)
    sink = torch.randn(4, device="cuda").requires_grad_()
    out = warpsmith.attention(*tensors, sink=sink, causal=True)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (*tensors, sink), dout)
    wide = [t.detach().double().requires_grad_() for t in (*tensors, sink)]
    exact = torch.autograd.grad(reference(*wide[:3], sink=wide[3], causal=True), wide, dout.double())
    for a, e in zip(found, exact, strict=True):
        assert (a.double() - e).abs().max() <= 0.02 * e.abs().max() + 1e-3


def test_packed_sequences_are_single_ones():
    torch.manual_seed(0)
    lengths = [100, 1, 0, 257, 64]
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    q, k, v = made(sum(lengths), 4, 64), made(sum(lengths), 2, 64), made(sum(lengths), 2, 64)
    out = warpsmith.attention_varlen(q, k, v, cu, cu, max(lengths), max(lengths), causal=True)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if begin == end:
            continue
        part = [t.detach()[None, begin:end].double().requires_grad_() for t in (q, k, v)]
        exact = reference(*part, causal=True)
        wanted = torch.autograd.grad(exact, part, dout[None, begin:end].double())
        assert (out[begin:end].double() - exact[0]).abs().max() <= 0.02
        for a, e in zip(found, wanted, strict=True):
            assert (a[begin:end].double() - e[0]).abs().max() <= 0.02 * e.abs().max() + 0.01


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_packed_qkv_is_read_where_it_lies_and_has_one_gradient(layout):
    torch.manual_seed(0)
    qkv = made(2, 96, 3, 4, 64) if layout == "bshd" else made(2, 3, 4, 96, 64)
    out = warpsmith.attention(qkv, causal=True, layout=layout)
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, qkv, dout)
    apart = [t.detach().contiguous().requires_grad_() for t in qkv.unbind(2 if layout == "bshd" else 1)]
    expected = warpsmith.attention(*apart, causal=True, layout=layout)
    assert bitwise_equal(out.contiguous(), expected.contiguous())
    stacked = torch.stack(torch.autograd.grad(expected, apart, dout), 2 if layout == "bshd" else 1)
    assert bitwise_equal(found.contiguous(), stacked)


def test_expanded_and_misaligned_tensors():
    q, k, v = leaves(2, 70, 70, 4, 2, 64)
    out = warpsmith.attention(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    found = torch.autograd.grad(out, (q, k, v), torch.ones((), device="cuda", dtype=BF16).expand_as(out))
    assert all(map(bitwise_equal, found, expected))
    storage = torch.empty(q.numel() + 3, device="cuda", dtype=BF16)
    shifted = storage[3:].view(q.shape).copy_(q.detach())
    assert bitwise_equal(warpsmith.attention(shifted, k, v), out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_thousand_backwards_beside_other_work_have_one_result(causal, d):
    tensors = leaves(2, 1000, 1000, 8, 2, d)
    dout = torch.randn_like(tensors[0])
    first = run(warpsmith.attention, tensors, dout, causal=causal)
    other, matrix = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    for i in range(1000):
        with torch.cuda.stream(other):  # takes multiprocessors away, at another moment each time
            for _ in range(i % 7):
                torch.mm(matrix, matrix)
        assert all(map(torch.equal, run(warpsmith.attention, tensors, dout, causal=causal), first))


def test_a_step_is_captured_and_never_waits():
    tensors = leaves(2, 256, 256, 4, 2, 128)
    dout = torch.randn_like(tensors[0])
    expected = run(warpsmith.attention, tensors, dout, causal=True)
    torch.cuda.synchronize()
    with no_waits():
        run(warpsmith.attention, tensors, dout, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(warpsmith.attention, tensors, dout, causal=True)
    graph.replay()
    assert all(map(torch.equal, found, expected))


def test_a_thread_whose_first_work_is_attention():
    """Tensor maps are made by the driver, which does not bind a context to a thread by itself."""
    tensors = leaves(1, 128, 128, 2, 2, 64)
    dout = torch.randn_like(tensors[0])
    expected, found = run(warpsmith.attention, tensors, dout), []
    thread = threading.Thread(target=lambda: found.extend(run(warpsmith.attention, tensors, dout)))
    thread.start()
    thread.join()
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture
def portable_alone():
    torch.ops.warpsmith._attention_portable_alone(True)
    yield
    torch.ops.warpsmith._attention_portable_alone(False)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (64, 33)}])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(2, 113, 203, 4, 2, 128), (1, 300, 300, 6, 1, 64, 40), (1, 140, 70, 3, 3, 256, 136)])
def test_plain_problems_in_portable_kernels(portable_alone, shape, dtype, options):
    check_law(leaves(*shape, dtype=dtype), **options)


@pytest.mark.parametrize(
    "shape", [(2, 130, 130, 4, 2, 64), (2, 200, 130, 4, 2, 128), (2, 65, 65, 4, 2, 72), (2, 130, 70, 4, 2, 256)]
)
def test_every_element_of_new_memory_is_written_before_a_read(shape):
    """initcheck does not see what the Hopper kernels' bulk copies write (tools/gpu/sanitized_workload.py)."""
    tensors = leaves(*shape)
    dout = torch.randn_like(tensors[0])
    expected = run(warpsmith.attention, tensors, dout, causal=True)
    torch.use_deterministic_algorithms(True)  # new memory is filled, that of floats with NaN
    try:
        assert torch.empty(8, device="cuda").isnan().all()
        found = run(warpsmith.attention, tensors, dout, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, expected))


SEED = torch.tensor([5**25, 7**20])
SHAPES = {"bias": (2, 4, 130, 150), "head bias": (4, 130, 150), "key bias": (150,), "float bias": (1, 4, 1, 150)}


def option(name):
    """The options of a case for two sequences of 130 queries and 150 keys, four heads."""
    if name in SHAPES:
        return {"bias": made(*SHAPES[name], dtype=FP32 if name == "float bias" else BF16)}
    if name == "padding":
        return {"bias": torch.arange(150, device="cuda") < torch.tensor([150, 90], device="cuda")[:, None, None, None]}
    slopes = torch.rand(2, 4, device="cuda") / 4
    return {
        "dropout": {"dropout_p": 0.3, "seed": SEED.cuda()},
        "alibi": {"alibi_slopes": slopes[0], "causal": True},
        "alibi of sequences": {"alibi_slopes": slopes},
        "softcap": {"softcap": 2.0, "causal": True},
        "sink": {"sink": made(4, dtype=FP32), "causal": True},
        "negative scale": {"softmax_scale": -0.1},
        "everything": {
            "causal": True, "window_size": (60, 0), "softcap": 5.0, "dropout_p": 0.1, "seed": SEED.cuda(),
            "alibi_slopes": slopes, "bias": made(1, 4, 130, 150), "sink": made(4),
        },
    }[name]  # fmt: skip


PORTABLE = (
    *SHAPES, "padding", "dropout", "alibi", "alibi of sequences", "softcap", "sink", "negative scale", "everything",
)  # fmt: skip


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_kernels_under_the_law(portable_alone, name, d):
    tensors = leaves(2, 130, 150, 4, 2, d)
    check_law(tensors, **option(name))


@pytest.mark.parametrize(
    "shape", [(2, 130, 150, 4, 2, 256, 72), (1, 200, 70, 3, 1, 136, None), (1, 1, 300, 2, 2, 200, 8)]
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_wide_heads(shape, dtype):
    check_law(leaves(*shape, dtype=dtype), causal=True)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window_size": (40, 0)}, {"softcap": 3.0}, {"dropout_p": 0.2}]
)
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_float32(options, d):
    if "dropout_p" in options:
        options = {**options, "seed": SEED.cuda()}
    check_law(leaves(2, 130, 150, 4, 2, d, dtype=FP32), **options)


def test_portable_backwards_have_the_same_bits():
    tensors = leaves(2, 300, 300, 8, 2, 64)
    options = {"bias": made(8, 300, 300), "dropout_p": 0.1, "seed": SEED.cuda()}
    dout = torch.randn_like(tensors[0])
    first = run(warpsmith.attention, tensors, dout, **options)
    for _ in range(20):
        assert all(map(torch.equal, run(warpsmith.attention, tensors, dout, **options), first))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_tiles_of_keys_add_dq_in_a_fixed_order(portable_alone, d):
    tensors = leaves(2, 1000, 1000, 8, 2, d)
    dout = torch.randn_like(tensors[0])
    for options in ({}, {"causal": True}):
        first = run(warpsmith.attention, tensors, dout, **options)
        for _ in range(10):
            assert all(map(torch.equal, run(warpsmith.attention, tensors, dout, **options), first))


def test_the_dropout_mask_is_the_cpus():
    q, k, v = (t.detach() for t in leaves(2, 100, 90, 4, 2, 64))
    ones = torch.ones_like(v)
    out = warpsmith.attention(q, k, ones, dropout_p=0.5, seed=SEED.cuda())
    on_cpu = warpsmith.attention(q.cpu(), k.cpu(), ones.cpu(), dropout_p=0.5, seed=SEED)
    assert (out.cpu().float() - on_cpu.float()).abs().max() <= 0.02


def weights_of_chunks(op, length, d):
    """Which weights are not 0, (B, H, Sq, Sk). A call covers d keys: key j has a value of 1 in column j."""
    chunks = []
    for first in range(0, length, d):
        at = torch.arange(length, device="cuda")[:, None] - first == torch.arange(d, device="cuda")
        chunks.append(op(at.to(BF16)) != 0)
    return torch.cat(chunks, -1)[..., :length]


@pytest.mark.parametrize(("p", "causal"), [(0.3, False), (0.3, True), (0.002, False), (0.9999, False)])
@pytest.mark.parametrize("d", [64, 128])
def test_hopper_and_portable_kernels_drop_the_same_weights(d, p, causal):
    """Compares which weights forward and backward drop with the definition, and with the portable kernels (which run in
    float32). All logits are equal."""
    b, h, sq, sk = 2, 3, 200, 330
    options = {"dropout_p": p, "seed": SEED.cuda(), "causal": causal}

    def forward(dtype):
        q, k = (torch.zeros(b, n, h, d, device="cuda", dtype=dtype) for n in (sq, sk))

        def op(values):
            v = values.to(dtype)[None, :, None].expand(b, sk, h, d).contiguous()
            return warpsmith.attention(q, k, v, **options).transpose(1, 2)

        return weights_of_chunks(op, sk, d)

    def backward(dtype):
        q, k, v = (torch.zeros(b, n, h, d, device="cuda", dtype=dtype).requires_grad_() for n in (sq, sk, sk))
        out = warpsmith.attention(q, k, v, **options)

        def op(upstream):
            dout = upstream.to(dtype)[None, :, None].expand(b, sq, h, d).contiguous()
            return torch.autograd.grad(out, v, dout, retain_graph=True)[0].transpose(1, 2)

        return weights_of_chunks(op, sq, d).transpose(2, 3)

    kept = dropout_mask(SEED.cuda(), torch.arange(b, device="cuda") * ((sq + 15) // 16), h, sq, sk, p)
    if causal:
        kept &= torch.ones(sq, sk, device="cuda").tril(sk - sq).bool()
    for made_by in (forward, backward):
        assert torch.equal(made_by(BF16), kept)
        assert torch.equal(made_by(FP32), kept)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (90, 0)}])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [40, 64, 128])
def test_dropout_in_hopper_kernels(d, dtype, options):
    tensors = leaves(2, 400, 530, 4, 2, d, dtype=dtype)
    options = {**options, "dropout_p": 0.1, "seed": SEED.cuda()}
    check_law(tensors, **options)
    dout = torch.randn_like(tensors[0])
    first = run(warpsmith.attention, tensors, dout, **options)
    for _ in range(5):
        assert all(map(torch.equal, run(warpsmith.attention, tensors, dout, **options), first))


BIASES = ("bias", "head bias", "padding", "rows without keys", "alibi", "bias of tiles", "shared bias of tiles")


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [40, 64, 128])
def test_biases_in_hopper_kernels(d, dtype, name):
    tensors = leaves(2, 400, 528 if "tiles" in name else 530, 4, 2, d, dtype=dtype)
    rows, keys = (torch.arange(n, device="cuda") for n in (400, 530))
    options = {
        # dbias by its Hopper kernel
        "bias of tiles": {"bias": made(1, 4, 400, 528, dtype=dtype), "causal": True},
        "shared bias of tiles": {"bias": made(400, 528, dtype=dtype)},
        "bias": {"bias": made(2, 4, 400, 530, dtype=dtype)},
        "head bias": {"bias": made(4, 400, 530, dtype=dtype), "causal": True},
        "padding": {"bias": keys < torch.tensor([530, 90], device="cuda")[:, None, None, None]},
        "rows without keys": {"bias": torch.rand(400, 530, device="cuda") < rows[:, None] % 3 / 4},
        "alibi": {"alibi_slopes": torch.rand(2, 4, device="cuda") / 4, "window_size": (300, 0)},
    }[name]
    check_law(tensors, **options)
    dout = torch.randn_like(tensors[0])
    first = run(warpsmith.attention, tensors, dout, **options)
    for _ in range(5):
        assert all(map(bitwise_equal, run(warpsmith.attention, tensors, dout, **options), first))


def test_packed_sequences_with_every_option_are_those_of_the_cpu():
    torch.manual_seed(0)
    lengths = [33, 0, 90, 1]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = made(124, 4, 64), made(124, 2, 64), made(124, 2, 64)
    bias, slopes = made(4, 90, 90), torch.rand(4, 4) / 4

    def results(device):
        leaves = [t.detach().to(device).requires_grad_() for t in (q, k, v, bias)]
        out = warpsmith.attention_varlen(
            *leaves[:3], *(cu.to(device), cu.to(device), 90, 90),
            bias=leaves[3], alibi_slopes=slopes.to(device), dropout_p=0.2, seed=SEED.to(device), softcap=4.0,
        )  # fmt: skip
        return [out.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(out, leaves, torch.ones_like(out)))]

    for ours, expected in zip(results("cuda"), results("cpu"), strict=True):
        assert (ours.double() - expected.double()).abs().max() <= 0.02 * expected.double().abs().max() + 0.01


def test_float64_is_refused():
    with pytest.raises(ValueError, match="attention: q: expected float32, float16 or bfloat16 on CUDA, got float64"):
        warpsmith.attention(*leaves(1, 64, 64, 2, 2, 64, dtype=torch.float64))
