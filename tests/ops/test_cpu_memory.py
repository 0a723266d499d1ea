"""What an op allocates on the CPU, forward and backward: rows at one stride are read where they lie, and any other
layout costs at most one copy of the tensor that has it."""

import pytest
import torch
import warpsmith
from torch.profiler import ProfilerActivity, profile
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.run import run

from tests.ops.public_calls import arguments_of
from tests.ops.raw_calls import Recorder, copied
from tests.ops.test_documented_bytes import FAMILY, specs

COPIED = ("every_second", "transposed")


def usage(name, call):
    """(allocations, peak bytes) of a call of a raw op."""
    op, arguments = getattr(torch.ops.warpsmith, name).default, copied(call)
    op(*copied(call))  # what a first call leaves behind is no part of it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = op(*arguments)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    count = now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        count, now = count + (event.nbytes() > 0), now + event.nbytes()
        peak = max(peak, now)
    made = [result] if isinstance(result, torch.Tensor) else result or ()
    assert peak >= sum(t.nbytes for t in made if t is not None), f"{name}: {peak} bytes seen"
    return count, peak


def calls(spec, case):
    with Recorder() as recorder:
        run(spec.op, spec, case, make_inputs(spec, case))
    return {op: made[0] for op, made in recorder.calls.items()}


@pytest.mark.parametrize("name", sorted(specs().keys() & FAMILY.keys()))
def test_strided_tensors_cost_a_copy_at_most(name, monkeypatch):
    monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)  # `linear` hands plain layers to torch
    spec = specs()[name]
    base = spec.base_case()
    plain = {op: usage(op, call) for op, call in calls(spec, base).items()}
    for layout in ("misaligned", "padded_rows", *COPIED):
        for op, call in calls(spec, base.but(layout=layout)).items():
            count, peak = usage(op, call)
            given = [t for t in call if isinstance(t, torch.Tensor) and t.dtype != torch.int64 and t.dim() > 0]
            largest = max(t.numel() for t in given)  # statistics, one number a row, are small beside it
            rows_lie = layout not in COPIED and FAMILY[name] != "image"
            strided = [t for t in given if not t.is_contiguous() and (not rows_lie or 8 * t.numel() < largest)]
            again = FAMILY[name] in ("linear", "linear_loss")  # each of torch's products copies its operands
            most = plain[op][0] + (1 + again) * len(strided), plain[op][1] + sum(t.nbytes for t in strided)
            assert count <= most[0] and peak <= most[1], f"{op} {layout}: {count, peak}, expected at most {most}"


def otherwise_strided(t):
    """The same tensor with other strides of its dimensions of one element."""
    if not isinstance(t, torch.Tensor) or t.dtype == torch.int64:
        return t
    return t.as_strided(
        t.shape, [t.numel() + 3 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    )


@pytest.mark.parametrize("name", sorted(specs().keys() & FAMILY.keys()))
def test_the_stride_of_one_element_costs_nothing(name, monkeypatch):
    monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)
    spec = specs()[name]
    base = spec.base_case()
    options = {key: (1,) if key == "lengths" else value for key, value in base.options.items()}
    for op, call in calls(spec, base.but(shape=(1, *base.shape[1:]), options=options)).items():
        assert usage(op, [otherwise_strided(t) for t in call]) == usage(op, call), op


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_a_table_of_many_positions_is_read_where_it_lies(name):
    """Halves of one table beside two of their own: a copy would cost more than the few tokens of a call."""
    given, table = arguments_of(name), torch.randn(4096, 2, 4, dtype=torch.float64)
    used = []
    for cos, sin in (table.unbind(1), table.transpose(0, 1).contiguous()):
        with Recorder() as recorder:
            getattr(warpsmith, name)(**given | {"cos": cos, "sin": sin})
        used.append([usage(op, made[0]) for op, made in recorder.calls.items()])
    assert used[0] == used[1]
