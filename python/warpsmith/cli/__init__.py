"""What ``python -m warpsmith`` runs. Nothing here is imported by ``import warpsmith``."""

import argparse
from collections.abc import Sequence

from warpsmith.cli import doctor, info, plan, sync_audit


def main(arguments: Sequence[str]) -> int:
    """Runs one tool and returns its exit code: 0 done, 1 something is wrong and was named, 2 (argparse) wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m warpsmith", description="Tools of the warpsmith package.")
    tools = parser.add_subparsers(dest="tool", required=True)
    info.add_to(tools)
    doctor.add_to(tools)
    sync_audit.add_to(tools)
    plan.add_to(tools, named=list(arguments[:1]) == ["plan"])
    given = parser.parse_args(arguments)
    return given.run(given)
