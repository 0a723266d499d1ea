"""Builds programs for the host execution layer: csrc/sim, kernels and one test file, in one of four variants.

Objects are kept under build/sim/<variant> and rebuilt when a file they include (from the compiler's dependency list) or
the flags change.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sim"
COMMON = ["-std=c++20", "-DWARPSMITH_SIM", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"]
HINT = (
    "note: a built-in or primitive that the host execution layer does not know belongs into "
    "csrc/device/host_builtins.h (CUDA built-ins) or a header of csrc/device with a device body and a host body"
)


@dataclass(frozen=True)
class Variant:
    """`kernel` flags apply to kernels and tests, `machine` flags to csrc/sim."""

    name: str
    kernel: tuple[str, ...]
    machine: tuple[str, ...]
    link: tuple[str, ...] = ()


def _variant(name: str, kernel: str, machine: str | None = None, link: str = "") -> Variant:
    return Variant(name, tuple(kernel.split()), tuple((machine or kernel).split()), tuple(link.split()))


_ASAN = "-g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
VARIANTS = {
    v.name: v
    for v in (
        _variant("plain", "-O1", "-O2 -g"),
        # Optimising instrumented kernels costs more than it saves: rms_norm.cu compiles in 31 s at -O1, in 7 s at -O0.
        # The machine is compiled once and computes wgmma: -O1 is three times as fast.
        _variant("asan", f"-O0 {_ASAN}", f"-O1 {_ASAN}", "-fsanitize=address,undefined"),
        # The machine is not instrumented: its own bookkeeping is not part of the kernel.
        _variant(
            "tsan",
            "-O1 -g1 -fsanitize=thread -DWARPSMITH_SIM_TSAN",
            "-O2 -g -DWARPSMITH_SIM_TSAN",
            "-fsanitize=thread",
        ),
        _variant("coverage", "-O0 -g --coverage -fno-inline -fno-exceptions", "-O2", "--coverage"),
    )
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:history_size=4",
}


class BuildError(Exception):
    """A compiler failed; the text is its output."""


def compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or "c++"


def _is_fresh(target: Path, command: list[str]) -> bool:
    stamp, listing = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and stamp.exists() and listing.exists()) or stamp.read_text() != shlex.join(command):
        return False
    built = target.stat().st_mtime_ns
    inputs = re.sub(r"\\\n", " ", listing.read_text()).split(":", 1)[1].split()
    return all(os.path.exists(path) and os.stat(path).st_mtime_ns <= built for path in inputs)


def compile_object(source: Path, flags: list[str], folder: Path) -> Path:
    tag = hashlib.sha1(str(source).encode()).hexdigest()[:8]
    target = folder / f"{source.stem}-{tag}.o"
    command = [compiler(), *COMMON, *flags, "-x", "c++", "-c", str(source), "-o", str(target)]
    if _is_fresh(target, command):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    dependencies = ["-MMD", "-MF", str(target.with_suffix(".d"))]
    result = subprocess.run([*command, *dependencies], capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        hint = HINT if "not declared" in result.stderr or "no member named" in result.stderr else ""
        raise BuildError(f"{shlex.join(command)}\n{result.stderr}\n{hint}")
    target.with_suffix(".cmd").write_text(shlex.join(command))
    return target


def kernel_sources(test: Path) -> list[Path]:
    """The op's .cu, and those named in lines `// links: csrc/...` of the test."""
    op = test.stem.removeprefix("sim_")
    named = [ROOT / line for line in re.findall(r"^// links: (\S+)$", test.read_text(), re.M)]
    return sorted({*(ROOT / "csrc" / "kernels").rglob(f"{op}.cu"), *named})


def _shadowed(source: Path, include_first: Path | None) -> Path:
    mutant = include_first / source.relative_to(ROOT / "csrc") if include_first else source
    return mutant if mutant.exists() else source


def machine_objects(variant: str) -> list[Path]:
    flags = [*VARIANTS[variant].machine, f"-I{ROOT / 'csrc'}"]
    return [compile_object(f, flags, BUILD / variant) for f in sorted((ROOT / "csrc" / "sim").glob("*.cpp"))]


def link(objects: list[Path], variant: str, program: Path) -> Path:
    if program.exists() and all(o.stat().st_mtime_ns <= program.stat().st_mtime_ns for o in objects):
        return program
    command = [compiler(), *VARIANTS[variant].link, "-rdynamic", *map(str, objects), "-ldl", "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(result.stderr)
    return program


def build(test: Path, variant: str, include_first: Path | None = None) -> Path:
    """Returns the test's program. `include_first` shadows csrc (for mutants); then its objects go there."""
    folder = include_first / "objects" if include_first else BUILD / variant
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpp'}"]
    flags = [*VARIANTS[variant].kernel, *includes]
    main = ROOT / "tests" / "cpp" / ("planted_main.cpp" if test.stem.startswith("planted_") else "harness.cpp")
    objects = [*machine_objects(variant), compile_object(main, flags, BUILD / variant)]
    if include_first:
        flags = [*VARIANTS[variant].kernel, f"-I{include_first}", *includes]
    sources = [_shadowed(s, include_first) for s in kernel_sources(test)] + [test]
    objects += [compile_object(s, flags, folder) for s in sources]
    return link(objects, variant, folder / test.stem)


def build_program(source: Path, variant: str = "plain") -> Path:
    """A program with its own main() on the host execution layer, without the test harness."""
    flags = [*VARIANTS[variant].kernel, f"-I{ROOT / 'csrc'}"]
    objects = [*machine_objects(variant), compile_object(source, flags, BUILD / variant)]
    return link(objects, variant, BUILD / variant / source.stem)


def run(program: Path, arguments: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, env=environment, timeout=timeout, cwd=ROOT
    )


def tests_of(op: str | None) -> list[Path]:
    folder = ROOT / "tests" / "cpp"
    found = sorted(folder.glob(f"sim_{op}.cpp" if op else "sim_*.cpp"))
    if not found:
        known = ", ".join(p.stem.removeprefix("sim_") for p in sorted(folder.glob("sim_*.cpp")))
        sys.exit(f"no tests/cpp/sim_{op}.cpp; there are: {known}")
    return found
