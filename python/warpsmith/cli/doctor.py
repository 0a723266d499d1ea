"""``python -m warpsmith doctor --distributed``: what keeps ranks from meeting or makes them slow, before a job starts.

Under ``torchrun`` it also compares the ranks and measures an all-reduce::

    torchrun --nproc-per-node 2 -m warpsmith doctor --distributed
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.cli.links import expect, expectation, gpu_words, link_problems, links

if TYPE_CHECKING:  # the tools are imported where torch is missing or broken too, to say so
    import torch

_MATTERS = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_DISTRIBUTED|TORCH_FR|GLOO|MASTER|LOCAL|GROUP|UCX)_\w+|RANK|WORLD_SIZE|OMP_NUM_THREADS|"
    r"CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER)|LD_(LIBRARY_PATH|PRELOAD)|SLURM_(PROCID|NTASKS|LOCALID)"
)
# What a variable means that somebody set and forgot.
_SET_AND_FORGOTTEN = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for: for debugging alone",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a host talk through its memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a host talk through its network",
    ("NCCL_IB_DISABLE", "1"): "hosts talk through TCP, not InfiniBand",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "the host waits in every collective",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is compared among ranks: for debugging alone",
}
_RENAMED = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG")  # torch's, now TORCH_NCCL_...
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIZES_BYTES, _MORE_BYTES_ON_GPUS = (4, 16 * 2**20), (2**30,)
_REPEATS = 10


def environment_problems(environ: Mapping[str, str]) -> list[str]:
    """Variables that slow a job down, that torch no longer reads, or that are incomplete.

    Example:
        >>> environment_problems({"NCCL_P2P_DISABLE": "1"})
        ['NCCL_P2P_DISABLE=1: GPUs of a host talk through its memory']
    """
    found = [
        f"{name}={value}: {words}" for (name, value), words in _SET_AND_FORGOTTEN.items() if environ.get(name) == value
    ]
    found += [f"{name}: torch reads TORCH_{name} now" for name in _RENAMED if name in environ]
    have = [name for name in _PLACE if name in environ]
    if have and len(have) < len(_PLACE) and "RANK" in have:
        missing = ", ".join(name for name in _PLACE if name not in have)
        found.append(f"RANK is set without {missing}: start with torchrun, or set all of {', '.join(_PLACE)}")
    return found


def interface_problems(environ: Mapping[str, str], interfaces: Iterable[str]) -> list[str]:
    """Variables that name network interfaces which this host does not have.

    Example:
        >>> interface_problems({"GLOO_SOCKET_IFNAME": "eth7"}, ["lo", "eth0"])
        ['GLOO_SOCKET_IFNAME=eth7: expected one of lo, eth0']
    """
    here, found = list(interfaces), []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = name.startswith("GLOO") or value.startswith("=")
        wanted = value.lstrip("=").split(",")
        fits = [i for i in here for w in wanted if (i == w if exact else i.startswith(w))]
        if not fits:
            found.append(f"{name}={value}: expected one of {', '.join(here)}")
    return found


def nccl_libraries(folders: Iterable[str | Path], maps: str = "") -> list[str]:
    """The different NCCL libraries in folders and in a process's memory map, links followed.

    Example:
        >>> nccl_libraries([], "7f00-7f01 r-xp 00000000 00:00 0    /opt/nccl/libnccl.so.2.28.9")
        ['/opt/nccl/libnccl.so.2.28.9']
    """
    found = re.findall(r"(/\S*libnccl\.so\S*)", maps)
    for folder in folders:
        found += [str(path.resolve()) for path in sorted(Path(folder).glob("libnccl.so*"))]
    return list(dict.fromkeys(found))


def _loadable_folders(environ: Mapping[str, str]) -> list[Path]:
    """Where the loader looks before torch's own folder, and that one. A copy of the system's is behind both."""
    listed = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    wheels = [Path(part) / "nvidia" / "nccl" / "lib" for part in sys.path if part]
    return [folder for folder in (*listed, *wheels) if folder.is_dir()]


def gather() -> dict[str, Any]:
    """The facts of this process and what is wrong with them."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    interfaces = [name for _, name in socket.if_nameindex()]
    libraries = nccl_libraries(_loadable_folders(os.environ), maps)
    problems = environment_problems(os.environ) + interface_problems(os.environ, interfaces)
    if len(libraries) > 1:
        problems.append(
            f"{len(libraries)} NCCL libraries: {', '.join(libraries)}: torch should load its own; keep the others out "
            "of LD_LIBRARY_PATH and LD_PRELOAD"
        )
    if cuda and not dist.is_nccl_available():
        problems.append("this torch has no NCCL: GPUs will talk through gloo")
    joined = links() if os.environ.get("LOCAL_RANK", "0") == "0" else None  # once for each host
    problems += link_problems(joined["gpus"]) if joined else []
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "backends": [n for n in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{n}_available")()],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
        "nccl_libraries": libraries,
        "interfaces": interfaces,
        "links": joined,
        "environment": {name: value for name, value in sorted(os.environ.items()) if _MATTERS.fullmatch(name)},
        "problems": problems,
    }


def differences(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be the same on all ranks and is not.

    Example:
        >>> differences([{"torch": "2.13.0"}, {"torch": "2.12.0"}])
        ['torch: 2.13.0 on rank 0, 2.12.0 on rank 1']
    """
    found = []
    for name in ("torch", "cuda", "nccl", "python", "backends"):
        for rank, other in enumerate(facts):
            if other.get(name) != facts[0].get(name):
                found.append(f"{name}: {facts[0].get(name)} on rank 0, {other.get(name)} on rank {rank}")
                break
    return found


def measure_all_reduce(device: torch.device) -> list[dict[str, Any]]:
    """The median time of an all-reduce, and its bus bandwidth 2 (N - 1) / N * bytes / time (as nccl-tests count)."""
    import torch
    import torch.distributed as dist

    ranks, found = dist.get_world_size(), list[dict[str, Any]]()
    for size_bytes in _SIZES_BYTES + (_MORE_BYTES_ON_GPUS if device.type == "cuda" else ()):
        t = torch.zeros(size_bytes // 4, device=device)
        times = []
        for _ in range(_REPEATS + 2):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(t)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[2:])
        bus = 2 * (ranks - 1) / ranks * size_bytes / seconds
        found.append({"bytes": size_bytes, "microseconds": seconds * 1e6, "bus_gigabytes_per_s": bus / 1e9})
    return found


def _text(facts: Mapping[str, Any]) -> str:
    lines = [f"{name:12s} {_words(facts[name])}" for name in ("host", "python", "torch", "cuda", "gpus", "backends")]
    lines.append(f"{'nccl':12s} {_words(facts['nccl'])}; libraries: {_words(facts['nccl_libraries'])}")
    lines.append(f"{'interfaces':12s} {_words(facts['interfaces'])}")
    if facts["links"]:
        lines += [f"{'links':12s} {words}" for words in _link_words(facts["links"])]
    lines += [f"{'environment':12s} {name}={value}" for name, value in facts["environment"].items()]
    if "all_reduce" not in facts:
        lines.append(f"{'bandwidth':12s} not measured: one process; torchrun ... -m warpsmith doctor --distributed")
    for row in facts.get("all_reduce", ()):
        where = f"over {facts['ranks']} ranks, {facts['backend']}"
        speed = f"{row['microseconds']:.1f} us, bus {row['bus_gigabytes_per_s']:.3f} GB/s"
        expected = f"no expectation known: {row['expectation_from']}"
        if row["expected_gigabytes_per_s"] is not None:
            expected = f"expected {row['expected_gigabytes_per_s']:.3f} ({row['expectation_from']})"
        lines.append(f"{'bandwidth':12s} all-reduce of {row['bytes']:.0f} bytes {where}: {speed}; {expected}")
    lines += [f"problem: {words}" for words in facts["problems"]] or ["no problem found"]
    return "\n".join(lines) + "\n"


def _link_words(found: Mapping[str, Any]) -> list[str]:
    """Lines of what ``links`` found."""
    if found["missing"]:
        return [f"not known: {found['missing']}"]
    return [gpu_words(gpu) for gpu in found["gpus"]] + found["topology"]


def _words(value: Any) -> str:
    return (", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")) or "none"


def _together(facts: dict[str, Any], network_gbit: float | None) -> int:
    """Adds what the ranks of a job find together; returns this rank. What keeps them from meeting is a problem."""
    from warpsmith.distributed import init
    from warpsmith.distributed.exchange import all_gather_json
    from warpsmith.distributed.launch.environment import launch_environment

    try:
        if launch_environment(os.environ).world_size == 1:
            return 0
        ctx = init(timeout_s=120)
    except (ValueError, RuntimeError) as error:
        if not any(words.startswith("RANK is set without") for words in facts["problems"]):
            facts["problems"].append(str(error).removeprefix("init: "))
        return 0  # no other rank prints it
    with ctx:
        everybody = all_gather_json(facts)
        facts["problems"] = [
            f"rank {r}: {words}" for r, one in enumerate(everybody) for words in one["problems"]
        ] + differences(everybody)
        facts |= {"ranks": ctx.world_size, "backend": ctx.backend, "hosts": [one["host"] for one in everybody]}
        facts["all_reduce"] = measure_all_reduce(ctx.device)
        gpus = [name for one in everybody for name in one["gpus"]]
        known = expectation(ctx.device.type, gpus, facts["hosts"], network_gbit)
        facts["problems"] += expect(facts["all_reduce"], *known, facts["hosts"])
    return ctx.rank


def _run(given: argparse.Namespace) -> int:
    if given.network_gbit is not None and not 0 < given.network_gbit < math.inf:
        print(f"doctor: --network-gbit: expected a number above 0, got {given.network_gbit:g}", file=sys.stderr)
        return 2
    facts = gather()
    if _together(facts, given.network_gbit) == 0:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n" if given.json else _text(facts))
    return 1 if facts["problems"] else 0


def add_to(tools: Any) -> None:
    """Adds the tool to the subparsers of ``python -m warpsmith``."""
    parser = tools.add_parser("doctor", help="what keeps ranks from meeting, or makes them slow")
    parser.add_argument("--distributed", action="store_true", required=True, help="look at what many ranks need")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--network-gbit", type=float, help="Gbit/s of each GPU between hosts, for the expectation")
    parser.set_defaults(run=_run)
