"""warpsmith.nn.functional against torch.nn.functional: torch's own sample inputs, and which of them are fused."""

import inspect
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as theirs
import warpsmith
import warpsmith.nn.functional as ours
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from warpsmith.testing import measure

from tests.dispatched import Dispatched

NAMES = ["layer_norm", "rms_norm", "batch_norm", "softmax", "log_softmax", "linear", "cross_entropy"]
NAMES += ["scaled_dot_product_attention"]
if hasattr(theirs, "linear_cross_entropy"):  # newer than torch 2.11
    NAMES.append("linear_cross_entropy")
INFOS = {  # variants have options of linear_cross_entropy, which is torch's with them
    name: info
    for info in op_db
    if (name := info.name.removeprefix("nn.functional.")) in NAMES and not info.variant_test_name
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CLOSE_IN_16_BITS = {"rtol": 4e-2, "atol": 4e-2}


def test_torch_has_samples_of_all():
    assert set(INFOS) == set(NAMES)


def run(function, sample, dtype):
    """Output and gradients of the tensors that require one, for an upstream gradient of a dtype. Behind the gradients
    all other tensors: batch_norm updates its statistics."""
    leaves, others = [], []

    def leaf(t):
        if isinstance(t, torch.Tensor):
            t = t.detach().clone().requires_grad_(t.requires_grad)
            (leaves if t.requires_grad else others).append(t)
        return t

    arguments, options = [leaf(sample.input), *map(leaf, sample.args)], {k: leaf(v) for k, v in sample.kwargs.items()}
    torch.manual_seed(0)
    y = function(*arguments, **options)
    if not leaves or not y.requires_grad:
        return y, others
    upstream = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    return y.detach(), [*torch.autograd.grad(y, leaves, upstream.to(y.dtype), allow_unused=True), *others]


def in_float64(sample):
    def wide(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    return sample.transform(wide)


def in_channels_last(t):
    """Also what has a single dimension of pixels."""
    t = t.unsqueeze(-1) if isinstance(t, torch.Tensor) and t.dim() == 3 else t
    pixels = isinstance(t, torch.Tensor) and t.dim() == 4
    return t.contiguous(memory_format=torch.channels_last) if pixels else t


def orders_of(name, dtype, sample):
    """Orders of a head's elements, in which a sample of attention is computed: attention does not depend on them.

    Torch's samples have logits of about a hundred. In float32 most of a gradient's error then is the rounding of a few
    products of q and k, for which the order of their additions is decisive: over orders, errors of torch and of ours
    are equally large, in one of them either may be four times the other. The law is about the largest over some.
    """
    if name != "scaled_dot_product_attention" or dtype != torch.float32:
        return [None]
    width = sample.input.shape[-1]
    return [torch.randperm(width, generator=torch.Generator().manual_seed(i)) for i in range(8)]


def in_order(function, order):
    if order is None:
        return function
    return lambda q, k, *rest, **options: function(q[..., order], k[..., order], *rest, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_torchs_sample_inputs(name, dtype, figure):
    """Dtypes and shapes are torch's, values and gradients within the error law; dropout's, which are random, are not
    compared."""
    info = INFOS[name]
    if dtype not in info.supported_dtypes("cpu"):
        pytest.skip(f"torch has no {name} for {dtype} on the CPU")
    torch.manual_seed(0)
    count = fused = 0
    samples = info.sample_inputs("cpu", dtype, requires_grad=True)
    if name == "batch_norm":  # in NCHW it is torch's
        samples = [s.transform(in_channels_last) for s in samples]
    for sample in samples:
        triples = []
        for order in orders_of(name, dtype, sample):
            with Dispatched() as fused_ops:
                found, grads = run(in_order(getattr(ours, name), order), sample, dtype)
            with sdpa_kernel(SDPBackend.MATH):  # the law's measure is plain PyTorch
                expected, expected_grads = run(in_order(getattr(theirs, name), order), sample, dtype)
            exact, exact_grads = run(getattr(theirs, name), in_float64(sample), dtype)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), sample
            triples.append([(found, exact, expected), *zip(grads, exact_grads, expected_grads, strict=True)])
        count, fused = count + 1, fused + bool(fused_ops.calls)
        if sample.kwargs.get("dropout_p"):
            whole = getattr(ours, name)(sample.input, *sample.args, **{**sample.kwargs, "dropout_p": 0.0})
            assert not torch.equal(found, whole)
            continue
        for of_orders in zip(*triples, strict=True):
            assert all((actual is None) == (baseline is None) for actual, _, baseline in of_orders)
            if of_orders[0][0] is not None:
                error = measure(name, *(torch.stack(tensors) for tensors in zip(*of_orders, strict=True)))
                assert error.ok, f"{error}: {sample}"
    assert count and fused
    figure(f"nn.functional.{name} {dtype}: {fused} of torch's {count} sample inputs are fused")


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs(name):
    builtins = {  # of torch, which have none
        "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal scale enable_gqa",
        "linear": "input weight bias",
    }
    if name in builtins:
        assert list(inspect.signature(getattr(ours, name)).parameters) == builtins[name].split()
        return
    found, expected = (inspect.signature(getattr(f, name)).parameters for f in (ours, theirs))
    assert [(k, p.kind, p.default) for k, p in found.items()] == [(k, p.kind, p.default) for k, p in expected.items()]


# Values that are false, and mean something else than the default or None.
FALSE = {"ignore_index": 0, "eps": 0.0, "scale": 0.0}


@pytest.mark.parametrize(
    ("name", "option"), [(n, o) for n in NAMES for o in FALSE if o in inspect.signature(getattr(ours, n)).parameters]
)
def test_zero_is_a_value(name, option):
    torch.manual_seed(0)
    for sample in INFOS[name].sample_inputs("cpu", torch.float32, requires_grad=False):
        probabilities = option == "ignore_index" and sample.args[:2][-1].is_floating_point()  # none is ignored
        if sample.kwargs.get("dropout_p") or sample.kwargs.get("training") or probabilities:  # eps=0 is refused there
            continue
        options = {**sample.kwargs, option: FALSE[option]}
        with sdpa_kernel(SDPBackend.MATH):  # torch's flash attention gives NaN for scale=0.0 under a causal mask
            found, expected = (getattr(f, name)(sample.input, *sample.args, **options) for f in (ours, theirs))
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_every_other_name_is_torchs():
    for name in dir(theirs):
        if name.startswith("_") or name in (*NAMES, "group_norm", "max_pool2d", "math", "torch", "Tensor"):
            continue
        assert getattr(ours, name) is getattr(theirs, name), name
        assert name in dir(ours)
    with pytest.raises(AttributeError):
        ours.no_such_function  # noqa: B018


MIXED = [
    *(("rms_norm", *dtypes) for dtypes in itertools.permutations(DTYPES, 2)),
    *(("layer_norm", dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("name", "dtype", "weight_dtype"), MIXED)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_weights_of_another_dtype(name, dtype, weight_dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(30, 64).to(dtype), torch.rand(64).to(weight_dtype)
    dy, results = torch.randn(30, 64).to(dtype), []
    for f, wide in ((ours, None), (theirs, torch.float64), (theirs, None)):
        leaves = [t.detach().to(wide or t.dtype).requires_grad_() for t in (x, weight)]
        y = getattr(f, name)(leaves[0], (64,), leaves[1])
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    for found, exact, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert (error := measure(name, found, exact, expected)).ok, error


def test_what_torch_refuses_is_refused():
    x, q, target = torch.randn(3, 8), torch.randn(1, 2, 3, 8), torch.tensor([0, 1, 2])
    for call in (
        lambda f: f.layer_norm(x, (7,)),
        lambda f: f.rms_norm(x, ()),
        lambda f: f.layer_norm(x, (8,), torch.ones(7)),
        lambda f: f.batch_norm(x, None, None),
        lambda f: f.batch_norm(x, None, torch.ones(8), training=True),
        lambda f: f.batch_norm(x[:1], None, None, training=True),
        lambda f: f.batch_norm(x, None, None, training=True, eps=0.0),
        lambda f: f.batch_norm(x, torch.ones(7), torch.ones(8)),
        lambda f: f.batch_norm(x, None, None, training=True, momentum="x"),
        lambda f: f.cross_entropy(x, target[:2]),
        lambda f: f.cross_entropy(x, target.int()),
        lambda f: f.cross_entropy(x, target, reduction="x"),
        lambda f: f.cross_entropy(x, target, torch.ones(8, requires_grad=True)),
        lambda f: f.scaled_dot_product_attention(x, x, x[:2]),
        lambda f: f.scaled_dot_product_attention(q, q, q, attn_mask=x[:2]),
        lambda f: f.scaled_dot_product_attention(q, q, q, attn_mask=x[:2] > 0),
        lambda f: f.scaled_dot_product_attention(q, q, q, attn_mask=x[0, :3]),
        lambda f: f.scaled_dot_product_attention(q, q, q, scale="x"),
        lambda f: f.scaled_dot_product_attention(q, q, q, dropout_p="0.1"),
        lambda f: f.scaled_dot_product_attention(q, q, q, dropout_p=None),
    ):
        with pytest.raises(Exception) as expected:
            call(theirs)
        with pytest.raises(type(expected.value)) as found:
            call(ours)
        assert str(found.value) == str(expected.value)


X, Q, W = torch.randn(6, 8), torch.randn(1, 2, 3, 8), torch.rand(5, 8)
GIVEN = {
    "layer_norm": {"input": X, "normalized_shape": (8,), "weight": W[0], "bias": W[1]},
    "rms_norm": {"input": X, "normalized_shape": (8,), "weight": W[0]},
    "batch_norm": {"input": X, "running_mean": W[2], "running_var": W[3], "weight": W[0], "bias": W[1]},
    "softmax": {"input": X, "dim": -1},
    "log_softmax": {"input": X, "dim": -1},
    "linear": {"input": X, "weight": W, "bias": W[:, 0]},
    "cross_entropy": {"input": X, "target": torch.arange(6), "weight": W[0]},
    "linear_cross_entropy": {"input": X, "linear_weight": W, "target": torch.arange(6) % 5, "weight": W[:, 0]},
    "scaled_dot_product_attention": {"query": Q, "key": Q, "value": Q, "attn_mask": X[:3, :3]},
}
GIVEN["linear_cross_entropy"]["linear_bias"] = W[:, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_on_another_device_is_what_it_is_for_torch(name):
    tensors = {key for key, p in inspect.signature(getattr(ours, name)).parameters.items() if "Tensor" in p.annotation}
    assert tensors <= GIVEN[name].keys()
    for key in tensors:
        results = []
        for f in (ours, theirs):
            try:
                results.append(getattr(f, name)(**{**GIVEN[name], key: GIVEN[name][key].to("meta")}).device)
            except Exception as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1], key


def test_what_is_not_fused_is_torchs():
    x = torch.randn(3, 8)
    assert torch.equal(ours.layer_norm(x, (8,), eps=float("inf")), theirs.layer_norm(x, (8,), eps=float("inf")))
    z = torch.complex(x, x)
    assert torch.equal(ours.rms_norm(z, (8,)), theirs.rms_norm(z, (8,)))
    probabilities = torch.softmax(torch.randn(3, 8), -1)
    assert torch.equal(ours.cross_entropy(x, probabilities), theirs.cross_entropy(x, probabilities))
    _, found = torch.func.jvp(lambda t: ours.layer_norm(t, (8,)), (x,), (x + 1,))
    _, expected = torch.func.jvp(lambda t: theirs.layer_norm(t, (8,)), (x,), (x + 1,))
    assert torch.equal(found, expected)


def test_plan_says_what_is_called():
    def plan(name, **problem):
        return warpsmith.plan(f"nn.functional.{name}", **problem)

    assert plan("layer_norm", dtype="bfloat16")["calls"] == "warpsmith.layer_norm"
    other = plan("layer_norm", dtype="float32", weight_dtype=torch.bfloat16)
    assert other["calls"] == "torch.nn.functional.layer_norm" and "weight is torch.bfloat16" in other["why"]
    assert plan("batch_norm", dtype="bfloat16", running_dtype="float32")["calls"] == "warpsmith.batch_norm"
    assert "not in channels_last" in plan("batch_norm", dtype="float32", channels_last=False)["why"]
    assert "statistics are torch.bfloat16" in plan("batch_norm", dtype="float32", running_dtype="bfloat16")["why"]
    assert "momentum is no finite" in plan("batch_norm", dtype="float32", momentum=float("inf"))["why"]
    assert plan("rms_norm", dtype="float32", weight_dtype="bfloat16")["calls"] == "warpsmith.rms_norm"
    assert "float64 is fused on the CPU" in plan("rms_norm", dtype="float64", device="cuda")["why"]
    assert "only class indices" in plan("cross_entropy", dtype="float32", target_dtype="float32")["why"]
    name = "scaled_dot_product_attention"
    assert plan(name, dtype="bfloat16", head_dim=64)["calls"] == "warpsmith.attention"
    assert plan(name, dtype="bfloat16", dropout=True)["calls"] == "warpsmith.attention"
    assert plan(name, dtype="bfloat16", head_dim=12)["calls"].startswith("torch.")
    assert plan(name, dtype="bfloat16", dropout=True, device="cpu")["calls"] == "warpsmith.attention"
    assert set(plan("layer_norm")["keys"]) == {"dtype", "device", "weight_dtype", "bias_dtype", "eps"}
    with pytest.raises(ValueError, match="plan: nn.functional.layer_norm: expected arguments among dtype.*, got rows"):
        plan("layer_norm", rows=3)
    with pytest.raises(ValueError, match="plan: nn.functional.layer_norm: dtype: expected a value, got none"):
        plan("layer_norm", device="cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_under_autocast_are_torchs(dtype, device):
    x, target = torch.randn(3, 8, device=device).to(dtype), torch.tensor([0, 1, 2], device=device)
    w = torch.ones(8, device=device)
    with torch.autocast(device, torch.bfloat16):
        for call in (
            lambda f: f.layer_norm(x, (8,), w, w),
            lambda f: f.rms_norm(x, (8,), w),
            lambda f: f.batch_norm(x, None, None, w, w, training=True),
            lambda f: f.cross_entropy(x, target),
            lambda f: f.scaled_dot_product_attention(*(x.view(1, 1, 3, 8),) * 3),
        ):
            a, b = call(ours), call(theirs)
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, **CLOSE_IN_16_BITS)


def test_compiled():
    x, w, target = torch.randn(3, 8, requires_grad=True), torch.ones(8), torch.tensor([0, 1, 2])

    def loss(x):
        return ours.cross_entropy(ours.layer_norm(ours.rms_norm(x, (8,), w), (8,), w, w), target)

    torch._dynamo.reset()
    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, loss(x))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_attention_is_compiled_without_a_warning():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 3, 8)
    mask = torch.zeros(3, 3)

    def attend(scale):
        return ours.scaled_dot_product_attention(q, q, q, mask, scale=scale)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in (0.3, 0.5, 0.7):
        assert torch.equal(compiled(scale), attend(scale))


NUMBERS = {
    "eps": (True, 1, 2**10, np.float32(0.5), np.True_, torch.tensor(0.5)),
    "label_smoothing": (True, 0, np.float64(0.25), torch.tensor(0.25)),
    "ignore_index": (np.int64(1), np.array(1), torch.tensor(1)),
    "scale": (1, np.float32(0.5), torch.tensor(0.5), True),
}


@pytest.mark.parametrize("argument", NUMBERS)
def test_numbers_that_torch_takes_are_torchs(argument):
    """Ours where an op takes the number, and else torch's function."""
    x, q, target = torch.randn(3, 8), torch.randn(1, 2, 4, 8), torch.tensor([0, 1, 2])
    calls = {
        "eps": lambda functional, **o: [functional.layer_norm(x, (8,), **o), functional.rms_norm(x, (8,), **o)],
        "label_smoothing": lambda functional, **o: [functional.cross_entropy(x, target, **o)],
        "ignore_index": lambda functional, **o: [functional.cross_entropy(x, target, **o)],
        "scale": lambda functional, **o: [functional.scaled_dot_product_attention(q, q, q, **o)],
    }
    for value in NUMBERS[argument]:
        expected = calls[argument](theirs, **{argument: value})
        for found, like in zip(calls[argument](ours, **{argument: value}), expected, strict=True):
            torch.testing.assert_close(found, like)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("old", [*itertools.product((None, True, False), repeat=2)], ids=str)
def test_old_arguments_mean_what_they_mean_in_torch(old, reduction):
    logits, target = torch.randn(5, 4), torch.tensor([0, 3, 2, -100, 1])
    options = {**dict(zip(("size_average", "reduce"), old, strict=True)), "reduction": reduction}
    torch.testing.assert_close(*(f.cross_entropy(logits, target, **options) for f in (ours, theirs)))
