"""warpsmith::attention and attention_varlen in C++ equal Python's in values, gradients and errors."""

import pytest
import torch
import warpsmith

SEED = torch.tensor([3, 4])


def problem(dtype):
    g = torch.Generator().manual_seed(1)
    shapes = ((2, 6, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (4, 6, 9), (4,))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_python(cpp, dtype):
    q, k, v, bias, sink = leaves = problem(dtype)
    found = cpp.attention(q, k, v, True, bias, sink, 0.2, SEED, 0)
    options = {"causal": True, "softcap": 4.0, "bias": bias, "sink": sink, "dropout_p": 0.2, "seed": SEED}
    wanted = warpsmith.attention(q, k, v, return_lse=True, **options)
    assert equal(found, wanted)
    grads = [torch.randn_like(t) for t in wanted]
    for which in (leaves, leaves[:1], leaves[3:], leaves[1:3]):
        pairs = (torch.autograd.grad(y, which, grads, retain_graph=True) for y in (found, wanted))
        assert equal(*pairs)
    alone = (torch.autograd.grad(y[1], q, grads[1], retain_graph=True) for y in (found, wanted))
    assert equal(*alone)


def test_packed_inputs(cpp):
    q, k, v = (t.detach()[:, :6] for t in problem(torch.float32)[:3])
    heads = torch.cat((q, k, v), 2).requires_grad_()
    found = cpp.attention(heads, None, None, False, None, None, 0.0, None, 2)
    wanted = warpsmith.attention(heads, kv_heads=2, softcap=4.0, return_lse=True)
    assert equal(found, wanted)
    assert equal(*(torch.autograd.grad(y[0].square().sum(), heads) for y in (found, wanted)))
    qkv = torch.stack((q, q, q), 2)
    assert torch.equal(
        cpp.attention(qkv, None, None, False, None, None, 0.0, None, 0)[0], warpsmith.attention(qkv, softcap=4.0)
    )


def test_packed_sequences(cpp):
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    leaves = [t.detach()[0, :6].contiguous().requires_grad_() for t in problem(torch.float32)[:3]]
    found = cpp.attention_varlen(*leaves, cu_seqlens, 4)
    wanted = warpsmith.attention_varlen(*leaves, cu_seqlens, max_seqlen_q=4, causal=True, return_lse=True)
    assert equal(found, wanted)
    assert equal(*(torch.autograd.grad(y[0].square().sum(), leaves) for y in (found, wanted)))


def test_a_seed_is_drawn_from_torchs_generator(cpp):
    q, k, v = (t.detach() for t in problem(torch.float32)[:3])
    torch.manual_seed(1)
    found = cpp.attention(q, k, v, False, None, None, 0.5, None, 0)
    torch.manual_seed(1)
    assert torch.equal(found[0], warpsmith.attention(q, k, v, dropout_p=0.5, softcap=4.0))


def test_a_second_derivative_is_refused(cpp):
    q, k, v = problem(torch.float32)[:3]
    out, _ = cpp.attention(q, k, v, False, None, None, 0.0, None, 0)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="^attention: second derivatives are not available"):
        gradient.sum().backward()


def test_bad_input_is_named(cpp):
    q, k, v = problem(torch.float32)[:3]
    with pytest.raises(ValueError, match="^attention: v: expected 9 tokens, got 8"):
        cpp.attention(q, k, v[:, 1:], False, None, None, 0.0, None, 0)
    with pytest.raises(ValueError, match=r"^attention: dropout_p: expected a number in \[0, 1\), got 1"):
        cpp.attention(q, k, v, False, None, None, 1.0, None, 0)
