"""Writes the README's speed table from the newest H200 run in benchmarks/results: `python docs/speed_table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"
OURS, YARDSTICK = "warpsmith", "copy_"

Row = dict[str, Any]


def newest() -> Path:
    """The newest kept run that holds measurements."""
    runs = sorted((ROOT / "benchmarks/results").glob("*-nvidia-h200.json"))
    return [path for path in runs if json.loads(path.read_text())["rows"]][-1]


def cells(rows: list[Row]) -> list[dict[str, Row]]:
    """The rows by cell, each {contender: row}, in the order of the file."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("op", "shape", "dtype", "direction"))
        found.setdefault(key, {})[row["contender"]] = row
    return list(found.values())


def on_gpu(cell: dict[str, Row]) -> bool:
    """Rows do not name their device: on the GPU there is a yardstick; host rows of the CPU are float32's of a norm."""
    row = cell[OURS]
    return YARDSTICK in cell or row["dtype"] == "bfloat16" or (row["op"], row["direction"]) == ("adamw", "host")


def time_text(row: Row) -> str:
    if row["value"] is None:
        return "failed"
    value = row["value"] * 1e3 if row["unit"] == "ms" and row["value"] < 0.9995 else row["value"]
    unit = "us" if value != row["value"] else row["unit"]
    figure = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{figure} {unit} ({row['spread']:.0%})"


def line(cell: dict[str, Row]) -> str:
    """One line of the table. Every contender but ours and the copy is a rival."""
    ours = cell[OURS]
    rivals = [r for name, r in cell.items() if name not in (OURS, YARDSTICK) and r["value"] is not None]
    best = min(rivals, key=lambda r: r["value"])
    ratio = best["value"] / ours["value"]
    columns = (
        f"`{ours['op']}`",
        ours["direction"],
        ours["shape"],
        {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[ours["dtype"]],
        time_text(ours),
        "" if ours["of_yardstick"] is None else f"{ours['of_yardstick']:.2f}",
        f"{best['contender']}, {time_text(best)}",
        f"{ratio:.2f}",
    )
    return f"| {' | '.join(columns)} |"


def table(path: Path) -> str:
    """What stands between the README's two marks."""
    run = json.loads(path.read_text())
    e = run["environment"]
    found = cells(run["rows"])
    head = (
        "| op | direction | size | dtype | time (spread) | of copy | best rival (spread) | rival's time / ours |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    gpu = "\n".join(line(cell) for cell in found if on_gpu(cell))
    cpu = "\n".join(line(cell) for cell in found if not on_gpu(cell))
    return (
        f"{e['gpu']} (driver {e['driver_version']}, {e['power.limit']}), torch {e['torch']}, CUDA {e['cuda']}, "
        f"Python {e['python']}, {e['date'][:10]}, by `tools/gpu/run.sh bench`. Below 1 in the last column the rival is "
        f"faster. Sizes of `adamw`: elements in tensors, or tensors x elements.\n"
        f"All contenders: `{path.relative_to(ROOT)}`.\n\n"
        f"{head}{gpu}\n\n"
        f"The CPU of the same machine ({e['cpu']}, 2 threads; mind the spread):\n\n"
        f"{head}{cpu}\n\n{layers()}"
    )


def layers() -> str:
    """The layers and losses, of the file that was gathered while they were tuned: ours alone, beside the copy."""
    path = ROOT / "benchmarks/results/2026-11-21-layers.json"
    run = json.loads(path.read_text())
    e = run["environment"]
    lines = []
    for row in run["rows"]:
        if row["contender"].startswith(OURS) and row["value"] is not None and row["direction"] != "peak memory":
            name = f"`{row['op'].split()[0]}`" + row["op"][len(row["op"].split()[0]) :] + row["contender"][len(OURS) :]
            of_copy = "" if row["of_yardstick"] is None else f"{row['of_yardstick']:.2f}"
            ratio = "" if row["of_best_rival"] is None else f"{row['of_best_rival']:.2f}"
            lines.append(f"| {name} | {row['direction']} | {row['shape']} | {time_text(row)} | {of_copy} | {ratio} |")
    return (
        f"Layers and losses, bf16, same card and software, {e['date']}, an op at a time while the kernels were tuned. "
        f"Rivals: torch eager, Liger's Triton kernels and cuDNN where they have the op; torch.compile for `swiglu` and "
        f"the linear losses alone. `layer_norm` backward of 65536x768 has another configuration since, not measured.\n"
        f"All contenders, times and commits: `{path.relative_to(ROOT)}`.\n\n"
        "| op | direction | size | time (spread) | of copy | best rival's time / ours |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(before + BEGIN + "\n" + table(newest()) + "\n" + END + after)


if __name__ == "__main__":
    main()
