"""cross_entropy's gradient: over the logits where that is allowed, and once."""

import pytest
import torch
import torch.nn.functional as F
import warpsmith

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("upstream", [1.0, 0.25])
@pytest.mark.parametrize("classes", [17, 1100])
def test_the_gradient_in_place_is_the_gradient(device, dtype, reduction, upstream, classes):
    torch.manual_seed(0)
    leaf = torch.randn(6, classes + 3, device=device).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (6,), device=device)
    target[2] = -100

    def gradient(inplace):
        padded = leaf * 1
        logits = padded[:, :classes]
        loss = warpsmith.cross_entropy(logits, target, reduction=reduction, inplace_backward=inplace)
        seen = []
        logits_node = loss.grad_fn.next_functions[0][0]
        logits_node.register_prehook(lambda grads: seen.append(grads[0]))
        (grad,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))
        if inplace:
            assert seen[0].data_ptr() == logits.data_ptr()
            assert torch.equal(padded[:, classes:], leaf[:, classes:])
        return loss, grad[:, :classes]

    (loss, expected), (loss_inplace, found) = gradient(False), gradient(True)
    assert torch.equal(loss, loss_inplace)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_in_place_is_refused(reduction):
    leaf = torch.randn(3, 5, requires_grad=True)
    target = torch.tensor([0, 1, 2])
    loss = warpsmith.cross_entropy(leaf * 1, target, reduction=reduction, inplace_backward=True).sum()
    torch.autograd.grad(loss, leaf, retain_graph=True)
    with pytest.raises((ValueError, RuntimeError), match="expected one backward|modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_that_others_saved_are_not_lost_in_silence(reduction, dtype):
    """Nor where the gradient is written by the backward."""
    leaf = torch.randn(3, 5).to(dtype).requires_grad_()
    logits = leaf.exp()  # its backward needs the result
    loss = warpsmith.cross_entropy(logits, torch.tensor([0, 1, 2]), reduction=reduction, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_that_cannot_hold_their_gradient_are_refused_early(dtype, reduction):
    """Also where the gradient is only computed there."""
    leaf = torch.randn(3, 5).to(dtype).requires_grad_()
    three = leaf.expand(2, 3, 5) * 1
    good = (leaf * 1)[:, :4], three[..., 1:], (leaf * 1)[:0], (leaf * 1)[1:2]
    bad = (leaf * 1).T, (leaf * 1)[:1].expand(3, 5), (leaf * 1)[:, ::2], three.transpose(0, 1), three[:, :2]
    for logits in good:
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        expected = warpsmith.cross_entropy(logits.clone(), target, reduction=reduction).sum()
        (expected,) = torch.autograd.grad(expected, leaf, retain_graph=True)
        loss = warpsmith.cross_entropy(logits, target, reduction=reduction, inplace_backward=True).sum()
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], expected)
    for logits in bad:
        with pytest.raises(ValueError, match="cross_entropy: logits: expected rows at one stride that do not overlap"):
            warpsmith.cross_entropy(logits, logits[..., 0].long() * 0, reduction=reduction, inplace_backward=True)


def test_leaves_are_not_overwritten():
    x = torch.randn(3, 5, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(ValueError, match="cross_entropy: logits: expected the result of an operation.*got a leaf"):
        warpsmith.cross_entropy(x, torch.tensor([0, 1, 2]), inplace_backward=True)
    assert torch.equal(x, before)
    with torch.no_grad():
        warpsmith.cross_entropy(x, torch.tensor([0, 1, 2]), inplace_backward=True)
    assert torch.equal(x, before)


def test_compiled_with_permission_to_overwrite_leaves_the_logits():
    x = torch.randn(3, 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        logits = x * 1
        return warpsmith.cross_entropy(logits, torch.tensor([0, 1, 2]), inplace_backward=True) + 0 * logits.sum()

    leaf = x.clone().requires_grad_()
    f(leaf).backward()
    expected = x.clone().requires_grad_()
    F.cross_entropy(expected, torch.tensor([0, 1, 2])).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)
