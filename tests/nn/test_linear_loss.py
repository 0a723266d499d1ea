"""The linear losses: torch's linear_cross_entropy, and the head that is a linear layer and its loss."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as theirs
import warpsmith
import warpsmith.nn.functional as ours
from torch.testing._internal.common_methods_invocations import op_db

from tests.dispatched import Dispatched

OPTIONS = getattr(torch.nn, "LinearCrossEntropyOptions", None)
needs_torchs = pytest.mark.skipif(
    not hasattr(theirs, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)


def case(dtype=torch.float32, rows=6, width=8, classes=5):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, width, generator=generator).to(dtype) for n in (rows, classes))
    return x, w, torch.randint(0, classes, (rows,), generator=generator)


def composed(x, w, target, linear_bias=None, ignore_index=None, **options):
    ignore_index = -100 if ignore_index is None else ignore_index
    return theirs.cross_entropy(theirs.linear(x, w, linear_bias), target, ignore_index=ignore_index, **options)


X, W, TARGET = case()
B, CLASSES = torch.linspace(-1, 1, 5), torch.linspace(0.5, 2, 5)
FUSED = {
    "plain": (lambda f: f(X, W, TARGET)),
    "one row": (lambda f: f(X[0], W, TARGET[0])),
    "bias": (lambda f: f(X, W, TARGET, linear_bias=B)),
    "rows of no adjacent elements": (lambda f: f(X.t().contiguous().t(), W.t().contiguous().t(), TARGET)),
    "class weights": (lambda f: f(X, W, TARGET, weight=CLASSES, reduction="none")),
    "ignore_index": (lambda f: f(X, W, TARGET, ignore_index=TARGET[0].item(), reduction="sum")),
    "label smoothing": (lambda f: f(X, W, TARGET, linear_bias=B, weight=CLASSES, label_smoothing=0.2)),
    "uint8": (lambda f: f(X, W, TARGET.byte())),
    "no rows": (lambda f: f(X[:0], W, TARGET[:0], reduction="none")),
    "all ignored": (lambda f: f(X, W, torch.full_like(TARGET, -100), reduction="sum")),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    with Dispatched() as fused:
        found = FUSED[name](ours.linear_cross_entropy)
    assert fused.calls
    torch.testing.assert_close(found, FUSED[name](composed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_loss_has_the_dtype_of_the_input(dtype):
    x, w, target = case(dtype)
    for reduction in ("mean", "none"):
        with Dispatched() as fused:
            found = ours.linear_cross_entropy(x, w, target, weight=CLASSES.to(dtype), reduction=reduction)
        expected = composed(x, w, target, weight=CLASSES.to(dtype), reduction=reduction)
        assert fused.calls and found.dtype is expected.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"weight": CLASSES}, {"linear_bias": B}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_under_autocast(dtype, options):
    """Product in the autocast dtype, loss in float32 with float32 class weights, as torch's linear and cross_entropy
    have them; gradients in the dtypes of the leaves."""
    x, w, target = case(dtype)
    if dtype is torch.float64:  # autocast leaves it
        options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    results = []
    for f in (ours.linear_cross_entropy, composed):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16), Dispatched() as fused:
            loss = f(*leaves, target, **options)
        assert bool(fused.calls) == (f is ours.linear_cross_entropy)
        results.append([loss, *torch.autograd.grad(loss.sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_under_autocast_on_a_gpu():
    x, w, target = (t.cuda() for t in case())
    with torch.autocast("cuda", torch.bfloat16):
        found = ours.linear_cross_entropy(x, w, target, weight=CLASSES.cuda())
        expected = composed(x, w, target, weight=CLASSES.cuda())
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


NOT_FUSED = {
    "class probabilities": (lambda f: f(X, W, torch.softmax(X @ W.t(), -1))),
    "probabilities of one row": (lambda f: f(X[0], W, torch.softmax(W @ X[0], -1))),
    "a loss of two dimensions": (lambda f: f(X, W.view(5, 2, 4).repeat(1, 1, 2), TARGET.view(6, 1).repeat(1, 2))),
    "with a bias": (lambda f: f(X, W.repeat(2, 1).view(5, 2, 8), TARGET.view(6, 1).repeat(1, 2), linear_bias=W[:, :2])),
    "class 0 ignored": (lambda f: f(X, W.repeat(2, 1).view(5, 2, 8), TARGET.view(6, 1).repeat(1, 2), ignore_index=0)),
}


@pytest.mark.parametrize("present", [pytest.param(True, marks=needs_torchs), False])
@pytest.mark.parametrize("name", NOT_FUSED)
def test_the_rest_is_torchs(name, present, monkeypatch):
    expected = None if not present else NOT_FUSED[name](theirs.linear_cross_entropy)
    if not present:
        expected = NOT_FUSED[name](reference)
        monkeypatch.delattr(theirs, "linear_cross_entropy", raising=False)
    with Dispatched() as fused:
        found = NOT_FUSED[name](ours.linear_cross_entropy)
    assert not fused.calls and torch.equal(found, expected)


def reference(x, w, target, linear_bias=None, ignore_index=-100):
    """torch's definition for logits (N, C, ...)."""
    logits = (x @ w.flatten(0, -2).t()).view(*x.shape[:-1], *w.shape[:-1])
    logits = logits if linear_bias is None else logits + linear_bias
    return theirs.cross_entropy(logits, target, ignore_index=ignore_index)


@needs_torchs
def test_a_torch_without_it_takes_torchs_samples(monkeypatch):
    """The composition has the bits of torch's function on all of its samples without options."""
    samples = [
        (sample, theirs.linear_cross_entropy(sample.input, *sample.args, **sample.kwargs))
        for info in op_db
        if info.name == "nn.functional.linear_cross_entropy" and not info.variant_test_name
        for sample in info.sample_inputs("cpu", torch.float32)
    ]
    monkeypatch.delattr(theirs, "linear_cross_entropy")
    count = 0
    for sample, expected in samples:
        with Dispatched() as fused:
            found = ours.linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)
        count += not fused.calls
        assert fused.calls or torch.equal(found, expected), sample
    assert count


def test_a_torch_without_it_refuses(monkeypatch):
    monkeypatch.delattr(theirs, "linear_cross_entropy", raising=False)
    f, kdim = ours.linear_cross_entropy, W.view(5, 1, 8)
    for call, words in (
        (lambda: f(X, W, TARGET, options=3), "options: expected None with torch .*, which has none, got a int"),
        (lambda: f(X[None], W, TARGET), r"input: expected shape \(H\) or \(N, H\), got \(1, 6, 8\)"),
        (lambda: f(X, W[:, :7], TARGET), r"linear_weight: expected shape \(C, ..., 8\), got \(5, 7\)"),
        (lambda: f(X, W[0], TARGET), r"linear_weight: expected shape \(C, ..., 8\), got \(8\)"),
        (lambda: f(X[0], kdim, TARGET[:1]), r"linear_weight: expected shape \(C, 8\), got \(5, 1, 8\)"),
        (lambda: f(X, W, TARGET, linear_bias=B[:4]), r"linear_bias: expected shape \(5\), got \(4\)"),
        (lambda: f(X, W, X @ W.t(), ignore_index=0), "ignore_index: expected None beside class probabilities, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^linear_cross_entropy: {words}$"):
            call()


@needs_torchs
def test_what_torch_refuses_is_refused():
    for call in (
        lambda f: f(X[None], W, TARGET),
        lambda f: f(X, W[:, :7], TARGET),
        lambda f: f(X, W, TARGET[:2]),
        lambda f: f(X, W, TARGET.int()),
        lambda f: f(X, W.double(), TARGET),
        lambda f: f(X, W, TARGET, linear_bias=B[:4]),
        lambda f: f(X, W, TARGET, weight=CLASSES.double()),
        lambda f: f(X.bfloat16(), W.bfloat16(), TARGET, weight=CLASSES),
        lambda f: f(X, W, TARGET, weight=CLASSES.clone().requires_grad_()),
        lambda f: f(X, W, TARGET, reduction="x"),
        lambda f: f(X, W, TARGET, label_smoothing=2.0),
        lambda f: f(X, W, X @ W.t(), ignore_index=0),
        lambda f: f(X, W, TARGET, B),
    ):
        with pytest.raises(Exception) as expected:
            call(theirs.linear_cross_entropy)
        with pytest.raises(type(expected.value)) as found:
            call(ours.linear_cross_entropy)
        assert str(found.value) == str(expected.value)


@needs_torchs
def test_calls_with_options_and_derivatives_forward_are_torchs():
    options = OPTIONS(batch_chunk_size=2)
    with Dispatched() as fused:
        found = ours.linear_cross_entropy(X, W, TARGET, options=options)
    assert not fused.calls and torch.equal(found, theirs.linear_cross_entropy(X, W, TARGET, options=options))
    _, found = torch.func.jvp(lambda t: ours.linear_cross_entropy(t, W, TARGET), (X,), (X + 1,))
    _, expected = torch.func.jvp(lambda t: theirs.linear_cross_entropy(t, W, TARGET), (X,), (X + 1,))
    assert torch.equal(found, expected)


def test_plan_says_what_is_called():
    def plan(**problem):
        return warpsmith.plan("nn.functional.linear_cross_entropy", **problem)

    assert plan(dtype="bfloat16") == {"calls": "warpsmith.linear_cross_entropy", "why": "fused"}
    other = plan(dtype="float32", options=True)
    name = "nn.functional.linear_cross_entropy"
    theirs_name = (
        f"torch.{name}" if hasattr(theirs, "linear_cross_entropy") else "torch.nn.functional.linear and cross_"
    )
    assert other["calls"].startswith(theirs_name) and "options" in other["why"]
    assert "linear_weight is torch.float32" in plan(dtype="bfloat16", linear_weight_dtype="float32")["why"]
    assert "linear_bias is torch.float64" in plan(dtype="float32", linear_bias_dtype="float64")["why"]
    assert "only class indices" in plan(dtype="float32", target_dtype="float32")["why"]
    assert "float64 is fused on the CPU" in plan(dtype="float64")["why"]
    assert "weight is torch.float32" in plan(dtype="bfloat16", weight_dtype="float32")["why"]
    assert plan(dtype="bfloat16", weight_dtype="float32", autocast=True)["why"] == "fused"
    assert {"dtype", "device", "options", "autocast", "weight_dtype"} <= set(plan()["keys"])


def test_compiled():
    leaves = [X.clone().requires_grad_(), W.clone().requires_grad_()]

    def loss(x, w):
        return ours.linear_cross_entropy(x, w, TARGET, linear_bias=B, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))
    torch._dynamo.reset()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_derivative_is_refused():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ours.linear_cross_entropy(x, W, TARGET), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second"):
        grad.sum().backward()


def test_names_of_arguments_where_torch_has_none():
    names = "input linear_weight target linear_bias weight reduction ignore_index label_smoothing options".split()
    assert list(inspect.signature(ours.linear_cross_entropy).parameters) == names


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_is_a_linear_layer_and_a_loss(bias, softcap):
    ours = warpsmith.nn.LinearCrossEntropyHead(16, 50, bias, softcap=softcap, label_smoothing=0.1)
    theirs = torch.nn.Linear(16, 50, bias)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    hidden, target = torch.randn(3, 7, 16), torch.randint(0, 50, (3, 7))
    target[1, 2] = -100
    logits = theirs(hidden)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    torch.testing.assert_close(ours.logits(hidden), logits)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    loss, stats = ours(hidden, target, return_stats=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(stats.lse, logits.logsumexp(-1))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_a_weight_shared_with_an_embedding_gets_both_gradients():
    embedding = torch.nn.Embedding(50, 16)
    head = warpsmith.nn.LinearCrossEntropyHead(16, 50, reduction="sum")
    head.weight = embedding.weight
    tokens = torch.randint(0, 50, (4, 9))
    head(embedding(tokens[:, :-1]), tokens[:, 1:]).backward()
    found, embedding.weight.grad = embedding.weight.grad, None
    logits = embedding(tokens[:, :-1]) @ embedding.weight.t()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    torch.testing.assert_close(found, embedding.weight.grad)


def test_options_deepcopy_and_repr():
    head = warpsmith.nn.LinearCrossEntropyHead(16, 50, ignore_index=3, reduction="none", max_chunk_bytes=400)
    head = copy.deepcopy(head)
    loss = head(torch.randn(5, 16), torch.tensor([0, 3, 2, 3, 1]))
    assert [bool(x) for x in loss] == [True, False, True, False, True]
    assert "out_features=50, bias=False, ignore_index=3, reduction='none'" in repr(head)
    meta = warpsmith.nn.LinearCrossEntropyHead(16, 50, device="meta", dtype=torch.bfloat16)
    empty = torch.empty(5, 16, device="meta", dtype=torch.bfloat16)
    assert meta(empty, torch.empty(5, device="meta", dtype=torch.int64)).shape == ()
