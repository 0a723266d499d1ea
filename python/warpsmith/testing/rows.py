"""Benchmark rows: what one figure must say of itself, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from warpsmith.testing.gpu_timer import Timing


@dataclass(frozen=True)
class Row:
    """One contender's time in one cell of a benchmark.

    Attributes:
        op, shape, dtype, direction: the cell; direction is "forward", "backward", "step" or "host".
        contender: whose time.
        value: the median, in ``unit``; None if it failed.
        unit: "ms" or "us".
        spread: (90th - 10th percentile) / median.
        tb_s: TB/s on the op's floor bytes, where it has them.
        of_yardstick: the copy yardstick's time over this one's.
        of_best_rival: the best other contender's time over this one's: above 1 is faster than every rival. Only on
            our own rows.
        note: the error, if it failed.
        device: "cuda" or "cpu", where the figure's maker says it.
    """

    op: str
    shape: str
    dtype: str
    direction: str
    contender: str
    value: float | None
    unit: str = "ms"
    spread: float = 0.0
    tb_s: float | None = None
    of_yardstick: float | None = None
    of_best_rival: float | None = None
    note: str = ""
    device: str = ""


OURS = "warpsmith"
YARDSTICK = "copy_"


def make_rows(
    op: str,
    shape: str,
    dtype: str,
    direction: str,
    timings: dict[str, Timing],
    *,
    floor_bytes: int | None = None,
    unit: str = "ms",
    not_rivals: Sequence[str] = (YARDSTICK,),
) -> list[Row]:
    """Rows of one cell. The contender ``copy_`` is the yardstick; those in ``not_rivals``, and other forms of ours
    (named ``warpsmith, <form>``), do not count as rivals."""
    yardstick = timings[YARDSTICK].ms if YARDSTICK in timings else None
    rivals = [t.ms for n, t in timings.items() if n.split(",")[0] != OURS and n not in not_rivals and t.ms]
    rows, cell = [], (op, shape, dtype, direction)
    for name, t in timings.items():
        if t.ms is None:
            rows.append(Row(*cell, name, None, unit, note=t.error))
            continue
        rows.append(
            Row(
                *cell,
                name,
                t.ms,
                unit,
                t.spread,
                tb_s=floor_bytes / t.ms / 1e9 if floor_bytes else None,
                of_yardstick=yardstick / t.ms if yardstick else None,
                of_best_rival=min(rivals) / t.ms if name == OURS and rivals else None,
            )
        )
    return rows


COLUMNS = ("op", "shape", "dtype", "direction", "contender", "time", "spread", "TB/s", "of copy", "vs best rival")


def format_table(rows: Iterable[Row]) -> str:
    """The rows as a text table; figures that do not exist are blank, failed contenders say why."""
    lines = [COLUMNS]
    for r in rows:
        time_text = f"{r.value:.4g} {r.unit}" if r.value is not None else "-"
        line = (
            r.op,
            r.shape,
            r.dtype,
            r.direction,
            r.contender,
            time_text,
            f"{100 * r.spread:.0f}%" if r.value is not None else "",
            _number(r.tb_s),
            _number(r.of_yardstick),
            _number(r.of_best_rival) if r.value is not None else r.note,
        )
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS) - 1)]
    texts = [
        "  ".join([c.ljust(w) for c, w in zip(line, widths, strict=False)] + [line[-1]]).rstrip() for line in lines
    ]
    texts.insert(1, "-" * len(texts[0]))
    return "\n".join(texts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def environment() -> dict[str, Any]:
    """Where and how a figure was measured: GPU, driver, clocks, versions, CPU, date, command."""
    from warpsmith._version import __version__

    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": " ".join(Path(a).name for a in sys.argv),
        "warpsmith": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts.update(_nvidia_smi())
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _nvidia_smi() -> dict[str, str]:
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (part.strip() for part in answer.split(",")), strict=False))


def write_json(path: str | Path, rows: Iterable[Row], **facts: Any) -> None:
    """Writes ``{"environment": ..., "rows": [...]}``, replacing the file in one step.

    ``facts`` join the environment.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(
        json.dumps({"environment": {**environment(), **facts}, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
    )
    part.replace(target)
