"""warpsmith::qk_norm_rope in C++ equals Python's in values, gradients and errors."""

import pytest
import torch
import warpsmith


def problem(dtype):
    g = torch.Generator().manual_seed(1)
    shapes = ((2, 6, 4, 32), (2, 6, 2, 32), (32,), (32,))
    leaves = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * torch.rand(12, generator=g, dtype=torch.float64)
    return leaves, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_values_and_gradients_are_those_of_python(cpp, dtype, interleaved):
    leaves, cos, sin = problem(dtype)
    found = cpp.qk_norm_rope(*leaves, cos, sin, 1e-5, interleaved, None, 2)
    wanted = warpsmith.qk_norm_rope(*leaves, cos, sin, eps=1e-5, interleaved=interleaved, position_offset=2)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    grads = [torch.randn_like(t) for t in wanted]
    for which in (leaves, leaves[:1], leaves[3:], leaves[1:3]):
        pairs = zip(
            torch.autograd.grad(found, which, grads, retain_graph=True),
            torch.autograd.grad(wanted, which, grads, retain_graph=True),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)
    alone = torch.autograd.grad(found[1], leaves, grads[1], retain_graph=True, allow_unused=True)
    assert [g is None for g in alone] == [True, False, True, False]


def test_packed_sequences_without_gradients(cpp):
    leaves, cos, sin = problem(torch.float32)
    q, k, *weights = (t.detach() for t in leaves)
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    found = cpp.qk_norm_rope(q[0], k[0], *weights, cos, sin, 1e-6, False, cu_seqlens, 0)
    wanted = warpsmith.qk_norm_rope(q[0], k[0], *weights, cos, sin, cu_seqlens=cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].grad_fn is None


def test_a_second_derivative_is_refused(cpp):
    leaves, cos, sin = problem(torch.float32)
    q_out, _ = cpp.qk_norm_rope(*leaves, cos, sin, 1e-6, False, None, 0)
    (gradient,) = torch.autograd.grad(q_out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"^qk_norm_rope: second derivatives are not available in C\+\+"):
        gradient.sum().backward()


def test_bad_input_is_named(cpp):
    leaves, cos, sin = problem(torch.float32)
    with pytest.raises(ValueError, match=r"^qk_norm_rope: q_weight: expected shape \(32\), got \(31\)"):
        cpp.qk_norm_rope(*leaves[:2], leaves[2][1:], leaves[3], cos, sin, 1e-6, False, None, 0)
    with pytest.raises(ValueError, match=r"^qk_norm_rope: sin: expected a tensor that requires no gradient"):
        cpp.qk_norm_rope(*leaves, cos, sin.requires_grad_(), 1e-6, False, None, 0)
