"""warpsmith::rope in C++ equals Python's in values, gradients of both orders and errors."""

import pytest
import torch
import warpsmith


def problem(dtype, heads=(4, 2)):
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 6, h, 32, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for h in heads)
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * torch.rand(12, generator=g, dtype=torch.float64)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [2, torch.tensor([3, 0])], ids=["number", "tensor"])
def test_values_and_gradients_are_those_of_python(cpp, dtype, interleaved, offset):
    q, k, cos, sin = problem(dtype)
    number, tensor = (0, offset) if isinstance(offset, torch.Tensor) else (offset, None)
    found = cpp.rope(q, k, cos, sin, interleaved, None, number, tensor)
    wanted = warpsmith.rope(q, k, cos, sin, interleaved=interleaved, position_offset=offset)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    grads = [torch.randn_like(t) for t in wanted]
    for which in ((q, k), (q,), (k,)):
        pairs = zip(
            torch.autograd.grad(found, which, grads, retain_graph=True),
            torch.autograd.grad(wanted, which, grads, retain_graph=True),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_packed_sequences(cpp):
    q, k, cos, sin = (t.detach() for t in problem(torch.float32))
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    found = cpp.rope(q[0], k[0], cos, sin, False, cu_seqlens, 0, None)
    wanted = warpsmith.rope(q[0], k[0], cos, sin, cu_seqlens=cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].grad_fn is None


def test_second_derivatives(cpp):
    q, k, cos, sin = problem(torch.float64, heads=(1, 1))

    def call(q, k):
        return cpp.rope(q, k, cos, sin, False, None, 0, None)

    leaves = [t.detach()[:, :2].clone().requires_grad_() for t in (q, k)]
    assert torch.autograd.gradgradcheck(call, leaves)


def test_bad_input_is_named(cpp):
    q, k, cos, sin = problem(torch.float32)
    with pytest.raises(ValueError, match=r"^rope: k: expected the shape of q but for its heads, \(2, 6, 4, 32\), got"):
        cpp.rope(q, k[:, 1:], cos, sin, False, None, 0, None)
    with pytest.raises(ValueError, match=r"^rope: position_offset: expected positions from 0 to 8"):
        cpp.rope(q, k, cos, sin, False, None, 4, None)
    with pytest.raises(ValueError, match=r"^rope: cos: expected a tensor that requires no gradient"):
        cpp.rope(q, k, cos.requires_grad_(), sin, False, None, 0, None)
