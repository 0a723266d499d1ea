"""``python -m warpsmith info``: what was built, what torch offers, and which kernels run on this machine."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from warpsmith._core import load as _load


class Verdict(NamedTuple):
    """Whether kernels run on a device, and why. ``device`` and ``code``: the architectures of the GPU and of the code
    that runs there, such as ``"sm_90"`` and ``"sm_80"``; None where there is no such thing."""

    runs: bool
    why: str
    device: str | None = None
    code: str | None = None


def _sm(number: str) -> str:
    return "sm_" + number


def cuda_verdict(capability: tuple[int, int], architectures: Sequence[str], name: str = "this GPU") -> Verdict:
    """Which of the compiled architectures a GPU runs, by NVIDIA's rules of compatibility.

    Machine code runs on GPUs of its own major version and an equal or higher minor one, that of an ``a`` architecture
    on its own alone. PTX (entries without ``-real``) is compiled by the driver for any GPU that is as new. With
    ``CUDA_FORCE_PTX_JIT=1`` the driver passes over all machine code.

    Args:
        capability: compute capability of the GPU, for example (9, 0).
        architectures: as CMake writes them: ``80-real`` machine code, ``80-virtual`` PTX, ``80`` both.
        name: of the GPU.
    """
    major, minor = capability
    device = _sm(f"{major}{minor}")
    forced = os.environ.get("CUDA_FORCE_PTX_JIT") == "1"
    exact, machine, ptx = [], [], []
    for entry in architectures:
        match = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", entry)
        if match is None:
            continue
        has = (int(match[1]), int(match[2]))
        number, suffix, kind = match[1] + match[2] + match[3], match[3], match[4]
        if kind != "-virtual" and not forced:
            if suffix == "a":
                exact += [number] * (has == capability)
            elif has[0] == major and has[1] <= minor:
                machine.append((has, number))
        if kind != "-real" and (has == capability or (not suffix and has <= capability)):
            ptx.append((has, number))
    if exact or machine:
        number, form = exact[-1] if exact else max(machine)[1], "machine code"
    elif ptx:
        number, form = max(ptx)[1], "PTX, compiled by the driver at first use"
    else:
        built = ", ".join(_sm(a.removesuffix("-real")) for a in architectures)
        why = f"{name} is {device}, but the kernels are built for {built}"
        return Verdict(False, f"{why}; build with TORCH_CUDA_ARCH_LIST={major}.{minor}", device)
    return Verdict(True, f"{name} ({device}) with code of {_sm(number)} ({form})", device, _sm(number))


def asked(verdict: Verdict, index: int) -> Verdict:
    """The verdict on a GPU that is here, with the code that the driver picked: what the choosers of kernels go by."""
    import torch

    if not verdict.runs:
        return verdict
    try:
        found = _sm(str(torch.ops.warpsmith._code_capability(index)))
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        return verdict._replace(runs=False, why=f"{verdict.why}, by its architectures; but the driver says: {said}")
    if verdict.code and verdict.code.rstrip("af") == found:
        return verdict
    return verdict._replace(why=f"{verdict.why}, by its architectures; the driver picked code of {found}", code=found)


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

    all_names = torch._C._dispatch_get_all_op_names()
    names = [n for n in all_names if n.startswith("warpsmith::") and not n.startswith("warpsmith::_")]
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
            verdict = cuda_verdict(tuple(device["capability"]), build["cuda_architectures"], device["name"])
            found[f"cuda:{device['index']}"] = verdict
    return found


def collect() -> dict[str, Any]:
    """All facts as plain values. What cannot be found out stands in ``problems``, as a sentence each."""
    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform(), "problems": []}
    facts.update(build=None, torch=None, library=None, ops={}, kernels={}, cublas_lt=None)
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
        facts["cublas_lt"] = cublas_lt(facts["build"])
        for device, verdict in kernels(facts["build"], facts["torch"]).items():
            index = device.removeprefix("cuda:")
            facts["kernels"][device] = (asked(verdict, int(index)) if index.isdigit() else verdict)._asdict()
    return facts


def _runs_on(facts: dict[str, Any]) -> str:
    """In one sentence: do the ops run here, on which devices, and what to do where they do not."""
    if facts["problems"]:
        return f"nothing runs: {facts['problems'][0]}"
    kernels = facts["kernels"].items()
    names = {"cpu": "the CPU", "cuda": "CUDA"}
    runs = [names.get(device, device) for device, kernel in kernels if kernel["runs"]]
    fails = [f"{names.get(device, device)}: no, {kernel['why']}" for device, kernel in kernels if not kernel["runs"]]
    return "; ".join([f"runs on {' and '.join(runs)}", *fails])


def cublas_lt(build: dict[str, Any]) -> str:
    """cuBLASLt's version, or why linear layers take torch's products instead."""
    import torch

    if not build["cuda"]:
        return "not used: this build is for the CPU only"
    try:
        number = torch.ops.warpsmith._cublas_lt_version()
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0].removeprefix("cublas_lt: ")
        return f"not used, linear layers take torch's products: {said}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def public_ops() -> list[str]:
    """The ops as functions."""
    from warpsmith import ops

    return sorted(filter(str.islower, ops.__all__))


def text(facts: dict[str, Any], list_ops: bool = False) -> str:
    """The facts for reading, what they come to first."""
    lines = [f"verdict    {_runs_on(facts)}"]
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
    for device, kernel in facts["kernels"].items():
        lines.append(f"{device:<10} {'runs' if kernel['runs'] else 'does not run'}: {kernel['why']}")
    if facts.get("cublas_lt"):
        lines.append(f"cublasLt   {facts['cublas_lt']}")
    if facts["ops"]:
        lines.append(f"ops        {', '.join(public_ops())}")
    if list_ops:
        lines += [f"op         {name}: {', '.join(keys) or 'no kernel'}" for name, keys in facts["ops"].items()]
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
    form.add_argument("--ops", action="store_true", help="also each op of the dispatcher and where it has a kernel")
    form.add_argument("--cmake-dir", action="store_true", help="print the directory for CMake's warpsmith_DIR")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.cmake_dir:
        return _print_cmake_dir()
    facts = collect()
    print(json.dumps(facts, indent=2) if given.json else text(facts, given.ops))
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
