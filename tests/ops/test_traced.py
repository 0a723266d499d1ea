"""All differentiable ops under torch.compile: in functions of torch.func, and with sizes that come from data."""

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal

from tests.ops.public_calls import NAMES, NOT_DIFFERENTIABLE, TOKENS, arguments_of, floating_of

DIFFERENTIABLE = [name for name in NAMES if name not in NOT_DIFFERENTIABLE]
PRESENT = torch.tensor([1, 0, 1, 1, 1, 1])  # tokens that a mask keeps


def outputs_of(found):
    return [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]


def loss_of(found):
    return sum(t.cos().sum() for t in outputs_of(found))


def same(found, expected):
    return all(bitwise_equal(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True))


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_torch_func_are_traced(name):
    arguments = arguments_of(name)
    given = floating_of(arguments)

    def loss(*tensors):
        return loss_of(getattr(warpsmith, name)(**arguments | dict(zip(given, tensors, strict=True))))

    each = tuple(range(len(given)))
    for wanted in {each, each[:1]}:
        gradient = torch.func.grad(loss, argnums=wanted)
        assert same(compiled(gradient)(*given.values()), gradient(*given.values()))


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "attention", "linear_cross_entropy"])
def test_products_with_a_jacobian_are_traced(name):
    arguments = arguments_of(name)
    first, *_ = given = floating_of(arguments)

    def pulled_back(x):
        out, pull = torch.func.vjp(lambda t: getattr(warpsmith, name)(**arguments | {first: t}), x)
        return pull(out.cos())

    assert same(compiled(pulled_back)(given[first]), pulled_back(given[first]))


def of_present(name, arguments, present):
    """The call with the tokens of a mask alone, of which torch.compile does not know how many there are."""
    index = present.nonzero()[:, 0]
    kept = {
        k: t[index] if isinstance(t, torch.Tensor) and t.shape[:1] == (TOKENS,) and k not in ("cos", "sin") else t
        for k, t in arguments.items()
    }
    if name == "attention_varlen":
        ends = [index.new_zeros(()), present[:3].sum(), present.sum()]
        kept["cu_seqlens_q"] = torch.stack(ends).to(torch.int32)
        kept["max_seqlen_q"] = kept["cu_seqlens_q"].diff().max().item()
        kept["max_seqlen_k"] = None
    if name in ("rope", "qk_norm_rope"):
        kept["position_offset"] = present[:1].sum().item()
    return getattr(warpsmith, name)(**kept)


@pytest.fixture
def sizes_from_data():
    options = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(options):
        yield


CASES = [(name, torch.float32 if name == "scaled_linear" else torch.float64) for name in DIFFERENTIABLE]
CASES += [(name, torch.bfloat16) for name in DIFFERENTIABLE if name.startswith("linear")]  # its sums may be wider


@pytest.mark.parametrize("present", [PRESENT, torch.zeros_like(PRESENT)], ids=["some", "none"])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_sizes_from_data_are_traced(name, dtype, present, sizes_from_data):
    """What an op writes in place, its traced form returns."""

    def run(function):
        arguments = {
            k: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for k, t in arguments_of(name).items()
        }
        arguments |= {"training": True} if name == "batch_norm" else {}
        learned = [t.requires_grad_() for t in floating_of(arguments).values()]
        found = function(name, arguments, present)
        given = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
        return [*outputs_of(found), *torch.autograd.grad(loss_of(found), learned), *given]

    assert same(run(compiled(of_present)), run(of_present))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention_of_a_length_from_data(layout, sizes_from_data):
    q, bias = torch.randn(2, 6, 6, 8, requires_grad=True), torch.randn(2, 1, 6, 6)

    def call(q, bias, lengths):
        longest = lengths.max().item()
        torch._check(longest <= 6)
        torch._check(longest > 1)
        part = q[:, :longest] if layout == "bshd" else q[:, :, :longest]
        return warpsmith.attention(part, part, part, bias=bias[..., :longest, :longest], layout=layout)

    def run(function):
        out = function(q, bias, torch.tensor([5, 3]))
        return [out, *torch.autograd.grad(out.cos().sum(), q)]

    assert same(run(compiled(call)), run(call))
