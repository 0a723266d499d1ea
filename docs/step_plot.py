"""Draws docs/img/step.png: tokens a second and memory of a training step of GPT-2 124M, beside torch and torch.compile.

    python -m benchmarks --device cuda --op gpt2   # one more recording
    python docs/step_plot.py

A bar is the median of all recordings of that step, its whisker their range.
"""

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.recorded import load  # noqa: E402

GPU = "NVIDIA H200"
CELL = ("train_gpt", "gpt2-124m 64x1024")
TOKENS = 64 * 1024
CONTENDERS = {"torch": "#9aa0a6", "torch.compile": "#5f6368", "warpsmith": "#1a73e8"}


def recorded() -> dict[str, dict[str, list[float]]]:
    """{direction: {contender: values}} of every recording."""
    found: dict[str, dict[str, list[float]]] = {"step": {}, "peak memory": {}}
    for row in (row for facts, rows in load() if facts["gpu"] == GPU for row in rows):
        if (row["op"], row["shape"]) == CELL and row["value"] is not None:
            found[row["direction"]].setdefault(row["contender"], []).append(row["value"])
    return found


def medians() -> dict[str, tuple[float, float]]:
    """{contender: (thousand tokens a second, gigabytes)}."""
    speeds, memory = figures(recorded())
    return {name: (statistics.median(speeds[name]), statistics.median(memory[name])) for name in CONTENDERS}


def figures(found: dict[str, dict[str, list[float]]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Thousand tokens a second and gigabytes of every recording, by contender."""
    speeds = {name: [TOKENS / ms for ms in found["step"][name]] for name in CONTENDERS}
    return speeds, {name: [mb / 1e3 for mb in found["peak memory"][name]] for name in CONTENDERS}


def main() -> None:
    from matplotlib.figure import Figure

    found = recorded()
    speeds, memory = figures(found)
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, values, title in (
        (axes[0], speeds, "thousand tokens a second (longer is better)"),
        (axes[1], memory, "GB above weights and optimizer states (shorter is better)"),
    ):
        for y, (name, color) in enumerate(CONTENDERS.items()):
            middle = statistics.median(values[name])
            whisker = [[middle - min(values[name])], [max(values[name]) - middle]]
            axis.barh(y, middle, color=color, xerr=whisker, error_kw={"elinewidth": 1, "ecolor": "#202124"})
            axis.text(middle * 0.02, y, f"{name}  {middle:.0f}", va="center", color="white", fontweight="bold")
        axis.set_title(title, fontsize=9)
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
    runs = len(speeds["warpsmith"])
    figure.suptitle(f"A training step of GPT-2 124M, bf16 autocast, 64 x 1,024 tokens, H200: {runs} runs", fontsize=10)
    figure.savefig(ROOT / "docs/img/step.png", dpi=120)


if __name__ == "__main__":
    main()
