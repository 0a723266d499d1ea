"""Several linear layers of one input: in one launch of ours where that runs, else a product for each."""

from __future__ import annotations

import os

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal
from warpsmith.testing.sim import is_loaded, launches, torch_device

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.warpsmith
ON_CUDA = pytest.mark.gpu
DEVICES = ["sim-"] if is_loaded() else ["cpu", pytest.param("cuda", marks=ON_CUDA)]
OURS = ["sim-"] if is_loaded() else [pytest.param("cuda", marks=ON_CUDA)]

# Shape of x, widths, and the layers that have a bias.
CASES = {
    "q, k, v": ((2, 33, 72), (136, 40, 40), (0, 1, 2)),
    "gate, up": ((70, 64), (264, 264), ()),
    "a bias of one": ((300, 208), (64, 512, 8), (1,)),
    "off 16 bytes": ((7, 13), (5, 3, 9), (0, 2)),
    "one": ((5, 24), (16,), (0,)),
    "four": ((5, 24), (16, 8, 8, 24), (3,)),
    "nothing of one": ((5, 24), (16, 0, 8), ()),
    "no rows": ((0, 24), (16, 8), (0,)),
    "no terms": ((5, 0), (16, 8), (0,)),
}


@pytest.fixture(autouse=True)
def ours():
    switch = getattr(OPS, "_own_product", lambda how: 0)
    switch("1")
    yield
    switch(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto"))


def made(case, dtype, device):
    shape, widths, biased = CASES[case]
    g = torch.Generator().manual_seed(1)

    def random(*sizes):
        return torch.randn(*sizes, generator=g).to(torch_device(device.strip("-")), dtype)

    x, weights = random(*shape), [random(n, shape[-1]) for n in widths]
    biases = [random(n) if i in biased else None for i, n in enumerate(widths)]
    return x, weights, biases, [random(*shape[:-1], n) for n in widths]


def error(found, exact):
    return (found.double() - exact).abs().max().item() if exact.numel() else 0.0


def assert_as_right(found, plain, exact):
    """Twice torch's error, and a step of what is largest."""
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype) and found.is_contiguous()
    step = torch.finfo(found.dtype).eps * (exact.abs().max().item() if exact.numel() else 0.0)
    assert error(found, exact) <= 2 * error(plain, exact) + step


def assert_law(x, weights, biases, dys):
    """Of results and input gradient, which repeat."""
    found, plain, exact = [], [], []
    for _ in range(2):
        found.append([*OPS.linear_siblings(x, weights, biases), OPS.linear_siblings_input_gradient(dys, weights)])
    for results, wide in ((plain, False), (exact, True)):
        of_x, *others = (t.double() if wide and t is not None else t for t in (x, *weights, *biases, *dys))
        ws, bs, gs = (others[i : i + len(weights)] for i in (0, len(weights), 2 * len(weights)))
        results += [torch.nn.functional.linear(of_x, w, b) for w, b in zip(ws, bs, strict=True)]
        results.append(sum(g @ w for g, w in zip(gs, ws, strict=True)))
    for a, again, b, c in zip(*found, plain, exact, strict=True):
        assert_as_right(a, b, c)
        assert bitwise_equal(a, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_and_input_gradients(case, dtype, device):
    assert_law(*made(case, dtype, device))


@pytest.mark.parametrize("device", OURS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_one_launch_has_the_bits_of_one_for_each(dtype, device):
    """The input gradient those of a product with all weights in one matrix, where each ends with a stage of 64."""
    x, weights, biases, dys = made("a bias of one", dtype, device)
    weights[2], biases[2] = weights[2].repeat(8, 1), None
    dys[2] = dys[2].repeat(1, 8)
    before = OPS._own_product("1")
    ys = OPS.linear_siblings(x, weights, biases)
    dx = OPS.linear_siblings_input_gradient(dys, weights)
    assert OPS._own_product("1") == before + 2
    for y, w, b in zip(ys, weights, biases, strict=True):
        assert bitwise_equal(y, OPS.linear_inference(x, None, w, b, None, 0))
    alone = OPS.linear_backward(
        torch.cat(dys, 1), None, torch.cat(weights), None, x.new_empty(0), 0, None, True, False, False
    )
    assert bitwise_equal(dx, alone[0])
    some = OPS.linear_siblings(x[100:117], weights, biases)
    assert all(bitwise_equal(a, y[100:117]) for a, y in zip(some, ys, strict=True))


def apart(t):
    return torch.cat([t, t.new_full((*t.shape[:-1], 8), torch.nan)], -1)[..., : t.shape[-1]]


def turned(t):
    return t.mT.contiguous().mT


def off_16_bytes(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lie", [apart, turned, off_16_bytes])
def test_how_operands_lie(lie, device):
    """Rows further apart are ours; the others torch multiplies."""
    x, weights, biases, dys = made("q, k, v", BF16, device)
    before = OPS._own_product("1") if device != "cpu" else 0
    assert_law(lie(x), [*map(lie, weights)], biases, [*map(lie, dys)])
    if device != "cpu":
        assert (OPS._own_product("1") - before == 4) == (lie is apart)


@pytest.mark.skipif(not is_loaded(), reason="counts launches of the simulated device")
@pytest.mark.parametrize("device", ["sim-"])
def test_one_launch(device, monkeypatch):
    """Of each direction, and of a module; of a gated layer's input gradient too."""
    monkeypatch.setattr("warpsmith.ops._linear.may_pay", lambda *_: True)
    layer = warpsmith.nn.NormLinear(72, (136, 40, 40), bias=True, dtype=BF16)
    x = torch.randn(33, 72, dtype=BF16, requires_grad=True)
    before, products = launches(), OPS._own_product("1")
    ys = layer(x)
    assert launches() - before == 2 and OPS._own_product("1") - products == 1
    products = OPS._own_product("1")
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert OPS._own_product("1") - products == 1  # weights' gradients are torch's
    weights = [torch.randn(48, 72, dtype=BF16, requires_grad=True) for _ in range(2)]
    y, products = warpsmith.gated_linear(x, *weights), OPS._own_product("1")
    y.backward(y.detach())
    assert OPS._own_product("1") - products == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_norm_and_its_layers_by_one_launch(dtype, device, monkeypatch):
    """As by a product for each: within two roundings."""
    torch.manual_seed(0)
    layer = warpsmith.nn.NormLinear(64, (72, 40, 40), bias=True).to(torch_device(device.strip("-")), dtype)
    x = torch.randn(2, 17, 64).to(layer.norm.weight)
    results = []
    for joined in (False, True):
        monkeypatch.setattr("warpsmith.ops._linear.may_pay", lambda *_, joined=joined: joined)
        leaf = x.clone().requires_grad_()
        ys = layer(leaf)
        found = torch.autograd.grad(sum(y.float().square().sum() for y in ys), (leaf, *layer.parameters()))
        results.append([*ys, *found])
    tight = {"rtol": 3e-2, "atol": 3e-1} if dtype == BF16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(*results, **tight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": []}, "biases: expected one for each of one or more weights, got 0"),
        ({"biases": [None]}, "biases: expected one for each of one or more weights, got 1"),
        ({"weights": [torch.ones(4, 8), torch.ones(4, 7)]}, r"weights: expected shape \(N, 8\), got \(4, 7\)"),
        ({"weights": [torch.ones(4, 8).half(), torch.ones(4, 8)]}, "weights: expected .*float32.*got .*float16"),
        ({"biases": [torch.ones(4), torch.ones(3)]}, r"biases: expected .*\(4\).*got.*\(3\)"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused(change, message, device):
    given = {"weights": [torch.ones(4, 8)] * 2, "biases": [None, None], **change}
    given = {n: [None if t is None else t.to(device) for t in ts] for n, ts in given.items()}
    if not given["weights"]:
        given["biases"] = []
    with pytest.raises(ValueError, match="linear_siblings: " + message):
        OPS.linear_siblings(torch.ones(3, 8, device=device), *given.values())


@pytest.mark.parametrize(
    ("dys", "weights", "message"),
    [
        ([(3, 4)], [(4, 8), (4, 8)], "dys: expected one for each of one or more weights, got 1"),
        ([(3, 4), (3, 5)], [(4, 8), (4, 8)], r"dys: expected shape \(3, 4\), got \(3, 5\)"),
        ([(3, 4), (2, 4)], [(4, 8), (4, 8)], r"dys: expected shape \(3, 4\), got \(2, 4\)"),
        ([(3, 4), (3, 4)], [(4, 8), (4, 9)], r"weights: expected shape \(N, 8\), got \(4, 9\)"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_that_do_not_fit_are_refused(dys, weights, message, device):
    given = ([torch.ones(s, device=device) for s in shapes] for shapes in (dys, weights))
    with pytest.raises(ValueError, match="linear_siblings_input_gradient: " + message):
        OPS.linear_siblings_input_gradient(*given)


@pytest.mark.skipif(is_loaded(), reason="asks for fakes")
def test_opcheck():
    x, weights, biases, dys = made("q, k, v", FP32, "cpu")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.linear_siblings.default, (x, weights, biases), test_utils=checks)
    torch.library.opcheck(OPS.linear_siblings_input_gradient.default, (dys, weights), test_utils=checks)
