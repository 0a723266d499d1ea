"""Each tensor of each raw op and of each public function with a wrong shape, dtype or device, made from the schema:
refused before anything is written, in words that tell what came beside what was expected, by the fakes of public ops in
the same words; or a value of another kind that the op takes, which then gives the same results."""

import re

import pytest
import torch
import warpsmith
from torch.utils._pytree import tree_map_only
from warpsmith.testing import bitwise_equal

from tests.ops.public_calls import NAMES, NOT_DIFFERENTIABLE, arguments_of, floating_of
from tests.ops.raw_calls import SCHEMAS, copied, few_calls
from tests.ops.test_arguments_in_pairs import OF_8_BITS, base_of, others_of

# The table of grad_check_table is addresses, which nothing can check.
NO_TENSORS = {"_attention_portable_alone", "_code_capability", "grad_check_table"}
NO_TENSORS |= {"_cublas_lt_choice", "_cublas_lt_version", "_own_product"}
ROWS, SHAPE = "fewer rows", "(a wider row|fewer rows|one dimension more|no dimension)"
# Sizes of which no other tensor of the call has one: "op argument kind".
FREE = re.compile(
    rf"(bias_\w+|\w*(layer|rms)_norm(_forward|_inference|_fp8)?) x {ROWS}"
    rf"|(mlp|gated_linear|scaled_linear|linear_siblings)(_forward|_inference)? x {ROWS}"
    rf"|(relu_squared\w*|(log_)?softmax(_forward)?|linear_cross_entropy_scale\w) x {SHAPE}"
    rf"|batch_norm_forward_of_ranks of_ranks {ROWS}"
    rf"|(clip_grads|unscale_grads|grad_\w+) (tensors|like|partials) ({SHAPE}|integers|complex)"
    rf"|dropout_add_backward dy {SHAPE}|cross_entropy_scale_ dlogits {SHAPE}|rank_mean parts {ROWS}"
    r"|cross_entropy_\w+_ logits a wider row"
    rf"|(group_norm(_forward|_inference)?|batch_norm_statistics) x (a wider row|{ROWS}|one dimension more)"
    rf"|max_pool2d(_forward|_inference)? x (a wider row|{ROWS})|max_pool2d x integers"  # these are torch's
    rf"|matmul_symmetric x (a wider row|{ROWS}|one dimension more)"
    rf"|(quantize_fp8 x|fp8_amax x|fp8_scale amax|dequantize_fp8 (data|scale)) {SHAPE}"
    r"|cross_entropy_backward_? dloss no dimension"  # of a loss that is one number
    r"|(qk_norm_)?rope\w* offsets no dimension"  # one for all sequences
)
# Likewise of public functions, and the tensors whose dtype may be another one.
FREE_OF_FUNCTIONS = re.compile(
    rf"{FREE.pattern}|attention q {ROWS}|attention\w* bias ({ROWS}|no dimension)|normalize_image x {ROWS}"
    r"|cross_entropy logits a wider row|(qk_norm_)?rope position_offset no dimension"
    r"|(\w*rms_norm weight|\w*add_\w+ residual|attention\w* (bias|sink)|(linear_)?cross_entropy class_weight"
    r"|(bias_\w+|linear|mlp|gated_linear) (bias|b1|b2|\w+_bias)) another float"
    r"|(cross_entropy logits|(max_pool2d|matmul_symmetric|quantize_fp8|relu_squared|scaled_linear|(log_)?softmax) x)"
    r" (another float|half)"
)
FORM = re.compile(r"^(\w+): ([\w\[\]]+): expected .+, got .+", re.DOTALL)
OTHER_DTYPE = {torch.float32: torch.bfloat16, torch.float64: torch.float32}


def resized(change):
    """Another shape, filled with the tensor's values again and again: those of a table are addresses."""

    def resize(t):
        shape = torch.Size(change(list(t.shape)))
        values = t.flatten() if t.numel() else t.new_zeros(1)
        return values.repeat(shape.numel() // values.numel() + 1)[: shape.numel()].view(shape)

    return resize


WRONG = {
    "a wider row": resized(lambda s: [*s[:-1], s[-1] + 1] if s else [2]),
    "fewer rows": resized(lambda s: [max(s[0] - 1, 0), *s[1:]] if s else [0]),
    "one dimension more": resized(lambda s: [*s, 1]),
    "no dimension": resized(lambda s: [] if s else [1, 1]),
    "integers": lambda t: t.to(torch.int16 if t.dtype != torch.int16 else torch.int8),
    "complex": lambda t: t.to(torch.complex64),
    "another float": lambda t: t.to(OTHER_DTYPE.get(t.dtype, torch.float32)) if t.is_floating_point() else t.float(),
    "meta": lambda t: t.to("meta"),
}


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def places(call):
    """(index of an argument, index in its list or None, the tensor)."""
    for i, value in enumerate(call):
        if isinstance(value, torch.Tensor):
            yield i, None, value
        for j, t in enumerate(value[:2] if isinstance(value, list) else ()):
            if isinstance(t, torch.Tensor):
                yield i, j, t


def replaced(call, i, j, new):
    changed = list(copied(call))
    if j is None:
        changed[i] = new
    else:
        changed[i][j] = new
    return changed


def outcome(op, call):
    """The error of a call, or the tensors that it returned or wrote to."""
    before = copied(call)
    try:
        result = op(*call)
    except Exception as error:
        for old, new in zip(tensors_of(before), tensors_of(list(call)), strict=True):
            assert old.is_meta or new.is_meta or bitwise_equal(old, new), f"written to before {error}"
        return error
    written = [v for v, a in zip(call, op._schema.arguments, strict=True) if a.alias_info and a.alias_info.is_write]
    return [*tensors_of(result), *tensors_of(written)]


def results_agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-2, equal_nan=True)


def unlike_fake(op, call, kind, said):
    """What the fake of a public op says of the call, if that is something else. Of a wrong dtype it may name others."""
    name = op._schema.name.removeprefix("warpsmith::")
    if not hasattr(warpsmith, name) or name == "adamw" or kind == "meta" or "offsets that never fall" in said:
        return None  # what depends on values no fake sees
    try:
        op(*tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), list(call)))
    except ValueError as error:
        told = [text.split(" expected ")[0] if kind in ("integers", "complex") else text for text in (said, str(error))]
        return None if told[0] == told[1] else f"fake: {error}"
    return "taken by the fake"


def tells(said, wrong, good):
    """Whether a message shows what is wrong: the device, the dtype, or a size (of offsets, a count or a value)."""
    if wrong.device != good.device:
        return "meta" in said
    if wrong.dtype != good.dtype:
        return re.search(rf"\b{str(wrong.dtype).removeprefix('torch.')}\b", said)
    if not wrong.dim():
        return "()" in said or "dimension" in said
    return {*map(str, wrong.shape)} & {*re.findall(r"\d+", said)} or re.search("offset|ascending", said)


def complaint(op, call, place, kind):
    """What is wrong with the answer to a call with one wrong tensor; None if nothing is."""
    i, j, t = place
    wrong, argument = WRONG[kind](t), op._schema.arguments[i].name
    name = op._schema.name.removeprefix("warpsmith::")
    found = outcome(op, replaced(call, i, j, wrong.clone()))
    if isinstance(found, ValueError):
        changed = replaced(call, i, j, wrong)
        fits = FORM.match(str(found)) and tells(str(found), wrong, t)
        return unlike_fake(op, changed, kind, str(found)) if fits else f"said {found}"
    if isinstance(found, Exception):
        no_fake = isinstance(found, NotImplementedError) and wrong.is_meta
        return None if no_fake else f"{type(found).__name__}: {found}"
    if kind == "another float":  # values that both dtypes have
        if name != "grad_table":  # which holds addresses and dtypes
            results_agree(found, outcome(op, replaced(call, i, j, wrong.to(t.dtype))))
        return None
    if wrong.shape != t.shape and (wrong.numel() == t.numel() == 1 or not t.numel()):
        return None  # one number in another form, or what stands for no tensor
    alone = wrong.is_meta and len(tensors_of(list(call))) == 1
    return None if alone or FREE.fullmatch(f"{name} {argument} {kind}") else "taken"


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - NO_TENSORS))
def test_wrong_tensors_are_refused(name):
    op = getattr(torch.ops.warpsmith, name).default
    for call in few_calls(name):
        assert not isinstance(outcome(op, copied(call)), Exception)
        for place in places(call):
            for kind in WRONG:
                wrong, t = WRONG[kind](place[2]), place[2]
                if (wrong.shape, wrong.dtype, wrong.device) != (t.shape, t.dtype, t.device):
                    said = complaint(op, call, place, kind)
                    assert said is None, f"{name}: {op._schema.arguments[place[0]].name}, {kind}: {said}"


def public_calls(name, device):
    """The arguments of calls in which each tensor that a public function takes is there."""
    base = arguments_of(name) if name in OF_8_BITS else base_of(name)
    more = {} if name in OF_8_BITS else others_of(name, base)
    more = {n: t for n, t in more.items() if isinstance(t, torch.Tensor) and n not in base}
    for given in (base, *({**base, n: t} for n, t in more.items())):
        yield tree_map_only(torch.Tensor, lambda t: (t.bfloat16() if t.dtype == torch.float64 else t).to(device), given)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("learns", [False, True], ids=["", "learns"])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "adamw"])
def test_wrong_tensors_of_functions_are_refused(name, learns, device):
    def refused(given):
        try:
            getattr(warpsmith, name)(**given)
        except ValueError as error:
            return str(error)
        except NotImplementedError:  # torch's, of max pooling of integers on CUDA
            return None

    asked = set()
    for given in public_calls(name, device):
        for key in [key for key, t in given.items() if isinstance(t, torch.Tensor) and key not in asked]:
            asked.add(key)
            for kind, change in (WRONG | {"half": torch.Tensor.half}).items():
                good, wrong = given[key], change(given[key])
                if (wrong.shape, wrong.dtype, wrong.device) == (good.shape, good.dtype, good.device):
                    continue
                called = {**given, key: wrong}
                for t in floating_of(called).values() if learns and name not in NOT_DIFFERENTIABLE else ():
                    t.requires_grad_()
                before = {n: t.detach().clone() for n, t in called.items() if isinstance(t, torch.Tensor)}
                said, case = refused(called), f"{name} {key} {kind}"
                if said is None:
                    # The host does not read offsets on CUDA.
                    offsets = "cu_seqlens" in key or case == "attention_varlen q fewer rows"
                    unseen = (device == "cuda" and offsets) or (wrong.is_meta and len(before) == 1)
                    assert FREE_OF_FUNCTIONS.fullmatch(case) or unseen, f"taken: {case}"
                    continue
                assert FORM.match(said).group(1) == name and tells(said, wrong, good), f"{case}: {said}"
                assert all(t.is_meta or bitwise_equal(called[n].detach(), t) for n, t in before.items()), case
                if not wrong.is_meta and key != "cu_seqlens" and "offsets that" not in said:  # of values no fake sees
                    fake = refused(tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), called)) or ""
                    until = " expected " if kind in ("integers", "complex") else "\n"  # it may name other dtypes
                    assert fake.split(until)[0] == said.split(until)[0], f"{case}: {said}, fake: {fake}"


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - NO_TENSORS))
def test_each_tensor_may_lie_apart(name):
    """Read or written, forward and backward, it gives the same results or is refused."""
    op = getattr(torch.ops.warpsmith, name).default
    for call in few_calls(name):
        expected = outcome(op, copied(call))
        for i, j, t in places(call):
            if t.numel() > 1 and t.stride() != (0,) * t.dim():
                apart = torch.empty_strided(t.shape, [3 * s for s in t.contiguous().stride()], dtype=t.dtype).copy_(t)
                found = outcome(op, replaced(call, i, j, apart))
                if isinstance(found, Exception):
                    assert FORM.match(str(found)), f"{name} {op._schema.arguments[i].name}: {found}"
                else:
                    results_agree(found, expected)
