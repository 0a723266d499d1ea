"""The speed tables and plots, from benchmarks/results.csv. The docs build puts the tables into docs/benchmarks.md.

python docs/speed_table.py   # writes README.md's few rows and the pictures
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.recorded import YARDSTICK, Recording, Row, load, newest  # noqa: E402
from tools import families  # noqa: E402

BEGIN, END = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"  # in README.md
MARK = "<!-- speed tables -->"  # in docs/benchmarks.md
OURS, MEMORY = "warpsmith", "peak memory"
EAGER = ("torch", "torch, no cast", "torch fused")
GPU, PORTABLE, NO_GPU = "NVIDIA H200", "NVIDIA H200, sm_80 code", ""
WHOLE = ("loss + gradient", "forward + backward", "step")  # what is measured in one piece
NEAR = 0.98  # the README names the cells where a rival's time is less than this much of ours
README_OPS = tuple("rms_norm rope attention swiglu cross_entropy linear_cross_entropy adamw llama".split())
UNITS = (
    "bf16 unless the size says otherwise. *Of copy*: the rate as a fraction of a device copy of the same bytes. "
    "*torch / ours*, *best rival / ours*: their time over Warpsmith's; above 1, Warpsmith is faster."
)
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NAMES = (  # of the README's table and list
    "*1.0e9 in 292*: 1.0e9 elements in 292 tensors. *master*, *remainder*: bf16 parameters that the optimizer keeps "
    "with [float32 precision](docs/optimizers.md#precision); the rival keeps everything in bf16. `llama`: "
    "transformers' model of 1.2B parameters after `patch`; liger is the same model patched by Liger."
)
Cell = dict[str, Row]


def recordings(gpu: str = GPU) -> list[Recording]:
    """The newest rows of each op on one kind of machine, by run; newest run first."""
    device = "cuda" if gpu else "cpu"
    found = [Recording(facts, [row for row in rows if row["device"] == device]) for facts, rows in newest(load())]
    return [found for found in found if found.facts["gpu"] == gpu and found.rows]


def all_rows(found: list[Recording]) -> list[Row]:
    return [row for recording in found for row in recording.rows]


def cells(rows: list[Row]) -> list[Cell]:
    """The rows by cell, each {contender: row}, by op and then in the order of the file."""
    found: dict[tuple[str, ...], Cell] = {}
    for row in rows:
        key = tuple(row.get(name, "") for name in ("device", "op", "shape", "dtype", "direction"))
        found.setdefault(key, {})[row["contender"]] = row
    order = {row.name: i for i, row in enumerate(families.rows())}

    def place(cell: Cell) -> tuple[int, str]:
        op = cell[OURS]["op"]
        return order.get(op.split(" ")[0], len(order)), op  # "geglu tanh" stands behind geglu

    return sorted((c for c in found.values() if OURS in c), key=place)


def time_text(row: Row) -> str:
    if row["value"] is None:
        return "failed"
    value = row["value"] * 1e3 if row["unit"] == "ms" and row["value"] < 0.9995 else row["value"]
    unit = "us" if value != row["value"] else row["unit"]
    figure = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{figure} {unit} ({row['spread']:.0%})"


def best_rival(cell: Cell) -> Row | None:
    """The fastest that is neither ours nor the copy."""
    others = {name: r for name, r in cell.items() if name not in (YARDSTICK, "product")}  # a bare product is a floor
    rivals = [r for name, r in others.items() if not name.startswith(OURS) and r["value"]]
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
    return row["shape"] if row["dtype"] == usual else f"{row['shape']} {DTYPES.get(row['dtype'], row['dtype'])}"


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
    found: dict[tuple[str, ...], str] = {}
    for row in rows:
        if row["value"] is None:
            found.setdefault((row["contender"], row["op"], row["shape"]), row["note"])
    text = "; ".join(f"{c} at `{op}` {shape} ({why[:90]})" for (c, op, shape), why in found.items())
    return f"\nWithout a time: {text}.\n" if text else ""


def where(found: list[Recording], short: bool = False) -> str:
    """The machine, the versions and the recordings: a sentence for one, a list for several. short: without the list."""
    if len(found) == 1:
        run = found[0]
        return f"{facts(run)}, {run.facts['date'][:16]}, one run of `python -m benchmarks`: recording `{run.name}`. "
    machines = list(dict.fromkeys(facts(run) for run in found))
    dates = sorted(run.facts["date"][:10] for run in found)
    text = f"{'; '.join(machines)}. Each op has the figures of its newest run of `python -m benchmarks`"
    if short:
        return f"{text} ({len(found)} runs from {dates[0]} to {dates[-1]}: [list](benchmarks/recordings.csv)). "
    lines = []
    for run in found:
        ops = ", ".join(f"`{op}`" for op in dict.fromkeys(row["op"].split(" ")[0] for row in run.rows))
        machine = f" ({facts(run)})" if len(machines) > 1 else ""
        lines.append(f"- {run.facts['date'][:16]}{machine}, recording `{run.name}`: {ops}")
    return f"{text}:\n\n" + "\n".join(lines) + "\n\n"


def facts(run: Recording) -> str:
    e = run.facts
    machine = f"{e['gpu']} (driver {e['driver']}, {e['power']})" if e["gpu"] else e["cpu"]
    cuda = f", CUDA {e['cuda']}" if e["cuda"] else ""
    return f"{machine}, torch {e['torch']}{cuda}, Python {e['python']}"


def rivals(found: list[Recording]) -> str:
    """Who is in the runs, and who is not."""
    told = (recording.facts["rivals"] for recording in reversed(found))
    versions = dict(rival.rsplit(" ", 1) for text in told if text for rival in text.split(", "))
    here = "".join(f", {name} {version}" for name, version in versions.items() if version != "absent")
    absent = ", ".join(name for name, version in versions.items() if version == "absent")
    return f"Rivals: torch eager, `torch.compile`{here}" + (f" (not installed: {absent})." if absent else ".")


def tables(gpu_runs: list[Recording], cpu_runs: list[Recording]) -> str:
    """What the docs build puts into docs/benchmarks.md."""
    rows, cpu_rows = all_rows(gpu_runs), all_rows(cpu_runs)
    gpu, cpu = cells(rows), cells(cpu_rows)
    return (
        f"{where(gpu_runs)}{rivals(gpu_runs)} {UNITS} {behind(gpu)}\n\n"
        f"Each op at its first size:\n\n{by_op(gpu)}\nAll sizes:\n\n"
        f"{both_ways(gpu, 'bfloat16')}\n{the_rest(gpu, 'bfloat16')}\n{training(gpu)}{failures(rows)}\n"
        f"The CPU, 2 threads, fp32: {where(cpu_runs).strip()}\n\n"
        f"{both_ways(cpu, 'float32')}\n{the_rest(cpu, 'float32')}\n{training(cpu)}{failures(cpu_rows)}\n"
        f"{portable()}"
    )


def page(text: str) -> str:
    """docs/benchmarks.md with its tables."""
    if text.count(MARK) != 1:
        raise ValueError(f"docs/benchmarks.md: expected one line {MARK}")
    return text.replace(MARK, tables(recordings(), recordings(NO_GPU)).strip())


def portable() -> str:
    """What cards without kernels of their own run, on the card that is at hand; nothing where nobody recorded it."""
    runs = recordings(PORTABLE)
    if not runs:
        return ""
    found = cells(all_rows(runs))
    return (
        "## sm_80 code on an H200\n\n"
        "A library built for sm_80 alone, whose PTX the driver compiled: the kernels that A100, L40S and RTX 4090 "
        f"run. The times are an H200's. {where(runs)}{rivals(runs)}\n\n{both_ways(found, 'bfloat16')}\n"
        f"{the_rest(found, 'bfloat16')}"
    )


def ratio(cell: Cell, rival: Row | None, named: bool = False) -> str:
    if rival is None or not rival["value"] or not cell[OURS]["value"]:
        return ""
    return f"{rival['value'] / cell[OURS]['value']:.2f}" + f" {rival['contender']}" * named


def short(cell: Cell | None) -> list[str]:
    """Time, fraction of the copy's rate, torch's time over ours, the best rival's."""
    if cell is None:
        return [""] * 4
    ours = cell[OURS]
    of_copy = "" if ours["of_yardstick"] is None else f"{ours['of_yardstick']:.2f}"
    eager = min((r for n, r in cell.items() if n in EAGER and r["value"]), key=lambda r: r["value"], default=None)
    return [time_text(ours).split(" (")[0], of_copy, ratio(cell, eager), ratio(cell, best_rival(cell), named=True)]


def by_op(found: list[Cell], ops: tuple[str, ...] = ()) -> str:
    """Each op, or each of these, at its first size."""
    firsts: dict[str, dict[str, Cell]] = {}
    for cell in found:
        row = cell[OURS]
        shapes = firsts.setdefault(row["op"], {})
        if row["direction"] in ("forward", "backward", *WHOLE) and {c[OURS]["shape"] for c in shapes.values()} <= {
            row["shape"]
        }:
            shapes.setdefault(row["direction"], cell)
    lines = []
    for op, shapes in firsts.items():
        pair = [shapes.get("forward"), shapes.get("backward")]
        whole = [shapes[d] for d in WHOLE if d in shapes]
        first = next((c for c in [*pair, *whole] if c), None)
        if first is None or (ops and op not in ops):
            continue
        size = size_text(first[OURS], "bfloat16")
        if whole:
            lines.append(line([f"`{op}`, {whole[0][OURS]['direction']}", size, *short(whole[0]), *short(None)]))
        else:
            lines.append(line([f"`{op}`", size, *short(pair[0]), *short(pair[1])]))
    columns = ["of copy", "torch / ours", "best rival / ours"]
    return head(["op", "size", "forward", *columns, "backward", *columns]) + "\n".join(lines) + "\n"


def summary(runs: list[Recording]) -> str:
    """What stands between the README's marks: some ops at their first size, and where a rival is ahead."""
    gpu = cells(all_rows(runs))
    return (
        f"{where(runs, short=True)}{rivals(runs)} {UNITS}\n\n{by_op(gpu, README_OPS)}\n"
        f"{behind(gpu)}\n\n{NAMES} "
        "All ops, sizes and rivals: [results.csv](benchmarks/results.csv), which `make docs` turns into "
        "[tables](docs/benchmarks.md).\n"
    )


def behind(found: list[Cell]) -> str:
    """How many cells, and in which a rival is ahead by more than the noise."""
    timed = [c for c in found if c[OURS]["direction"] in ("forward", "backward", "loss", *WHOLE) and best_rival(c)]
    memory = {(c[OURS]["op"], c[OURS]["shape"]): c for c in found if c[OURS]["direction"] == MEMORY}
    ahead = []
    for cell in timed:
        ours, best = cell[OURS], best_rival(cell)
        assert best is not None
        if ours["value"] and best["value"] / ours["value"] < NEAR:
            held = memory.get((ours["op"], ours["shape"]), {})
            peaks = [f"{held[n]['value'] / 1e3:.2f} GB" for n in (best["contender"], OURS) if n in held]
            price = f", memory: {' beside our '.join(peaks)}" if peaks else ""
            ratio = best["value"] / ours["value"]
            what = f"`{ours['op']}` {size_text(ours, 'bfloat16')} {ours['direction']}"
            ahead.append((ratio, f"{what} ({ratio:.2f} {best['contender']}{price})"))
    text = f"Over all sizes a rival is more than {1 - NEAR:.0%} faster in {len(ahead)} of {len(timed)} cells"
    return f"{text}: {'; '.join(what for _, what in sorted(ahead))}." if ahead else f"{text}."


def write(path: Path, text: str) -> None:
    """Between the marks of a document."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


def main() -> None:
    runs = recordings()
    write(ROOT / "README.md", summary(runs))
    from speed_plots import attention_by_length, beside_rivals, memory_curve

    rows = all_rows(runs)
    gpu, date = runs[0].facts["gpu"], runs[0].facts["date"][:10]
    memory_curve(rows, f"{gpu}, {date_of(runs, 'linear_cross_entropy')}")
    attention_by_length(rows, f"{gpu}, bf16, 16,384 tokens, hidden size 2,048, {date_of(runs, 'attention')}")
    beside_rivals(cells(rows), f"{gpu}, bf16 unless said otherwise, to {date}")


def date_of(runs: list[Recording], op: str) -> str:
    """The day on which an op's rows were measured."""
    return next(str(r.facts["date"][:10]) for r in runs if any(row["op"] == op for row in r.rows))


if __name__ == "__main__":
    main()
