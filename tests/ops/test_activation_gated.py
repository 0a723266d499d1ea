"""The gated activations under the law, and their in-place backward."""

import functools

import pytest
import torch
import warpsmith
from warpsmith.testing import BadInput, Case, bitwise_equal, op_tests
from warpsmith.testing.sim import counted, is_loaded

from benchmarks.bench_activation import function_of
from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, op_spec
from tools import families

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PACKED = {"packed": True}

# Below, at and above a vector of 16 bytes and a block of 256 of them, and odd sizes; one tensor and two.
CASES = [
    *(Case((5, width), dtype) for width in (1, 7, 8, 33, 256) for dtype in (BF16, FP32)),
    *(Case((5, 2 * width), dtype, options=PACKED) for width in (1, 8, 33, 256) for dtype in (BF16, FP32)),
    *(Case((3, 2, 96), dtype) for dtype in (FP16, FP64)),
    *(Case((3, 2, 96), dtype, options=PACKED) for dtype in (FP16, FP64)),
    Case((2, 2047), BF16),
    Case((2, 2049), BF16),
    Case((40, 1000), BF16),
    Case((40, 1000), FP32, options=PACKED),
    Case((768,), FP32),
]
# For ops that share the body: what their function, and the dtypes, can change.
FEW_CASES = [
    *(Case((5, width), dtype) for width in (7, 33, 256) for dtype in (BF16, FP32)),
    *(Case((5, 2 * width), dtype, options=PACKED) for width in (8, 33) for dtype in (BF16, FP32)),
    *(Case((3, 2, 96), dtype) for dtype in (FP16, FP64)),
    Case((3, 2, 96), FP16, options=PACKED),
    Case((20, 1000), BF16),
]


def inputs(case, rng):
    if case.options.get("packed"):
        return {"gate": rng.normal(case.shape, std=2.0), "up": None}
    return {"gate": rng.normal(case.shape, std=2.0), "up": rng.normal(case.shape)}


BAD_INPUTS = [
    BadInput("scalar", but(gate=lambda g: g["gate"].sum(), up=lambda g: None), "gate: expected at least one dimension"),
    BadInput("odd", but(gate=lambda g: g["gate"][:, :7], up=lambda g: None), "gate: expected an even last dimension"),
    NO_FLOAT64_ON_CUDA,
]  # fmt: skip


TANH = {"approximate": "tanh"}
TANH_CASES = [
    *(Case((5, width), dtype, options=TANH) for width in (7, 256) for dtype in (BF16, FP32, FP16, FP64)),
    Case((5, 66), BF16, options={**PACKED, **TANH}),
]
ROWS = families.rows("GATED")
FORMS = families.forms("GATED")


def spec_of(row):
    """The first row has all cases, one with a flag the cases of both its functions, another few."""
    name, function = row.name, function_of(row)
    argument = "approximate" if "tanh" in row.arguments else None

    def with_extra(case, rng):
        made = inputs(case, rng)
        return made if argument is None else {**made, argument: case.options.get(argument, "none")}

    def baseline(gate, up, **options):
        if up is None:
            gate, up = gate.chunk(2, -1)
        return function(gate, **options) * up

    def floor_bytes(case):
        elements = torch.Size(case.shape).numel() // (2 if case.options.get("packed") else 1)
        return {"forward": 3 * elements * case.dtype.itemsize, "backward": 5 * elements * case.dtype.itemsize}

    def whole_pairs(draw, st, case):
        return case.but(shape=(*case.shape[:-1], -(-case.shape[-1] // 2) * 2)) if case.options.get("packed") else case

    return op_spec(
        name=name,
        baseline=baseline,
        inputs=with_extra,
        cases=CASES if row == ROWS[0] else FEW_CASES + TANH_CASES * (argument is not None),
        differentiable=("gate", "up"),
        outputs=("y",),
        batched=("gate", "up"),
        far_cases=[Case((3, 528), BF16, options=PACKED)],
        gradcheck_cases=[Case((3, 5), FP64), Case((2, 6), FP64, options={**PACKED, **TANH})],
        double_backward=True,
        func_transforms=True,
        bad_inputs=BAD_INPUTS,
        floor_bytes=floor_bytes,
        redraw=whole_pairs,
    )


for _row in ROWS:
    globals()[f"Test_{_row.name}"] = op_tests(spec_of(_row))

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def leaves(packed, dtype=FP32, shape=(4, 24)):
    torch.manual_seed(0)
    count = 1 if packed else 2
    return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize(
    "op",
    [functools.partial(getattr(warpsmith, row.name), **options) for row, options in FORMS.values()],
    ids=FORMS,
)
class TestInPlace:
    """``inplace_backward``."""

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_lie_over_the_inputs(self, op, packed, device):
        inputs = [t.detach().to(device).requires_grad_() for t in leaves(packed)]
        expected = torch.autograd.grad(op(*inputs).sum(), inputs)
        computed = [t * 1 for t in inputs]
        found = torch.autograd.grad(op(*computed, inplace_backward=True).sum(), computed)
        assert all(bitwise_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [t.data_ptr() for t in found] == [t.data_ptr() for t in computed]

    def test_only_what_has_a_gradient_is_overwritten(self, op):
        gate, up = leaves(False)
        computed, frozen = gate * 1, up.detach()
        before = frozen.clone()
        (expected,) = torch.autograd.grad(op(gate, frozen).sum(), gate)
        (found,) = torch.autograd.grad(op(computed, frozen, inplace_backward=True).sum(), computed)
        assert bitwise_equal(found, expected)
        assert bitwise_equal(frozen, before)

    def test_a_second_backward_is_refused(self, op):
        (x,) = leaves(True)
        y = op(x * 1, inplace_backward=True)
        y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_another_operation_that_kept_an_input_is_refused(self, op):
        (x,) = leaves(True)
        hidden = x.sigmoid()  # keeps its result for its backward
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            op(hidden, inplace_backward=True).sum().backward()

    @pytest.mark.parametrize("shared", ["one tensor twice", "overlapping", "halves of one tensor"])
    def test_shared_memory_is_not_overwritten(self, op, shared):
        (x,) = leaves(True)

        def run(**options):
            hidden = x * 1
            flat = hidden.flatten()
            pairs = {
                "one tensor twice": (hidden, hidden),
                "overlapping": (flat[:60], flat[5:65]),
                "halves of one tensor": hidden.chunk(2, -1),
            }
            (gradient,) = torch.autograd.grad(op(*pairs[shared], **options).square().sum(), x)
            return gradient

        assert bitwise_equal(run(inplace_backward=True), run())

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_leaf_is_refused(self, op, packed):
        with pytest.raises(ValueError, match=r"gate: expected a computed tensor for inplace_backward, got a leaf"):
            op(*leaves(packed), inplace_backward=True)

    def test_without_gradients_nothing_is_overwritten(self, op):
        x = torch.randn(4, 24)
        before = x.clone()
        op(x, inplace_backward=True)
        assert bitwise_equal(x, before)

    @pytest.mark.not_on_sim(reason="in float64")
    def test_second_derivatives_do_not_overwrite(self, op):
        (x,) = leaves(True, FP64)
        assert torch.autograd.gradgradcheck(lambda t: op(t * 1, inplace_backward=True), (x,))

    def test_compiled_code_overwrites_nothing_and_agrees(self, op):
        (x,) = leaves(True)

        def loss(x):
            return op(x * 2, inplace_backward=True).sum()

        (expected,) = torch.autograd.grad(loss(x), x)
        (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
        assert bitwise_equal(found, expected)


def test_small_values_keep_their_digits():
    gate = -torch.linspace(0.0, 12.0, 2001)  # torch's formula loses all of them from -5.5 on, in float64 from -8.3 on
    exact = 0.5 * gate.double() * torch.erfc(-gate.double() / 2**0.5)
    ours = warpsmith.geglu(gate, torch.ones_like(gate)).double()
    assert ((ours - exact).abs() <= 1e-5 * exact.abs()).all()


def test_a_dropped_gradient_takes_infinities_along_but_no_nan():
    gate = torch.tensor([-1.0, 0.0, 1.0, torch.nan], requires_grad=True)
    y = warpsmith.reglu(gate, torch.full((4,), torch.inf))
    (found,) = torch.autograd.grad(y.sum(), gate)
    assert found.tolist()[:3] == [0.0, 0.0, torch.inf]
    assert y[3].isnan()


def test_plan_says_how_the_card_is_used():
    flat = warpsmith.plan("swiglu", rows=8192, columns=14336)
    assert (flat["flat"], flat["vector_elems"], flat["blocks"]) == (True, 8, 8192 * 14336 // 8 // flat["threads"])
    packed = warpsmith.plan("swiglu", rows=8192, columns=14336, contiguous=False)
    assert (packed["flat"], packed["vector_elems"]) == (False, 8)
    odd = warpsmith.plan("swiglu", rows=10, columns=33, contiguous=False, dtype="float32")
    assert (odd["vector_elems"], odd["vectors"]) == (1, 330)
    assert warpsmith.plan("swiglu", rows=10, columns=33)["vectors"] == 42  # the last one is not full


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_backward_that_makes_the_output_again(form, packed, device):
    """Over dy the bits of the forward, over the inputs those of the backward."""
    row, options = FORMS[form]
    extra = (bool(options),) if "tanh" in row.arguments else ()
    forward, backward, again = (
        getattr(torch.ops.warpsmith, row.name + suffix).default
        for suffix in ("_forward", "_backward", "_backward_with_output_")
    )
    for dtype in (FP32, BF16, FP16, *([FP64] if device == "cpu" and not is_loaded() else [])):
        for shape in ((3, 33), (2, 4, 1032), (0, 8)):
            wide = (*shape[:-1], shape[-1] * (2 if packed else 1))
            gate, up = torch.randn(wide, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)
            given, dy = None if packed else up, torch.randn(shape, device=device).to(dtype)
            y, grads = forward(gate, given, True, *extra), backward(dy, gate, given, True, True, *extra)
            if is_loaded():  # each of three tensors is read and written once
                assert counted(lambda: again(dy, gate, given, *extra))[1] == (3 * y.nbytes, 3 * y.nbytes)  # noqa: B023
            else:
                again(dy, gate, given, *extra)
            assert bitwise_equal(dy, y) and bitwise_equal(gate, grads[0])
            assert packed or bitwise_equal(up, grads[1])


def test_what_is_overwritten_must_be_contiguous():
    again = torch.ops.warpsmith.swiglu_backward_with_output_.default
    for place, argument in enumerate(("dy", "gate", "up")):
        tensors = [torch.randn(4, 6) for _ in range(3)]
        tensors[place] = torch.randn(6, 4).t()
        before = [t.clone() for t in tensors]
        with pytest.raises(ValueError, match=f"swiglu_backward: {argument}: expected a contiguous tensor to overwrite"):
            again(*tensors)
        assert all(map(bitwise_equal, tensors, before))
