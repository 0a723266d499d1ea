"""``python -m warpsmith info``: what was built, what torch offers, and which kernels run on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from warpsmith import _load


class Verdict(NamedTuple):
    """Whether kernels run on a device, and why."""

    runs: bool
    why: str


def _sm(number: str) -> str:
    return "sm_" + number


def cuda_verdict(capability: tuple[int, int], architectures: Sequence[str]) -> Verdict:
    """Which of the compiled architectures a GPU runs, by NVIDIA's rules of compatibility.

    Machine code runs on GPUs of its own major version and an equal or higher minor one, that of an ``a`` architecture
    on its own alone. PTX (entries without ``-real``) is compiled at load by any GPU that is as new.

    Args:
        capability: compute capability of the GPU, for example (9, 0).
        architectures: as CMake writes them: ``80-real`` machine code, ``80-virtual`` PTX, ``80`` both.
    """
    major, minor = capability
    name = _sm(f"{major}{minor}")
    exact, machine, ptx = [], [], []
    for entry in architectures:
        match = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", entry)
        if match is None:
            continue
        has = (int(match[1]), int(match[2]))
        number, suffix, kind = match[1] + match[2] + match[3], match[3], match[4]
        if suffix == "a":
            if has == capability and kind != "-virtual":
                exact.append(number)
            continue
        if kind != "-virtual" and has[0] == major and has[1] <= minor:
            machine.append(number)
        if kind != "-real" and not suffix and has <= capability:
            ptx.append(number)
    if exact:
        return Verdict(True, f"{name}: kernels of {_sm(exact[-1])}")
    if machine:
        return Verdict(True, f"{name}: kernels of {_sm(machine[-1])}")
    if ptx:
        return Verdict(True, f"{name}: PTX of {_sm(ptx[-1])}, which the driver compiles at first use")
    built = ", ".join(_sm(a.removesuffix("-real")) for a in architectures)
    return Verdict(
        False,
        f"this GPU is {name}, but the kernels are built for {built}; build with TORCH_CUDA_ARCH_LIST={major}.{minor}",
    )


def _torch_facts() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            devices.append(
                {"index": i, "name": p.name, "capability": [p.major, p.minor], "memory_bytes": p.total_memory}
            )
    directory = torch.__path__[0]
    # "13000" is what driver 580 answers: the newest CUDA that it serves.
    driver = torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else 0
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}" if driver else None,
        "devices": devices,
        "path": directory,
        "libtorch": directory + "/lib",
        "threads": torch.get_num_threads(),
    }


def _ops() -> dict[str, list[str]]:
    import torch

    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("warpsmith::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {n.removeprefix("warpsmith::"): [k for k in ("CPU", "CUDA") if has(n, k)] for n in sorted(names)}


def kernels(build: dict[str, Any], torch_facts: dict[str, Any]) -> dict[str, Verdict]:
    """Whether our kernels run on each device of this machine, and why; ``cuda`` where there is no GPU."""
    found = {"cpu": Verdict(True, f"compiled by {build['host_compiler']}, {torch_facts['threads']} threads")}
    driver, needed = torch_facts["driver_cuda"], build["cuda_compiler"]
    if not build["cuda"]:
        found["cuda"] = Verdict(
            False,
            "this build is for the CPU only: no CUDA compiler was found, or WARPSMITH_CUDA=OFF was given; install "
            "again with nvcc on PATH",
        )
    elif torch_facts["cuda"] is None:
        found["cuda"] = Verdict(False, f"torch {torch_facts['version']} is a CPU build; install a CUDA build of torch")
    elif driver and int(driver.split(".")[0]) < int(needed.split(".")[0]):
        found["cuda"] = Verdict(False, f"the driver serves CUDA {driver}, the kernels need {needed}; update the driver")
    elif not torch_facts["devices"]:
        found["cuda"] = Verdict(False, "torch finds no CUDA device; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    else:
        for device in torch_facts["devices"]:
            verdict = cuda_verdict(tuple(device["capability"]), build["cuda_architectures"])
            found[f"cuda:{device['index']}"] = Verdict(verdict.runs, f"{device['name']}, {verdict.why}")
    return found


def collect() -> dict[str, Any]:
    """All facts as plain values. What cannot be found out stands in ``problems``, as a sentence each."""
    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform(), "problems": []}
    facts.update(build=None, torch=None, library=None, ops={}, kernels={})
    try:
        from warpsmith import _C

        facts["build"] = _C.build()
        facts["library"] = str(_load.library_path())
    except ImportError:
        pass  # load_library, below, says the same with what to do
    try:
        facts["torch"] = _torch_facts()
    except (ImportError, OSError, AttributeError):
        pass  # likewise: missing, broken, or so old that it lacks these names
    try:
        _load.load_library()
        facts["ops"] = _ops()
    except ImportError as error:
        facts["problems"].append(str(error))
    if facts["build"] and facts["torch"] and not facts["problems"]:
        facts["kernels"] = {
            device: {"runs": v.runs, "why": v.why} for device, v in kernels(facts["build"], facts["torch"]).items()
        }
    return facts


def text(facts: dict[str, Any]) -> str:
    """The facts for reading."""
    lines = []
    build, torch_facts = facts["build"], facts["torch"]
    if build:
        cuda = (
            f"CUDA {build['cuda_compiler']} for {' '.join(build['cuda_architectures'])}"
            if build["cuda"]
            else "CPU only"
        )
        lines.append(f"warpsmith  {build['version']}, built by {build['host_compiler']}, {cuda}")
    if facts["library"]:
        lines.append(f"library    {facts['library']}")
    lines.append(f"python     {facts['python']}, {facts['platform']}")
    if torch_facts:
        cuda = f"CUDA {torch_facts['cuda']}" if torch_facts["cuda"] else "without CUDA"
        lines.append(f"torch      {torch_facts['version']}, {cuda}, libtorch in {torch_facts['libtorch']}")
    lines += [f"op         {name}: {', '.join(keys) or 'no kernel'}" for name, keys in facts["ops"].items()]
    for device, kernel in facts["kernels"].items():
        lines.append(f"{device:<10} {'runs' if kernel['runs'] else 'does not run'}: {kernel['why']}")
    lines += [f"problem    {problem}" for problem in facts["problems"]]
    return "\n".join(lines)


def add_to(tools: Any) -> None:
    """Adds ``info`` to the parser's tools."""
    parser: argparse.ArgumentParser = tools.add_parser(
        "info",
        help="what was built, what torch offers, which kernels run here",
        description="What was built, what torch offers, and which kernels run on this machine and why not. Exit code 1 "
        "when the ops cannot be used at all.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same as JSON")
    form.add_argument("--cmake-dir", action="store_true", help="print the directory for CMake's warpsmith_DIR")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.cmake_dir:
        return _print_cmake_dir()
    facts = collect()
    print(json.dumps(facts, indent=2) if given.json else text(facts))
    return 1 if facts["problems"] else 0


def _print_cmake_dir() -> int:
    try:
        directory = _load.library_path().with_name("cmake")
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    if not (directory / "warpsmithConfig.cmake").exists():
        print(f"warpsmith: {directory} holds no warpsmithConfig.cmake; {_load.REINSTALL}", file=sys.stderr)
        return 1
    print(directory)
    return 0
