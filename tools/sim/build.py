"""Builds programs for the host execution layer: csrc/sim, kernels and one test file, in one of four variants.

Objects are kept under build/sim and rebuilt when a file they include (from the compiler's dependency list) or the flags
change. Several processes may build at once: each object has a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sim"
COMMON = ["-std=c++20", "-DWARPSMITH_SIM", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"]
UNKNOWN_NAME = re.compile(r"not( been)? declared|no member named|is not a member of|undeclared identifier")
HINT = (
    "note: a built-in or primitive that the host execution layer does not know belongs into "
    "csrc/device/host_builtins.h (CUDA built-ins) or a header of csrc/device with a device body and a host body"
)


@dataclass(frozen=True)
class Variant:
    """`kernel` flags apply to kernels and tests, `machine` flags to csrc/sim and the harness."""

    name: str
    kernel: tuple[str, ...]
    machine: tuple[str, ...]
    machine_folder: str
    link: tuple[str, ...]


def _variant(name: str, kernel: str, machine: str, folder: str, link: str = "") -> Variant:
    return Variant(name, tuple(kernel.split()), tuple(machine.split()), folder, tuple(link.split()))


# Kernels are not optimised: rms_norm.cu compiles in 6 s at -O1 and in 2 s at -O0 (31 and 7 s with the address
# sanitizer), and its tests run 1.2 times as long. The machine is optimised: it is compiled once for all tests.
_ADDRESS = "-g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
VARIANTS = {
    v.name: v
    for v in (
        _variant("plain", "-O0 -g1", "-O2 -g1", "machine"),
        _variant("asan", f"-O0 {_ADDRESS}", f"-O1 {_ADDRESS}", "machine-asan", "-fsanitize=address,undefined"),
        # The machine is not instrumented: its own bookkeeping is not part of the kernel.
        _variant(
            "tsan",
            "-O1 -g1 -fsanitize=thread -DWARPSMITH_SIM_TSAN",
            "-O2 -g1 -DWARPSMITH_SIM_TSAN",
            "machine-tsan",
            "-fsanitize=thread",
        ),
        _variant("coverage", "-O0 --coverage -fno-inline -fno-exceptions", "-O2 -g1", "machine", "--coverage"),
    )
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:history_size=4:atexit_sleep_ms=0",
}


class BuildError(Exception):
    """A compiler failed; the text is its output."""


def compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or "c++"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_fresh(target: Path, command: list[str]) -> bool:
    stamp, listing = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and stamp.exists() and listing.exists()) or stamp.read_text() != shlex.join(command):
        return False
    built = target.stat().st_mtime_ns
    inputs = re.sub(r"\\\n", " ", listing.read_text()).split(":", 1)[1].split()
    return all(os.path.exists(path) and os.stat(path).st_mtime_ns <= built for path in inputs)


def object_path(source: Path, folder: Path) -> Path:
    tag = hashlib.sha1(str(source).encode()).hexdigest()[:8]
    return folder / f"{source.stem}-{tag}.o"


def compile_object(source: Path, flags: list[str], folder: Path) -> Path:
    target = object_path(source, folder)
    command = [compiler(), *COMMON, *flags, "-x", "c++", "-c", str(source), "-o", str(target)]
    with _locked(target):
        if _is_fresh(target, command):
            return target
        dependencies = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        result = subprocess.run([*command, *dependencies], capture_output=True, text=True, cwd=ROOT)
        if result.returncode:
            hint = HINT if UNKNOWN_NAME.search(result.stderr) else ""
            raise BuildError(f"{shlex.join(command)}\n{result.stderr}\n{hint}")
        target.with_suffix(".cmd").write_text(shlex.join(command))
    return target


def kernel_sources(test: Path) -> list[Path]:
    """The op's .cu, and those named in lines `// links: csrc/...` of the test."""
    op = test.stem.removeprefix("sim_")
    named = [ROOT / line for line in re.findall(r"^// links: (\S+)$", test.read_text(), re.M)]
    return sorted({*(ROOT / "csrc" / "kernels").rglob(f"{op}.cu"), *named})


def machine_object(variant: str) -> Path:
    """csrc/sim as one translation unit: 4 s of compilation where its files, one by one, take 18."""
    folder = BUILD / VARIANTS[variant].machine_folder
    whole = folder / "machine.cpp"
    text = "".join(f'#include "sim/{f.name}"\n' for f in sorted((ROOT / "csrc" / "sim").glob("*.cpp")))
    with _locked(whole):
        if not whole.exists() or whole.read_text() != text:
            whole.write_text(text)
    return compile_object(whole, [*VARIANTS[variant].machine, f"-I{ROOT / 'csrc'}"], folder)


def main_object(test: Path, variant: str) -> Path:
    v = VARIANTS[variant]
    main = ROOT / "tests" / "cpp" / ("planted_main.cpp" if test.stem.startswith("planted_") else "harness.cpp")
    return compile_object(main, [*v.machine, f"-I{ROOT / 'csrc'}"], BUILD / v.machine_folder)


def link(objects: list[Path], variant: str, program: Path) -> Path:
    with _locked(program):
        if program.exists() and all(o.stat().st_mtime_ns <= program.stat().st_mtime_ns for o in objects):
            return program
        command = [compiler(), *VARIANTS[variant].link, "-rdynamic", *map(str, objects), "-ldl", "-o", str(program)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise BuildError(result.stderr)
    return program


def build(test: Path, variant: str) -> Path:
    """Returns the test's program."""
    folder = BUILD / variant
    flags = [*VARIANTS[variant].kernel, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpp'}"]
    objects = [machine_object(variant), main_object(test, variant)]
    objects += [compile_object(s, flags, folder) for s in [*kernel_sources(test), test]]
    return link(objects, variant, folder / test.stem)


def build_program(source: Path, variant: str = "plain") -> Path:
    """A program with its own main() on the host execution layer, without the test harness."""
    flags = [*VARIANTS[variant].kernel, f"-I{ROOT / 'csrc'}"]
    objects = [machine_object(variant), compile_object(source, flags, BUILD / variant)]
    return link(objects, variant, BUILD / variant / source.stem)


def run(
    program: Path, arguments: list[str], environment: dict[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        timeout=timeout,
        cwd=ROOT,
    )


def tests_of(op: str | None) -> list[Path]:
    folder = ROOT / "tests" / "cpp"
    found = sorted(folder.glob(f"sim_{op}.cpp" if op else "sim_*.cpp"))
    if not found:
        known = ", ".join(p.stem.removeprefix("sim_") for p in sorted(folder.glob("sim_*.cpp")))
        sys.exit(f"no tests/cpp/sim_{op}.cpp; there are: {known}")
    return found
