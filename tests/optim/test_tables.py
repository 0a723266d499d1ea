"""The raw ops below the optimizers: a table or a set of states that does not fit is an error, never a crash."""

import pytest
import torch

raw = torch.ops.warpsmith
# Rows of csrc/kernels/optim/optim_ops.h, and storages of optim.h.
ADAMW, SGD, RMSPROP, LAMB = 0, 2, 5, 6
FLOAT32, FLOAT32_8BIT = 0, 10
COUNTER = {ADAMW: 0b1000, SGD: 0b10, RMSPROP: 0b1000, LAMB: 0b100}


def make_table(optimizer, storage, has, count=2, elems=5):
    """A table of tensors with the arrays of `has`, which are returned beside it."""
    params = [torch.ones(elems) for _ in range(count)]
    arrays = []
    for p in params:
        arrays += [torch.zeros_like(p) for _ in range(bin(has & (COUNTER[optimizer] - 1)).count("1"))]
        arrays += [torch.zeros(())] if has & COUNTER[optimizer] else []
    given = (params, arrays, [has] * count, [0] * count, [])
    table, facts = raw.optim_table.default(optimizer, storage, *given)
    return table, facts, (params, arrays)


def step(table, facts, pointers):
    constants = torch.zeros(1, 4 + 2, dtype=torch.float64)  # SGD's
    raw.optim_step.default(table, facts, pointers, [torch.tensor(0.5)], constants, None, None)


def test_a_table_is_taken_only_with_its_own_facts():
    table, facts, (params, _) = make_table(SGD, FLOAT32, 0)
    other = make_table(SGD, FLOAT32, 0, count=3)
    grads = [torch.ones(5), torch.ones(5)]
    pointers = torch.tensor([g.data_ptr() for g in grads])
    for wrong in (other[1], facts[:-1], [*facts, 0], []):
        with pytest.raises(
            ValueError, match="^optim_step: (table: expected that of the facts|facts: expected 6 numbers)"
        ):
            step(table, wrong, pointers)
    for wrong in (other[0], table.clone(), table[:10], torch.zeros(1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="^optim_step: table: expected that of the facts, of 22 words"):
            step(wrong, facts, pointers)
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"^optim_step: pointers: expected 2 addresses, got {count}"):
            step(table, facts, torch.zeros(count, dtype=torch.int64))
    assert all(torch.equal(p, torch.ones(5)) for p in params)
    step(table, facts, pointers)
    assert all(torch.equal(p, torch.full((5,), 0.5)) for p in params)


def test_hyperparameters_in_memory_replace_those_in_the_call():
    """The kernel reads them, so that a graph follows what is written there; CPU memory is the CPU's device."""
    results = []
    for way in ("call", "memory"):
        table, facts, (params, _) = make_table(SGD, FLOAT32, 0, count=1)
        grad = torch.ones(5)
        pointers = torch.tensor([grad.data_ptr()])
        right = torch.tensor([[0.0, 0.0, 0.25, 0.0, 0.0, 0.0]], dtype=torch.float64)  # weight decay
        given, memory = (right, None) if way == "call" else (torch.zeros_like(right), right)
        raw.optim_step.default(table, facts, pointers, [torch.tensor(0.5)], given, None, None, memory)
        results.append(params[0])
        for wrong, text in (
            (right.float(), "device_constants: expected float64"),
            (right[:, :5], "device_constants: expected shape"),
            (torch.zeros(6, 2, dtype=torch.float64)[:, :1].t(), "device_constants: expected a contiguous tensor"),
        ):
            with pytest.raises(ValueError, match=f"^optim_step: {text}"):
                raw.optim_step.default(table, facts, pointers, [torch.tensor(0.5)], right, None, None, wrong)
    assert torch.equal(results[0], torch.full((5,), 0.375)) and torch.equal(*results)


@pytest.mark.parametrize(
    ("optimizer", "storage", "has", "expected"),
    [
        (RMSPROP, FLOAT32, 0b110, "a set of states of the optimizer"),
        (RMSPROP, FLOAT32, 0b000, "a set of states of the optimizer"),
        (ADAMW, FLOAT32, 0b1101, "a set of states of the optimizer"),
        (ADAMW, FLOAT32, 0b1001, "a set of states of the optimizer"),
        (ADAMW, FLOAT32, 0b0011, "a step counter"),
        (RMSPROP, FLOAT32_8BIT, 0b101, "states that may be 8-bit codes"),
        (ADAMW, FLOAT32_8BIT, 0b1111, "states that may be 8-bit codes"),
        (SGD, FLOAT32, 0b1001, "bits of states, counter and scales"),
    ],
)
def test_sets_of_states_that_no_kernel_has(optimizer, storage, has, expected):
    with pytest.raises(ValueError, match=rf"^optim_table: has\[0\]: expected {expected}, got "):
        make_table(optimizer, storage, has)


def test_more_words_than_one_launch_uploads():
    host, words = torch.arange(5000) ** 2, torch.full((5001,), -1)
    raw.optim_pointers.default(words[:5000], host)
    assert torch.equal(words[:5000], host) and words[5000] == -1


def test_what_a_step_does_beside_its_own_is_checked():
    table, facts, _ = make_table(SGD, FLOAT32, 0)
    pointers, constants = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 4 + 2, dtype=torch.float64)
    given = (facts, pointers, [torch.tensor(0.5)], constants, None, None, None, False)
    for beside, weight, text in (
        (torch.zeros(5, dtype=torch.int64), 0.0, "extras: expected 6 words, got 5"),
        (torch.zeros(6), 0.0, "extras: expected int64, got float32"),
        (None, 1.5, "ema_weight: expected a number from 0 to 1, got 1.5"),
        (None, float("nan"), "ema_weight: expected a number from 0 to 1, got nan"),
    ):
        with pytest.raises(ValueError, match=f"^optim_step: {text}"):
            raw.optim_step.default(table, *given, beside, weight, False)
    table, facts, _ = make_table(LAMB, FLOAT32, 0b111)
    constants = torch.zeros(1, 6 + 2, dtype=torch.float64)
    given = (facts, pointers, [torch.tensor(0.5)], constants, None, None, None, False)
    with pytest.raises(ValueError, match="^optim_step: zero_grads: expected none with 8-bit states or a layerwise"):
        raw.optim_step.default(table, *given, None, 0.0, True)
