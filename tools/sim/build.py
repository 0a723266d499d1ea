"""Builds programs for the host execution layer: csrc/sim, kernels and one test file, in one of four variants.

An object is known by the content of its source, of every file that it includes, of its flags and of the compiler's
version. It is kept under build/sim; where ccache is installed, it compiles. Several processes may build at once: each
object has a lock.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import store

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sim"
COUNTS = "build/sim/counts"
COMMON = ["-std=c++20", "-DWARPSMITH_SIM", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi", "-fPIC"]
COMMON += [f"-ffile-prefix-map={ROOT}=."]
Part = tuple[Path, list[str], Path]  # a source, its flags, and the folder of its object
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


def _has(instructions: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    known = cpuinfo.exists() and platform.machine() in ("x86_64", "AMD64")
    return known and re.search(rf"^flags\b.*\b{instructions}\b", cpuinfo.read_text(), re.M) is not None


def _contraction() -> str:
    """GCC contracts with -fexpensive-optimizations, where the processor has the instruction."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "-fexpensive-optimizations -ffp-contract=fast"
    return "-fexpensive-optimizations -ffp-contract=fast -mfma" if _has("fma") else ""


COMMON += ["-mf16c"] if _has("f16c") else []  # else each float16 is converted by a function: 7 % of linear's law
_CONTRACTION = _contraction()
# Kernels are not optimised: those of rms_norm took 6 s to compile at -O1 and 2 s at -O0 (31 and 7 s with the address
# sanitizer), and the tests run 1.2 times as long. The machine is optimised: it is compiled once for all tests.
_ADDRESS = "-g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
VARIANTS = {
    v.name: v
    for v in (
        _variant("plain", "-O0 -g1", "-O2 -g1", "machine"),
        _variant("asan", f"-O0 {_ADDRESS}", f"-O1 {_ADDRESS}", "machine-asan", "-fsanitize=address,undefined"),
        # The machine is not instrumented: its own bookkeeping is not part of the kernel. This build alone contracts
        # products and sums, as nvcc does: what must be rounded apart says so (__fmul_rn).
        _variant(
            "tsan",
            f"-O1 -g1 -fsanitize=thread -DWARPSMITH_SIM_TSAN {_CONTRACTION}",
            "-O2 -g1 -DWARPSMITH_SIM_TSAN",
            "machine-tsan",
            "-fsanitize=thread",
        ),
        # As the thread sanitizer's build, without it.
        _variant("contracted", f"-O1 -g1 {_CONTRACTION}", "-O2 -g1", "machine"),
        # Counts are written below the folder in which the program runs.
        _variant(
            "coverage",
            f"-O0 --coverage -fno-inline -fno-exceptions -fprofile-dir={COUNTS} -fprofile-prefix-path={ROOT}",
            "-O2 -g1",
            "machine",
            "--coverage",
        ),
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


def ccache() -> list[str]:
    """What stands before a compiler's command."""
    found = shutil.which("ccache")
    return [found] if found else []


@cache
def compiler_version() -> str:
    result = subprocess.run([compiler(), "-v"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return re.sub(r"^COLLECT_.*\n", "", result.stderr, flags=re.M)  # which name paths


@contextmanager
def locked(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_from(target: Path) -> str:
    """The key of an object or a program that was made; empty if there is none."""
    stamp = target.with_suffix(".key")
    return stamp.read_text() if target.exists() and stamp.exists() else ""


def _here(text: str) -> str:
    """A path as it is seen from the root, where compilers run: objects hold no other."""
    return text.replace(f"{ROOT}/", "")


def _nowhere(words: list[str]) -> list[str]:
    """A command as it reads in every clone."""
    return [word.replace(str(ROOT), "@") for word in words]


def object_path(source: Path, folder: Path) -> Path:
    tag = hashlib.sha1(_here(str(source)).encode()).hexdigest()[:8]
    return folder / f"{source.stem}-{tag}.o"


def _command(source: Path, flags: list[str]) -> list[str]:
    return [compiler(), *COMMON, *map(_here, flags), "-x", "c++", _here(str(source))]


def _compile(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        hint = HINT if UNKNOWN_NAME.search(result.stderr) else ""
        raise BuildError(f"{shlex.join(command)}\n{result.stderr}\n{hint}")
    return result.stdout


_listed: dict[tuple[str, ...], tuple[list[Path], list[tuple[int, int, int]]]] = {}  # by command, with what was seen


def dependencies(source: Path, flags: list[str]) -> list[Path]:
    """The source and all that it includes, as the compiler says; asked again when one of these files has changed."""
    command = [*_command(source, flags), "-M"]
    known = str(ROOT), *command
    if known in _listed:
        paths, seen = _listed[known]
        if _looks(paths) == seen:
            return paths
    folders = [_headers(Path(flag[2:])) for flag in flags if flag.startswith("-I")]  # a new one may come first
    kept = BUILD / "includes" / store.key("includes", compiler_version(), _nowhere(command), folders)
    paths = _kept_listing(kept) or _asked_listing(command, kept)
    _listed[known] = paths, _looks(paths)
    return paths


def _headers(folder: Path) -> list[str]:
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(os.path.relpath(file, folder) for file in files if file.endswith((".h", ".cuh")))


def _kept_listing(kept: Path) -> list[Path]:
    """What another process was told, if no file of it has other contents now; else nothing."""
    with suppress(FileNotFoundError):
        held = [(name, digest) for name, digest in json.loads(kept.read_text())]
        paths = [ROOT / name for name, _ in held]
        if store.digests(paths, ROOT) == held:
            return paths
    return []


def _asked_listing(command: list[str], kept: Path) -> list[Path]:
    started = time.time_ns()
    listing = _compile(command).replace("\\\n", " ").split(":", 1)[1]
    paths = [ROOT / name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", listing.strip())]
    if all(changed < started for changed, *_ in _looks(paths)):  # else: which of a file's states was read?
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(store.digests(paths, ROOT)))
        os.replace(written, kept)
    return paths


def _looks(paths: list[Path]) -> list[tuple[int, int, int]]:
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return found


def object_key(source: Path, flags: list[str]) -> str:
    """Of the object that these flags make of the source as it is now."""
    command = _nowhere(_command(source, flags)[1:])
    return store.key("object", compiler_version(), command, store.digests(dependencies(source, flags), ROOT))


def compile_object(source: Path, flags: list[str], folder: Path) -> Path:
    """The object, made if it is not there."""
    target = object_path(source, folder)
    with locked(target):
        key = object_key(source, flags)
        while made_from(target) != key:
            target.with_suffix(".key").unlink(missing_ok=True)
            _compile([*ccache(), *_command(source, flags), "-c", "-o", _here(str(target))])
            before, key = key, object_key(source, flags)
            if key != before:  # a file was edited meanwhile: which of its states was compiled?
                continue
            target.with_suffix(".key").write_text(key)
    return target


def changed_objects(parts: Iterable[Part], texts: Mapping[Path, str], folder: Path, family: str = "") -> list[Path]:
    """The objects of a build in which some files of csrc have other texts, those that are compiled anew first.

    A source that includes such a file is compiled into `folder`; the others as always. `family`: only that family's
    sources are compiled anew. Without optimisation the linker gives all the inline functions that it meets first.
    """
    csrc = ROOT / "csrc"
    shadows = {file: folder / file.relative_to(csrc) for file in texts}
    for path in folder.rglob("*"):  # what an earlier commit's texts left would be found before the file itself
        if path.is_file() and path not in shadows.values() and (csrc / path.relative_to(folder)).exists():
            path.unlink()
    for file, shadow in shadows.items():
        shadow.parent.mkdir(parents=True, exist_ok=True)
        shadow.write_text(texts[file])
    # ccache looks whether the files changed that a command has read, not whether one now lies before them.
    names = store.key("shadows", sorted(str(file.relative_to(csrc)) for file in texts))
    changed, usual = [], []
    for source, flags, kept in parts:
        concerned = not family or family_folder(source).name == family
        if concerned and not texts.keys().isdisjoint(dependencies(source, flags)):
            flags = ["-w", f"-DWARPSMITH_SHADOWS_{names}", f"-I{folder}", *flags]
            changed.append(compile_object(shadows.get(source, source), flags, folder))
        else:
            usual.append(compile_object(source, flags, kept))
    return changed + usual


def family_folder(source: Path) -> Path:
    """The folder of a source's family, in which it may lie in a folder for a target; of other sources their own."""
    kernels = ROOT / "csrc" / "kernels"
    return kernels / source.relative_to(kernels).parts[0] if source.is_relative_to(kernels) else source.parent


def kernel_sources(test: Path) -> list[Path]:
    """All .cu of the family that the test is named after, and those named in lines `// links: csrc/...` of it."""
    kernels, name = ROOT / "csrc" / "kernels", test.stem.removeprefix("sim_")
    named = [ROOT / line for line in re.findall(r"^// links: (\S+)$", test.read_text(), re.M)]
    return sorted({*(kernels / name).rglob("*.cu"), *kernels.rglob(f"{name}.cu"), *named})


def machine(variant: str) -> Part:
    """csrc/sim as one translation unit: 4 s of compilation where its files, one by one, take 18."""
    folder = BUILD / VARIANTS[variant].machine_folder
    whole = folder / "machine.cpp"
    text = "".join(f'#include "sim/{f.name}"\n' for f in sorted((ROOT / "csrc" / "sim").glob("*.cpp")))
    with locked(whole):
        if not whole.exists() or whole.read_text() != text:
            whole.write_text(text)
    return whole, [*VARIANTS[variant].machine, f"-I{ROOT / 'csrc'}"], folder


def main_part(test: Path, variant: str) -> Part:
    v = VARIANTS[variant]
    main = ROOT / "tests" / "sim" / ("planted_main.cpp" if test.stem.startswith("planted_") else "harness.cpp")
    return main, [*v.machine, f"-I{ROOT / 'csrc'}"], BUILD / v.machine_folder


def kernel_part(source: Path, variant: str) -> Part:
    # Attention's random cases take 0.78 of the processor's time so, and its four files 16 s to compile for 4.
    optimized = ["-O1"] if source.parent.name == "portable" else []
    return source, [*VARIANTS[variant].kernel, *optimized, f"-I{ROOT / 'csrc'}"], BUILD / variant


def parts(test: Path, variant: str) -> list[Part]:
    """What a test's program is made of."""
    kernels = [kernel_part(source, variant) for source in kernel_sources(test)]
    own = test, [*VARIANTS[variant].kernel, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'sim'}"], BUILD / variant
    return [machine(variant), main_part(test, variant), *kernels, own]


def _program_key(objects: list[str], variant: str) -> str:
    return store.key("program", compiler_version(), VARIANTS[variant].link, objects)


def parts_key(made_of: Iterable[Part], variant: str) -> str:
    """Of what `link` would make of the parts, without building it."""
    return _program_key([object_key(source, flags) for source, flags, _ in made_of], variant)


def program_key(test: Path, variant: str) -> str:
    return parts_key(parts(test, variant), variant)


def link(objects: list[Path], variant: str, program: Path, flags: Sequence[str] = ("-rdynamic",)) -> Path:
    """A program, or what the linker's other flags make of the objects."""
    with locked(program):
        key = _program_key([made_from(o) for o in objects], variant)
        if made_from(program) == key:
            return program
        command = [compiler(), *VARIANTS[variant].link, *map(str, objects), *flags, "-ldl", "-o", str(program)]
        program.with_suffix(".key").unlink(missing_ok=True)
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise BuildError(result.stderr)
        program.with_suffix(".key").write_text(key)
    return program


def build(test: Path, variant: str) -> Path:
    """Returns the test's program."""
    return link([compile_object(*part) for part in parts(test, variant)], variant, BUILD / variant / test.stem)


def own_parts(source: Path, variant: str = "plain") -> list[Part]:
    """Of a program with its own main() on the host execution layer, without the test harness."""
    return [machine(variant), (source, [*VARIANTS[variant].kernel, f"-I{ROOT / 'csrc'}"], BUILD / variant)]


def build_program(source: Path, variant: str = "plain") -> Path:
    return link([compile_object(*part) for part in own_parts(source, variant)], variant, BUILD / variant / source.stem)


def run(
    program: Path, arguments: Sequence[str], timeout: float | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a program in `folder`, as `execute` does."""
    return execute([str(program), *arguments], timeout, folder)


def execute(
    command: list[str], timeout: float | None, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Ends it after `timeout` seconds in a way that lets it say which test was running; subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        cwd=folder,
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, error = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
        raise subprocess.TimeoutExpired(command, timeout or 0, out, error) from None
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def tests_of(op: str | None, none_is_fine: bool = False) -> list[Path]:
    folder = ROOT / "tests" / "sim"
    found = sorted(folder.glob(f"sim_{op}.cpp" if op else "sim_*.cpp"))
    if not found and not none_is_fine:
        known = ", ".join(p.stem.removeprefix("sim_") for p in sorted(folder.glob("sim_*.cpp")))
        sys.exit(f"no tests/sim/sim_{op}.cpp; there are: {known}")
    return found
