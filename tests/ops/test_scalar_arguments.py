"""Tensors, numbers, flags and words of public functions: every value of a wrong kind is refused in the one form, and
nothing is written. The parameters come from the signatures, so that a new one is tested too."""

import copy
import inspect
import math
import re

import numpy as np
import pytest
import torch
import warpsmith
from torch.utils._pytree import tree_map_only
from warpsmith.testing import bitwise_equal

from tests.ops.public_calls import NAMES, NOT_DIFFERENTIABLE, arguments_of

TENSORS = {"half": torch.tensor(0.5), "three": torch.ones(3), "learned": torch.tensor(0.5, requires_grad=True)}
NO_SCALARS = {"a str": "False", "a list": [1], "a dict": {}, "complex": 1j, "bytes": b"1", "an array": np.ones(3)}
NO_INT64 = {"2**2000": 2**2000, "2**20000": 2**20000, "-2**63-1": -(2**63) - 1, "2**63": 2**63}
NO_DOUBLE = {"2**2000": 2**2000, "-2**2000": -(2**2000), "2**20000": 2**20000}
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e400": 1e400}
TRUE = {"True": True, "numpy's True": np.True_, "a tensor's True": torch.tensor(True)}
WRONG = {
    "bool": {**TENSORS, **NO_SCALARS, **NO_INT64, "1": 1, "0": 0, "1.0": 1.0, "nan": math.nan, "None": None},
    "int": {**TENSORS, **NO_SCALARS, **NO_INT64, **TRUE, **NOT_FINITE, "1.0": 1.0},
    "float": {**TENSORS, **NO_SCALARS, **NO_DOUBLE, **TRUE, **NOT_FINITE},
    "str": {**TENSORS, **NO_SCALARS, **NO_INT64, **TRUE, "1.0": 1.0, "None": None, "no word": "sbhd"},
    "int | Sequence[int]": {
        **TENSORS,
        **TRUE,
        **NOT_FINITE,
        **NO_INT64,
        "a str": "ab",
        "three": (1, 2, 3),
        "none": (),
        "a float": (1.0, 1),
        "-1": -1,
        "complex": 1j,
        "a dict": {},
    },
    "Sequence[int]": {
        "a str": "ab",
        "long": (2**20000, "x"),
        "one number": 3,
        "three": (1, 2, 3),
        "complex": 1j,
        "a dict": {},
        **{f"({name}, 0)": (value, 0) for name, value in {**TENSORS, **NO_INT64, **TRUE, **NOT_FINITE}.items()},
        **{f"(0, {name})": (0, value) for name, value in NO_INT64.items()},
    },
    "Sequence[float]": {
        "a str": "abc",
        "one number": 3.0,
        "two": (1.0, 2.0),
        "a dict": {},
        **{f"({n}, 0, 0)": (v, 0.0, 0.0) for n, v in {**TENSORS, **NO_DOUBLE, **TRUE, **NOT_FINITE}.items()},
    },
    "Tensor": {**NO_SCALARS, "True": True, "1": 1, "0.5": 0.5, "a tuple": (4,), "None": None},
    "Fp8Tensor": {**TENSORS, **NO_SCALARS, **TRUE, "1": 1, "a tuple": (4,), "None": None},
    "Fp8State": {**TENSORS, **NO_SCALARS, **TRUE, "1": 1},
    "torch.dtype": {**TENSORS, **NO_SCALARS, **TRUE, "1": 1, "int64": torch.int64},
}
# By parameter: numbers of the right kind.
OUT_OF_RANGE = {
    "beta1": (1.0,),
    "beta2": (-0.1,),
    "dropout_p": (1.0, -0.1),
    "eps": (-1.0,),
    "groups": (0, 4),
    "label_smoothing": (-0.1, 1.5),
    "lr": (-1.0,),
    "max_chunk_bytes": (0,),
    "max_seqlen_k": (-1,),
    "max_seqlen_q": (-1,),
    "num_groups": (0, 5),
    "p": (-0.1, 1.5),
    "position_offset": (-1, 7, 2**63 - 2),
    "softcap": (-1.0,),
    "std": ((1.0, 0.0, 1.0),),
    "stride": ((1, 0),),
    "temperature": (0.0, -1.0),
    "window_size": ((-2, 0),),
    "z_loss": (-1.0,),
}
WRONG["str | int | Sequence[int]"] = WRONG["int | Sequence[int]"]
# Tensors that a parameter takes beside numbers, and "None" for one that need not be given.
BESIDE = re.compile(r" \| (Tensor|None|Fp8Recipe)")


def scalars_of(function):
    """(parameter, kind, its other types) of a signature."""
    for name, parameter in inspect.signature(function).parameters.items():
        kind = BESIDE.sub("", str(parameter.annotation))
        if kind in WRONG:
            yield name, kind, BESIDE.findall(str(parameter.annotation))


CASES = [
    pytest.param(name, parameter, kind, others, id=f"{name}-{parameter}")
    for name in NAMES
    for parameter, kind, others in scalars_of(getattr(warpsmith, name))
]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.is_meta or bitwise_equal(a.detach(), b.detach())
    return all(map(same, a, b)) if isinstance(a, list) else True


OF_TENSORS = ("Tensor", "Sequence[Tensor]", "tuple[Tensor, Tensor]")


def test_every_scalar_of_a_signature_is_tested():
    """A parameter is a tensor, a sequence of them, or of a kind above."""
    for name in NAMES:
        tested = {parameter for parameter, _, _ in scalars_of(getattr(warpsmith, name))}
        for parameter in inspect.signature(getattr(warpsmith, name)).parameters.values():
            kind = BESIDE.sub("", str(parameter.annotation))
            assert parameter.name in tested or kind in OF_TENSORS, (name, parameter)
    assert len(CASES) > 60


def refused(name, parameter, value, how):
    """The message of a call with this value, which must change no argument and draw no random number."""
    arguments = arguments_of(name)
    if how == "learns" and name not in NOT_DIFFERENTIABLE:
        first = next(iter(arguments))
        arguments[first] = arguments[first].requires_grad_() * 1
    if how == "meta":
        arguments = tree_map_only(torch.Tensor, lambda t: t.to("meta"), arguments)
    copies = copy.deepcopy({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})
    state = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError)) as raised:
        getattr(warpsmith, name)(**arguments | {parameter: value})
    assert all(same(arguments[k], copies[k]) for k in copies)
    assert torch.equal(torch.get_rng_state(), state)
    return str(raised.value)


@pytest.mark.parametrize("how", ["", "learns", "meta"])
@pytest.mark.parametrize(("name", "parameter", "kind", "others"), CASES)
def test_a_value_of_a_wrong_kind_or_out_of_range_is_refused(name, parameter, kind, others, how):
    if how == "meta" and name == "adamw":
        pytest.skip("its fake looks at no numbers")
    out_of_range = () if how == "meta" else OUT_OF_RANGE.get(parameter, ())  # of values some fakes know nothing
    shown = {"window_size": "window_(size|left|right)"}.get(parameter, parameter)
    for what, value in (WRONG[kind] | {str(v): v for v in out_of_range}).items():
        if ("None" in others and value is None) or ("Tensor" in others and isinstance(value, torch.Tensor)):
            continue
        if value is None and how == "meta":  # in some sessions: "Object of type 'Tensor' is not ...", cause not known
            continue
        message = refused(name, parameter, value, how)
        assert re.fullmatch(f"{name}: {shown}: expected .*, got .*", message), (what, message)
        assert len(message) < 300


RIGHT = {
    "bool": (np.True_, np.False_),
    "int": (np.int64(3), np.int32(3), np.array(3), torch.tensor(3)),
    "float": (1, np.float32(0.5), np.float64(0.5), np.int64(1), np.array(0.5)),
}
OTHER_WORDS = {"kv_heads", "batch_invariant", "groups"}  # not beside k; on Hopper cards alone; of the channels


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_torch_takes_are_taken(name):
    for parameter, kind, _ in scalars_of(getattr(warpsmith, name)):
        for value in RIGHT.get(kind, ()) if parameter not in OTHER_WORDS else ():
            plain = value if isinstance(value, int) else value.item()
            if parameter.startswith("max_seqlen"):
                plain, value = plain + 4, value + 4
            if parameter == "num_groups":  # which divides the channels
                plain, value = plain + 1, value + 1
            if isinstance(value, torch.Tensor) and parameter != "ignore_index":
                continue  # what is looked at before the op is a Python number
            if (parameter in ("dropout_p", "beta1", "beta2") and plain == 1) or parameter == "position_offset":
                continue
            torch.manual_seed(0)
            found = getattr(warpsmith, name)(**arguments_of(name) | {parameter: value})
            torch.manual_seed(0)
            expected = getattr(warpsmith, name)(**arguments_of(name) | {parameter: plain})
            pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True)
            assert all(same(a, b) for a, b in pairs), (parameter, value)
