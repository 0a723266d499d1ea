"""What tools/gpu/run.sh starts: the stages in order, the time of each, the table and the JSON at the end."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import code_stages
import stages
from command import ROOT, Order, Verdict

STAGES = {**stages.STAGES, **code_stages.STAGES}
PROMISE_S = 600.0
DEADLINE_S = 585.0  # of all stages together: what is left of the promise is for the table and the JSON
LOG_LINES = 40  # of a failed stage's log that are printed


def groups(chosen: list[str]) -> list[list[str]]:
    """The stages in order; one that may run beside an earlier one that is chosen too is in its group."""
    found: list[list[str]] = []
    for name in chosen:
        partner = next((group for group in found if STAGES[name].beside in group), None)
        if partner:
            partner.append(name)
        else:
            found.append([name])
    return found


def planned_s(chosen: list[str]) -> float:
    """The most that these stages can take."""
    return sum(max(STAGES[name].limit_s for name in group) for group in groups(chosen))


def limit_of(group: list[str], last: bool, left_s: float) -> float:
    """A group's own limit; the last one gets all the time that is left."""
    return left_s if last else min(left_s, max(STAGES[name].limit_s for name in group))


def verdict_table(verdicts: list[Verdict]) -> str:
    """One line a verdict."""
    width = max(len(v.stage) for v in verdicts)

    def word(v: Verdict) -> str:
        return "CUT   " if v.cut else "ok    " if v.ok else "FAILED"

    return "\n".join(f"{v.stage.ljust(width)}  {word(v)}  {v.seconds:5.0f} s  {v.detail}" for v in verdicts)


def merge_logs(logs: Path) -> None:
    """The sanitizers' logs as one file."""
    parts = sorted(logs.glob("sanitize_*.log"))
    if parts:
        (logs / "sanitize.log").write_text("".join(f"==== {p.stem}\n{p.read_text(errors='replace')}\n" for p in parts))
    for path in parts:
        path.unlink()


def own_rows(rows: list[dict[str, Any]]) -> str:
    """The rows that are this package's as a table; the JSON has all."""
    # Which the first stage may have built, some stages in folders of their own.
    sys.path += [str(folder) for folder in sorted((ROOT / "build").glob("gpu-*/package"))]
    from warpsmith.testing import Row, format_table

    return format_table([Row(**row) for row in rows if row["contender"].startswith("warpsmith")])


def measured(logs: Path, ran: list[str]) -> dict[str, Any]:
    """The rows of the stages that measured, and where: the GPU's environment if its stage ran, else the CPU's."""
    kept: dict[str, Any] = {"environment": {}, "rows": []}
    for path in [logs / f"{name}_rows.json" for name in ran]:
        if path.exists():
            found = json.loads(path.read_text())
            kept = {"environment": kept["environment"] or found["environment"], "rows": kept["rows"] + found["rows"]}
            path.unlink()
    return kept


def finish(verdicts: list[Verdict], ran: list[str], logs: Path, **facts: Any) -> Path:
    """Prints the benchmark's table and the stages', and writes both as one JSON file beside the logs."""
    kept = measured(logs, ran)
    if kept["rows"]:
        print(own_rows(kept["rows"]))
    merge_logs(logs)
    gpu = re.sub(r"\W+", "-", str(kept["environment"].get("gpu", "cpu" if "cpu_rows" in ran else "gpu"))).lower()
    target = logs / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-{gpu}.json"
    target.write_text(json.dumps({"stages": [asdict(v) for v in verdicts], **facts, **kept}, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in kept["environment"].items()))
    print(verdict_table(verdicts))
    cut = [v.stage for v in verdicts if v.cut]
    print(f"{facts.get('seconds', 0):.0f} s in all" + (f"; cut: {', '.join(cut)}" if cut else ""))
    print(f"written: {target}")
    return target


def run_group(group: list[str], order: Order) -> list[Verdict]:
    """The stages of a group at the same time."""
    if order.limit_s < 5:
        return [Verdict(name, False, 0.0, "no time left", cut=True) for name in group]

    def one(name: str) -> list[Verdict]:
        limit_s = order.limit_s if len(group) == 1 else min(order.limit_s, STAGES[name].limit_s)
        return STAGES[name].run(Order(order.logs, limit_s, order.dry))

    with ThreadPoolExecutor(len(group)) as pool:
        return [verdict for verdicts in pool.map(one, group) for verdict in verdicts]


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages asked for and returns 0 if all are ok and whole."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu/run.sh", description="Build, test, sanitize and measure on this GPU."
    )
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(STAGES)}; default: up to bench")
    parser.add_argument("--dry-run", action="store_true", help="next to nothing of all stages, on the CPU")
    parser.add_argument("--plan", action="store_true", help="only say which stages would run, and how long at most")
    options = parser.parse_args(arguments)
    for stage in options.stages:
        if stage not in STAGES:
            parser.error(f"stage: expected one of {', '.join(STAGES)}, got {stage}")
    default = list(STAGES) if options.dry_run else [name for name, stage in STAGES.items() if stage.default]
    chosen = [name for name in STAGES if name in options.stages] if options.stages else default
    deadline_s = max(DEADLINE_S, planned_s(chosen))
    if options.plan:
        for group in groups(chosen):
            print(f"{', '.join(group):16s}  {max(STAGES[name].limit_s for name in group):4.0f} s at most")
        print(f"{planned_s(chosen):.0f} s in all at most; the last gets what the others leave, to {deadline_s:.0f} s")
        return 0
    logs = Path(os.environ.get("OUT") or ROOT / "build/gpu-logs")
    logs.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    verdicts: list[Verdict] = []
    order_of = groups(chosen)
    for number, group in enumerate(order_of):
        left_s = deadline_s - (time.monotonic() - start)
        limit_s = limit_of(group, number == len(order_of) - 1, left_s)
        print(f"== {', '.join(group)}: at most {limit_s:.0f} s; {left_s:.0f} s left of {deadline_s:.0f}", flush=True)
        new = run_group(group, Order(logs, limit_s, options.dry_run))
        verdicts += new
        print(verdict_table(new), flush=True)
        for verdict in new:
            log = logs / f"{verdict.stage.replace(' ', '_')}.log"
            if not verdict.ok and log.exists():
                tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print("\n".join(f"  | {line[:200]}" for line in tail), flush=True)
    facts = {"seconds": round(time.monotonic() - start, 1), "dry_run": options.dry_run}
    finish(verdicts, chosen, logs, **facts)
    return 0 if all(v.ok and not v.cut for v in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
