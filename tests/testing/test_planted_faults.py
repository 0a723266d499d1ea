"""A right op passes every check made from its spec; each check fails on an op with the fault it is there for."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.function import once_differentiable
from toy_op import SPEC, Apply, caught, raw, reference, scale, with_op
from warpsmith.testing import LAYOUTS, Case, make_inputs, op_tests
from warpsmith.testing.checks import numerics
from warpsmith.testing.law import measure
from warpsmith.testing.suite import check_op, checks_of

BF16 = Case((4, 17, 33), torch.bfloat16)
FP32 = Case((5, 3), torch.float32)


class Detached(torch.autograd.Function):
    """Adds to the output, or multiplies the gradients, by constants: a wrong op made from the right one."""

    @staticmethod
    def forward(ctx, y, factor, error):
        ctx.factor = factor
        return y + error

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None, None


def test_the_right_op_passes_everything():
    assert check_op(replace(SPEC, opcheck={})) == {}


def test_a_wrong_value_is_caught():
    caught(numerics.check_error_law, with_op(lambda x, scale: reference(x, scale) * 1.02), BF16, match="y: error")


def test_a_wrong_gradient_is_caught():
    op = with_op(lambda x, scale: Detached.apply(reference(x, scale), 1.02, 0.0))
    caught(numerics.check_error_law, op, BF16, match="grad_x: error")


def test_accumulation_in_16_bit_is_caught():
    class Half(Apply):
        @staticmethod
        def backward(ctx, dy):
            x, scale = ctx.saved_tensors
            total = torch.zeros_like(scale)
            for row in (dy * x).reshape(-1, x.shape[-1]):
                total = total + row
            return dy * scale, total

    caught(
        numerics.check_error_law,
        with_op(Half.apply_by_name),
        Case((2048, 33), torch.bfloat16),
        match="grad_scale: error",
    )


def test_a_bias_inside_the_bound_is_caught_by_the_median():
    def op(x, scale):
        y = reference(x, scale)
        largest = float(y.detach().double().abs().max())
        step = 2.0 ** torch.tensor(largest).log2().floor().item() * torch.finfo(y.dtype).eps
        return Detached.apply(y, 1.0, torch.full_like(y, 1.4 * step) * (y.detach().abs() < largest / 8))

    spec = with_op(op, cases=[Case((64, 33), torch.bfloat16)], differentiable=())
    numerics.check_error_law(spec, spec.cases[0])
    caught(numerics.check_median, spec, match="median error")


def test_a_wrong_dtype_is_caught():
    caught(
        numerics.check_error_law,
        with_op(lambda x, scale: x.float() * scale),
        BF16,
        match="expected bfloat16 .*, got float32",
    )


@pytest.mark.parametrize("layout", ["padded_rows", "every_second", "transposed", "expanded"])
def test_ignored_strides_are_caught(layout):
    def op(x, scale):
        dense = (
            x.as_strided(x.shape, torch.empty(x.shape).stride())
            if x.numel() <= x.untyped_storage().size() // 4
            else x * 0
        )
        return reference(dense, scale)

    caught(numerics.check_error_law, with_op(op), Case((7, 33), torch.float32, layout), match="y: error")


def test_ignored_storage_offset_is_caught():
    op = with_op(lambda x, scale: reference(x.as_strided(x.shape, x.stride(), 0), scale))
    caught(numerics.check_error_law, op, Case((7, 33), torch.float32, "misaligned"), match="y: error")


def test_a_crash_on_zero_sizes_is_caught():
    op = with_op(lambda x, scale: reference(x, scale) + 0 * x.detach().max())
    for case in numerics.size_cases(SPEC)[:2]:
        caught(numerics.check_error_law, op, case, match="numel")


@pytest.mark.parametrize("value", ["nan", "inf", "minus_inf"])
def test_swallowed_special_values_are_caught(value):
    op = with_op(lambda x, scale: reference(x.nan_to_num(0.0, 0.0, 0.0), scale))
    caught(numerics.check_edge_value, op, "x", value, match="neither the oracle's nor PyTorch's")


def test_an_overflow_that_pytorch_does_not_have_is_caught():
    op = with_op(lambda x, scale: reference(x * 1e30, scale) / 1e30)
    caught(numerics.check_edge_value, replace(op, cases=[FP32]), "x", "large", match="neither")


@pytest.mark.parametrize("error", [1e-7, 1e-5])
def test_where_pytorch_overflows_a_row_only_errors_are_caught(error):
    def overflowing(x, scale):
        total = 4 * x.abs().sum(-1, keepdim=True)
        return reference(x, scale) * (total / total)

    def op(x, scale):
        y = reference(x, scale)
        return Detached.apply(y, 1.0, error * y.detach().abs().amax(-1, keepdim=True))

    spec = with_op(op, baseline=overflowing, cases=[Case((1, 33), torch.float32)], differentiable=())
    if error < torch.finfo(torch.float32).eps:
        numerics.check_edge_value(spec, "x", "max")
    else:
        caught(numerics.check_edge_value, spec, "x", "max", match="neither")


def test_a_slightly_wrong_derivative_is_caught_by_gradcheck():
    caught(
        numerics.check_gradcheck,
        with_op(lambda x, scale: Detached.apply(reference(x, scale), 1.001, 0.0)),
        match="Jacobian",
    )


def test_a_wrong_second_derivative_is_caught_by_gradgradcheck():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx, dy):
            x, scale = ctx.saved_tensors
            return dy * scale.detach(), (dy * x.detach()).sum_to_size(scale.shape)

    caught(numerics.check_gradcheck, with_op(Once.apply_named, double_backward=True), match="Jacobian|backward")


def test_a_silent_second_derivative_is_caught():
    caught(numerics.check_second_derivative_is_refused, with_op(reference), match="a second derivative was given")

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx, dy):
            x, scale = ctx.saved_tensors
            return raw.scale_backward.default(dy.detach(), x.detach(), scale.detach())

    caught(numerics.check_second_derivative_is_refused, with_op(Cut.apply_named), match="is cut off")

    class OfLossesAlone(Apply):
        backward = staticmethod(once_differentiable(Cut.backward))

    op = with_op(lambda x, scale: OfLossesAlone.apply(x, scale))
    caught(numerics.check_second_derivative_is_refused, op, match="is cut off|a second derivative was given")


torch.autograd.Function.apply_named = classmethod(lambda cls, x, scale: cls.apply(x, scale))


def test_a_result_that_changes_is_caught():
    calls = []

    def op(x, scale):
        calls.append(None)
        return reference(x, scale) + (1e-6 if len(calls) == 4 else 0.0)

    caught(numerics.check_repeats_bitwise, with_op(op), FP32, match="repeat 3")


def test_a_batch_whose_gradient_changes_is_caught():
    calls = []

    class Changing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return reference(x, scale)

        @staticmethod
        def backward(ctx, grad):
            calls.append(grad.numel())
            x, scale = (t.requires_grad_() for t in (s.detach() for s in ctx.saved_tensors))
            with torch.enable_grad():
                grads = torch.autograd.grad(reference(x, scale), (x, scale), grad)
            return grads[0], grads[1] + (1.0 if len(calls) == 3 else 0.0)

    spec = replace(SPEC, op=lambda x, scale: Changing.apply(x, scale), batched=("x",))
    caught(numerics.check_batch_repeats_bitwise, spec, FP32, 4000, "cpu", match="1 of 5 repeats have other bits")
    assert min(calls) > 2000


def test_a_result_that_depends_on_the_threads_is_caught():
    threads = torch.get_num_threads()
    op = with_op(lambda x, scale: reference(x, scale) + 1e-6 * (torch.get_num_threads() != threads))
    caught(numerics.check_repeats_bitwise, op, FP32, match="threads")


@pytest.mark.parametrize("fault", ["rows", "sum"])
def test_an_index_that_wraps_is_caught(fault):
    limit = 2**16 if fault == "rows" else 0

    class Wraps(Apply):
        @staticmethod
        def forward(ctx, x, scale):
            y = Apply.forward(ctx, x, scale)
            if limit:
                y[limit:] = 0
            return y

        @staticmethod
        def backward(ctx, dy):
            dx, dscale = raw.scale_backward.default(dy, *ctx.saved_tensors)
            return dx, dscale if limit else dscale * (0.96 if len(dy) > 2**16 else 1)

    spec = with_op(Wraps.apply_by_name, batched=("x",))
    numerics.check_batch(spec, FP32, 2**15)
    caught(numerics.check_batch, spec, FP32, 3 * 2**16, match=r"y: \d+ of" if limit else "grad_scale over")
    numerics.check_batch(replace(SPEC, batched=("x",)), FP32, 3 * 2**16)


def test_uninitialised_memory_is_caught():
    def op(x, scale):
        y = torch.empty_like(x)
        y[1:] = x[1:] * scale
        return y

    spec = with_op(op, differentiable=())
    caught(numerics.check_no_uninitialised_memory, spec, FP32, match="new memory filled: y: [1-3] of 15")


def test_a_gradient_that_depends_on_the_others_is_caught():
    def op(x, scale):
        return Detached.apply(reference(x, scale), 1.0 if x.requires_grad else 0.5, 0.0)

    caught(numerics.check_needs_input_grad, with_op(op), match="gradients of scale alone")


def test_a_graph_under_no_grad_is_caught():
    class Always(torch.nn.Module):
        def forward(self, x, scale):
            with torch.enable_grad():
                return reference(x, scale)

    caught(numerics.check_needs_input_grad, with_op(Always()), match="under no_grad: y requires a gradient")


def test_a_changed_input_is_caught():
    def op(x, scale):
        x.detach().add_(0)
        return reference(x.clone(), scale)

    caught(numerics.check_error_law, with_op(op, differentiable=()), FP32, match="x was changed")


def test_the_bound_is_twice_pytorch_and_two_rounding_steps():
    exact = torch.tensor([1.0, 0.5], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    plain = torch.tensor([1.0 + 2 * eps, 0.5])
    for ulps, ok in ((5, True), (6, False)):
        error = measure("y", torch.tensor([1.0 + ulps * eps, 0.5]), exact, plain)
        assert error.ok is ok
        assert error.ratio == pytest.approx(ulps / 2)


def test_every_check_of_a_spec_has_a_name_of_its_own():
    names = [name for name, _ in checks_of(SPEC)]
    assert len(names) == len(set(names)) > 60
    assert scale is SPEC.op


TestToy = op_tests(SPEC)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("laid_out", "expanded", "wanted"),
    [(None, None, {"x", "scale"}), (("x",), None, {"x"}), (("x", "scale"), ("x",), {"x"}), (("x",), (), set())],
)
def test_layouts_apply_to_the_inputs_named(layout, laid_out, expanded, wanted):
    spec = replace(SPEC, laid_out=laid_out, expanded=expanded)
    inputs = make_inputs(spec, SPEC.base_case().but(layout=layout))
    plain = make_inputs(spec, SPEC.base_case())
    if layout != "expanded":
        wanted = set(laid_out or ("x", "scale"))
    apart = {n for n, t in inputs.items() if t.stride() != plain[n].stride() or t.storage_offset()}
    assert apart == (set() if layout == "contiguous" else wanted)
