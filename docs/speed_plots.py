"""The pictures of docs/speed_table.py."""

from pathlib import Path
from typing import Any

from speed_table import MEMORY, OURS, ROOT, WHOLE, YARDSTICK

CURVE = "linear_cross_entropy by chunks"
FLOPS_OF = {"forward": 1.0, "backward": 2.5}
COLOURS = ("#777777", "#d95f02", "#7570b3", "#1b9e77", "#e7298a", "#66a61e", "#e6ab02")
MARKERS = "os^Dv*P"  # with the colours: rivals differ in both


def memory_curve(rows: list[dict[str, Any]], where: str) -> None:
    """linear_cross_entropy's time over its memory beside its rivals, where the run has it."""
    points: dict[tuple[str, str], dict[str, float]] = {}
    shape = ""
    for row in rows:
        if row["op"] == CURVE and row["value"]:
            shape = row["shape"]
            points.setdefault(tuple(row["contender"].split(", ")), {})[row["direction"]] = row["value"]
    found = [(dtype, int(n), p["forward + backward"], p[MEMORY]) for (dtype, n), p in points.items()]
    others: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["op"], row["shape"]) == ("linear_cross_entropy", shape) and family(row["contender"]) and row["value"]:
            others.setdefault(row["contender"], {})[row["direction"]] = row["value"]
    rivals = [(name, p["forward + backward"], p[MEMORY]) for name, p in others.items() if len(p) == 2]
    if found:
        draw_curve(found, shape.split("x"), ROOT / "docs/img/linear_loss_curve.png", rivals, where)


def draw_curve(found: list[Any], shape: list[str], path: Path, rivals: list[Any], where: str) -> None:
    """found: (dtype of the weight's gradient, chunks, milliseconds, megabytes). rivals: (name, milliseconds,
    megabytes). where: the GPU, for the title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    for dtype in dict.fromkeys(p[0] for p in found):
        line = [p for p in found if p[0] == dtype]
        label = f"Warpsmith, weight gradient in {dtype}; figures: chunks"
        axes.plot([p[3] / 1e3 for p in line], [p[2] for p in line], marker="o", markersize=5, label=label)
        upright = max(p[3] for p in line) < 1.01 * min(p[3] for p in line)  # the points lie above each other
        for _, chunks, ms, megabytes in line:
            offset, side = ((6, -3), "left") if upright else ((3, 5), "left")
            below = upright and chunks == min(p[1] for p in line)
            at = (6, -9) if below else offset
            axes.annotate(
                str(chunks), (megabytes / 1e3, ms), textcoords="offset points", xytext=at, ha=side, fontsize=9
            )
    for (name, ms, megabytes), marker in zip(rivals, "sD^vPX", strict=False):
        at = megabytes / 1e3, ms
        axes.plot(*at, linestyle="", marker=marker, color="#5f6368", markerfacecolor="none", markersize=9)
        axes.annotate(name, at, textcoords="offset points", xytext=(0, -19), ha="center", color="#5f6368", fontsize=9)
    axes.set(xlabel="memory above the inputs, GB", ylabel="forward and backward, ms")
    axes.set_xlim(left=0, right=1.12 * max([p[3] for p in found] + [r[2] for r in rivals]) / 1e3)
    axes.set_ylim(bottom=0, top=1.3 * max([p[2] for p in found] + [r[1] for r in rivals]))
    title = f"linear_cross_entropy, {' x '.join(map(str, shape))} (tokens x width x classes), bf16"
    axes.set_title(title + (f"\n{where}" if where else ""), fontsize=10)
    axes.legend(loc="upper right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def attention_rates(rows: list[dict[str, Any]]) -> dict[tuple[int, str, str], dict[str, dict[int, float]]]:
    """TFLOP/s of attention over 16,384 tokens of a hidden size of 2,048, cut into sequences: {(head_dim, mask,
    direction): {contender: {tokens of a sequence: rate}}}. 4 B H S S D FLOPs forward, 2.5 times that backward, half of
    it if causal."""
    found: dict[tuple[int, str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        sizes, _, mask = row["shape"].partition(" ")
        if row["op"] == "attention" and row["device"] == "cuda" and mask in ("", "causal") and ":" not in sizes:
            batch, tokens, heads, dim = map(int, sizes.split("x"))
            if batch * tokens == 16384 and heads * dim == 2048 and row["value"]:
                flops = 4.0 * batch * heads * tokens**2 * dim * (0.5 if mask else 1) * FLOPS_OF[row["direction"]]
                cell = found.setdefault((dim, mask or "full", row["direction"]), {})
                cell.setdefault(row["contender"], {})[tokens] = flops / row["value"] / 1e9
    return found


def style(i: int, name: str) -> dict[str, Any]:
    """Of a line: ours is black and thicker, rivals differ in colour and marker."""
    colour = "black" if name == OURS else COLOURS[i % len(COLOURS)]
    return {"color": colour, "marker": MARKERS[i % len(MARKERS)], "linewidth": 1 + (name == OURS), "markersize": 5}


def attention_by_length(rows: list[dict[str, Any]], title: str) -> None:
    """Attention's rate over the length of a sequence, beside its rivals, where the run has it."""
    from matplotlib.figure import Figure

    rates = {key: cell for key, cell in attention_rates(rows).items() if OURS in cell}
    if not rates:
        return
    names = list(dict.fromkeys(n for cell in rates.values() for n in cell if not n.startswith(f"{OURS},")))
    columns = [(mask, direction) for mask in ("full", "causal") for direction in FLOPS_OF]
    dims = sorted({dim for dim, _, _ in rates}, reverse=True)
    figure = Figure(figsize=(12, 3 * len(dims)))
    axes = figure.subplots(len(dims), 4, sharex=True, sharey=True, squeeze=False)
    for line_of_axes, dim in zip(axes, dims, strict=True):
        for axis, (mask, direction) in zip(line_of_axes, columns, strict=True):
            for i, name in enumerate(names):
                points = sorted(rates.get((dim, mask, direction), {}).get(name, {}).items())
                if points:
                    lengths, values = zip(*points, strict=True)
                    axis.plot(lengths, values, **style(i, name))
            axis.set_title(f"{direction}, {mask}, heads of {dim}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1024, 4096, 16384], ["1k", "4k", "16k"])
            axis.grid(alpha=0.25)
        line_of_axes[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("tokens of a sequence")
    axes[0, 0].set_ylim(bottom=0)
    for i, name in enumerate(names):
        axes[0, 0].plot([], [], **style(i, name), label=name)
    figure.legend(loc="lower center", ncols=len(names), frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(ROOT / "docs/img/attention_speed.png", dpi=110)


def size_of(row: dict[str, Any]) -> str:
    """The shape, and the dtype where it is not the picture's bfloat16."""
    return row["shape"] + (f", {row['dtype']}" if row["dtype"] not in ("bfloat16", "") else "")


def family(contender: str) -> str | None:
    """A library's variants are one contender, the fastest of them counts."""
    name = contender.split(",")[0].split()[0]
    return None if name in (OURS, YARDSTICK, "rms_norm") else name


def beside_rivals(cells: list[dict[str, dict[str, Any]]], where: str) -> None:
    """Each contender's time over ours, a line for each op at its first size. `where`: what is said of the run."""
    from matplotlib.figure import Figure

    panels = {"forward": ("forward", "loss"), "backward, or all in one": ("backward", *WHOLE)}
    figure = Figure(figsize=(13, 8))
    axes = figure.subplots(1, 2, sharex=True)
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
                i = names.index(name)
                height = -y + 0.36 * (0.5 - i / max(1, len(names) - 1))  # side by side where times are equal
                axis.scatter(value, height, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], s=30)
        labels = [f"{op}  {size_of(cell[OURS])}" for op, cell in chosen.items()]
        axis.set_yticks([-y for y in range(len(chosen))], labels, fontsize=9)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.5, 1, 2, 4, 8, 16], ["1/2", "1", "2", "4", "8", "16"])
        axis.grid(axis="both", alpha=0.25)
        axis.set_title(title)
        axis.set_xlabel("time over Warpsmith's (right of 1: slower)")
    for i, name in enumerate(names):
        label = "torch eager (attention: its SDPA)" if name == "torch" else name
        axes[0].scatter([], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=label)
    figure.legend(loc="lower center", ncols=len(names), frameon=False)
    figure.suptitle(where, fontsize=11)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(ROOT / "docs/img/speed.png", dpi=110)
