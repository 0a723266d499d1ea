"""What was measured: benchmarks/results.csv has a row for each figure, benchmarks/recordings.csv one for each run.

results.csv holds what the tables and plots read: of each GPU, device and op the newest run, and every run of the ops in
HISTORY. The copy that other contenders are compared with has no row: its time is value times of_yardstick.

A row names its recording. The recording names the date, the machine, the versions, the command and a commit.
`git show COMMIT:FILE` prints a recording that has a file. A recording without a file measured that commit, and its
replaced rows stand in the history of results.csv.
"""

import csv
import os
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
FACTS = tuple("recording date gpu cpu driver power torch cuda python rivals commit file command".split())
FIGURES = {"value": 6, "spread": 4, "tb_s": 4, "of_yardstick": 5}  # significant digits
CELL = ("op", "device", "shape", "dtype", "direction", "contender")
COLUMNS = (*CELL, "value", "unit", "spread", "tb_s", "of_yardstick", "note", "recording")
SHARED = {"linear_cross_entropy by chunks": "linear_cross_entropy"}  # drawn in one picture: from one run
HISTORY = ("train_gpt",)  # docs/step_plot.py draws all runs
YARDSTICK = "copy_"
Row = dict[str, Any]


class Recording(NamedTuple):
    """A run: its line of recordings.csv and its rows."""

    facts: dict[str, str]
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.facts["recording"]


def load(folder: Path = FOLDER) -> list[Recording]:
    """All recordings, newest first."""
    found = {facts["recording"]: Recording(facts, []) for facts in _read(folder / "recordings.csv")}
    for row in _read(folder / "results.csv"):
        figures = {name: float(row[name]) if row[name] else None for name in FIGURES}
        found[row["recording"]].rows.append({**row, **figures})
    return _newest_first(found.values())


def newest(recordings: Iterable[Recording], history: tuple[str, ...] = ()) -> list[Recording]:
    """The recordings with those of their rows that no newer one of the GPU, device and op replaces. Rows of the host's
    time are those of another benchmark."""
    seen: set[tuple[str, str, str]] = set()
    found = []
    for facts, rows in _newest_first(recordings):
        keys = [(facts["gpu"], row["device"], _benchmark_of(row)) for row in rows]
        found.append(
            Recording(facts, [row for row, key in zip(rows, keys, strict=True) if key not in seen or key[2] in history])
        )
        seen |= set(keys)
    return found


def _benchmark_of(row: Row) -> str:
    op = SHARED.get(row["op"], row["op"])
    return f"{op}, host" if row["direction"].startswith("host") else op


def _newest_first(recordings: Iterable[Recording]) -> list[Recording]:
    return sorted(recordings, key=lambda found: (found.facts["date"], found.name), reverse=True)


def name_of(environment: Row) -> str:
    """The name of a run that begins now: minute and machine."""
    machine = re.sub(r"\W+", "-", environment.get("gpu") or "cpu").lower()
    return f"{time.strftime('%Y-%m-%d-%H%M%S', time.gmtime())}-{machine}"


def commit() -> str:
    """What was measured: WARPSMITH_COMMIT, where the sources are a copy without git, or git's HEAD."""
    if told := os.environ.get("WARPSMITH_COMMIT"):
        return told
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def facts_of(name: str, environment: Row) -> dict[str, str]:
    """A line of recordings.csv from `warpsmith.testing.environment` and what the run says of itself."""
    rivals = ", ".join(f"{library} {version}" for library, version in environment.get("rivals", {}).items())
    renamed = {"driver": environment.get("driver_version"), "power": environment.get("power.limit")}
    told = {"commit": commit(), **environment, **renamed, "recording": name, "rivals": rivals}
    return {fact: str(told.get(fact) or "") for fact in FACTS}


def add(name: str, rows: Iterable[Any], environment: Row, folder: Path) -> None:
    """Adds a run to the tables in the folder, which are made from those of the repository where there are none. A run
    that is there under this name is replaced."""
    found = load(folder if (folder / "results.csv").exists() else FOLDER)
    new = Recording(facts_of(name, environment), [asdict(row) if is_dataclass(row) else row for row in rows])
    write([new, *(old for old in found if old.name != name)], folder)


def write(recordings: Iterable[Recording], folder: Path) -> None:
    """Both tables, without the rows that newer ones replace; sorted, so that a new run changes few lines."""
    kept = newest(recordings, HISTORY)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "recordings.csv", FACTS, [found.facts for found in reversed(kept)])
    rows = [{**row, "recording": found.name} for found in reversed(kept) for row in found.rows]
    rows = [row for row in rows if row["contender"] != YARDSTICK]
    for row in rows:
        row.update({name: f"{row[name]:.{digits}g}" for name, digits in FIGURES.items() if row[name] is not None})
        row["note"] = re.sub(r"\x1b\[[\d;]*m", "", row["note"]).strip()[:100]  # compilers colour their messages
    _write(folder / "results.csv", COLUMNS, sorted(rows, key=lambda row: (row["op"], row["device"])))


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(path: Path, columns: tuple[str, ...], rows: list[Row]) -> None:
    """Replaces the file in one step."""
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    part.replace(path)
