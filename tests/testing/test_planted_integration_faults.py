"""Faults in how an op meets torch (schema, fakes, compile, export, transforms, autocast) and in what it refuses: each
check must fail on the one it is there for."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from toy_op import SPEC, Apply, caught, reference, with_op
from warpsmith.testing import BadInput
from warpsmith.testing.checks import integration


def test_a_false_schema_is_caught_by_opcheck():
    lib = torch.library.Library("warpsmith_planted", "FRAGMENT")
    lib.define("quietly_mutates(Tensor x, Tensor scale) -> Tensor")
    lib.impl("quietly_mutates", lambda x, scale: x.mul_(2).clone(), "CPU")
    torch.library.register_fake("warpsmith_planted::quietly_mutates", lambda x, scale: torch.empty_like(x), lib=lib)
    op = torch.ops.warpsmith_planted.quietly_mutates.default
    spec = replace(SPEC, opcheck={op: lambda i: (i["x"], i["scale"])})
    with pytest.raises(Exception, match=r"mutat|opcheck"):
        integration.check_opcheck(spec, op)


def test_an_op_that_no_call_reaches_is_caught():
    spec = replace(SPEC, opcheck={torch.ops.warpsmith.rms_norm.default: None})
    with pytest.raises(AssertionError, match="a call reaches neither warpsmith.rms_norm.default nor"):
        integration.check_opcheck(spec, torch.ops.warpsmith.rms_norm.default)


def test_a_compiled_op_that_differs_is_caught():
    op = with_op(lambda x, scale: reference(x, scale) * (1.001 if torch.compiler.is_compiling() else 1.0))
    caught(integration.check_compiled, op, match=r"compiled \(aot_eager\): y")


def test_a_graph_break_is_caught():
    def op(x, scale):
        torch._dynamo.graph_break()
        return reference(x, scale)

    with pytest.raises(Exception, match="graph_break"):
        integration.check_compiled(with_op(op))


def test_an_op_that_dissolves_on_export_is_caught():
    caught(
        integration.check_exported,
        with_op(reference),
        match="expected warpsmith_toy.scale.default in the exported graph",
    )


def _steps(x, scale):
    """Strides that are right where all tensors lie alike."""
    columns = 1 if x.is_contiguous() == scale.is_contiguous() else 2
    return [math.prod(x.shape[d + 1 :]) * columns for d in range(x.dim())]


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (lambda x, scale: torch.empty_like(x), "strides"),
        (lambda x, scale: x.new_empty_strided(x.shape, _steps(x, scale)), "strides of one tensor alone"),
        (lambda x, scale: torch.empty(x.shape, dtype=torch.float64, device=x.device), "dtype"),
    ],
    ids=["strides", "one tensor alone", "dtype"],
)
def test_a_false_fake_is_caught(fake, words):
    name = f"false_{words.replace(' ', '_')}"
    lib = torch.library.Library("warpsmith_planted", "FRAGMENT")
    lib.define(f"{name}(Tensor x, Tensor scale) -> Tensor")
    lib.impl(name, lambda x, scale: (x * scale).contiguous(), "CPU")
    torch.library.register_fake(f"warpsmith_planted::{name}", fake, lib=lib)
    op = getattr(torch.ops.warpsmith_planted, name).default
    spec = with_op(lambda x, scale: op(x, scale), differentiable=(), layouts=("transposed",))
    caught(integration.check_fake_and_meta, spec, match="meta tensor: expected")


def test_dropped_tangents_are_caught():
    def op(x, scale):
        with torch._C._AutoDispatchBelowAutograd():
            return reference(x, scale)

    caught(integration.check_forward_mode, with_op(op), match="tangent of x is dropped")


def test_a_wrong_tangent_is_caught():
    def op(x, scale):
        return reference(x, scale) + 0.1 * (x - x.detach())

    caught(integration.check_forward_mode, with_op(op), match="not close")


def test_missing_func_transforms_are_caught():
    caught(integration.check_func_transforms, with_op(Apply.apply_by_name), match="setup_context")
    integration.check_func_transforms(with_op(reference))


def test_a_wrong_vmap_is_caught():
    def op(x, scale):
        batched = torch._C._functorch.is_batchedtensor(x) and x.dim() == 2
        return reference(x, scale) * (1.01 if batched else 1.0)

    caught(integration.check_func_transforms, with_op(op), match="vmap")


def test_a_cast_under_autocast_is_caught():
    def op(x, scale, left=torch.float64):
        y = reference(x, scale)
        casts = torch.is_autocast_enabled("cpu") and y.dtype != left
        return y.to(torch.get_autocast_dtype("cpu")) if casts else y

    stated = {"autocast": lambda inputs, dtype: (dtype,)}
    caught(integration.check_autocast, with_op(op), match="under autocast: expected")
    integration.check_autocast(with_op(op, **stated))
    caught(integration.check_autocast, with_op(partial(op, left=None), **stated), match="expected .torch.float64")


def bad(match="expected shape", error=ValueError):
    return BadInput("long scale", lambda i: {**i, "scale": i["scale"].repeat(2)}, match, error)


def refusing(message, error=ValueError, before=lambda x: None):
    def op(x, scale):
        if scale.shape != x.shape[-1:]:
            before(x)
            raise error(message)
        return reference(x, scale)

    return with_op(op)


RIGHT_WORDS = "scale: scale: expected shape (3), got (6)"


@pytest.mark.parametrize(
    ("spec", "item", "words"),
    [
        (with_op(lambda x, scale: reference(x, scale[: x.shape[-1]])), bad(), "the call went through"),
        (refusing("scale: x: expected one thing, got another"), bad(), "expected a message with"),
        (refusing("expected shape (3)"), bad(), "expected 'op: argument: expected X, got Y'"),
        (refusing("other: scale: expected shape (3), got (6)"), bad(), "begin with 'scale'"),
        (refusing(RIGHT_WORDS, TypeError), bad(), "expected ValueError, got TypeError"),
        (refusing(RIGHT_WORDS, before=lambda x: x.detach().zero_()), bad(), "x was changed"),
        (refusing(RIGHT_WORDS, before=lambda x: torch.rand(())), bad(), "random state was changed"),
    ],
    ids=["accepted", "wrong argument", "form", "wrong op", "wrong type", "changed input", "used randomness"],
)
def test_bad_refusals_are_caught(spec, item, words):
    integration.check_bad_input(refusing(RIGHT_WORDS), bad())
    caught(integration.check_bad_input, spec, item, match=words)


def test_a_fake_that_accepts_what_the_kernel_refuses_is_caught():
    lib = torch.library.Library("warpsmith_planted", "FRAGMENT")
    lib.define("lenient(Tensor x, Tensor scale) -> Tensor")
    lib.impl("lenient", lambda x, s: SPEC.op(x, s).detach().clone(), "CPU")
    torch.library.register_fake("warpsmith_planted::lenient", lambda x, s: torch.empty_like(x), lib=lib)
    op = torch.ops.warpsmith_planted.lenient.default
    caught(
        integration.check_bad_input, with_op(lambda x, scale: op(x, scale)), bad(), match="fake tensors.*went through"
    )
