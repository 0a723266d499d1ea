"""attention where others went wrong, and what no table holds: packed inputs, layouts, masks, dropout."""

import functools

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention as reference
from warpsmith.reference.attention import dropout_mask
from warpsmith.testing import bitwise_equal

from tests.ops.attention_cases import BF16, FP32, FP64, SEED

NEGATIVE_INFINITY = float("-inf")


def tensors(*shapes, dtype=FP32, seed=0, std=1.0):
    g = torch.Generator().manual_seed(seed)
    return [(std * torch.randn(shape, generator=g, dtype=FP64)).to(dtype) for shape in shapes]


def problem(batch=2, seqlen_q=20, seqlen_k=None, heads=4, k_heads=None, dim=16, **more):
    k_shape = (batch, seqlen_k or seqlen_q, k_heads or heads, dim)
    return tensors((batch, seqlen_q, heads, dim), k_shape, k_shape, **more)


def gradients(op, leaves, upstream, **options):
    leaves = [t.detach().requires_grad_() for t in leaves]
    out, lse = op(*leaves, return_lse=True, **options)
    found = torch.autograd.grad((out, lse), leaves, [u.to(t.dtype) for u, t in zip(upstream, (out, lse), strict=True)])
    return [out.detach(), lse.detach(), *found]


def assert_close_to_reference(leaves, rtol=1e-9, dout=None, **options):
    """In float64, so that what remains is an error of thought, not of rounding."""
    leaves = [t.double() for t in leaves]
    out, lse = reference(*leaves, return_lse=True, **options)
    upstream = [torch.randn_like(out) if dout is None else dout.double(), torch.where(lse.isfinite(), 1.0, 0.0)]
    ours = gradients(warpsmith.attention, leaves, upstream, **options)
    exact = gradients(reference, leaves, upstream, **options)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sequences"])
def test_packed_tensors_give_the_bits_of_three_and_one_gradient(layout):
    q, k, v = problem()
    op, heads = functools.partial(warpsmith.attention, causal=True, layout=layout), 2 if layout == "bshd" else 1
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    if layout == "sequences":
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        lengths = {"cu_seqlens_q": torch.tensor([0, 25, 40], dtype=torch.int32), "max_seqlen_q": 25}
        op = functools.partial(warpsmith.attention_varlen, causal=True, **lengths)
    few = [t.narrow(heads, 0, 2).contiguous() for t in (k, v)]
    for three, joined, packed, options in (
        ((q, k, v), torch.stack, 3, {}),
        ((q, k, v), torch.stack, 2, {}),
        ((q, *few), torch.cat, 3, {"kv_heads": 2}),
    ):
        upstream = op(*three, return_lse=True)
        apart = gradients(op, three, upstream)
        found = gradients(op, [*three[:-packed], joined(three[-packed:], heads)], upstream, **options)
        assert all(map(bitwise_equal, found, [*apart[:-packed], joined(apart[-packed:], heads)]))


def test_packed_qkv_of_a_linear_layer_is_not_copied_or_joined():
    # (B, S, 3 C) is a view of (B, S, 3, H, D), and so must its gradient be.
    (x,) = tensors((2, 20, 3 * 64))
    x.requires_grad_()
    out = warpsmith.attention(x.view(2, 20, 3, 4, 16))
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert dx.is_contiguous()
    assert dx._base is None or dx._base.shape == (2, 20, 3, 4, 16)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_results_lie_as_the_inputs_do(layout):
    for head_major in (False, True):
        leaves = problem()
        if layout == "bhsd":
            leaves = [t.transpose(1, 2) for t in leaves]
        if head_major != (layout == "bhsd"):
            leaves = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
        else:
            leaves = [t.contiguous() for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        out = warpsmith.attention(*leaves, layout=layout)
        for t in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out))):
            in_memory = t.transpose(1, 2) if head_major != (layout == "bhsd") else t
            assert in_memory.is_contiguous()


def test_lse_is_good_to_two_ten_thousandths():
    for dtype in (BF16, FP32):
        q, k, v = problem(seqlen_q=200, dim=64, dtype=dtype)
        lse = warpsmith.attention(q, k, v, return_lse=True)[1]
        exact = reference(q.double(), k.double(), v.double(), return_lse=True)[1]
        assert float((lse - exact).abs().max()) <= 2e-4


def test_logits_of_ten_thousand():
    q, k, v = problem(seqlen_q=70, dim=16)
    scale = 1e4 / float((q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).abs().max())
    ours = gradients(warpsmith.attention, (q, k, v), (q, torch.zeros(2, 4, 70)), softmax_scale=scale)
    exact = gradients(
        reference, [t.double() for t in (q, k, v)], (q.double(), torch.zeros(2, 4, 70)), softmax_scale=scale
    )
    # A logit of 1e4 is known to 1e-3 in float32.
    for a, b in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-3, atol=5e-3)
    assert all(bool(t.isfinite().all()) for t in ours)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FP32, BF16])  # Hopper kernels take the second
@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_a_key(sink, dtype, device):
    seqlen_q, seqlen_k = 150, 20  # bottom right: the first 130 queries see nothing
    leaves = [t.to(device) for t in problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)]
    options = {"sink": torch.linspace(-1, 1, 4, device=device)} if sink else {}
    # What joins partial results by their lse may give rows of lse -inf a gradient of NaN.
    dlse = torch.full((2, 4, seqlen_q), 0.0 if sink else float("nan"), device=device)
    dlse[..., seqlen_q - seqlen_k :] = 1.0
    upstream = leaves[0], dlse
    out, lse, dq, dk, dv = gradients(warpsmith.attention, leaves, upstream, causal=True, **options)
    empty = slice(0, seqlen_q - seqlen_k)
    assert bool((out[:, empty] == 0).all())
    expected = options["sink"][None, :, None].expand(2, 4, 130) if sink else torch.full((2, 4, 130), NEGATIVE_INFINITY)
    assert bitwise_equal(lse[:, :, empty].contiguous().cpu(), expected.contiguous().cpu())
    assert bool((dq[:, empty] == 0).all())
    assert all(bool(g.isfinite().all()) for g in (dq, dk, dv))


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_everything_masked(dtype, device):
    leaves = [t.to(device) for t in problem(dtype=dtype)]
    for bias in (torch.zeros(20, 20, dtype=torch.bool), torch.full((20, 20), NEGATIVE_INFINITY).to(dtype)):
        out, lse, *grads = gradients(warpsmith.attention, leaves, (leaves[0], torch.ones(2, 4, 20)), bias=bias)
        assert all(bool((t == 0).all()) for t in (out, *grads))
        assert bool((lse == NEGATIVE_INFINITY).all())


def test_softcap_with_masks():
    q, k, v = problem(seqlen_q=80, std=30.0)
    visible = torch.rand(80, 80, generator=torch.Generator().manual_seed(1)) < 0.3
    visible[5] = False
    assert_close_to_reference((q, k, v), rtol=1e-7, softcap=5.0, bias=visible, window_size=(40, 3))
    ours = gradients(warpsmith.attention, (q, k, v), (q, torch.zeros(2, 4, 80)), softcap=5.0, bias=visible)
    assert all(bool(t.isfinite().all()) for t in (ours[0], *ours[2:]))


def with_bias(q, k, v, bias, **options):
    return warpsmith.attention(q, k, v, bias=bias, **options)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_window_hides_of_a_bias_may_be_nan(dim, dtype, device):
    q, k, v = (t.to(device) for t in problem(batch=1, seqlen_q=130, seqlen_k=200, heads=1, dim=dim, dtype=dtype))
    (bias,) = (t.to(device) for t in tensors((130, 200), dtype=dtype))
    hidden = torch.arange(200) > torch.arange(130)[:, None] + 70
    upstream = q, torch.ones(1, 1, 130)

    def results(bias):
        leaves = [q, k, v, bias]
        return gradients(
            lambda q, k, v, b, **o: warpsmith.attention(q, k, v, bias=b, **o), leaves, upstream, causal=True
        )

    for a, b in zip(results(bias), results(bias.masked_fill(hidden, float("nan"))), strict=True):
        assert bitwise_equal(a, b)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_keys_that_a_mask_hides_may_be_nan(dtype, device):
    """In the forward: the products of such keys are NaN or infinite, and no weight is."""
    q, k, v = (t.to(device) for t in problem(batch=1, seqlen_q=70, seqlen_k=300, heads=1, dim=64, dtype=dtype))
    shown = torch.arange(300, device=device) % 7 != 3
    clean = warpsmith.attention(q, k, v, bias=shown, return_lse=True)
    k[:, 3::14], k[:, 10::14] = float("nan"), float("inf")
    for a, b in zip(clean, warpsmith.attention(q, k, v, bias=shown, return_lse=True), strict=True):
        assert bitwise_equal(a, b)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("space", [8, 2])  # TMA reads rows that lie multiples of 16 bytes apart
@pytest.mark.parametrize("keys", [200, 198])
def test_a_bias_with_space_between_its_rows(keys, space, device):
    """Heads before the batch in memory, and NaN in the space."""
    q, k, v = (t.to(device) for t in problem(seqlen_q=150, seqlen_k=keys, heads=2, k_heads=1, dim=64, dtype=BF16))
    (bias,) = (t.to(device) for t in tensors((2, 2, 150, keys), dtype=BF16))
    room = torch.full((2, 150, 2, (keys + 7) // 8 * 8 + space), float("nan"), dtype=BF16, device=device)
    spaced = room[..., :keys].permute(2, 0, 1, 3).copy_(bias)
    upstream = q, torch.ones(2, 2, 150)
    together, apart = (gradients(with_bias, (q, k, v, x), upstream) for x in (bias, spaced))
    for a, b in zip(together, apart, strict=True):
        assert bitwise_equal(a.contiguous(), b.contiguous())


@pytest.mark.parametrize(("p", "of_256"), [(0.3, 77), (0.1, 26), (1e-9, 1), (0.9999, 255)])
def test_the_mask_has_its_probability_everywhere(p, of_256):
    """``p`` is rounded to a multiple of 1 / 256, but neither to 0 nor to 1."""
    kept = dropout_mask(SEED, torch.arange(3) * 8, 5, 128, 512, p)
    share, expected = kept.double(), 1 - of_256 / 256
    deviation = (expected * (1 - expected) / kept.numel()) ** 0.5
    assert abs(float(share.mean()) - expected) < 4 * deviation
    for dim, size in enumerate(kept.shape):
        along = share.transpose(0, dim).reshape(size, -1).mean(1)
        assert float((along - expected).abs().max()) < 5 * deviation * size**0.5


@pytest.mark.parametrize(("p", "of_256"), [(0.3, 77), (0.002, 1), (1e-9, 1), (0.5, 128), (0.997, 255), (0.9999, 255)])
def test_every_decision_and_the_scale_are_the_definitions(p, of_256):
    """Equal logits, and values that are 1 in one column for each key: out is the weights after dropout."""
    b, h, sq, sk = 2, 3, 53, 72
    q, k = (torch.zeros(b, n, h, 8, dtype=torch.float64) for n in (sq, sk))
    v = torch.eye(sk, dtype=torch.float64)[None, :, None].expand(b, sk, h, sk).contiguous().requires_grad_()
    out = warpsmith.attention(q, k, v, dropout_p=p, seed=SEED)
    kept = dropout_mask(SEED, torch.arange(b) * 4, h, sq, sk, p)
    assert torch.equal(out.transpose(1, 2) != 0, kept)
    torch.testing.assert_close(out.transpose(1, 2), kept.double() * (256 / (256 - of_256) / sk))
    dout = torch.eye(sq, dtype=torch.float64)[None, :, None].expand(b, sq, h, sq)
    padded = torch.nn.functional.pad(dout, (0, sk - sq))
    (dv,) = torch.autograd.grad(out, v, padded)
    assert torch.equal(dv[..., :sq].permute(0, 2, 3, 1) != 0, kept)


def test_plans_say_why_no_faster_kernel_is_taken():
    plan = warpsmith.plan("attention", seqlen_q=4096, head_dim=128)
    assert plan["forward"]["kernel"] == plan["backward"]["kernel"] == "sm_90a"
    plan = warpsmith.plan("attention", seqlen_q=4096, head_dim=128, softcap=True)
    assert [plan[part]["kernel"] for part in ("forward", "backward")] == ["sm_90a", "sm_80"]
    assert plan["backward"]["why"] == "the portable kernel takes every option; no Hopper kernel for softcap"
    plan = warpsmith.plan("attention", seqlen_q=4096, head_dim=128, dropout=True)
    assert [plan[part]["kernel"] for part in ("forward", "backward")] == ["sm_90a", "sm_90a"]
    assert plan["forward"]["why"].startswith("dropout") and plan["backward"]["why"].startswith("dropout")
    plan = warpsmith.plan("attention", seqlen_q=4096, head_dim=128, dropout=True, softcap=True)
    assert plan["forward"]["why"].endswith("no Hopper kernel for dropout beside a softcap")
    plan = warpsmith.plan("attention", seqlen_q=4096, head_dim=256, dropout=True)
    assert plan["forward"]["why"].endswith("no Hopper kernel for dropout with head dimensions above 128")
    assert plan["backward"]["why"].endswith("no Hopper kernel for dropout with head dimensions above 128")
    plan = warpsmith.plan("attention", seqlen_q=4096, head_dim=64, head_dim_v=256)
    assert [plan[part]["kernel"] for part in ("forward", "backward")] == ["sm_90a", "sm_90a"]
    assert plan["forward"]["head_dim"] == plan["backward"]["head_dim"] == 256
    assert plan["backward"]["why"].startswith("head dimensions up to 256: one kernel for dk and dv")
    for option in ("bias", "mask", "alibi"):
        for d in (64, 128):
            for part in warpsmith.plan("attention", seqlen_q=4096, head_dim=d, **{option: True}).values():
                assert part["kernel"] == "sm_90a" and part["why"].startswith("bias, mask or ALiBi")
    for change, reason in (
        ({"bias": True, "mask": True}, "a bias beside a mask"),
        ({"bias": True, "dropout": True}, "dropout beside a bias, mask or ALiBi"),
        ({"alibi": True, "softcap": True}, "a softcap beside a bias, mask or ALiBi"),
        ({"mask": True, "head_dim_v": 256}, "a bias, mask or ALiBi with head dimensions above 128"),
        ({"dtype": "float32"}, "a dtype other than float16 and bfloat16"),
        ({"sm90a_code": False}, "a device that runs no code of sm_90a"),
    ):
        for part in warpsmith.plan("attention", seqlen_q=100, head_dim=64, **change).values():
            assert part["kernel"] == "sm_80" and part["why"].endswith(f"no Hopper kernel for {reason}")
    assert warpsmith.plan("attention", seqlen_q=100, head_dim=136)["forward"]["head_dim"] == 256
    long = warpsmith.plan("attention", seqlen_q=2**28, head_dim=64)["forward"]
    assert long == {"kernel": None, "why": "no CUDA kernel for sequences of 2^28 tokens or more"}


@pytest.mark.parametrize("argument", ["head_dim", "head_dim_v"])
def test_plans_take_the_head_dimensions_of_the_op(argument):
    for width in (-8, 0, 1, 7, 8, 12, 64, 250, 256, 257, 264, 4096, 2**40):
        sizes = {"head_dim": 64, "head_dim_v": 64, argument: width}
        q = torch.empty(1, 1, 1, max(0, min(sizes["head_dim"], 5000)), device="meta")
        v = torch.empty(1, 1, 1, max(0, min(sizes["head_dim_v"], 5000)), device="meta")
        try:
            warpsmith.attention(q, q, v)
        except ValueError:
            for op in ("attention", "attention_varlen"):
                expected = f"^plan: {op}: {argument}: expected 8 to 256 in steps of 8, got {width}$"
                with pytest.raises(ValueError, match=expected):
                    warpsmith.plan(op, seqlen_q=128, **sizes)
        else:
            assert warpsmith.plan("attention", seqlen_q=128, **sizes)["forward"]["kernel"]
