"""warpsmith.attention as the flash attention of torch's scaled_dot_product_attention."""

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from warpsmith.integrations import sdpa
from warpsmith.reference.attention import attention as reference
from warpsmith.testing import bitwise_equal

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


@pytest.fixture
def active():
    sdpa.register()
    activate_flash_attention_impl("warpsmith")
    yield
    if current_flash_attention_impl():
        restore_flash_attention_impl()


def tensors(q_shape, k_shape=None, dtype=FP32, order="bhsd", device="cpu"):
    g = torch.Generator().manual_seed(0)
    made = []
    for shape in (q_shape, k_shape or q_shape, k_shape or q_shape):
        t = torch.randn(shape, generator=g).to(device, dtype)
        made.append(t.transpose(1, 2).contiguous().transpose(1, 2) if order == "bshd" else t)
    return [t.requires_grad_() for t in made]


def results(op, leaves, **options):
    out = op(*leaves, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def ours(q, k, v, **options):
    return warpsmith.attention(q, k, v, layout="bhsd", causal_align="top_left", **options)


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert bitwise_equal(x.contiguous(), y.contiguous())


def differ(a, b):
    return any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


SHAPES = [
    ((2, 4, 70, 64), None),
    ((1, 4, 33, 32), (1, 4, 90, 32)),
    ((2, 4, 70, 16), (2, 2, 40, 16)),
    ((2, 3, 1, 8), None),
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_it_has_the_bits_of_warpsmith_and_the_strides_of_torch(active, shapes, causal, dtype, order):
    leaves, gqa = tensors(*shapes, dtype=dtype, order=order), shapes[1] is not None and shapes[1][1] != shapes[0][1]
    found = results(F.scaled_dot_product_attention, leaves, is_causal=causal, enable_gqa=gqa)
    assert_same_bits(found, results(ours, leaves, causal=causal))
    restore_flash_attention_impl()
    theirs = results(F.scaled_dot_product_attention, leaves, is_causal=causal, enable_gqa=gqa)
    assert [t.stride() for t in found] == [t.stride() for t in theirs]
    tolerance = {FP32: 1e-5, BF16: 3e-2, FP64: 1e-12}[dtype]
    torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance)


def test_restored_it_is_torchs_again():
    leaves = tensors((2, 4, 70, 64))
    before = results(F.scaled_dot_product_attention, leaves, is_causal=True)
    sdpa.register()
    sdpa.register()
    assert "warpsmith" in list_flash_attention_impls()
    assert_same_bits(before, results(F.scaled_dot_product_attention, leaves, is_causal=True))  # registered, not active
    for _ in range(2):
        activate_flash_attention_impl("warpsmith")
        assert current_flash_attention_impl() == "warpsmith"
        assert differ(before, results(F.scaled_dot_product_attention, leaves, is_causal=True)), "ours did not run"
        restore_flash_attention_impl()
        assert current_flash_attention_impl() is None
        assert_same_bits(before, results(F.scaled_dot_product_attention, leaves, is_causal=True))


def test_activated_twice_it_is_restored_at_once():
    leaves = tensors((2, 4, 70, 64))
    before = results(F.scaled_dot_product_attention, leaves)
    sdpa.register()
    activate_flash_attention_impl("warpsmith")
    activate_flash_attention_impl("warpsmith")
    restore_flash_attention_impl()
    assert_same_bits(before, results(F.scaled_dot_product_attention, leaves))


def masks(q, k):
    g = torch.Generator().manual_seed(2)
    seen = torch.rand(q[2], k[2], generator=g) < 0.7
    added = torch.randn(q[0], 1, q[2], k[2], generator=g)
    return {"boolean": seen, "added": added, "for each head": torch.randn(q[0], q[1], q[2], k[2], generator=g)}


@pytest.mark.parametrize("name", ["boolean", "added", "for each head"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_masks(active, name, dtype):
    q, k = (2, 4, 33, 32), (2, 4, 90, 32)
    leaves, mask = tensors(q, k, dtype=dtype), masks(q, k)[name]
    mask = mask if mask.dtype == torch.bool else mask.to(dtype)
    found = results(F.scaled_dot_product_attention, leaves, attn_mask=mask)
    assert_same_bits(found, results(ours, leaves, bias=mask))
    wide = mask if mask.dtype == torch.bool else mask.double()
    exact = reference(*(t.double() for t in leaves), layout="bhsd", bias=wide)
    torch.testing.assert_close(found[0].double(), exact, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("width", [20, 264])
def test_heads_that_ours_refuses_are_torchs(active, width):
    leaves = tensors((1, 2, 30, width))
    found = results(F.scaled_dot_product_attention, leaves, is_causal=True)
    restore_flash_attention_impl()
    assert_same_bits(found, results(F.scaled_dot_product_attention, leaves, is_causal=True))


def test_the_backward_has_the_same_bits_at_every_run(active):
    leaves = tensors((1, 2, 700, 64))
    first = results(F.scaled_dot_product_attention, leaves, is_causal=True)
    for _ in range(3):
        assert_same_bits(first, results(F.scaled_dot_product_attention, leaves, is_causal=True))


def test_a_second_derivative_is_refused(active):
    q, k, v = tensors((1, 2, 10, 16))
    (dq,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(dq.sum(), q)


def test_without_gradients_and_in_inference_mode(active):
    q, k, v = tensors((2, 4, 70, 64))
    expected = ours(q, k, v).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(active, backend, order):
    torch._dynamo.reset()
    leaves = tensors((2, 4, 70, 64), order=order)

    def double(q, k, v):
        return 2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(double, fullgraph=True, backend=backend)
    expected = results(lambda q, k, v: 2 * ours(q, k, v, causal=True), leaves)
    assert_same_bits(results(compiled, leaves), expected)
    torch._dynamo.reset()


def test_a_mask_of_the_least_number(active):
    """A query whose whole row of the mask is finfo.min has the mean of the values, and its gradient."""
    leaves = tensors((2, 4, 20, 32))
    mask = torch.zeros(20, 20)
    mask[3] = torch.finfo(FP32).min
    found = results(F.scaled_dot_product_attention, leaves, attn_mask=mask)
    assert_same_bits(found, results(ours, leaves, bias=mask))
    torch.testing.assert_close(found[0][:, :, 3], leaves[2].detach().mean(2))


def test_what_a_gpu_calls_has_the_same_bits():
    """The functions for CUDA take tensors of any device; the causal mask of torch's op for GPUs aligns bottom right."""
    q, k, v = (t.detach() for t in tensors((2, 4, 33, 32), (2, 2, 90, 32), order="bshd"))
    for causal in (False, True):
        out, lse, *_, debug = sdpa.flash_attention(q, k, v, 0.0, causal, scale=0.3)
        options = {"layout": "bhsd", "causal": causal, "softmax_scale": 0.3}
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        expected, expected_lse = warpsmith.attention(*leaves, return_lse=True, **options)
        assert_same_bits((out, lse), (expected, expected_lse))
        assert out.stride() == torch.empty_like(q).stride()
        assert debug.numel() == 0
        state = torch.empty(2, dtype=torch.uint64)
        grads = sdpa.flash_attention_backward(
            expected, q, k, v, out, lse, None, None, 33, 90, 0.0, causal, state, state, scale=0.3
        )
        assert_same_bits(grads, torch.autograd.grad(expected, leaves, expected.detach()))
    with pytest.raises(ValueError, match="dropout"):
        sdpa.flash_attention(q, k, v, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(active, causal):
    leaves = tensors((2, 4, 256, 64), dtype=BF16, device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = results(F.scaled_dot_product_attention, leaves, is_causal=causal)
        assert_same_bits(found, results(ours, leaves, causal=causal))
        torch.manual_seed(0)
        dropped = results(F.scaled_dot_product_attention, leaves, dropout_p=0.1)  # torch's own
        restore_flash_attention_impl()
        torch.manual_seed(0)
        theirs = results(F.scaled_dot_product_attention, leaves, dropout_p=0.1)
    assert torch.equal(dropped[0], theirs[0])
    torch.testing.assert_close(dropped, theirs)
