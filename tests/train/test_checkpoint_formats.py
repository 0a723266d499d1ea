"""The two formats beneath checkpoints: trees as JSON, tensors as safetensors."""

import io
import json
import math
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from warpsmith.train import safetensors_file
from warpsmith.train.safetensors_file import DTYPES, Hashed
from warpsmith.train.tree import Packer, unpack

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tuple", "$tensor", "$dict", "a"]), inner, max_size=3),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=20,
)


def equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return equal(list(a.items()), list(b.items()))
    return a == b


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_a_tree_comes_back_in_value_type_and_order(tree):
    text = json.dumps(Packer(lambda name, t: t).pack(tree, ""), allow_nan=False)
    assert equal(unpack(json.loads(text), {}), tree)


def test_an_ordered_dict_comes_back_as_a_dict():
    assert unpack(Packer(lambda name, t: t).pack(OrderedDict(a=1), ""), {}) == {"a": 1}


def all_dtypes():
    tensors = {name: (torch.randn(3, 5) * 8).to(dtype) for name, dtype in DTYPES.items() if name[0] != "U"}
    tensors |= {name: torch.arange(7).to(dtype) for name, dtype in DTYPES.items() if name[0] == "U"}
    return tensors | {"scalar": torch.tensor(2.0), "none": torch.zeros(0, 3), 'odd "name"\n': torch.ones(1)}


def as_numbers(t):
    return t.contiguous().view(-1).view(torch.uint8) if t.numel() and t.dim() else t.reshape(-1).view(torch.uint8)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert torch.equal(as_numbers(a[name]), as_numbers(b[name])), name


def written(tensors):
    raw = io.BytesIO()
    file = Hashed(raw)
    safetensors_file.write(file, tensors)
    assert file.bytes == len(raw.getvalue())
    return raw.getvalue()


def test_safetensors_reads_what_we_write_and_we_what_it_writes():
    library = pytest.importorskip("safetensors.torch")
    tensors = all_dtypes()
    assert_same(library.load(written(tensors)), tensors)
    content = library.save(tensors, metadata={"format": "pt"})
    assert_same(safetensors_file.read(Hashed(io.BytesIO(content)), len(content)), tensors)
    assert_same(safetensors_file.read(Hashed(io.BytesIO(written({}))), len(written({}))), {})


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_file_is_an_error_and_asks_for_little_memory(data):
    content = bytearray(written({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int8)}))
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = safetensors_file.read(Hashed(io.BytesIO(bytes(content))), len(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    assert sum(t.nbytes for t in tensors.values()) <= len(content)


@pytest.mark.parametrize("length", [0, 7, 8, 20, -1])
def test_a_file_that_ends_early_is_an_error(length):
    content = written({"a": torch.arange(6.0)})
    with pytest.raises(ValueError, match="ends after|header has"):
        safetensors_file.read(Hashed(io.BytesIO(content[:length])), len(content))
