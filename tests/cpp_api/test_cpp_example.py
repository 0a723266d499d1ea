"""The C++ side: the example builds and learns; its functions equal Python's in values, gradients and errors."""

import functools
import os
import re
from pathlib import Path

import pytest
import torch
import warpsmith

from tools import families

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def examples(build):
    """The folder of the built programs of examples/cpp."""
    return build(ROOT / "examples/cpp")


@pytest.mark.parametrize(
    ("program", "expected"),
    [("train", ["step 50", "the loss fell from"]), ("scaled_step", ["scale 1024", "scale 2048", "1 step was skipped"])],
)
def test_the_examples_learn(examples, run, program, expected):
    # The programs bring their libraries by themselves.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    output = run(examples / program, env=environment)
    assert all(text in output for text in expected), output


def test_the_headers_are_the_source_trees(examples):
    """By what the compiler has written down: an installed copy would hide a change of the tree's."""
    listed = " ".join(path.read_text() for path in examples.rglob("*.o.d")).replace("\\\n", " ").split()
    ours = {Path(name).resolve() for name in listed if re.search(r"/warpsmith/(detail/)?\w+\.h$", name)}
    assert {path.name for path in ours} >= {"op.h", "norm.h", "optim.h"}
    assert all(path.is_relative_to(ROOT / "csrc") for path in ours), ours


def inputs(dtype, weight_dtype=None, shape=(3, 5, 40)):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=g, dtype=torch.float64).to(weight_dtype or dtype).requires_grad_()
    return x, weight, torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, None), (torch.float64, None), (torch.bfloat16, None), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize(("eps", "offset"), [(None, 0.0), (1e-3, 1.0)])
def test_rms_norm_has_the_values_and_gradients_of_python(cpp, dtype, weight_dtype, eps, offset):
    x, weight, dy = inputs(dtype, weight_dtype)
    y = cpp.rms_norm(x, weight, eps, offset)
    expected = warpsmith.rms_norm(x, weight, eps, offset)
    assert torch.equal(y, expected)
    found = torch.autograd.grad(y, (x, weight), dy)
    wanted = torch.autograd.grad(expected, (x, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("which", ["x", "weight", "no weight"])
def test_only_wanted_gradients_are_computed(cpp, which):
    x, weight, dy = inputs(torch.float32)
    x.requires_grad_(which != "weight")
    weight.requires_grad_(which == "weight")
    w = None if which == "no weight" else weight
    wanted = weight if which == "weight" else x
    (expected,) = torch.autograd.grad(warpsmith.rms_norm(x, w), wanted, dy)
    cpp.rms_norm(x, w, None, 0.0).backward(dy)
    assert torch.equal(wanted.grad, expected)
    assert (x if wanted is weight else weight).grad is None


def test_without_gradients_nothing_is_kept(cpp):
    x, weight, _ = inputs(torch.float32)
    with torch.no_grad():
        y = cpp.rms_norm(x, weight, None, 0.0)
    assert y.grad_fn is None
    assert torch.equal(y, warpsmith.rms_norm(x, weight))


@pytest.mark.parametrize("which", ["x", "weight"])
def test_a_second_derivative_is_refused(cpp, which):
    x, weight, _ = inputs(torch.float32)
    wanted = x if which == "x" else weight
    (gradient,) = torch.autograd.grad(cpp.rms_norm(x, weight, None, 0.0).square().sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^rms_norm: second derivatives are not available in C\+\+"):
        gradient.sum().backward()


def test_forward_mode_is_refused(cpp):
    x, weight, tangent = inputs(torch.float32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            cpp.rms_norm(dual, weight.detach(), None, 0.0)


@pytest.mark.parametrize("graded", [True, False])
def test_bad_input_of_rms_norm_is_named(cpp, graded):
    x, weight, _ = inputs(torch.float32)
    if not graded:
        x, weight = x.detach(), weight.detach()
    with pytest.raises(ValueError, match=r"^rms_norm: weight: expected shape \(40\), got \(3\)$"):
        cpp.rms_norm(x, weight[:3], None, 0.0)
    with pytest.raises(ValueError, match=r"^rms_norm: eps: expected a finite number >= 0, got -1"):
        cpp.rms_norm(x, weight, -1.0, 0.0)


def adamw_state(count=3):
    g = torch.Generator().manual_seed(2)
    lists = [[torch.randn(7 + i, 3, generator=g) for i in range(count)] for _ in range(4)]
    lists[3] = [v.square() for v in lists[3]]
    return [*lists, [], [torch.tensor(4.0) for _ in range(count)]]


def clone(state):
    return [[t.clone() for t in tensors] for tensors in state]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("lr_tensor", [None, torch.tensor(0.03)])
def test_adamw_writes_what_python_writes(cpp, maximize, lr_tensor):
    state = adamw_state()
    ours, expected = clone(state), clone(state)
    scale = torch.tensor(2.0)
    cpp.adamw(*ours, 0.01, 0.1, maximize, scale, None, lr_tensor)
    lr = 0.01 if lr_tensor is None else lr_tensor
    warpsmith.adamw(*expected, lr=lr, weight_decay=0.1, maximize=maximize, grad_scale=scale)
    for a, b in zip(ours, expected, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(ours[0][0], state[0][0])


def test_adamw_skips_a_step_with_overflow(cpp):
    state = adamw_state()
    ours = clone(state)
    cpp.adamw(*ours, 0.01, 0.1, False, None, torch.tensor(1.0), None)
    for a, b in zip(ours, state, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_adamw_writes_to_parameters_that_require_gradients(cpp):
    state = adamw_state()
    leaves = [p.requires_grad_() for p in state[0]]
    loss = sum(p.square().sum() for p in leaves)
    cpp.adamw(*state, 0.01, 0.1, False, None, None, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_input_of_adamw_is_named_and_changes_nothing(cpp):
    state = adamw_state()
    ours = clone(state)
    with pytest.raises(ValueError, match=r"^adamw: lr: expected a number >= 0, got -0\.1"):
        cpp.adamw(*ours, -0.1, 0.0, False, None, None, None)
    ours[1][2] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"^adamw: grads\[2\]: expected shape \(9, 3\), got \(2\)$"):
        cpp.adamw(*ours, 0.1, 0.0, False, None, None, None)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], state[0], strict=True))


def gated_inputs(packed, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    shape = (3, 5, 48 if packed else 24)
    inputs = [torch.randn(shape, generator=g).to(dtype).requires_grad_() for _ in range(1 if packed else 2)]
    return inputs, torch.randn((3, 5, 24), generator=g).to(dtype)


def call_gated(fn, tensors, *rest):
    return fn(tensors[0], tensors[1] if len(tensors) > 1 else None, *rest)


# The C++ functions of a row with the flag are called with it.
GATED = {
    row.name: functools.partial(
        getattr(warpsmith, row.name), **{"approximate": "tanh"} if "tanh" in row.arguments else {}
    )
    for row in families.rows("GATED")
}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gated_activations_have_python_values_and_gradients(cpp, name, packed, inplace):
    inputs, dy = gated_inputs(packed, torch.bfloat16)
    expected = call_gated(GATED[name], inputs)
    wanted = torch.autograd.grad(expected, inputs, dy)
    computed = [t * 1 for t in inputs]
    y = call_gated(getattr(cpp, name), computed, inplace)
    assert torch.equal(y, expected)
    found = torch.autograd.grad(y, computed, dy, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(found, computed, strict=True)] == [inplace] * len(inputs)
    if inplace:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


def test_what_gated_activations_refuse_in_cpp(cpp):
    inputs, _ = gated_inputs(False)
    with pytest.raises(ValueError, match="^swiglu: gate: expected a computed tensor for inplace_backward, got a leaf"):
        cpp.swiglu(*inputs, True)
    with pytest.raises(ValueError, match="^swiglu: gate: expected an even last dimension when there is no up"):
        cpp.swiglu(inputs[0][..., :3], None, False)
    (gradient,) = torch.autograd.grad(cpp.swiglu(*inputs, False).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"^swiglu: second derivatives are not available in C\+\+"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "weighted": True}, {"z_loss": 1e-2, "softcap": 3.0, "ignore_index": 2}]
)
def test_cross_entropy_has_the_values_and_gradients_of_python(cpp, dtype, reduction, options):
    logits, _, _ = inputs(dtype)
    target = torch.arange(15).view(3, 5)
    given = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0} | options
    real = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.linspace(0.1, 2, 40, dtype=real) if given.pop("weighted", False) else None
    expected = warpsmith.cross_entropy(logits, target, class_weight=weight, reduction=reduction, **given)
    number = ("none", "mean", "sum").index(reduction)
    numbers = (given[k] for k in ("label_smoothing", "z_loss", "softcap"))
    loss = cpp.cross_entropy(logits, target, weight, given["ignore_index"], number, *numbers)
    assert torch.equal(loss, expected)
    upstream = torch.full_like(loss, 0.37)
    (wanted,) = torch.autograd.grad(expected, logits, upstream)
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
        assert torch.equal(found, wanted)
    with torch.no_grad():
        assert cpp.cross_entropy(logits, target, weight, -100, number, 0.0, 0.0, 0.0).grad_fn is None


def test_a_second_derivative_of_cross_entropy_is_refused(cpp):
    logits, _, _ = inputs(torch.float32, shape=(3, 40))
    loss = cpp.cross_entropy(logits, torch.arange(3), None, -100, 1, 0.0, 0.0, 0.0)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: second derivatives are not available"):
        gradient.sum().backward()
    with pytest.raises(ValueError, match=r"cross_entropy: target: expected classes in \[0, 40\)"):
        cpp.cross_entropy(logits, torch.arange(3) + 38, None, -100, 1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", [row.name for row in families.rows("BIASED")])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
def test_biased_activations_have_python_values_and_gradients(cpp, name, bias_dtype):
    x, bias, dy = inputs(torch.bfloat16, bias_dtype)
    y, expected = getattr(cpp, name)(x, bias), getattr(warpsmith, name)(x, bias)
    assert torch.equal(y, expected)
    for wanted in ((x, bias), (x,), (bias,)):
        found = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        assert all(map(torch.equal, found, torch.autograd.grad(expected, wanted, dy, retain_graph=True)))
    with pytest.raises(ValueError, match=f"^{name}: bias: expected shape"):
        getattr(cpp, name)(x, bias[:3])
    (gradient,) = torch.autograd.grad(y.float().square().sum(), bias, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"^{name}: second derivatives are not available in C\+\+"):
        gradient.sum().backward()


def test_relu_squared_has_the_values_and_gradients_of_python(cpp):
    x, _, dy = inputs(torch.bfloat16)
    y, expected = cpp.relu_squared(x), warpsmith.relu_squared(x)
    assert torch.equal(y, expected)
    found, wanted = (torch.autograd.grad(t, x, dy, create_graph=t is y)[0] for t in (y, expected))
    assert torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match=r"^relu_squared: second derivatives are not available in C\+\+"):
        found.sum().backward()
    with pytest.raises(ValueError, match="^relu_squared: x: expected float32"):
        cpp.relu_squared(x.int())


@pytest.mark.parametrize("seed", [None, torch.tensor([4, -9])])
def test_dropout_add_has_the_values_and_gradients_of_python(cpp, seed):
    x, _, dy = inputs(torch.float32)
    residual = torch.randn(x.shape).requires_grad_()

    def run(fn):
        torch.manual_seed(5)
        y = fn(x, residual)
        return y.detach(), *torch.autograd.grad(y, (x, residual), dy)

    found = run(lambda x, residual: cpp.dropout_add(x, residual, 0.3, True, seed))
    wanted = run(lambda x, residual: warpsmith.dropout_add(x, residual, 0.3, seed=seed))
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(cpp.dropout_add(x, residual, 0.3, False, seed), x + residual)
    with pytest.raises(ValueError, match=r"^dropout_add: p: expected a number in \[0, 1\], got 2"):
        cpp.dropout_add(x, residual, 2.0, True, seed)
    y = cpp.dropout_add(x, residual, 0.3, True, seed)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^dropout_add: second derivatives are not available in C\+\+"):
        gradient.sum().backward()
