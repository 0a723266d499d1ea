"""The C++ side: the examples build and learn; AdamW writes what Python writes."""

import os
import re
from pathlib import Path

import pytest
import torch
import warpsmith

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def examples(build):
    """The folder of the built programs of examples/cpp."""
    return build(ROOT / "examples/cpp")


@pytest.mark.parametrize(
    ("program", "expected"),
    [("train", ["step 50", "the loss fell from"]), ("scaled_step", ["scale 1024", "scale 2048", "1 step was skipped"])],
)
def test_the_examples_learn(examples, run, program, expected):
    # The programs bring their libraries by themselves.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    output = run(examples / program, env=environment)
    assert all(text in output for text in expected), output


def test_the_headers_are_the_source_trees(examples):
    """By what the compiler has written down: an installed copy would hide a change of the tree's."""
    listed = " ".join(path.read_text() for path in examples.rglob("*.o.d")).replace("\\\n", " ").split()
    # Where ccache compiles, the names are relative to the build folder.
    ours = {(examples / name).resolve() for name in listed if re.search(r"/warpsmith/(detail/)?\w+\.h$", name)}
    assert {path.name for path in ours} >= {"op.h", "norm.h", "optim.h"}
    assert all(path.is_relative_to(ROOT / "csrc") for path in ours), ours


def adamw_state(count=3):
    g = torch.Generator().manual_seed(2)
    lists = [[torch.randn(7 + i, 3, generator=g) for i in range(count)] for _ in range(4)]
    lists[3] = [v.square() for v in lists[3]]
    return [*lists, [], [torch.tensor(4.0) for _ in range(count)]]


def clone(state):
    return [[t.clone() for t in tensors] for tensors in state]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("lr_tensor", [None, torch.tensor(0.03)])
def test_adamw_writes_what_python_writes(cpp, maximize, lr_tensor):
    state = adamw_state()
    ours, expected = clone(state), clone(state)
    scale = torch.tensor(2.0)
    cpp.adamw(*ours, 0.01, 0.1, maximize, scale, None, lr_tensor)
    lr = 0.01 if lr_tensor is None else lr_tensor
    warpsmith.adamw(*expected, lr=lr, weight_decay=0.1, maximize=maximize, grad_scale=scale)
    for a, b in zip(ours, expected, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(ours[0][0], state[0][0])


def test_an_undefined_tensor_is_an_absent_one_for_adamw(cpp, undefined):
    ours, expected = clone(adamw_state()), clone(adamw_state())
    cpp.adamw(*ours, 0.01, 0.1, False, None, None, None)
    warpsmith.adamw(*expected, lr=0.01, weight_decay=0.1)
    assert all(torch.equal(s, t) for s, t in zip(ours[0], expected[0], strict=True))


def test_adamw_skips_a_step_with_overflow(cpp):
    state = adamw_state()
    ours = clone(state)
    cpp.adamw(*ours, 0.01, 0.1, False, None, torch.tensor(1.0), None)
    for a, b in zip(ours, state, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_adamw_writes_to_parameters_that_require_gradients(cpp):
    state = adamw_state()
    leaves = [p.requires_grad_() for p in state[0]]
    loss = sum(p.square().sum() for p in leaves)
    cpp.adamw(*state, 0.01, 0.1, False, None, None, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_input_of_adamw_is_named_and_changes_nothing(cpp):
    state = adamw_state()
    ours = clone(state)
    with pytest.raises(ValueError, match=r"^adamw: lr: expected a number >= 0, got -0\.1"):
        cpp.adamw(*ours, -0.1, 0.0, False, None, None, None)
    ours[1][2] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"^adamw: grads\[2\]: expected shape \(9, 3\), got \(2\)$"):
        cpp.adamw(*ours, 0.1, 0.0, False, None, None, None)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], state[0], strict=True))
