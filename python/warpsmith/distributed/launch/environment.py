"""Where a process stands in its job, as torchrun, Slurm or nobody tells it through the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process of a job. address and port: of the store at which the ranks meet; None for a world of one, which
    needs none. agent_store: the launcher keeps that store, no rank listens."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None
    agent_store: bool = False

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world_size == self.world_size

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place that the environment's variables describe.

    torchrun sets RANK and WORLD_SIZE. ``srun`` sets SLURM_PROCID and SLURM_STEP_NUM_TASKS; the latter is absent in a
    batch script itself, where a plain ``python`` is one process and not a task. Otherwise the world is this process.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _slurm(environ)
    return LaunchEnvironment("none", 0, 1, 0, 1, None, None)


def _torchrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in environ:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise RuntimeError(
                f"init: {name} is not set, {other} is {environ[other]}: start with torchrun, or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )
    world_size = _number(environ, "WORLD_SIZE", 1, 2**31)
    rank = _number(environ, "RANK", 0, world_size)
    if "LOCAL_RANK" in environ:
        local_rank = _number(environ, "LOCAL_RANK", 0, world_size)
    elif world_size == 1:
        local_rank = 0
    else:
        raise RuntimeError(
            f"init: rank {rank} of {world_size}: LOCAL_RANK is not set: start with torchrun, or set it to the number "
            "of this process on its host, from 0"
        )
    known = "LOCAL_WORLD_SIZE" in environ or world_size == 1
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size + 1) if "LOCAL_WORLD_SIZE" in environ else 1
    if not known and environ.get("MASTER_ADDR") in ("localhost", LOOPBACK, "::1"):
        local_world_size = world_size
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size == 1 and not agent:
        return LaunchEnvironment("torchrun", 0, 1, local_rank, 1, None, None)
    address, port = _master(environ, rank, world_size)
    return LaunchEnvironment("torchrun", rank, world_size, local_rank, local_world_size, address, port, agent)


def _master(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[str, int]:
    remedies = {
        "MASTER_ADDR": "the host of rank 0 (127.0.0.1 if all ranks are on this host)",
        "MASTER_PORT": "a free port of rank 0's host, the same for all ranks",
    }
    for name, remedy in remedies.items():
        if not environ.get(name):
            raise RuntimeError(
                f"init: rank {rank} of {world_size}: {name} is not set: start with torchrun, or set it to {remedy}"
            )
    return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", 1, 2**16)


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", 1, 2**31)
    rank = _number(environ, "SLURM_PROCID", 0, world_size)
    local_rank = _number(environ, "SLURM_LOCALID", 0, world_size)
    if world_size == 1:
        return LaunchEnvironment("slurm", 0, 1, local_rank, 1, None, None)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise RuntimeError(f"init: rank {rank} of {world_size}: SLURM_STEP_NODELIST is not set: start with srun")
    one_host = environ.get("SLURM_STEP_NUM_NODES", "") == "1"
    address = environ.get("MASTER_ADDR") or (LOOPBACK if one_host else first_host(nodes))
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT", 1, 2**16)
    else:  # the same for all ranks of a step, another for the next step or job on the same host
        job, step = (_number(environ, name, 0, 2**63) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = 20_000 + (job * 7 + step) % 10_000
    return LaunchEnvironment("slurm", rank, world_size, local_rank, world_size if one_host else 1, address, port)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-07,11],login1`` has ``gpu03``."""
    match = re.match(r"([^\[,\s]+)(?:\[(\w+)[^\]]*\]([^,\s]*))?", nodes)
    if match is None:
        raise RuntimeError(f"init: SLURM_STEP_NODELIST: expected a list of hosts, got {nodes!r}")
    return match[1] + (match[2] or "") + (match[3] or "")


def _number(environ: Mapping[str, str], name: str, low: int, end: int) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d+", text) or not low <= int(text) < end:
        raise ValueError(f"init: {name}: expected a number from {low} to {end - 1}, got {text!r}")
    return int(text)
