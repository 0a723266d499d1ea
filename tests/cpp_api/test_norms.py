"""The norm family in C++ equals Python's in values, gradients, seeds and errors."""

import pytest
import torch
import warpsmith

SEED = torch.tensor([12, 3])
# Name, and for the tensors that there are: the C++ call and the Python one.
CALLS = {
    "layer_norm": (
        lambda f, x, r, w, b: f(x, w, b, 1e-5),
        lambda f, x, r, w, b: f(x, w, b),
    ),
    "add_rms_norm": (
        lambda f, x, r, w, b: f(x, r, w, None, 1.0),
        lambda f, x, r, w, b: f(x, r, w, weight_offset=1.0),
    ),
    "add_layer_norm": (
        lambda f, x, r, w, b: f(x, r, w, b, 1e-5),
        lambda f, x, r, w, b: f(x, r, w, b),
    ),
    "dropout_add_rms_norm": (
        lambda f, x, r, w, b, seed=SEED: f(x, r, w, 0.3, None, True, 1.0, seed),
        lambda f, x, r, w, b, seed=SEED: f(x, r, w, 0.3, weight_offset=1.0, seed=seed),
    ),
    "dropout_add_layer_norm": (
        lambda f, x, r, w, b, seed=SEED: f(x, r, w, b, 0.3, 1e-5, True, seed),
        lambda f, x, r, w, b, seed=SEED: f(x, r, w, b, 0.3, seed=seed),
    ),
}
DTYPES = {
    "float32": (torch.float32,) * 3,
    "float64": (torch.float64,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "bfloat16 beside float32": (torch.bfloat16, torch.float32, torch.float32),
}


def problem(dtypes=(torch.float32,) * 3):
    """x, residual, weight and bias, as leaves."""
    g = torch.Generator().manual_seed(1)
    dtype, residual, weight = dtypes
    shapes = {(3, 5, 40): dtype, (3, 5, 40, 1): residual, (40,): weight, (1, 40): weight}
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape, dtype in shapes.items()]
    return [t.view(40) if t.numel() == 40 else t.view(3, 5, 40) for t in tensors]


def both(cpp, op, *tensors, **options):
    """The outputs of the C++ function and of the Python one."""
    in_cpp, in_python = CALLS[op]
    pair = in_cpp(getattr(cpp, op), *tensors, **options), in_python(getattr(warpsmith, op), *tensors, **options)
    return [out if isinstance(out, tuple) else (out,) for out in pair]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_values_and_gradients_are_those_of_python(cpp, op, dtypes):
    tensors = [t.requires_grad_() for t in problem(DTYPES[dtypes])]
    ours, wanted = both(cpp, op, *tensors)
    assert same(ours, wanted)
    grads = [torch.randn_like(y) for y in wanted]
    for i in range(len(tensors)):  # each alone, and the rest without it
        for leaves in ([tensors[i]], tensors[:i] + tensors[i + 1 :]):
            found, expected = (
                torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)
                for outputs in (ours, wanted)
            )
            there = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None or b is not None]
            assert all(torch.equal(a, b) for a, b in there)


@pytest.mark.parametrize("op", CALLS)
def test_absent_weights_and_nothing_kept_without_gradients(cpp, op):
    x, residual, weight, bias = problem()
    ours, wanted = both(cpp, op, x, residual, None, None)
    assert same(ours, wanted)
    assert ours[0].grad_fn is None
    ours, wanted = both(cpp, op, x.requires_grad_(), residual, None, bias)
    found, expected = (torch.autograd.grad(y[0].square().sum(), x) for y in (ours, wanted))
    assert same(found, expected)


@pytest.mark.parametrize("op", [op for op in CALLS if "add" in op])
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_may_be_unused(cpp, op, used):
    tensors = [t.requires_grad_() for t in problem(DTYPES["bfloat16 beside float32"])]
    found, expected = (
        torch.autograd.grad(out[used].float().square().sum(), tensors[:2]) for out in both(cpp, op, *tensors)
    )
    assert same(found, expected)


@pytest.mark.parametrize("op", [op for op in CALLS if "dropout" in op])
def test_torchs_generator_decides(cpp, op):
    in_cpp, in_python = CALLS[op]
    tensors = problem()
    torch.manual_seed(4)
    ours = in_cpp(getattr(cpp, op), *tensors, seed=None)
    torch.manual_seed(4)
    assert same(ours, in_python(getattr(warpsmith, op), *tensors, seed=None))


@pytest.mark.parametrize("op", CALLS)
def test_a_second_derivative_is_refused(cpp, op):
    tensors = [t.requires_grad_() for t in problem()]
    out = both(cpp, op, *tensors)[0]
    (gradient,) = torch.autograd.grad(out[0].square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match=rf"^{op}: second derivatives are not available in C\+\+"):
        gradient.sum().backward()


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("graded", [True, False])
def test_bad_input_is_named(cpp, op, graded):
    x, residual, weight, bias = problem()
    with pytest.raises(ValueError, match=rf"^{op}: weight: expected shape \(40\), got \(3\)$"):
        CALLS[op][0](getattr(cpp, op), x.requires_grad_(graded), residual, weight[:3], bias)


def test_a_bad_p_is_named_and_draws_nothing(cpp):
    x, residual, weight, bias = problem()
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=r"^dropout_add_rms_norm: p: expected a number in \[0, 1\], got 1\.5"):
        cpp.dropout_add_rms_norm(x, residual, weight, 1.5, 1e-6, True, 0.0, None)
    assert torch.equal(before, torch.random.get_rng_state())
    _, s = cpp.dropout_add_layer_norm(x, residual, weight, bias, 0.9, 1e-5, False, None)
    assert torch.equal(s, x + residual)


def test_forward_mode_is_refused(cpp):
    x, residual, weight, _ = problem()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(residual, torch.ones_like(residual))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            cpp.add_rms_norm(x, dual, weight, 1e-6, 0.0)
