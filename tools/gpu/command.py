"""A command of a stage, with a limit of time, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUT = 124  # the exit code of a command that its limit stopped


@dataclass(frozen=True)
class Order:
    """What a stage gets: where its logs go, how long it may take, whether it only shows that it would run; variables of
    the environment for its commands, and what the names of its logs begin with."""

    logs: Path
    limit_s: float
    dry: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def log(self, name: str) -> Path:
        return self.logs / f"{self.prefix}{name}.log"


@dataclass
class Verdict:
    """How a command ended. ``cut``: time ended before the work did."""

    stage: str
    ok: bool
    seconds: float
    detail: str
    cut: bool = False


def run_command(
    command: list[str], log: Path, limit_s: float, env: Mapping[str, str] | None = None
) -> tuple[int, str, float]:
    """Runs a command in a process group of its own; at the limit all of it is killed and the exit code is CUT."""
    start = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment_of(env),
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{command[0]}: {error}\n".encode())
            code = 127
        else:
            try:
                code = process.wait(max(limit_s, 1.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = CUT
    return code, log.read_text(errors="replace"), time.monotonic() - start


def environment_of(extra: Mapping[str, str] | None) -> dict[str, str]:
    """This process's environment with the CUDA tools on PATH, which a login shell may have left out."""
    tools = str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        "PATH": path if tools in path.split(os.pathsep) else path + os.pathsep + tools,
        **(extra or {}),
    }


def why(code: int, limit_s: float) -> str:
    """An exit code in words."""
    return f"stopped after {limit_s:.0f} s" if code == CUT else f"exit code {code}"
