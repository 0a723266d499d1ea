"""``python -m warpsmith sync-audit script.py``: where a script's host waits for the device."""

from __future__ import annotations

import argparse
import copy
import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the other tools work where torch does not
    from warpsmith.train import SyncAudit


def add_to(tools: Any) -> None:
    """Adds the tool to the subparsers of ``python -m warpsmith``."""
    parser: argparse.ArgumentParser = tools.add_parser(
        "sync-audit",
        help="run a training script and list every wait of the host for the device",
        description="Runs a training script and lists every wait of the host for the device, from the end of the "
        "warmup to the end of the last optimizer step, with file, line, count and time. Exit code 0: no more waits a "
        "step than --allow; 1: more; 2: no steps; else the script's own.",
    )
    add = parser.add_argument
    add("--warmup", type=int, default=3, metavar="N", help="leave out what happens before N optimizer steps (3)")
    add("--allow", type=float, default=0.0, metavar="X", help="waits a step that are no failure (0)")
    add("--device", choices=("cuda", "cpu"), help="cpu: a dry run, as if CPU tensors were on a GPU (default: the GPU)")
    add("--json", action="store_true", help="print the list as JSON")
    add("script", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        return _refuse("--device: expected cpu, since torch finds no GPU, got cuda")
    if given.warmup < 0 or given.allow < 0:
        return _refuse("--warmup and --allow: expected numbers >= 0")
    if not Path(given.script).is_file():
        return _refuse(f"script: expected a Python file, got {given.script}")
    code, audit, taken = _audited(given, device)
    if code:
        return code
    steps = audit.steps if given.warmup else max(audit.steps, 1)
    if taken < given.warmup or not steps:
        return _refuse(f"the script took {taken} optimizer steps: expected more than --warmup {given.warmup}")
    if given.json:
        print(json.dumps({"device": device, "steps": audit.steps, "syncs": [asdict(s) for s in audit.syncs]}, indent=2))
    else:
        print(audit)
    return int(audit.total > given.allow * steps)


def _audited(given: argparse.Namespace, device: str) -> tuple[int, SyncAudit, int]:
    """Runs the script. Returns its exit code, what was found in the steps after the warmup, and the number of optimizer
    steps. A step ends with the optimizer's, so that the script's last lines belong to none."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from warpsmith.train import sync_audit

    before = sys.argv, sys.path[:]
    sys.argv = [given.script, *given.arguments]
    sys.path.insert(0, str(Path(given.script).resolve().parent))
    code = taken = 0
    with sync_audit(device) as audit:
        until_last_step = audit

        def count(*_: Any) -> None:
            nonlocal taken, until_last_step
            taken += 1
            if taken == given.warmup:
                audit.clear()
            until_last_step = copy.deepcopy(audit)

        hook = register_optimizer_step_post_hook(count)
        try:
            runpy.run_path(given.script, run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        finally:
            hook.remove()
            sys.argv, sys.path[:] = before
    return code, until_last_step, taken


def _refuse(text: str) -> int:
    print(f"sync-audit: {text}", file=sys.stderr)
    return 2
