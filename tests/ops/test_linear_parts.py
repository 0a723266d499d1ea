"""What the linear family is beside the law: where gradients go, how they lie, and what they cost."""

import os

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.testing import bitwise_equal, cpu_threads

from tests.dispatched import Dispatched

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ON_CUDA = pytest.mark.gpu
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
ROWS, WIDTH, OUT = 24, 16, 40


def problem(dtype=FP32, device="cpu", rows=ROWS):
    g = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(*shape, generator=g).to(device, dtype) for shape in ((rows, WIDTH), (OUT, WIDTH)))
    return x, weight.requires_grad_(), torch.randn(OUT, generator=g).to(device, dtype).requires_grad_()


@on_both
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_main_grad_takes_the_weights_gradient(dtype, activation, device):
    x, weight, bias = problem(dtype, device)
    warpsmith.linear(x, weight, bias, activation).sum().backward()
    expected, dbias, weight.grad, bias.grad = weight.grad, bias.grad, None, None
    main_grad = torch.ones(OUT, WIDTH, device=device)
    warpsmith.linear(x, weight, bias, activation, main_grad=main_grad).sum().backward()
    torch.testing.assert_close((main_grad - 1).to(dtype), expected)
    assert not weight.grad.any() and weight.grad.shape == weight.shape
    assert bitwise_equal(bias.grad, dbias)


@on_both
def test_micro_batches_add_to_main_grad(device):
    """Eight micro-batches into one tensor are the whole batch, but for the order of float32 sums."""
    x, weight, bias = problem(BF16, device, rows=64)
    one, eight = torch.zeros(2, OUT, WIDTH, device=device)
    warpsmith.linear(x, weight, bias, main_grad=one).sum().backward()
    for part in x.chunk(8):
        warpsmith.linear(part, weight, bias, main_grad=eight).sum().backward()
    torch.testing.assert_close(eight, one, rtol=1e-5, atol=1e-4)
    again = torch.zeros_like(eight)
    for part in x.chunk(8):
        warpsmith.linear(part, weight, bias, main_grad=again).sum().backward()
    assert bitwise_equal(again, eight)


def test_uses_of_a_tied_weight_add_to_one_main_grad():
    x, weight, _ = problem(rows=8)
    main_grad = torch.zeros(OUT, WIDTH)
    first = warpsmith.linear(x, weight, main_grad=main_grad)
    warpsmith.linear(2 * x, weight, main_grad=main_grad).sum().add(first.sum()).backward()
    torch.testing.assert_close(main_grad, 3 * x.sum(0).expand(OUT, WIDTH))


def test_main_grad_of_a_frozen_weight_stays():
    x, weight, bias = problem()
    main_grad = torch.zeros(OUT, WIDTH)
    warpsmith.linear(x, weight.detach(), bias, main_grad=main_grad).sum().backward()
    assert not main_grad.any()


@on_both
@pytest.mark.parametrize("frozen", ["", "gate_weight", "up_weight"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_main_grads_take_the_gradients_of_both_weights(dtype, frozen, device):
    x, gate, _ = problem(dtype, device)
    up = (gate.detach().flip(0) * 0.5).requires_grad_()
    biases = [torch.linspace(-1, 1, OUT, device=device, dtype=dtype).requires_grad_() for _ in range(2)]
    weights = {"gate_weight": gate, "up_weight": up}
    if frozen:
        weights[frozen].requires_grad_(False)
    x.requires_grad_()
    inputs = [x, *weights.values(), *biases]
    wanted = [t for t in inputs if t.requires_grad]
    expected = torch.autograd.grad(warpsmith.gated_linear(*inputs, "gelu").square().sum(), wanted)
    main_grads = tuple(torch.ones(OUT, WIDTH, device=device) for _ in range(2))
    found = torch.autograd.grad(warpsmith.gated_linear(*inputs, "gelu", main_grads=main_grads).square().sum(), wanted)
    for t, a, b in zip(wanted, found, expected, strict=True):
        if any(t is w for w in weights.values()):
            assert not a.any() and a.shape == t.shape
            main_grad = main_grads[0 if t is gate else 1]
            torch.testing.assert_close((main_grad - 1).to(dtype), b)
        else:
            assert bitwise_equal(a, b)
    if frozen:
        assert (main_grads[0 if frozen == "gate_weight" else 1] == 1).all()


def test_main_grads_are_two_places_of_their_own():
    x, gate, _ = problem()
    up, place = gate.detach().clone(), torch.zeros(OUT, WIDTH)
    bad = {
        r"main_grads: expected two tensors, or None, got ": (place, (place,), 3),
        r"main_grads\[1\]: expected other memory than that of main_grads\[0\]": ((place, place),),
        r"main_grads\[0\]: expected other memory than that of up_weight": ((up, place),),
        r"main_grads\[1\]: expected float32, got bfloat16": ((place, up.bfloat16()),),
        r"main_grads\[0\]: expected shape \(40, 16\), got \(39, 16\)": ((place[1:], up * 1),),
    }
    for words, wrong in bad.items():
        for main_grads in wrong:
            with pytest.raises(ValueError, match=f"^gated_linear: {words}"):
                warpsmith.gated_linear(x, gate, up, main_grads=main_grads)
    with pytest.raises(TypeError, match=r"gated_linear: main_grads\[1\]: expected a tensor, got None"):
        warpsmith.gated_linear(x, gate, up, main_grads=(place, None))
    y = warpsmith.gated_linear(x.requires_grad_(), gate, up, main_grads=(place, up * 1))
    with pytest.raises(ValueError, match="gated_linear: main_grads: expected None where a second derivative is taken"):
        torch.autograd.grad(y.sum(), [x, gate], create_graph=True)
    assert not place.any()


def test_main_grad_is_not_what_something_else_holds():
    x, weight, bias = problem()
    with pytest.raises(ValueError, match="linear: main_grad: expected other memory than that of weight"):
        warpsmith.linear(x, weight, bias, main_grad=weight.detach())
    with pytest.raises(TypeError, match="linear: main_grad: expected a tensor, got the int 3"):
        warpsmith.linear(x, weight, bias, main_grad=3)


def test_a_plain_layer_looks_at_its_main_grad_each_time():
    """It has a way of its own, whose checks must be those of all layers."""
    x, weight, bias = problem()
    memory = torch.zeros(OUT * WIDTH + ROWS * WIDTH)
    main_grad, beside = memory[: OUT * WIDTH].view(OUT, WIDTH), memory[OUT * WIDTH :].view(ROWS, WIDTH)
    last = memory[OUT * WIDTH - 1 :]  # from its last element on
    bad = {
        "a tensor that requires no gradient": {"main_grad": torch.zeros(OUT, WIDTH, requires_grad=True)},
        "a tensor that holds its values": {"main_grad": torch._neg_view(main_grad)},
        r"shape \(40, 16\), got \(16, 40\)": {"main_grad": main_grad.view(WIDTH, OUT)},
        r"shape \(40, 16\), got \(40, 16, 1\)": {"main_grad": main_grad[..., None]},
        "float32, got float64": {"main_grad": main_grad.double()},
        "float32, got bfloat16": {"main_grad": main_grad.bfloat16()},
        "a tensor on cpu": {"main_grad": main_grad.to("meta")},
        "a contiguous tensor or its transpose": {"main_grad": torch.zeros(OUT, 2 * WIDTH)[:, ::2]},
        "other memory than that of weight": {"weight": main_grad.detach().requires_grad_()},
        "other memory than that of x": {"x": last[: ROWS * WIDTH].view(ROWS, WIDTH)},
        "other memory than that of bias": {"bias": last[:OUT].detach().requires_grad_()},
    }
    good = {"x": x, "weight": weight, "bias": bias, "main_grad": main_grad}
    for words, changed in bad.items():
        warpsmith.linear(**good)
        with pytest.raises(ValueError, match=f"^linear: main_grad: expected {words}"):
            warpsmith.linear(**good | changed)
    main_grad.requires_grad_()
    with pytest.raises(ValueError, match="expected a tensor that requires no gradient"):
        warpsmith.linear(**good)
    main_grad.requires_grad_(False)
    assert not memory.any()
    beside.fill_(1)
    warpsmith.linear(**good | {"x": beside}).sum().backward()
    assert (main_grad == ROWS).all() and (beside == 1).all()


def test_a_plain_layer_gives_what_is_asked():
    x, weight, bias = problem()
    main_grad = torch.zeros(OUT, WIDTH)
    x.requires_grad_()
    with Dispatched() as ops:
        y, expected = warpsmith.linear(x, weight, bias, main_grad=main_grad), F.linear(x, weight, bias)
    assert not ops.names and torch.equal(y, expected)
    for asked in (x, bias):
        (found,), (want,) = (torch.autograd.grad(t.sum(), asked, retain_graph=True) for t in (y, expected))
        torch.testing.assert_close(found, want)
    added = main_grad.clone()
    with pytest.raises(ValueError, match="linear: main_grad: expected None where a second derivative is taken"):
        torch.autograd.grad(y.sum(), [x, weight], create_graph=True)
    assert torch.equal(main_grad, added)


@on_both
def test_main_grad_may_lie_transposed(device):
    x, weight, bias = problem(BF16, device)
    plain, turned = torch.zeros(OUT, WIDTH, device=device), torch.zeros(WIDTH, OUT, device=device).t()
    for main_grad in (plain, turned):
        warpsmith.linear(x, weight, bias, main_grad=main_grad).sum().backward()
    torch.testing.assert_close(turned, plain)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.13 has no grad_dtype")
@on_both
def test_grad_dtype_gives_an_unrounded_gradient(device):
    x, weight, bias = problem(BF16, device, rows=200)
    weight.grad_dtype = FP32
    warpsmith.linear(x, weight, bias).square().sum().backward()
    main_grad = torch.zeros(OUT, WIDTH, device=device)
    found, weight.grad = weight.grad, None
    warpsmith.linear(x, weight, bias, main_grad=main_grad).square().sum().backward()
    assert found.dtype == FP32
    torch.testing.assert_close(found, main_grad)
    assert not torch.equal(found, found.bfloat16().float())


@on_both
def test_a_transposed_weight_is_read_as_it_lies(device):
    """GPT-2's Conv1D: the gradient lies as the weight does, so that autograd makes no copy of it."""
    x, weight, bias = problem(device=device)
    stored = weight.detach().t().contiguous().requires_grad_()
    warpsmith.linear(x, stored.t(), bias, "silu").sum().backward()
    warpsmith.linear(x, weight, bias, "silu").sum().backward()
    torch.testing.assert_close(stored.grad.t(), weight.grad)
    assert stored.grad.is_contiguous()
    dweight = torch.ops.warpsmith.linear_backward(
        x.new_ones(ROWS, OUT), x, stored.detach().t(), None, x.new_empty(0), 0, None, False, True, False
    )[1]
    assert dweight.stride() == (1, OUT)


def test_x_is_not_kept_for_a_frozen_weight():
    """LoRA: the base layer's input can go once its output is there."""
    kept = []
    x, weight, bias = problem()
    x.requires_grad_()
    for residual, way in ((None, "AddmmBackward0"), (torch.randn(ROWS, OUT), "linearBackward")):  # torch's layer, ours
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            y = warpsmith.linear(x, weight.detach(), bias, residual=residual)
        assert type(y.grad_fn).__name__ == way
    assert kept and x.shape not in kept


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_sizes_of_zero(sizes, activation):
    rows, width, out = sizes
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(out, width, requires_grad=True)
    bias = torch.randn(out, requires_grad=True)
    found = warpsmith.linear(x, weight, bias, activation)
    expected = warpsmith.reference.linear(x, weight, bias, activation)
    torch.testing.assert_close(found, expected)
    leaves = x, weight, bias
    for a, b in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.not_on_sim(reason="of the CPU's loops")
@pytest.mark.parametrize("rows", [1, 9, 100, 1000])
def test_bias_gradients_do_not_depend_on_threads(rows):
    x, weight, bias = problem(rows=rows)
    dy = torch.randn(rows, OUT)

    def dbias(activation):
        (found,) = torch.autograd.grad(warpsmith.linear(x, weight.detach(), bias, activation), bias, dy)
        return found

    expected = dbias(None)
    torch.testing.assert_close(expected, dy.sum(0))
    for count in (1, 2, 3):
        with cpu_threads(count):
            assert bitwise_equal(dbias(None), expected)


def test_relu_keeps_its_result_alone():
    """The result is kept anyway by what reads it; gelu keeps the pre-activation."""
    kept = []
    x, weight, bias = problem()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = warpsmith.linear(x, weight, bias, "relu")
    assert y.data_ptr() in kept


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({}, "cublas_lt"),
        ({"activation": "gelu"}, "torch"),
        ({"activation": None}, "torch"),
        ({"dtype": "float16"}, "torch"),
        ({"residual": True}, "torch"),
        ({"aligned": False}, "torch"),
        ({"library": False}, "torch"),
        ({"code_capability": 80}, "torch"),
        ({"derivative": True}, "cublas_lt"),
        ({"derivative": True, "rows": 4096}, "torch"),
    ],
)
def test_the_plan_says_who_multiplies(change, path):
    problem = {"rows": 8192, "in_features": 2048, "out_features": 8192, "activation": "gelu_tanh"}
    problem["own_product"] = "never"
    found = warpsmith.plan("linear", **{**problem, **change})
    assert found["path"] == path and found["why"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ("own", "128x256", "2x1", "store")),
        ({"residual": True}, ("own", "128x256", "2x1", "residual")),
        ({"derivative": True}, ("own", "128x256", "2x1", "derivative")),
        ({"op": "gated_linear", "activation": "silu"}, ("own", "128x256", "2x1", "gated")),
        ({"op": "gated_linear", "activation": "gelu_tanh", "own_product": "never"}, ("torch", None, None, None)),
        ({"product": "input_gradient"}, ("own", "128x256", "2x1", "store")),
        ({"product": "main_grad"}, ("own", "256x192", "2x1", "float32")),  # 66 units for 66 clusters
        ({"product": "main_grad", "out_features": 2048}, ("own", "128x256", "2x1", "float32")),
        ({"product": "weight_gradient", "out_features": 768}, ("own", "128x256, split", "2x1", "store")),
        ({"own_product": "never"}, ("torch", None, None, None)),
        ({"dtype": "float32"}, ("torch", None, None, None)),
        ({"aligned": False}, ("torch", None, None, None)),
        ({"code_capability": 80}, ("torch", None, None, None)),
    ],
)
def test_the_plan_says_which_product_is_ours(change, found):
    problem = {"rows": 8192, "in_features": 2048, "out_features": 3072, "own_product": "always"}
    plan = warpsmith.plan(**{"op": "linear", **problem, **change})
    assert (plan["path"], *(plan.get(key) for key in ("tile", "cluster", "epilogue"))) == found
    assert plan["why"] and (plan["path"] == "own" or "own_product" in change or "ours needs" in plan["own"]
                            or "operands of 16 bits" in plan["own"])  # fmt: skip


@pytest.mark.parametrize(
    ("change", "is_ours"),
    [
        ({}, True),
        ({"residual": True}, True),
        ({"activation": "silu"}, True),
        ({"activation": "gelu_tanh", "kept": True}, True),
        ({"activation": "gelu_tanh"}, False),  # cuBLASLt's epilogue
        ({"activation": "gelu_tanh", "library": False}, True),
        ({"activation": "gelu_tanh", "dtype": "float16"}, True),
        ({"product": "input_gradient"}, True),
        ({"product": "input_gradient", "out_features": 16384}, False),
        ({"derivative": True, "activation": "gelu_tanh"}, True),
        ({"op": "gated_linear", "activation": "silu"}, True),
        ({"product": "weight_gradient"}, False),
        ({"product": "main_grad"}, False),
        ({"rows": 1024}, False),
        ({"multiprocessors": 60}, False),
        ({"code_capability": 80}, False),
    ],
)
def test_our_product_runs_where_it_was_measured_to_pay(change, is_ours):
    sizes = {"rows": 8192, "in_features": 2048, "out_features": 3072}
    assert (warpsmith.plan(**{"op": "linear", **sizes, **change})["path"] == "own") == is_ours


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 2048, 3072), (65536, 768, 3072), (65536, 3072, 768), (8191, 2064, 1000)])
def test_our_products_of_layers_are_as_right_as_cublas(shape):
    """Rounded results: within 1.05 of the library's largest error. Sums in float32: the law."""
    rows, width, out = shape
    torch.manual_seed(0)
    x, w, dy = (torch.randn(s, device="cuda").to(BF16) for s in ((rows, width), (out, width), (rows, out)))
    raw, none = torch.ops.warpsmith, x.new_empty(0)

    def results():
        main_grad = torch.zeros(out, width, device="cuda")
        raw.linear_backward_main_grad(dy, x, w, None, none, main_grad, 0, False, False)
        gradients = raw.linear_backward(dy, x, w, None, none, 0, None, True, True, False)[:2]
        return [raw.linear_inference(x, None, w, None, None, 0), *gradients, main_grad]

    wide = [t.double() for t in (x, w, dy)]
    right = [wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0], wide[2].t() @ wide[0]]
    try:
        raw._own_product("0")
        library = [(a - b).abs().max().item() for a, b in zip(results(), right, strict=True)]
        before = raw._own_product("1")
        ours = results()
        again = results()
    finally:
        launched = raw._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto")) - before
    assert launched == 2 * len(ours)
    assert all(bitwise_equal(a, b) for a, b in zip(ours, again, strict=True))
    for of_ours, exact, bound, times in zip(ours, right, library, (1.05, 1.05, 1.05, 2), strict=True):
        assert (of_ours - exact).abs().max().item() <= times * bound


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [128, 1000, 65600])  # the last: the derivative is in a product's epilogue too
def test_the_epilogue_and_its_fallback_are_as_right_as_torch(rows):
    """The same layer with rows that lie on 16 bytes, where cuBLASLt's epilogue is taken, and with rows that do not."""
    torch.manual_seed(0)
    x, w1, b1, w2 = (torch.randn(s, device="cuda").to(BF16) / 8 for s in ((rows, 256), (512, 256), (512,), (256, 512)))
    dy = torch.randn(rows, 256, device="cuda").to(BF16)
    apart = torch.empty(rows * 256 + 1, dtype=BF16, device="cuda")[1:].view(rows, 256).copy_(x)

    def of_torch(x, w1, b1, w2):
        return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2)

    def gradients(function, dtype, x):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w1, b1, w2)]
        y = function(*leaves)
        return [t.double() for t in (y, *torch.autograd.grad(y, leaves, dy.to(dtype)))]

    def errors(found):
        return [(a - b).square().mean().sqrt().item() for a, b in zip(found, right, strict=True)]

    def ours(x, w1, b1, w2):
        return warpsmith.mlp(x, w1, b1, w2, None)

    right = gradients(of_torch, torch.float64, x)
    bounds = errors(gradients(of_torch, BF16, x))
    for found in (gradients(ours, BF16, x), gradients(ours, BF16, apart)):
        for error, bound in zip(errors(found), bounds, strict=True):
            assert error <= 2 * bound  # the error law


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "mlp", "gated_linear"])
def test_composed_gradients_read_relus_sign_in_the_forward(name, dtype):
    """A pre-activation that is made again may round to the other side of 0."""
    g = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (48, 40), (48, 40), (48,), (48,)] if name == "gated_linear" else [(24, 40), (48, 40), (48,)]
    shapes += [(24, 48), (24,)] if name == "mlp" else []
    tensors = [torch.randn(8, *s, generator=g).to(dtype) for s in shapes]

    def total(*t):
        return getattr(warpsmith, name)(*t, activation="relu").float().sum()

    wanted = tuple(range(len(shapes)))
    together = torch.func.vmap(torch.func.grad(total, argnums=wanted))(*tensors)
    for sample in range(8):
        leaves = [t[sample].clone().requires_grad_() for t in tensors]
        plain = torch.autograd.grad(total(*leaves), leaves)
        twice = torch.autograd.grad(total(*leaves), leaves, create_graph=True)
        for a, b, c in zip(plain, twice, together, strict=True):
            scale = a.abs().max()
            assert (a - b).abs().max() <= 0.01 * scale and (a - c[sample]).abs().max() <= 0.01 * scale


class Subclass(torch.Tensor):
    pass


# What is changed of x (24, 16), weight (40, 16) and bias (40); the rest takes torch's way.
BY_THE_OP = {
    "strided x": lambda x, w, b: (x.t().contiguous().t(), w, b),
    "x of another type": lambda x, w, b: (x.as_subclass(Subclass), w, b),
    "float64": lambda x, w, b: (x.double(), w.detach().double(), b.detach().double()),
    "a bias in float32": lambda x, w, b: (x.bfloat16(), w.detach().bfloat16(), b),
    "a bias of one": lambda x, w, b: (x, w[:1], b[:1]),
    "a row of 16": lambda x, w, b: (x[0], w, b),
    "a transposed weight with a gradient": lambda x, w, b: (x, w.detach().t().contiguous().t().requires_grad_(), b),
}
BY_TORCH = {
    "plain": lambda x, w, b: (x, w, b),
    "no bias": lambda x, w, b: (x, w, None),
    "bfloat16": lambda x, w, b: tuple(t.detach().bfloat16().requires_grad_() for t in (x, w, b)),
    "parameters": lambda x, w, b: (x, torch.nn.Parameter(w.detach()), torch.nn.Parameter(b.detach())),
    "a transposed weight": lambda x, w, b: (x, w.detach().t().contiguous().t(), b),
    "three dimensions": lambda x, w, b: (x.view(2, 12, 16), w, b),
    "no rows": lambda x, w, b: (x[:0], w, b),
}


@pytest.mark.parametrize("name", [*BY_THE_OP, *BY_TORCH])
def test_a_plain_layer_is_torchs_call(name):
    x, weight, bias = (BY_THE_OP | BY_TORCH)[name](*problem())
    with Dispatched() as ops:
        y = warpsmith.linear(x, weight, bias)
    assert bool(ops.calls) is (name in BY_THE_OP)
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    torch.testing.assert_close(y.double(), F.linear(*wide), rtol=1e-2, atol=1e-2)


def test_each_call_asks_anew():
    """What a parameter is may change between two calls, and so may the mode."""
    x, weight, _ = problem()
    weight = torch.nn.Parameter(weight.detach())
    found = []
    for change in (
        lambda: None,
        lambda: setattr(weight, "data", weight.data.t().contiguous().t()),
        lambda: weight.requires_grad_(False),
        lambda: weight.requires_grad_(True),
        lambda: setattr(weight, "data", weight.data.contiguous()),
        lambda: setattr(weight, "grad_dtype", FP32),
    ):
        change()
        with Dispatched() as ops:
            y = warpsmith.linear(x, weight)
        assert torch.equal(y, F.linear(x, weight))
        with torch.no_grad(), Dispatched() as without:
            warpsmith.linear(x, weight)
        assert not without.calls
        found.append(bool(ops.calls))
    assert found == [False, True, False, True, False, False]


def test_large_layers_ask_for_our_product(monkeypatch):
    """From 3e10 multiplications on."""
    asked = []
    monkeypatch.setattr("warpsmith.ops._linear.may_pay", lambda *of: bool(asked.append(of)))
    monkeypatch.setattr(F, "linear", lambda *of: len(asked))
    weight = torch.empty(1024, 1024)
    assert [warpsmith.linear(torch.empty(rows, 1024), weight) for rows in (1 << 14, 1 << 15)] == [0, 1]
