import json
import time
from dataclasses import replace

import pytest
import torch
from toy_op import SPEC
from warpsmith.testing import (
    Case,
    GpuTimer,
    Row,
    copy_yardstick_ms,
    environment,
    format_table,
    host_time_us,
    time_cpu,
    time_op,
    write_json,
)
from warpsmith.testing.gpu_timer import Timing, copy_call
from warpsmith.testing.rows import make_rows


def test_cpu_times_are_interleaved_medians_and_failures_stay():
    order = []
    times = time_cpu({"a": lambda: (order.append("a"), time.sleep(0.002)), "b": lambda: order.append("b")}, rounds=9)
    assert times["a"].ms > 1.9
    assert times["a"].samples == times["b"].samples == 9
    timed = order[4:]  # after two calls each to warm up
    assert all(set(timed[i : i + 2]) == {"a", "b"} for i in range(0, 18, 2))
    assert len({tuple(timed[i : i + 2]) for i in range(0, 18, 2)}) == 2, "both orders occur"
    assert time_cpu({"c": lambda: 1 / 0})["c"] == Timing(None, error="ZeroDivisionError: division by zero")


def test_without_rounds_each_is_called_once_and_none_timed():
    calls = []
    times = time_cpu({"a": lambda: calls.append("a"), "b": lambda: 1 / 0}, rounds=0)
    assert calls == ["a"]
    assert times["a"] == Timing(None, error="not timed")
    assert times["b"].error == "ZeroDivisionError: division by zero"
    spec = replace(SPEC, floor_bytes=lambda case: {"forward": 1000, "backward": 2000})
    assert {r.note for r in time_op(spec, Case((64, 33)), rounds=0)} == {"not timed"}


def test_host_time_is_per_call():
    assert 900 < host_time_us({"sleep": lambda: time.sleep(0.001)}, calls=5, rounds=3)["sleep"].ms < 20_000


def test_rows_state_rates_and_ratios():
    timings = {
        "warpsmith": Timing(2.0, 1.9, 2.1, 5),
        "torch": Timing(3.0, 3.0, 3.0, 5),
        "warpsmith, in place": Timing(1.5, 1.5, 1.5, 5),
        "copy_": Timing(1.0, 1.0, 1.0, 5),
        "absent": Timing(None, error="ImportError: no"),
    }
    ours, torch_row, in_place, _, absent = make_rows("op", "2x2", "fp32", "forward", timings, floor_bytes=4_000_000_000)
    assert (ours.tb_s, ours.of_yardstick, ours.of_best_rival) == (2.0, 0.5, 1.5)
    assert ours.spread == pytest.approx(0.1)
    assert torch_row.of_best_rival is None and in_place.of_best_rival is None
    assert absent.value is None
    table = format_table([ours, torch_row, absent])
    assert "2.000  0.500    1.500" in table
    assert "ImportError: no" in table


def test_json_has_rows_and_the_environment(tmp_path):
    write_json(tmp_path / "deep" / "rows.json", [Row("op", "1", "fp32", "forward", "torch", 1.0)], rivals={"x": "1.0"})
    read = json.loads((tmp_path / "deep" / "rows.json").read_text())
    assert read["rows"][0]["value"] == 1.0
    assert read["environment"]["torch"] == torch.__version__ == environment()["torch"]
    assert read["environment"]["rivals"] == {"x": "1.0"}
    assert {"date", "command", "cpu", "cuda"} <= read["environment"].keys()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["rows.json"]


def test_a_declared_op_is_timed_beside_torch_and_rivals():
    spec = replace(SPEC, floor_bytes=lambda case: {"forward": 1000, "backward": 2000})
    rows = time_op(spec, Case((64, 33)), rivals={"slow": slow}, rounds=3)
    assert [(r.direction, r.contender) for r in rows] == [
        (direction, name) for direction in ("forward", "backward") for name in ("warpsmith", "torch", "slow")
    ]
    assert rows[2].value > 20
    assert all(r.value and r.shape == "64x33" and r.tb_s for r in rows)
    with pytest.raises(ValueError, match="scale: floor_bytes: expected a function"):
        time_op(SPEC, Case((64, 33)))


def slow(x, scale):
    time.sleep(0.02)
    return x * scale


def test_without_a_gpu_the_timer_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="expected a CUDA device"):
        GpuTimer().time({})


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_times_scale_with_the_work_and_hide_the_host():
    timer = GpuTimer(rounds=9)
    small, large = copy_yardstick_ms(2**28, timer), copy_yardstick_ms(2**31, timer)
    assert 4 < large / small < 16
    x = torch.zeros(8, device="cuda")

    def slow_host():
        time.sleep(0.0002)
        x.add_(1)

    times = timer.time({"quick": lambda: x.add_(1), "slow host": slow_host, "fails": lambda: 1 / 0})
    assert times["slow host"].ms < 0.1, "the spin kernel hides 0.2 ms of host time"
    assert times["fails"].error.startswith("ZeroDivisionError")


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_inputs_are_cold():
    source = torch.randn(2**21, device="cuda")  # 8 MiB: a warm copy would come from L2
    target = torch.empty_like(source)
    cold = GpuTimer(rounds=15).time({"copy": lambda: target.copy_(source)})["copy"].ms
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    target.copy_(source)
    start.record()
    target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    assert cold > 1.2 * start.elapsed_time(end)
    assert copy_call(100)() is not None
