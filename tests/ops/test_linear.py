"""linear, mlp and gated_linear under the law; what else they are has a file beside this one."""

import os
from dataclasses import replace

import pytest
import torch
import warpsmith
from warpsmith.testing import LAYOUTS, BadInput, Case, bitwise_equal, op_tests
from warpsmith.testing.sim import is_loaded, launches, torch_device

from tests.ops.public_calls import but, in_call, op_spec, raw_ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
NUMBERS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}  # of the raw ops
OPS = torch.ops.warpsmith


def weight(rng, out, width):
    return rng.normal((out, width), std=1.5 / max(width, 1) ** 0.5)


def linear_inputs(case, rng):
    width, out = case.shape[-1], case.options.get("out", 37)
    return {
        "x": rng.normal(case.shape),
        "weight": weight(rng, out, width),
        "bias": rng.normal((out,)) if case.options.get("bias", True) else None,
        "activation": case.options.get("activation"),
        "residual": rng.normal((*case.shape[:-1], out)) if case.options.get("residual") else None,
    }


def mlp_inputs(case, rng):
    width, hidden, out = case.shape[-1], case.options.get("hidden", 37), case.options.get("out", 19)
    biased = case.options.get("bias", True)
    return {
        "x": rng.normal(case.shape),
        "w1": weight(rng, hidden, width),
        "b1": rng.normal((hidden,)) if biased else None,
        "w2": weight(rng, out, hidden),
        "b2": rng.normal((out,)) if biased else None,
        "activation": case.options.get("activation", "gelu_tanh"),
    }


def gated_inputs(case, rng):
    width, out = case.shape[-1], case.options.get("out", 37)
    biased = case.options.get("bias", False)
    return {
        "x": rng.normal(case.shape),
        "gate_weight": weight(rng, out, width),
        "up_weight": weight(rng, out, width),
        "gate_bias": rng.normal((out,)) if biased else None,
        "up_bias": rng.normal((out,)) if biased else None,
        "activation": case.options.get("activation", "silu"),
    }


def other_sizes(draw, st, case):
    """Any number of outputs goes with any width."""
    sizes = {n: draw(st.integers(4, 2 * case.options.get(n, 37) + 2)) for n in ("out", "hidden")}
    return case.but(options={**case.options, **sizes})


# The upstream gradient alone in each layout, where its rows too are whole vectors.
WHOLE = [
    Case((150, 48), BF16, options={"hidden": 32, "out": 64, "bias": True}, layouts={"grad_y": layout})
    for layout in LAYOUTS[1:]
]
LINEAR_CASES = [
    *(Case((6, 24), dtype, options={"activation": a}) for dtype in DTYPES for a in ACTIVATIONS),
    *(Case((6, 24), dtype) for dtype in DTYPES),
    *(Case((3, 5, 24), dtype, options={"residual": True}) for dtype in (BF16, FP32)),
    *(Case((9, 32), dtype, options={"residual": True, "activation": a}) for dtype in (BF16, FP32) for a in ACTIVATIONS),
    *(Case((9, 32), dtype, options={"residual": True, "bias": False}) for dtype in DTYPES),
    *(Case((9, 32), dtype, options={"bias": False, "activation": "gelu"}) for dtype in (BF16, FP32)),
    *(Case((9, 32), dtype, dtypes={"bias": FP32}, options={"activation": a}) for dtype in (BF16, FP16)
      for a in (None, "gelu_tanh")),
    *(Case((7, 13), dtype, options={"out": n, "activation": "silu"}) for dtype in (BF16, FP32) for n in (1, 2, 8, 131)),
    *(Case((40, k), FP32, options={"out": 16}) for k in (1, 7, 16, 17, 112, 144)),
    *(Case((m, 48), BF16, options={"out": 64, "activation": "gelu_tanh"}) for m in (1, 15, 17, 127, 129)),
    *(Case((60, 46), dtype, options={"out": 94}) for dtype in (BF16, FP32)),  # QuACK's 960 x 736 -> 1504 by 16
    *(Case((6, 24), dtype, options={"activation": "gelu"}, wanted=w) for dtype in (BF16, FP32)
      for w in (("x",), ("weight",), ("bias",))),
    Case((24,), FP32),
    Case((24,), BF16, options={"activation": "relu"}),
    Case((300, 16), BF16, options={"out": 50}),
    *WHOLE,
]  # fmt: skip
MLP_CASES = [
    *(Case((6, 24), dtype, options={"activation": a}) for dtype in DTYPES for a in ACTIVATIONS),
    *(Case((3, 5, 24), dtype, options={"bias": False}) for dtype in (BF16, FP32)),
    *(Case((9, 32), dtype, dtypes={"b1": FP32, "b2": FP32}) for dtype in (BF16, FP16)),
    *(Case((40, 16), FP32, options={"hidden": h, "out": n}) for h, n in ((1, 8), (64, 16), (131, 1))),
    *(Case((m, 48), BF16, options={"hidden": 64, "out": 48}) for m in (1, 17, 129)),
    Case((24,), FP32),
    Case((300, 16), BF16, options={"hidden": 50}),
    *WHOLE,
]
GATED_CASES = [
    *(Case((6, 24), dtype, options={"activation": a}) for dtype in DTYPES for a in ACTIVATIONS),
    *(Case((3, 5, 24), dtype, options={"bias": True}) for dtype in (BF16, FP32)),
    *(Case((9, 32), dtype, dtypes={"gate_bias": FP32}, options={"bias": True}) for dtype in (BF16, FP16)),
    *(Case((40, 16), FP32, options={"out": n}) for n in (1, 8, 131)),
    *(Case((m, 48), BF16, options={"out": 64}) for m in (1, 17, 129)),
    Case((24,), FP32),
    Case((300, 16), BF16, options={"out": 50}),
    *WHOLE,
]


def grown(t):
    return t.detach().float()


LINEAR_BAD = [
    BadInput("broadcast residual", but(residual=lambda g: g["x"].new_ones(37)),
             r"residual: expected shape \(6, 37\), got \(37\)"),
    BadInput("batch_invariant in float32", but(batch_invariant=lambda g: True, **{
        n: lambda g, n=n: grown(g[n]) for n in ("x", "weight", "bias")}),
             r"batch_invariant: expected False \(.+\), got True", fake=False),
    BadInput("main grad dtype", but(main_grad=lambda g: g["weight"].detach().clone()),
             "main_grad: expected float32, got bfloat16"),
    BadInput("main grad shape", but(main_grad=lambda g: grown(g["weight"])[1:]),
             r"main_grad: expected shape \(37, 24\), got \(36, 24\)"),
    BadInput("main grad strides", but(main_grad=lambda g: torch.zeros(37, 48, device=g["x"].device)[:, ::2]),
             "main_grad: expected a contiguous tensor or its transpose"),
    BadInput("main grad device", but(main_grad=lambda g: grown(g["weight"]).to("meta")), "main_grad: expected a",
             fake=False),
    BadInput("main grad with a gradient", but(main_grad=lambda g: grown(g["weight"]).requires_grad_()),
             "main_grad: expected a tensor that requires no gradient", fake=False),
]  # fmt: skip


def with_main_grad(**good):
    return warpsmith.linear(**good, main_grad=torch.zeros(good["weight"].shape, device=good["x"].device))


def with_main_grads(**good):
    main_grads = [torch.zeros(good["gate_weight"].shape, device=good["x"].device) for _ in range(2)]
    return warpsmith.gated_linear(**good, main_grads=main_grads)


SHARED = {
    "outputs": ("y",),
    "expanded": ("x",),
    "thread_counts": (),
    "double_backward": True,
    "func_transforms": True,
    "autocast": lambda good, dtype: (dtype,),
    "redraw": other_sizes,
}
LINEAR_SPEC = op_spec(
    name="linear",
    inputs=linear_inputs,
    cases=LINEAR_CASES,
    differentiable=("x", "weight", "bias", "residual"),
    laid_out=("x", "weight"),
    gradcheck_cases=[
        *(Case((3, 4), FP64, options={"out": 5, "activation": a}) for a in (None, *ACTIVATIONS[1:])),
        Case((3, 4), FP64, options={"out": 5, "activation": "silu", "residual": True, "bias": False}),
    ],
    opcheck=raw_ops("linear") | in_call(with_main_grad, OPS.linear_backward_main_grad),
    bad_inputs=LINEAR_BAD,
    **SHARED,
)
MLP_SPEC = op_spec(
    name="mlp",
    inputs=mlp_inputs,
    cases=MLP_CASES,
    differentiable=("x", "w1", "b1", "w2", "b2"),
    laid_out=("x", "w1", "w2"),
    gradcheck_cases=[Case((3, 4), FP64, options={"hidden": 5, "out": 2, "activation": a}) for a in ACTIVATIONS[1:]],
    **SHARED,
)
GATED_SPEC = op_spec(
    name="gated_linear",
    inputs=gated_inputs,
    cases=GATED_CASES,
    differentiable=("x", "gate_weight", "up_weight", "gate_bias", "up_bias"),
    laid_out=("x", "gate_weight", "up_weight"),
    gradcheck_cases=[Case((3, 4), FP64, options={"out": 5, "activation": a, "bias": True}) for a in ACTIVATIONS[1:]],
    opcheck=raw_ops("gated_linear") | in_call(with_main_grads, OPS.gated_linear_backward_main_grads),
    **SHARED,
)

TestLinear = op_tests(LINEAR_SPEC)


# The first case has an activation: a kernel of ours runs.
PLAIN_CASES = [LINEAR_CASES[0], *(c for c in LINEAR_CASES if not {"activation", "residual"} & {*c.options})]


class TestPlainLinearByTheOp(op_tests(replace(LINEAR_SPEC, cases=PLAIN_CASES))):
    """What :func:`warpsmith.linear` hands to torch where it can."""

    @pytest.fixture(autouse=True)
    def without_torchs(self, monkeypatch):
        monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)


HALVES = (BF16, FP16)
OWN_CASES = [
    *(Case((6, 24), dtype, options={"activation": a, "out": 40}) for dtype in HALVES for a in (None, *ACTIVATIONS)),
    *(Case((3, 5, 24), dtype, options={"residual": True, "out": 40, "bias": b}) for dtype in HALVES
      for b in (True, False)),
    *(Case((m, 48), BF16, options={"out": 64, "activation": "gelu_tanh"}) for m in (1, 15, 17, 127, 129)),
    *(Case((40, k), BF16, options={"out": 16}) for k in (16, 32, 48, 112, 128, 144)),
    Case((9, 32), BF16, dtypes={"bias": FP32}, options={"activation": "silu", "residual": True, "out": 24}),
    Case((300, 136), BF16, options={"out": 264}),
    Case((7, 13), BF16),  # on 16 bytes nowhere
    *WHOLE,
]  # fmt: skip
OWN_MLP_CASES = [
    *(Case((24, 40), dtype, options={"activation": a, "hidden": 48, "out": 24}) for dtype in HALVES
      for a in ACTIVATIONS),
    *(Case((m, 48), BF16, options={"hidden": 64, "out": 48}) for m in (1, 17, 129, 300)),
    Case((24, 40), BF16, dtypes={"b1": FP32, "b2": FP32}, options={"hidden": 48, "out": 24}),
]  # fmt: skip
OWN_GATED_CASES = [
    *(Case((6, 24), dtype, options={"activation": a, "out": 40}) for dtype in HALVES for a in ACTIVATIONS),
    *(Case((m, 48), BF16, options={"out": 64, "bias": True}) for m in (1, 15, 17, 127, 129)),
    *(Case((40, k), BF16, options={"out": 16}) for k in (16, 32, 112, 144)),
    Case((3, 5, 24), FP16, dtypes={"gate_bias": FP32}, options={"bias": True, "out": 40}),
    Case((300, 136), BF16, options={"out": 264, "activation": "gelu_tanh"}),
    *(Case((40, 24), BF16, options={"out": 40}, layouts={weight: "transposed"})
      for weight in ("gate_weight", "up_weight")),  # to the library
    Case((7, 13), BF16, options={"bias": True}),
    *WHOLE,
]  # fmt: skip


ON_CUDA = pytest.mark.gpu


class OwnProducts:
    """All products that can be are ours."""

    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch):
        monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)
        OPS._own_product("1")
        yield
        OPS._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto"))


class TestLinearByOwnProducts(
    OwnProducts, op_tests(replace(LINEAR_SPEC, cases=OWN_CASES, devices=("cuda",), bad_inputs=()))
):
    @pytest.mark.parametrize("device", ["sim-"] if is_loaded() else [pytest.param("cuda", marks=ON_CUDA)])
    def test_tiles_and_rows_do_not_change_bits(self, device):
        """The order of a sum depends on its length alone."""
        g = torch.Generator().manual_seed(1)
        x, w = (torch.randn(*s, generator=g).to(torch_device(device.strip("-")), BF16) for s in ((300, 208), (72, 208)))
        y = warpsmith.linear(x, w)
        for some in (warpsmith.linear(x[100:117], w), warpsmith.linear(x[100:101], w)):
            assert bitwise_equal(some, y[100 : 100 + len(some)])
        z = warpsmith.linear(x, w)
        activated = warpsmith.bias_gelu(z, z.new_zeros(72), approximate="tanh")  # by its own kernel
        assert bitwise_equal(warpsmith.linear(x, w, None, "gelu_tanh"), activated)
        before = OPS._own_product("256")
        assert bitwise_equal(warpsmith.linear(x, w), y)
        assert OPS._own_product("0") == before + 1

    @pytest.mark.parametrize("device", ["sim-"] if is_loaded() else [pytest.param("cuda", marks=ON_CUDA)])
    @pytest.mark.parametrize("how", ["auto", "0", "256"])
    @pytest.mark.parametrize("options", [{}, {"activation": "gelu_tanh"}, {"residual": True}], ids=str)
    def test_batch_invariant_rows(self, options, how, device):
        """Whatever the number of rows, the tile and what is asked for: a row and its gradient have the same bits."""
        g = torch.Generator().manual_seed(1)
        x, w, b, dy = (
            torch.randn(*s, generator=g).to(torch_device(device.strip("-")), BF16)
            for s in ((300, 208), (72, 208), (72,), (300, 72))
        )
        before = OPS._own_product(how)

        def made(rows):
            some = x[rows].clone().requires_grad_()
            more = options | ({"residual": dy[rows]} if "residual" in options else {})
            y = warpsmith.linear(some, w, b, batch_invariant=True, **more)
            y.backward(dy[rows])
            return y.detach(), some.grad

        whole = made(slice(0, 300))
        for rows in (slice(0, 1), slice(100, 117), slice(37, 300)):
            assert all(bitwise_equal(part, all_of[rows]) for part, all_of in zip(made(rows), whole, strict=True))
        assert OPS._own_product("1") == before + 8

    @pytest.mark.parametrize("device", ["sim-"] if is_loaded() else [pytest.param("cuda", marks=ON_CUDA)])
    def test_a_long_sum_is_split_over_clusters(self, device):
        """Small integers, whose sums are exact in any order."""
        g = torch.Generator().manual_seed(2)
        x, dy = (
            torch.randint(-2, 3, (8200, n), generator=g).to(torch_device(device.strip("-")), BF16) for n in (16, 24)
        )
        w, total = x.new_zeros(24, 16), torch.ones(24, 16, device=x.device)
        OPS.linear_backward_main_grad(dy, x, w, None, x.new_empty(0), total, 0, False, False)
        right = dy.float().t() @ x.float()
        assert bitwise_equal(total, right + 1)
        dweight = OPS.linear_backward(dy, x, w, None, x.new_empty(0), 0, None, False, True, False)[1]
        assert bitwise_equal(dweight, right.to(BF16))

    @pytest.mark.skipif(not is_loaded(), reason="counts launches of the simulated device")
    @pytest.mark.parametrize("device", ["sim-"])
    def test_every_product_is_one_launch(self, device):
        x, w1, w2 = (torch.randn(s, dtype=BF16, requires_grad=True) for s in ((24, 40), (48, 40), (24, 48)))
        b = torch.randn(48, requires_grad=True)
        main_grad = torch.zeros(48, 40)
        before = launches()
        warpsmith.linear(x.detach(), w1.detach(), b.detach(), "silu")
        y = warpsmith.linear(x, w1, b, residual=x.new_ones(24, 48), main_grad=main_grad)
        assert launches() - before == 2
        y.backward(y.detach())
        assert launches() - before == 2 + 4  # two products, column sums of each slice, and of the slices
        y, before = warpsmith.mlp(x, w1, b, w2, None), launches()
        y.backward(y.detach())
        assert launches() - before == 4 + 1  # a product with the derivative and sums of its columns, three more


TestMlp = op_tests(MLP_SPEC)


class TestMlpByOwnProducts(
    OwnProducts, op_tests(replace(MLP_SPEC, cases=OWN_MLP_CASES, devices=("cuda",), bad_inputs=()))
):
    pass


TestGatedLinear = op_tests(GATED_SPEC)


class TestGatedLinearByOwnProducts(
    OwnProducts, op_tests(replace(GATED_SPEC, cases=OWN_GATED_CASES, devices=("cuda",), bad_inputs=()))
):
    @pytest.mark.parametrize("device", ["sim-"] if is_loaded() else [pytest.param("cuda", marks=ON_CUDA)])
    @pytest.mark.parametrize("biases", [(), ("gate",), ("up",), ("gate", "up")])
    def test_one_product_has_the_bits_of_two_and_a_kernel(self, biases, device):
        g = torch.Generator().manual_seed(1)
        x, gate_weight, up_weight, *both = (
            torch.randn(s, generator=g).to(torch_device(device.strip("-")), BF16)
            for s in ((300, 208), (264, 208), (264, 208), (264,), (264,))
        )
        given = [b if name in biases else None for name, b in zip(("gate", "up"), both, strict=True)]
        before = OPS._own_product("1")
        y, gate, up = OPS.gated_linear_forward(x, gate_weight, up_weight, *given, None, None, NUMBERS["gelu"])
        alone = OPS.gated_linear_inference(x, gate_weight, up_weight, *given, None, None, NUMBERS["gelu"])
        assert OPS._own_product("1") == before + 2
        assert bitwise_equal(gate, warpsmith.linear(x, gate_weight, given[0]))
        assert bitwise_equal(up, warpsmith.linear(x, up_weight, given[1]))
        assert bitwise_equal(y, warpsmith.geglu(gate, up)) and bitwise_equal(alone, y)
        some = OPS.gated_linear_inference(x[100:117], gate_weight, up_weight, *given, None, None, NUMBERS["gelu"])
        assert bitwise_equal(some, y[100:117])
