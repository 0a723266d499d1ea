"""The pictures of docs/speed_table.py."""

from __future__ import annotations

import sys
from typing import Any

from speed_table import MEMORY, OURS, ROOT, WHOLE, YARDSTICK

CURVE = "linear_cross_entropy by chunks"
COLOURS = ("#777777", "#d95f02", "#7570b3", "#1b9e77", "#e7298a", "#66a61e", "#e6ab02")


def memory_curve(rows: list[dict[str, Any]]) -> None:
    """linear_cross_entropy's time over its memory, where the run has it."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.linear_loss_curve import plot as draw

    points: dict[tuple[str, str], dict[str, float]] = {}
    shape = ""
    for row in rows:
        if row["op"] == CURVE and row["value"]:
            shape = row["shape"]
            points.setdefault(tuple(row["contender"].split(", ")), {})[row["direction"]] = row["value"]
    found = [(dtype, int(n), p["forward + backward"], p[MEMORY]) for (dtype, n), p in points.items()]
    if found:
        draw(found, shape.split("x"), ROOT / "docs/img/linear_loss_curve.png")


def family(contender: str) -> str | None:
    """A library's variants are one contender, the fastest of them counts."""
    name = contender.split(",")[0].split()[0]
    return None if name in (OURS, YARDSTICK, "rms_norm") else name


def beside_rivals(cells: list[dict[str, dict[str, Any]]]) -> None:
    """Each contender's time over ours, a line for each op at its first size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"forward": ("forward", "loss"), "backward, or all in one": ("backward", *WHOLE)}
    figure, axes = plt.subplots(1, 2, figsize=(11, 7.5), sharex=True)
    names = list(dict.fromkeys(n for c in cells for n in map(family, c) if n))
    names.sort(key=lambda n: (n != "torch", n != "torch.compile", n))
    for axis, (title, directions) in zip(axes, panels.items(), strict=True):
        chosen: dict[str, dict[str, dict[str, Any]]] = {}
        for cell in cells:
            if cell[OURS]["direction"] in directions:
                chosen.setdefault(cell[OURS]["op"], cell)
        for y, cell in enumerate(chosen.values()):
            ratios: dict[str, float] = {}
            for contender, row in cell.items():
                name = family(contender)
                if name and row["value"]:
                    time = row["value"] / cell[OURS]["value"]
                    ratios[name] = min(time, ratios.get(name, time))
            for name, value in ratios.items():
                axis.scatter(value, -y, color=COLOURS[names.index(name) % len(COLOURS)], s=36, alpha=0.85)
        axis.set_yticks([-y for y in range(len(chosen))], list(chosen))
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.5, 1, 2, 4, 8, 16], ["1/2", "1", "2", "4", "8", "16"])
        axis.grid(axis="both", alpha=0.25)
        axis.set_title(title)
        axis.set_xlabel("time over ours (right of 1: slower than Warpsmith)")
    for i, name in enumerate(names):
        axes[0].scatter([], [], color=COLOURS[i % len(COLOURS)], label="torch eager" if name == "torch" else name)
    figure.legend(loc="lower center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(ROOT / "docs/img/speed.png", dpi=110)
    plt.close(figure)
