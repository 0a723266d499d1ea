"""The op among torch's machinery: dispatcher, fake tensors, compile, export, functorch, autocast, bad input."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from warpsmith.testing.checks.numerics import single_layout_cases
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.law import measure
from warpsmith.testing.run import (
    Unchanged,
    as_leaves,
    assert_same_bits,
    exact_result,
    flatten,
    raw_arguments,
    run,
    upstream,
    wanted_inputs,
)
from warpsmith.testing.sim import torch_device
from warpsmith.testing.spec import BadInput, Inputs, OpSpec

MESSAGE_FORM = re.compile(r"^\w+: \w+: expected .+, got .+", re.DOTALL)


def check_opcheck(spec: OpSpec, op: Any, device: str = "cpu") -> None:
    """torch.library.opcheck of a dispatcher op: schema and mutation, autograd registration, fake tensors, AOT
    dispatch (not where an output is of 8-bit floats, which it cannot sum; compiled calls have checks of their own). Nor
    can the schema's check compare these once autograd has saved them. Off the default stream: on it small results are
    parts of a chunk of zeros (csrc/bindings/support/scratch.h), whose offset fake tensors do not have."""
    inputs = make_inputs(spec, spec.base_case(), device)
    if device == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            return _opcheck(spec, op, inputs)
    return _opcheck(spec, op, inputs)


def _opcheck(spec: OpSpec, op: Any, inputs: Inputs) -> None:
    given = raw_arguments(spec, op, inputs)
    made = op(*given)
    eight_bit = any(t.is_floating_point() and t.itemsize == 1 for t in tree_leaves(made) if isinstance(t, Tensor))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += [] if eight_bit else ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, given, test_utils=tests)
    if spec.traced is not None and op is _overload(spec.traced):
        names = [a.name for a in op._schema.arguments[: len(given)]]
        leaves = as_leaves(dict(zip(names, given, strict=True)), wanted_inputs(spec, inputs))
        torch.library.opcheck(op, (*leaves.values(),), test_utils=tests[eight_bit:])


def _overload(qualified: str) -> Any:
    namespace, name = qualified.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def check_compiled(spec: OpSpec, device: str = "cpu", backend: str = "aot_eager", dynamic: bool | None = None) -> None:
    """torch.compile(fullgraph=True), forward and backward, gives the bits of eager mode."""
    case = spec.base_case()
    inputs = make_inputs(spec, case, device)
    eager = run(spec.op, spec, case, inputs).all()
    torch._dynamo.reset()
    try:
        compiled = torch.compile(spec.op, fullgraph=True, backend=backend, dynamic=dynamic)
        assert_same_bits(f"{spec.name} compiled ({backend})", eager, run(compiled, spec, case, inputs).all())
        without = {n: y for n, y in eager.items() if n in spec.outputs}
        assert_same_bits(
            f"{spec.name} compiled, no gradient", without, run(compiled, spec, case, inputs, wanted=()).outputs
        )
    finally:
        torch._dynamo.reset()


def check_exported(spec: OpSpec, device: str = "cpu") -> None:
    """torch.export keeps the op as one node (where ``traced`` names it), and the exported program gives the same
    bits."""
    case = spec.base_case()
    inputs = make_inputs(spec, case, device)
    tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
    others = {k: v for k, v in inputs.items() if not isinstance(v, Tensor)}

    class Module(torch.nn.Module):
        def forward(self, **kwargs: Tensor) -> Any:
            return spec.op(**kwargs, **others)

    program = torch.export.export(Module(), (), kwargs=tensors)
    if spec.traced is not None:
        targets = {str(node.target) for node in program.graph.nodes}
        wanted = str(_overload(spec.traced))
        assert wanted in targets, f"{spec.name}: expected {wanted} in the exported graph, got {sorted(targets)}"
    got = flatten(program.module()(**tensors), spec.outputs)
    assert_same_bits(f"{spec.name} exported", flatten(spec.op(**inputs), spec.outputs), got)


def _layout_of(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), tuple(t.stride()), t.dtype


def check_fake_and_meta(spec: OpSpec, device: str = "cpu") -> None:
    """Meta and fake tensors give the shapes, strides and dtypes of real ones, forward and backward, in every layout of
    all tensors and of each tensor alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    base = spec.base_case()
    of_all = [base.but(layout=layout) for layout in spec.layouts or ("contiguous", "transposed", "padded_rows")]
    for case in (*of_all, *single_layout_cases(spec)):
        inputs = make_inputs(spec, case, device)
        real = run(spec.op, spec, case, inputs)
        grads = upstream(spec, case, real.outputs)
        mode = FakeTensorMode()
        conversions: dict[str, Callable[[Tensor], Tensor]] = {"meta": _to_meta, "fake": mode.from_tensor}
        for kind, convert in conversions.items():
            converted = _convert(inputs, convert)
            context = mode if kind == "fake" else torch.no_grad()
            with context, torch.enable_grad():
                imagined = run(spec.op, spec, case, converted, grads={k: convert(g) for k, g in grads.items()})
            assert real.all().keys() == imagined.all().keys(), f"{spec.name} {case} {kind}: {imagined.all().keys()}"
            for name, t in real.all().items():
                got = imagined.all()[name]
                assert _layout_of(t) == _layout_of(got), (
                    f"{spec.name} {case}: {name}: {kind} tensor: expected (shape, strides, dtype) {_layout_of(t)}, "
                    f"got {_layout_of(got)}"
                )
                device_type = "meta" if kind == "meta" else t.device.type
                assert got.device.type == device_type, f"{spec.name}: {name}: {kind} tensor on {got.device}"


def _to_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _convert(inputs: Inputs, convert: Callable[[Tensor], Tensor]) -> Inputs:
    return {k: convert(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def check_forward_mode(spec: OpSpec, device: str = "cpu") -> None:
    """Forward-mode derivatives are right or refused, never silently dropped."""
    case = spec.base_case()
    inputs = make_inputs(spec, case, device)
    for name in wanted_inputs(spec, inputs):
        for requires_grad in (False, True):
            leaves = as_leaves(inputs, (name,) if requires_grad else ())
            with forward_ad.dual_level():
                dual = {**leaves, name: forward_ad.make_dual(leaves[name], torch.ones_like(inputs[name]))}
                try:
                    outputs = flatten(spec.op(**dual), spec.outputs)
                except (RuntimeError, NotImplementedError):
                    continue
                expected = flatten(spec.reference(**dual), spec.outputs)
                for out, y in outputs.items():
                    tangent, wanted = forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(expected[out]).tangent
                    if wanted is None:
                        continue
                    assert tangent is not None, f"{spec.name}: the tangent of {name} is dropped on the way to {out}"
                    torch.testing.assert_close(tangent, wanted)


def check_func_transforms(spec: OpSpec, device: str = "cpu") -> None:
    """torch.func.grad obeys the error law; jacrev equals it, and vmap a loop, within a rounding, vmap alone and over
    grad (per-sample gradients, also where the incoming gradient differs by sample)."""
    case = spec.base_case()
    inputs = make_inputs(spec, case, device)
    names = wanted_inputs(spec, inputs)

    def total(*tensors: Tensor) -> Tensor:
        outputs = flatten(spec.op(**{**inputs, **dict(zip(names, tensors, strict=True))}), spec.outputs)
        return torch.stack([y.float().sum() for y in outputs.values() if y.is_floating_point()]).sum()

    def curved(*tensors: Tensor) -> Tensor:
        return total(*tensors).sin()

    tensors = tuple(inputs[n].detach() for n in names)
    numbers = tuple(range(len(names)))
    by_func = torch.func.grad(total, argnums=numbers)(*tensors)
    plain = run(spec.op, spec, case, inputs)
    ones = {n: torch.ones_like(y) for n, y in plain.outputs.items() if y.is_floating_point()}
    exact = exact_result(spec, case, inputs, plain, ones)
    baseline = run(spec.baseline or spec.reference, spec, case, inputs, ones).grads
    for name, grad in zip(names, by_func, strict=True):
        error = measure(f"grad_{name}", grad, exact[f"grad_{name}"], baseline[f"grad_{name}"])
        assert error.ok, f"{spec.name}: torch.func.grad: {error}"
    batched = tuple(torch.stack([t, t.flip(0), -t]) for t in tensors)
    by_grad = torch.func.grad(curved, argnums=numbers)(*tensors)
    for name, a, b in zip(names, torch.func.jacrev(curved, argnums=numbers)(*tensors), by_grad, strict=True):
        error = measure(f"jacrev {name}", a, b.double(), b)
        assert error.ok, f"{spec.name}: {error}"
    for what, fn in (
        ("vmap", total),
        ("vmap over grad", torch.func.grad(total, argnums=numbers)),
        ("vmap over grad of a sine", torch.func.grad(curved, argnums=numbers)),
    ):
        together = torch.func.vmap(fn)(*batched)
        one_by_one = [fn(*sample) for sample in zip(*batched, strict=True)]
        columns = zip(*one_by_one, strict=True) if isinstance(together, tuple) else [one_by_one]
        got = together if isinstance(together, tuple) else (together,)
        for name, a, samples in zip(names, got, columns, strict=False):
            error = measure(f"{what} {name}", a, torch.stack(list(samples)).double(), torch.stack(list(samples)))
            assert error.ok, f"{spec.name}: {error}"


def check_autocast(spec: OpSpec, device: str = "cpu") -> None:
    """Under autocast the outputs have the dtypes the spec states; where it states none, and of float64, which autocast
    leaves, they have the bits of a call without."""
    for dtype in dict.fromkeys(c.dtype for c in spec.cases_on(device) if not c.dtypes):
        case = spec.base_case(dtype)
        inputs = make_inputs(spec, case, device)
        plain = run(spec.op, spec, case, inputs)
        with torch.autocast(torch_device(device), dtype=torch.bfloat16):
            under = run(spec.op, spec, case, inputs)
            expected = (
                tuple(y.dtype for y in plain.outputs.values())
                if spec.autocast is None or dtype == torch.float64
                else spec.autocast(inputs, torch.bfloat16)
            )
        got = tuple(y.dtype for y in under.outputs.values())
        assert got == expected, f"{spec.name} {case} under autocast: expected {expected}, got {got}"
        if spec.autocast is None or dtype == torch.float64:
            assert_same_bits(f"{spec.name} {case} under autocast", plain.all(), under.all())


def check_bad_input(spec: OpSpec, bad: BadInput, device: str = "cpu") -> None:
    """Bad input is refused with the stated words, real or fake, changes nothing, and the next good call works."""
    case = spec.base_case()
    good = make_inputs(spec, case, device)
    before = flatten(spec.op(**good), spec.outputs)
    for requires_grad in (False, True):
        inputs = bad.change(dict(good))
        if requires_grad:
            inputs = {
                k: v.detach().requires_grad_()
                if isinstance(v, Tensor) and k in spec.differentiable and v.is_floating_point()
                else v
                for k, v in inputs.items()
            }
        with Unchanged(f"{spec.name} with bad {bad.label}", inputs):
            _expect_refusal(spec, bad, inputs, "real tensors")
    assert_same_bits(f"{spec.name} after bad {bad.label}", before, flatten(spec.op(**good), spec.outputs))
    if bad.fake:
        from torch._subclasses.fake_tensor import FakeTensorMode

        inputs = bad.change(dict(good))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = _convert(inputs, mode.from_tensor)
            _expect_refusal(spec, bad, fakes, "fake tensors")
        if len({v.device for v in inputs.values() if isinstance(v, Tensor)}) == 1:
            _expect_refusal(spec, bad, _convert(inputs, _to_meta), "meta tensors")


def _expect_refusal(spec: OpSpec, bad: BadInput, inputs: Inputs, kind: str) -> None:
    what = f"{spec.name} with bad {bad.label}, {kind}"
    try:
        spec.op(**inputs)
    except bad.error as error:
        text = str(error)
        assert re.search(bad.match, text), f"{what}: expected a message with {bad.match!r}, got {text!r}"
        if bad.error is ValueError:
            assert MESSAGE_FORM.match(text), f"{what}: expected 'op: argument: expected X, got Y', got {text!r}"
            assert text.startswith(spec.name), f"{what}: expected the message to begin with {spec.name!r}, got {text!r}"
    except Exception as error:
        raise AssertionError(f"{what}: expected {bad.error.__name__}, got {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{what}: expected {bad.error.__name__}, but the call went through")
