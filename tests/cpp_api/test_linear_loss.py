"""warpsmith::linear_cross_entropy and linear_log_prob in C++ equal Python's in values, gradients and errors."""

import pytest
import torch
import warpsmith

NUMBERS = {"none": 0, "mean": 1, "sum": 2}  # of warpsmith::Reduction


def problem(dtype):
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((2, 9, 16), (33, 16), (33,))
    )
    target = torch.randint(0, 33, (2, 9), generator=g)
    return hidden, weight, target, bias


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 500])
def test_cross_entropy_has_the_values_and_gradients_of_python(cpp, dtype, reduction, chunk):
    hidden, weight, target, bias = problem(dtype)
    target[0, 3] = -100
    class_weight = torch.rand(33, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    number = NUMBERS[reduction]
    found = cpp.linear_cross_entropy(hidden, weight, target, bias, class_weight, number, 0.1, chunk)
    options = {"class_weight": class_weight, "reduction": reduction, "label_smoothing": 0.1, "max_chunk_bytes": chunk}
    wanted = warpsmith.linear_cross_entropy(hidden, weight, target, bias, **options)
    assert torch.equal(found, wanted)
    up = torch.full_like(found, 3.0)
    for which in ((hidden, weight, bias), (weight,), (hidden,)):
        grads = [torch.autograd.grad(loss, which, up, retain_graph=True) for loss in (found, wanted)]
        assert equal(*grads)
    assert equal(torch.autograd.grad(found, (hidden, weight), up), torch.autograd.grad(wanted, (hidden, weight), up))


@pytest.mark.parametrize("save_logits", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_prob_has_the_values_and_gradients_of_python(cpp, temperature, save_logits):
    hidden, weight, target, bias = problem(torch.bfloat16)
    found = cpp.linear_log_prob(hidden, weight, target, bias, temperature, save_logits)
    options = {"temperature": temperature, "save_logits": save_logits}
    wanted = warpsmith.linear_log_prob(hidden, weight, target, bias, **options)
    assert equal(found, wanted)
    inputs = (hidden, weight, bias)
    for used in ((0, 1, 2), (0,), (2,)):
        grads = [
            torch.autograd.grad(sum(out[i].square().sum() for i in used), inputs, retain_graph=True)
            for out in (found, wanted)
        ]
        assert equal(*grads)


def test_without_gradients_and_without_a_bias(cpp):
    hidden, weight, target, _ = (t.detach() for t in problem(torch.float32))
    loss = cpp.linear_cross_entropy(hidden, weight, target, None, None, NUMBERS["mean"], 0.0, None)
    assert loss.grad_fn is None
    assert torch.equal(loss, warpsmith.linear_cross_entropy(hidden, weight, target))
    outputs = cpp.linear_log_prob(hidden, weight, target, None, 1.0, True)
    assert equal(outputs, warpsmith.linear_log_prob(hidden, weight, target))


def test_second_derivatives_are_refused(cpp):
    hidden, weight, target, bias = problem(torch.float32)
    loss = cpp.linear_cross_entropy(hidden, weight, target, bias, None, NUMBERS["mean"], 0.0, None)
    with pytest.raises(RuntimeError, match="second derivatives are not available"):
        torch.autograd.grad(loss, weight, create_graph=True)
    log_prob = cpp.linear_log_prob(hidden, weight, target, bias, 1.0, False)[0].sum()
    with pytest.raises(RuntimeError, match="second derivatives are not available"):
        torch.autograd.grad(log_prob, weight, create_graph=True)


def test_bad_input_is_named(cpp):
    hidden, weight, target, bias = problem(torch.float32)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: reduction: expected none, mean or sum \(0, 1 or 2"):
        cpp.linear_cross_entropy(hidden, weight, target, bias, None, 3, 0.0, None)
    with pytest.raises(ValueError, match=r"^linear_log_prob: bias: expected shape \(33\), got \(32\)$"):
        cpp.linear_log_prob(hidden, weight, target, bias[1:], 1.0, False)
    target[1, 2] = 33
    with pytest.raises(ValueError, match=r"^linear_log_prob: target: expected classes in \[0, 33\), got 33 at pos"):
        cpp.linear_log_prob(hidden, weight, target, bias, 1.0, False)
