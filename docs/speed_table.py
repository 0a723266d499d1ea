"""Writes the README's speed tables, and the plot of linear_cross_entropy's memory, from the newest H200 run in
benchmarks/results: `python docs/speed_table.py`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"
OURS, YARDSTICK, MEMORY = "warpsmith", "copy_", "peak memory"
CURVE = "linear_cross_entropy by chunks"
PLOT = ROOT / "docs/img/linear_loss_curve.png"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# In this order; others follow by name.
OPS = (
    *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "dropout_add_rms_norm", "dropout_add_layer_norm"),
    *("rope", "qk_norm_rope", "swiglu", "geglu", "geglu tanh", "reglu", "relu_squared", "bias_gelu", "bias_silu"),
    *("dropout_add", "cross_entropy", "linear_cross_entropy", "linear_log_prob", "adamw", "train_gpt"),
)

Row = dict[str, Any]
Cell = dict[str, Row]


def newest() -> Path:
    """The newest kept run that holds measurements."""
    runs = sorted((ROOT / "benchmarks/results").glob("*-nvidia-h200.json"))
    return [path for path in runs if json.loads(path.read_text())["rows"]][-1]


def cells(rows: list[Row]) -> list[Cell]:
    """The rows by cell, each {contender: row}, by op and then in the order of the file."""
    found: dict[tuple[str, ...], Cell] = {}
    for row in rows:
        key = tuple(row.get(name, "") for name in ("device", "op", "shape", "dtype", "direction"))
        found.setdefault(key, {})[row["contender"]] = row
    order = {op: i for i, op in enumerate(OPS)}
    return sorted((c for c in found.values() if OURS in c), key=lambda c: order.get(c[OURS]["op"], len(OPS)))


def on_gpu(cell: Cell) -> bool:
    return bool(cell[OURS]["device"] == "cuda")


def time_text(row: Row) -> str:
    if row["value"] is None:
        return "failed"
    value = row["value"] * 1e3 if row["unit"] == "ms" and row["value"] < 0.9995 else row["value"]
    unit = "us" if value != row["value"] else row["unit"]
    figure = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{figure} {unit} ({row['spread']:.0%})"


def best_rival(cell: Cell) -> Row | None:
    """The fastest that is neither ours nor the copy."""
    rivals = [r for name, r in cell.items() if not name.startswith(OURS) and name != YARDSTICK and r["value"]]
    return min(rivals, key=lambda r: r["value"], default=None)


def figures(cell: Cell | None, name: str = OURS) -> list[str]:
    """Time, fraction of the copy's rate, best rival, its time over ours."""
    if cell is None:
        return [""] * 4
    ours, best = cell[name], best_rival(cell)
    of_copy = "" if ours["of_yardstick"] is None else f"{ours['of_yardstick']:.2f}"
    if best is None or ours["value"] is None:
        return [time_text(ours), of_copy, "", ""]
    return [time_text(ours), of_copy, f"{best['contender']}, {time_text(best)}", f"{best['value'] / ours['value']:.2f}"]


def line(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |"


def head(columns: list[str]) -> str:
    return f"{line(columns)}\n{'|---' * len(columns)}|\n"


def size_text(row: Row, usual: str) -> str:
    return row["shape"] if row["dtype"] == usual else f"{row['shape']} {DTYPES[row['dtype']]}"


def both_ways(found: list[Cell], usual: str) -> str:
    """Ops with a forward and a backward, a line for each size."""
    pairs: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in found:
        row = cell[OURS]
        if row["direction"] in ("forward", "backward"):
            pairs.setdefault((row["op"], row["shape"], row["dtype"]), {})[row["direction"]] = cell
    lines = []
    for pair in pairs.values():
        forward, backward = pair.get("forward"), pair.get("backward")
        row = (forward or pair["backward"])[OURS]
        lines.append(line([f"`{row['op']}`", size_text(row, usual), *figures(forward), *figures(backward)]))
    if not lines:
        return ""
    columns = ["time (spread)", "of copy", "best rival", "rival / ours"]
    return head(
        ["op", "size", *(f"forward: {columns[0]}", *columns[1:]), *(f"backward: {columns[0]}", *columns[1:])]
    ) + ("\n".join(lines) + "\n")


def the_rest(found: list[Cell], usual: str) -> str:
    """Everything else, a line for each of our variants."""
    memory = {(c[OURS]["op"], c[OURS]["shape"]): c for c in found if c[OURS]["direction"] == MEMORY}
    lines = []
    for cell in found:
        row = cell[OURS]
        if row["direction"] in ("forward", "backward", MEMORY):
            continue
        held = memory.get((row["op"], row["shape"]), {})
        best = best_rival(cell)
        for name in (n for n in cell if n.startswith(OURS)):
            peaks = [held[n]["value"] for n in (name, best["contender"] if best else "") if n in held]
            lines.append(
                line(
                    [
                        f"`{row['op']}`{name.removeprefix(OURS)}",
                        row["direction"],
                        size_text(row, usual),
                        *figures(cell, name),
                        ", ".join(f"{peak / 1e3:.2f}" for peak in peaks) + (" GB" if peaks else ""),
                    ]
                )
            )
    columns = ["op", "what", "size", "time (spread)", "of copy", "best rival", "rival / ours", "memory: ours, rival's"]
    return head(columns) + "\n".join(lines) + "\n"


def training(found: list[Cell]) -> str:
    """Tokens a second of the example's training step."""
    text = ""
    for cell in found:
        row = cell[OURS]
        if row["op"] == "train_gpt" and row["direction"] == "step":
            name, shape = row["shape"].split()
            tokens = 1
            for size in shape.split("x"):
                tokens *= int(size)
            rates = [f"{c} {1e3 * tokens / r['value']:,.0f}" for c, r in cell.items() if r["value"]]
            text += f"Tokens a second in training `{name}` ({shape} a step): {', '.join(rates)}.\n"
    return text


def failures(rows: list[Row]) -> str:
    """Contenders without a time, each once."""
    found = {}
    for row in rows:
        if row["value"] is None:
            note = re.sub(r"\x1b\[[\d;]*m", "", row["note"]).strip()  # compilers colour their messages
            found.setdefault((row["contender"], row["op"], row["shape"]), note)
    text = "; ".join(f"{c} at `{op}` {shape} ({why[:90]})" for (c, op, shape), why in found.items())
    return f"\nWithout a time: {text}.\n" if text else ""


def untimed(gpu: list[Cell], cpu: list[Cell]) -> str:
    """The ops that the run's time did not suffice for on the CPU."""
    left = [f"`{op}`" for op in dict.fromkeys(c[OURS]["op"] for c in gpu) if op not in {c[OURS]["op"] for c in cpu}]
    return f"\nNot timed on the CPU in this run: {', '.join(left)}.\n" if left else ""


def table(path: Path) -> str:
    """What stands between the README's two marks."""
    run = json.loads(path.read_text())
    e, found = run["environment"], cells(run["rows"])
    gpu, cpu = [c for c in found if on_gpu(c)], [c for c in found if not on_gpu(c)]
    rivals = ", ".join(f"{name} {version}" for name, version in e["rivals"].items())
    return (
        f"{e['gpu']} (driver {e['driver_version']}, {e['power.limit']}), torch {e['torch']}, CUDA {e['cuda']}, "
        f"Python {e['python']}, {e['date'][:16]}, one run of `python -m benchmarks`. Beside torch eager and "
        f"`torch.compile`: {rivals}. Below 1 under *rival / ours* the rival is faster.\n"
        f"All contenders: `{path.relative_to(ROOT)}`.\n\n"
        f"bf16 where nothing else is said:\n\n"
        f"{both_ways(gpu, 'bfloat16')}\n{the_rest(gpu, 'bfloat16')}\n{training(gpu)}{failures(run['rows'])}\n"
    ) + (
        f"The CPU of the same machine ({e['cpu']}, 2 threads, fp32):\n\n"
        f"{both_ways(cpu, 'float32')}\n{the_rest(cpu, 'float32')}\n{training(cpu)}{untimed(gpu, cpu)}"
        if cpu
        else "The run has no rows of the CPU.\n"
    )


def plot(path: Path) -> None:
    """The curve's picture, where the run has it."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.linear_loss_curve import plot as draw

    points: dict[tuple[str, str], dict[str, float]] = {}
    shape = ""
    for row in json.loads(path.read_text())["rows"]:
        if row["op"] == CURVE and row["value"]:
            shape = row["shape"]
            points.setdefault(tuple(row["contender"].split(", ")), {})[row["direction"]] = row["value"]
    found = [(dtype, int(n), p["forward + backward"], p[MEMORY]) for (dtype, n), p in points.items()]
    if found:
        draw(found, shape.split("x"), PLOT)


def main() -> None:
    readme, run = ROOT / "README.md", newest()
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(before + BEGIN + "\n" + table(run) + "\n" + END + after)
    plot(run)


if __name__ == "__main__":
    main()
