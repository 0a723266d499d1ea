"""What joins the GPUs of a host, and how fast an all-reduce over it should be. For ``doctor``."""

from __future__ import annotations

import importlib
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpsmith.distributed.plan import Cluster

LEAST_SHARE = 0.5  # of the expected bandwidth; less is a problem
_MOST_NVLINKS = 18  # of a GPU, where the bindings do not tell


def links() -> dict[str, Any]:
    """What NVML tells of the GPUs; else the table of ``nvidia-smi topo -m``; else what is missing.

    Returns:
        ``gpus``: a dict for each GPU, for ``gpu_words``. ``topology``: lines of the table. ``missing``: why there
        is neither, empty where there is one.
    """
    try:
        gpus, why = _from_nvml(importlib.import_module("pynvml")), ""
    except ImportError:
        gpus, why = [], "NVML's Python bindings are not installed (nvidia-ml-py)"
    except Exception as error:  # NVMLError: no driver, no GPU
        gpus, why = [], f"NVML: {error}"
    if gpus:
        return {"gpus": gpus, "topology": [], "missing": ""}
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": [], "topology": [], "missing": f"{why or 'NVML sees no GPU'}; no nvidia-smi in PATH"}
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"gpus": [], "topology": [], "missing": f"{why}; nvidia-smi topo -m: {error}"}
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        return {"gpus": [], "topology": [], "missing": f"{why}; nvidia-smi topo -m: {words}"}
    return {"gpus": [], "topology": [line for line in done.stdout.splitlines() if line.strip()], "missing": ""}


def _from_nvml(nvml: Any) -> list[dict[str, Any]]:
    found = []
    nvml.nvmlInit()
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(gpu)
            active = 0
            for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MOST_NVLINKS)):
                try:
                    active += nvml.nvmlDeviceGetNvLinkState(gpu, link)
                except nvml.NVMLError:  # no such link
                    break
            found.append(
                {
                    "index": index,
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "nvlinks": active,
                    "pcie_generation": nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
                    "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
                    "most_pcie_width": nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
                }
            )
    finally:
        nvml.nvmlShutdown()
    return found


def gpu_words(gpu: Mapping[str, Any]) -> str:
    """One GPU of ``links`` in a line.

    Example:
        >>> gpu = {"index": 0, "name": "NVIDIA H200", "nvlinks": 18}
        >>> gpu_words(gpu | {"pcie_generation": 5, "pcie_width": 16, "most_pcie_width": 16})
        'GPU 0 NVIDIA H200: 18 NVLinks active, PCIe 5 x16 of x16'
    """
    pcie = f"PCIe {gpu['pcie_generation']} x{gpu['pcie_width']} of x{gpu['most_pcie_width']}"
    return f"GPU {gpu['index']} {gpu['name']}: {gpu['nvlinks'] or 'no'} NVLinks active, {pcie}"


def link_problems(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """GPUs with fewer NVLinks than most, or fewer PCIe lanes than they can have.

    A PCIe link of an idle GPU lowers its generation, not its width: the generation is no sign.

    Example:
        >>> whole = {"nvlinks": 18, "pcie_width": 16, "most_pcie_width": 16}
        >>> link_problems([whole | {"index": 0}, whole | {"index": 1, "nvlinks": 17}, whole | {"index": 2}])
        ['GPU 1: 17 NVLinks active, expected 18, as on most GPUs']
    """
    found = []
    usual = statistics.mode(gpu["nvlinks"] for gpu in gpus) if gpus else 0
    for gpu in gpus:
        if gpu["nvlinks"] < usual:
            found.append(f"GPU {gpu['index']}: {gpu['nvlinks']} NVLinks active, expected {usual}, as on most GPUs")
        if gpu["pcie_width"] < gpu["most_pcie_width"]:
            found.append(f"GPU {gpu['index']}: PCIe x{gpu['pcie_width']}, expected x{gpu['most_pcie_width']}")
    return found


def expectation(
    device: str, gpus: Iterable[str], hosts: Sequence[str], network_gbit: float | None
) -> tuple[Cluster | None, str]:
    """The cluster of ``warpsmith.distributed.plan`` that ranks run on, and where it is from, or why there is none.

    Args:
        device: its type, such as ``"cuda"``. gpus: the names of all ranks' GPUs. hosts: of each rank.
        network_gbit: of each GPU, in Gbit/s; None: not known.

    Example:
        >>> cluster, words = expectation("cuda", ["NVIDIA H200"] * 2, ["a", "a"], None)
        >>> words, round(cluster.gpu.link_bytes_per_s / 1e9)
        ('plan.Cluster of H200', 354)
        >>> expectation("cpu", [], ["a", "a"], None)
        (None, 'ranks are on cpu')
    """
    from warpsmith.distributed.plan import GPUS, Cluster

    if device != "cuda":
        return None, f"ranks are on {device}"
    names = sorted(set(gpus))
    # The table has GPUs with NVLink to all others; cards in PCIe slots have none, or bridges between two.
    known = [gpu for gpu in GPUS for name in names if re.search(rf"\b{gpu}\b", name) and not re.search("PCI|NVL", name)]
    if len(known) != 1 or len(names) != 1:
        return None, f"the table has no {', '.join(names)}"
    if len(set(hosts)) > 1 and network_gbit is None:
        return None, f"{len(set(hosts))} hosts: give --network-gbit, of each GPU"
    cluster = Cluster.of(known[0]) if network_gbit is None else Cluster.of(known[0], network_gbit=network_gbit)
    return cluster, f"plan.Cluster of {known[0]}"


def expect(rows: Iterable[dict[str, Any]], cluster: Cluster | None, source: str, hosts: Sequence[str]) -> list[str]:
    """Adds to timed all-reduces what was expected of them; the problems, of the largest one alone.

    Example:
        >>> cluster, source = expectation("cuda", ["NVIDIA H200"], ["a", "a"], None)
        >>> row = {"bytes": 2**30, "bus_gigabytes_per_s": 40.0}
        >>> expect([row], cluster, source, ["a", "a"])
        ['bandwidth: bus 40 GB/s, expected about 352 (plan.Cluster of H200)']
    """
    rows, ranks, in_host = list(rows), len(hosts), max(Counter(hosts).values())
    for row in rows:
        row["expectation_from"] = source
        if cluster is None:
            row["expected_gigabytes_per_s"] = None
        else:
            seconds = cluster.collective_s("all_reduce", row["bytes"], ranks=ranks, in_host=in_host)
            row["expected_gigabytes_per_s"] = 2 * (ranks - 1) / ranks * row["bytes"] / seconds / 1e9
    largest = max(rows, key=lambda row: float(row["bytes"]))
    got, expected = largest["bus_gigabytes_per_s"], largest["expected_gigabytes_per_s"]
    if expected is None or got >= LEAST_SHARE * expected:
        return []
    return [f"bandwidth: bus {got:.3g} GB/s, expected about {expected:.3g} ({source})"]
