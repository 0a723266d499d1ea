"""The log of train_gpt.py: a line of JSON a step, and the plot of its losses."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

NATS = "nats per token"


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def as_json_lines(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def read_log(path: Path) -> list[dict[str, Any]]:
    """A line a step {"step", "loss", "lr", "tokens_per_s", "seconds"}, and lines {"step", "validation_loss"}."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a kill or a full disk can cut a line short
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def plot_losses(lines: list[dict[str, Any]], title: str) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (
        ("loss", "training batch", {"color": "tab:blue", "alpha": 0.6, "linewidth": 0.8}),
        ("validation_loss", "validation", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    ):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            label = f"{label} (last: {points[-1][1]:.3f})"
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel=f"loss [{NATS}]", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
