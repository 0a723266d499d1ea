"""What a checkpoint holds comes back: trees as JSON, tensors as safetensors, nested states, also from old files."""

import enum
import hashlib
import io
import json
import math
import random
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested_states import KEYS, Stateful, differences, loose_ties, random_state
from warpsmith.train import Checkpointer, safetensors_file
from warpsmith.train.safetensors_file import DTYPES, Hashed
from warpsmith.train.tree import Packer, unpack

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
TREE_KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TREE_KEYS, inner, max_size=4),
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


def through_the_formats(state):
    """The state as JSON and safetensors, and back."""
    packer, raw = Packer(lambda name, t: torch.empty(t.shape, dtype=t.dtype).copy_(t)), io.BytesIO()
    text = json.dumps(packer.pack(state, ""), allow_nan=False)
    safetensors_file.write(Hashed(raw), packer.tensors)
    raw.seek(0)
    return unpack(json.loads(text), safetensors_file.read(Hashed(raw), len(raw.getvalue())))


@settings(deadline=None, max_examples=2000)
@given(seed=st.integers(0, 2**32), leaves=st.integers(1, 24))
def test_a_nested_state_comes_back(seed, leaves):
    state = random_state(random.Random(seed), leaves)
    loaded = through_the_formats(state)
    assert differences(state, loaded) == []
    assert loose_ties(state, loaded) == []


def test_no_two_paths_of_keys_share_a_tensor():
    """Every key below every key, and each beside the dotted form of the two."""
    state = {a: {b: torch.tensor([i, j]) for j, b in enumerate(KEYS)} for i, a in enumerate(dict.fromkeys(KEYS))}
    state |= {f"{a}.{b}": torch.tensor([-i, j]) for i, a in enumerate(KEYS) for j, b in enumerate(KEYS)}
    assert differences(state, through_the_formats(state)) == []


def test_states_of_modules_and_extra_come_back(tmp_path):
    rng = random.Random(0)
    states = [random_state(rng, 12) for _ in range(100)]
    models = torch.nn.ModuleList(Stateful(rng, []) for _ in range(20))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model=models, extra=states)
    rng = random.Random(0)
    [random_state(rng, 12) for _ in range(100)]
    others = torch.nn.ModuleList(Stateful(rng, []) for _ in range(20))
    for module in list(others.modules())[1:]:
        module.held = [None]
    with torch.no_grad():
        [buffer.zero_() for buffer in others.buffers()]
    loader = Checkpointer(tmp_path)
    assert loader.load(model=others) == 1
    assert differences(dict(models.state_dict()), dict(others.state_dict())) == []
    assert differences(states, loader.extra) == [] and loose_ties(states, loader.extra) == []


def test_a_save_is_not_bound_to_the_one_before(tmp_path):
    """One checkpointer, and values of one name whose dtype, shape, strides or kind are others at each save."""
    kinds = [(torch.ones(2, 3) * 1.2345678).to(dtype) for dtype in DTYPES.values()]
    kinds += [torch.ones(3, 2).t() * 1.2345678, torch.ones(2, 1).expand(2, 3), torch.ones(6), torch.ones(()), 5, None]
    with Checkpointer(tmp_path) as checkpoints:
        for step in range(3):
            state = {str(i): kinds[(i + step) % len(kinds)] for i in range(len(kinds))}
            checkpoints.save(step, extra=state)
            checkpoints.load()
            assert differences(state, checkpoints.extra) == [], step


def test_extra_states_of_another_model_change_nothing(tmp_path):
    """A module that has an extra state beside one that has none, both ways: nothing is loaded."""
    with_state, without = Stateful(random.Random(1), [], depth=2), torch.nn.Module()
    for name, buffer in with_state.named_buffers():
        without.register_buffer(name, buffer.clone())
    for saved, own in ((with_state, without), (without, with_state)):
        folder = tmp_path / type(saved).__name__
        with Checkpointer(folder) as checkpoints:
            checkpoints.save(1, model=saved)
        before = [buffer.zero_() for buffer in own.buffers()]
        with pytest.raises(ValueError, match="model: expected the one of step-00000001, got another: _extra_state: "):
            Checkpointer(folder).load(model=own)
        assert all((buffer == 0).all() for buffer in before)


class Text(str, enum.Enum):
    A = "a"


class ByIdentity(int):
    __hash__, __eq__ = object.__hash__, object.__eq__


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({ByIdentity(1): 0, ByIdentity(1): 1}, "extra: : expected keys that differ as plain values, got"),
        (
            {"x": {torch.ones(1): 0}},
            "extra: x.key: expected a key that can be looked up when it is loaded, got a tensor",
        ),
        ({"x": {(1, torch.ones(1)): 0}}, "extra: x.key.1: expected a key that can be looked up"),
        ({"x": {frozenset(): 0}}, "extra: x.key: expected tensors, numbers, .* got builtins.frozenset"),
        (torch.ones(1, device="meta"), "extra: : expected a dense tensor of a dtype .*, got torch.float32, meta"),
        (
            torch.ones(1).to_sparse(),
            "extra: : expected a dense tensor of a dtype .*, got torch.float32, torch.sparse_coo",
        ),
    ],
)
def test_what_a_file_cannot_hold_is_refused(tmp_path, extra, words):
    with pytest.raises(TypeError, match=f"^Checkpointer.save: {words}"):
        Checkpointer(tmp_path).save(1, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_a_class_comes_back_plain():
    assert differences({"a": 1}, through_the_formats({Text.A: 1})) == []


OLD_STATE = """{
 "step": 7, "world_size": 1, "torch": "2.11.0",
 "parts": {
  "model": {"weight": {"$tensor": "weight"}, "bias": {"$tensor": "bias"}},
  "optimizer": {
   "state": {"$dict": [
    [0, {"momentum_buffer": {"$tensor": "state.0.momentum_buffer"}}],
    [1, {"momentum_buffer": {"$tensor": "state.1.momentum_buffer"}}]]},
   "param_groups": [{
    "lr": 0.5, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": false, "maximize": false,
    "foreach": null, "differentiable": false, "fused": null, "params": [0, 1]}]},
  "extra": {"$dict": [
   [1, {"$tensor": "1"}],
   ["$tensor", {"$tuple": [{"$float": "inf"}, {"$bytes": "AAE="}]}],
   [{"$tuple": [1, "b"]}, {"picture": {"$tensor": "(1, 'b').picture", "order": [0, 2, 3, 1]}}],
   ["tied", {"$tensor": "1"}],
   ["count", {"$counter": [["a", 2]]}]]}
 }
}"""


def test_a_checkpoint_of_the_first_version_loads(tmp_path):
    """Its files in the form in which version 1 of the format wrote them, byte by byte but for the layout of JSON."""
    picture = torch.randn(2, 3, 4, 5)
    tensors = {
        "model": {"weight": torch.randn(2, 3), "bias": torch.randn(2)},
        "optimizer": {"state.0.momentum_buffer": torch.randn(2, 3), "state.1.momentum_buffer": torch.randn(2)},
        "extra": {"1": torch.arange(3), "(1, 'b').picture": picture},
    }
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    for name, part in tensors.items():
        header, data = {}, b""
        for key, tensor in sorted(part.items(), key=lambda item: (-item[1].element_size(), item[0])):
            dtype = {torch.int64: "I64", torch.float32: "F32"}[tensor.dtype]
            end = len(data) + tensor.nbytes
            header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
            data += bytes(tensor.flatten().view(torch.uint8).tolist())
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (folder / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "state.json").write_text(OLD_STATE)
    (folder / "ranks.json").write_text("[]")
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    entries = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    text = json.dumps({"format": 1, "step": 7, "files": entries}, indent=1).encode()
    (folder / "manifest.json").write_bytes(text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n")

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.load(model=model, optimizer=optimizer) == 7 and checkpoints.refused == []
    assert differences(tensors["model"], dict(model.state_dict())) == []
    buffers = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    assert differences(list(tensors["optimizer"].values()), buffers) == []
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["momentum"] == 0.9
    extra = checkpoints.extra
    assert list(extra) == [1, "$tensor", (1, "b"), "tied", "count"]
    assert extra["tied"] is extra[1] and torch.equal(extra[1], torch.arange(3)) and extra["count"] == {"a": 2}
    assert extra["$tensor"] == (float("inf"), b"\x00\x01")
    loaded = extra[(1, "b")]["picture"]
    assert torch.equal(loaded, picture) and loaded.is_contiguous(memory_format=torch.channels_last)
