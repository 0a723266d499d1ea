"""warpsmith::rope and warpsmith::qk_norm_rope in C++ equal Python's in values, gradients and errors."""

import pytest
import torch
import warpsmith


def problem(dtype, heads=(4, 2), weights=0):
    """Leaves q, k and as many weights; cos and sin."""
    g = torch.Generator().manual_seed(1)
    shapes = (*((2, 6, h, 32) for h in heads), *((32,),) * weights)
    leaves = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * torch.rand(12, generator=g, dtype=torch.float64)
    return *leaves, angles.cos().to(dtype), angles.sin().to(dtype)


def assert_same_gradients(found, wanted, grads, choices):
    """For each of the choices of leaves."""
    for which in choices:
        pairs = zip(
            torch.autograd.grad(found, which, grads, retain_graph=True),
            torch.autograd.grad(wanted, which, grads, retain_graph=True),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [2, torch.tensor([3, 0])], ids=["number", "tensor"])
def test_rope(cpp, dtype, interleaved, offset):
    q, k, cos, sin = problem(dtype)
    number, tensor = (0, offset) if isinstance(offset, torch.Tensor) else (offset, None)
    found = cpp.rope(q, k, cos, sin, interleaved, None, number, tensor)
    wanted = warpsmith.rope(q, k, cos, sin, interleaved=interleaved, position_offset=offset)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    grads = [torch.randn_like(t) for t in wanted]
    assert_same_gradients(found, wanted, grads, ((q, k), (q,), (k,)))


def test_rope_of_packed_sequences(cpp):
    q, k, cos, sin = (t.detach() for t in problem(torch.float32))
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    found = cpp.rope(q[0], k[0], cos, sin, False, cu_seqlens, 0, None)
    wanted = warpsmith.rope(q[0], k[0], cos, sin, cu_seqlens=cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].grad_fn is None


def test_rope_has_second_derivatives(cpp):
    q, k, cos, sin = problem(torch.float64, heads=(1, 1))

    def call(q, k):
        return cpp.rope(q, k, cos, sin, False, None, 0, None)

    leaves = [t.detach()[:, :2].clone().requires_grad_() for t in (q, k)]
    assert torch.autograd.gradgradcheck(call, leaves)


def test_bad_input_of_rope_is_named(cpp):
    q, k, cos, sin = problem(torch.float32)
    with pytest.raises(ValueError, match=r"^rope: k: expected the shape of q but for its heads, \(2, 6, 4, 32\), got"):
        cpp.rope(q, k[:, 1:], cos, sin, False, None, 0, None)
    with pytest.raises(ValueError, match=r"^rope: position_offset: expected positions from 0 to 8"):
        cpp.rope(q, k, cos, sin, False, None, 4, None)
    with pytest.raises(ValueError, match=r"^rope: cos: expected a tensor that requires no gradient"):
        cpp.rope(q, k, cos.requires_grad_(), sin, False, None, 0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope(cpp, dtype, interleaved):
    *leaves, cos, sin = problem(dtype, weights=2)
    found = cpp.qk_norm_rope(*leaves, cos, sin, 1e-5, interleaved, None, 2)
    wanted = warpsmith.qk_norm_rope(*leaves, cos, sin, eps=1e-5, interleaved=interleaved, position_offset=2)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    grads = [torch.randn_like(t) for t in wanted]
    assert_same_gradients(found, wanted, grads, (leaves, leaves[:1], leaves[3:], leaves[1:3]))
    alone = torch.autograd.grad(found[1], leaves, grads[1], retain_graph=True, allow_unused=True)
    assert [g is None for g in alone] == [True, False, True, False]


def test_qk_norm_rope_of_packed_sequences_without_gradients(cpp):
    *leaves, cos, sin = problem(torch.float32, weights=2)
    q, k, *weights = (t.detach() for t in leaves)
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    found = cpp.qk_norm_rope(q[0], k[0], *weights, cos, sin, None, False, cu_seqlens, 0)
    wanted = warpsmith.qk_norm_rope(q[0], k[0], *weights, cos, sin, cu_seqlens=cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].grad_fn is None


def test_a_second_derivative_of_qk_norm_rope_is_refused(cpp):
    *leaves, cos, sin = problem(torch.float32, weights=2)
    q_out, _ = cpp.qk_norm_rope(*leaves, cos, sin, 1e-6, False, None, 0)
    (gradient,) = torch.autograd.grad(q_out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"^qk_norm_rope: second derivatives are not available in C\+\+"):
        gradient.sum().backward()


def test_bad_input_of_qk_norm_rope_is_named(cpp):
    *leaves, cos, sin = problem(torch.float32, weights=2)
    with pytest.raises(ValueError, match=r"^qk_norm_rope: q_weight: expected shape \(32\), got \(31\)"):
        cpp.qk_norm_rope(*leaves[:2], leaves[2][1:], leaves[3], cos, sin, 1e-6, False, None, 0)
    with pytest.raises(ValueError, match=r"^qk_norm_rope: sin: expected a tensor that requires no gradient"):
        cpp.qk_norm_rope(*leaves, cos, sin.requires_grad_(), 1e-6, False, None, 0)
