"""What killed a sim program: the test that it names is run again, by itself, under the address sanitizer."""

import re
import subprocess
from pathlib import Path

import build

DIED = re.compile(r"^died in: (\w+)(?:, case (\d+))?, schedule seed (\d+)$", re.M)
TIMEOUT_S = 600.0


def explain(test: Path, variant: str, result: subprocess.CompletedProcess[str], code: int = 90) -> str:
    """Text for the report of a run that died; empty if it did not die, or did so under the address sanitizer."""
    died = DIED.search(result.stderr)
    if not died or variant == "asan":
        return ""
    name, case, seed = died.groups()
    flags = ["--test", name, "--first-seed", seed, "--seeds", "1", "--code", str(code)]
    flags += ["--first-case", case, "--random", "1"] if case else []
    again = f"{test.stem}: {name} died (exit status {result.returncode}); by itself under the address sanitizer"
    try:
        alone = build.run(build.build(test, "asan"), flags, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{again} it does not end within {TIMEOUT_S:g} s\n"
    if alone.returncode == 0:
        return f"{again} it passes: it needs what ran before it, or other memory\n"
    return f"{again}:\n{alone.stdout}{alone.stderr}"
