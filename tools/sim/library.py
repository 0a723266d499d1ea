"""The op library on the host execution layer: kernels, bindings and csrc/sim in one file.

    python tools/sim/library.py     # builds it and prints its path

A Python process that loads it before it imports warpsmith runs every op by its CUDA kernels, on CPU tensors
(warpsmith.testing.sim). `python -m pytest --sim tests/ops/test_norm.py` does so for the laws of ops.

A variant of tools/sim/build.py (asan, coverage) compiles the kernels of one family that way, and all else plainly.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import forked

import build

CSRC, TESTS = build.ROOT / "csrc", build.ROOT / "tests"
VARIABLE = "WARPSMITH_SIM_LIBRARY"  # names the library that this process has loaded, or shall load
CODE = "WARPSMITH_SIM_CODE"
SIZE = "WARPSMITH_SIM_MULTIPROCESSORS"
SCHEDULES, RANDOM_SHARE = "WARPSMITH_SIM_SCHEDULES", "WARPSMITH_SIM_RANDOM_SHARE"  # warpsmith.testing.sim
LAUNCHES = "WARPSMITH_SIM_LAUNCHES"  # the file to which a run of a law writes the kernels that it launched
NAMES_IMPORTS = "WARPSMITH_SIM_NAMES_IMPORTS"  # where it is set, a session ends with a line that begins
IMPORTED = "imported: "
PLAIN = "plain"


class Machine(NamedTuple):
    """code: the architecture whose code runs. checks: what pytest's -k chooses of a law. schedules: of its repeats."""

    code: int
    multiprocessors: int
    checks: str
    schedules: int = 6


# With one multiprocessor every block that takes rows in turn takes many. Code of sm_80 is other instructions in the
# same bodies, and other choices.
MACHINES = {
    "sm90": Machine(90, 4, "sim-"),
    "sm90_alone": Machine(90, 1, "sim- and (error_law or repeats or bytes)", schedules=3),
    "sm80": Machine(80, 2, "sim- and (error_law or layout or bytes)"),
}
COUNTED = {"sm90", "sm80"}  # without which device code is not covered; the other adds 6 of 8,280 branches
# Every pair of accesses without a barrier between is a race, whatever the values. This build alone contracts, too: what
# is hard to add up runs in it.
RACES = "sim- and (error_law or repeats)"
# Of the norms every length by layer_norm, whose kernels are those of rms_norm with a mean; 320 s else.
RACES_OF = {"norm": "sim- and (error_law and TestLayerNorm or repeats or hard) and not Rms"}
# A huge element of q or k multiplies what rounding leaves of dP - delta, where PyTorch's CPU kernel rounds otherwise
# (grad_k of q = large: 3.4 times the bound); k = max overflows in q k, which kernels scale afterwards.
ATTENTION = (
    " and not edge_value[q-large and not edge_value[k-large and not edge_value[k-max and not edge_value[k-lowest"
)
HOLDS = (0, 5)  # what pytest returns: passed, or none of the module's checks is for this machine
# Where a family has many modules, the one with the edges of its kernels.
EDGES = {family: TESTS / f"{name}.py" for family, name in (
    ("attention", "ops/test_attention_drawn"), ("linear_loss", "ops/test_linear_loss_parts"),
    ("optim", "optim/test_kernels"),
)}  # fmt: skip
# What the address sanitizer runs. Other values, repeats, digests and counts of bytes touch addresses of other checks
# again; rows beyond 2^31 elements take two minutes an op.
ADDRESSES = (
    "sim- and not (far_rows or beyond_2_31 or bytes_moved or edge_value or no_uninitialised or repeats or hard"
    " or bits_of_a_card or depend_on_the_others)"
)
# Of the optimizers' edges: bytes are counted, and gradients of the other dtype are misaligned by another test.
SANITIZED_EDGES = {"optim": ["-k", "not reads_and_writes and not other-sim"]}
# Variables under a sanitizer: every schedule has the same addresses. Two more than a law's own: late, early and random.
FEWER = {"asan": {SCHEDULES: "1", RANDOM_SHARE: "16"}, "tsan": {SCHEDULES: "2", RANDOM_SHARE: "16"}}
# Modules of another family's op, which launches kernels of this family that no op of this family launches.
BY_ANOTHER = {"quantize": ("test_linear_scaled",)}
# All of whose modules run.
WHOLE = (
    *("test_activation", "test_attention", "test_batch_norm", "test_cross_entropy", "test_linear"),
    *("test_norm", "test_quantize", "test_rope"),
)
# Modules without specs that run whole; on other machines than the first, their tests of a device.
BESIDE = [TESTS / f"{name}.py" for name in (
    "ops/test_linear_loss_cross_entropy", "ops/test_linear_loss_log_prob", "ops/test_linear_loss_parts",
    "ops/test_optim", "optim/test_adamw", "optim/test_clip", "optim/test_eight_bit", "optim/test_ema",
    "optim/test_fp8_weights", "optim/test_fuse", "optim/test_gradient_dtypes", "optim/test_kernels", "optim/test_lamb",
    "optim/test_layouts", "optim/test_muon", "optim/test_optimizers", "optim/test_precision", "optim/test_random_lists",
    "optim/test_refinements", "optim/test_second_turns", "optim/test_tables",
    "amp/test_grad_scaler", "amp/test_kept_table", "amp/test_overflows",
)]  # fmt: skip


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise build.BuildError("the op library needs torch's headers, and there is no torch")
    return Path(spec.origin).parent


def specs() -> list[Path]:
    """The test modules of ops' laws, and those beside them whose tests run on a device."""
    found = []
    for path in sorted((TESTS / "ops").glob("test_*.py")):
        if not family_of(path):  # composed in Python: no kernels
            continue
        text = path.read_text()
        if " = op_tests(" in text or ('"device"' in text and path.stem.startswith(WHOLE) and path not in BESIDE):
            found.append(path)
    return found + BESIDE


def family_of(spec: Path) -> str:
    """The family of kernels that a test module's name begins with; empty: none."""
    if spec.parent.name != "ops":
        return "optim"
    families = (folder.name for folder in (CSRC / "kernels").iterdir() if folder.is_dir())
    return max((f for f in families if f"{spec.stem}_".startswith(f"test_{f}_")), key=len, default="")


def checks(spec: Path, chosen: str = "sim-") -> list[str]:
    """What pytest runs of a module: the checks that hold on the simulated kernels."""
    if spec in BESIDE and "(" not in chosen:  # all its checks
        return ["-m", "not gpu", str(spec)]
    return ["-k", chosen + (ATTENTION if family_of(spec) == "attention" else ""), str(spec)]


FAMILIES = sorted({family_of(spec) for spec in specs()})


def runs(family: str, chosen: str = "sim-") -> list[list[str]]:
    """What pytest runs of a family's laws; each list is one process."""
    modules: dict[tuple[str, ...], list[str]] = {}
    for spec in specs():
        if family_of(spec) == family or spec.stem in BY_ANOTHER.get(family, ()):
            *options, module = checks(spec, chosen)
            modules.setdefault((*options,), []).append(module)
    return [[*options, *names] for options, names in modules.items()]


def sanitized_runs(family: str, variant: str) -> list[list[str]]:
    """`runs` for a sanitizer, which takes many times as long."""
    if family in EDGES:
        return [["-m", "not gpu", *SANITIZED_EDGES.get(family, []), str(EDGES[family])]]
    return runs(family, RACES_OF.get(family, RACES) if variant == "tsan" else ADDRESSES)


def parts(variant: str = PLAIN, family: str = "") -> Iterator[build.Part]:
    """What the library is made of; `family`: whose kernels are of the variant.

    They come first: the linker takes each inline function from the first object that has it.
    """
    usual = [*build.VARIANTS[PLAIN].kernel, f"-I{CSRC}"]
    binding = [
        *usual,
        "-fvisibility=hidden",
        "-isystem",
        f"{torch_folder()}/include",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]
    kernels = sorted((CSRC / "kernels").rglob("*.cu"))
    for source in kernels:
        if build.family_folder(source).name == family:
            yield build.kernel_part(source, variant)
    yield build.machine(variant)
    for source in kernels:
        if build.family_folder(source).name != family:
            yield build.kernel_part(source, PLAIN)
    for source in sorted((CSRC / "cpu").rglob("*.cpp")):
        yield source, usual, build.BUILD / PLAIN
    for source in sorted((CSRC / "bindings").rglob("*.cpp")):
        yield source, binding, build.BUILD / PLAIN


def key(variant: str = PLAIN, family: str = "") -> str:
    """Of the library that `library` would return, without building it."""
    return build.parts_key(parts(variant, family), variant)


def link(objects: list[Path], variant: str, target: Path) -> Path:
    # Torch's library is in the process that loads this one; names of this one's own are taken from itself.
    flags = ["-shared", "-Wl,-Bsymbolic,--no-as-needed,--allow-shlib-undefined", f"-L{torch_folder()}/lib", "-ltorch"]
    return build.link(objects, variant, target, flags)


def library(variant: str = PLAIN, family: str = "") -> Path:
    """Returns the library, made if it is not there."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        objects = list(pool.map(lambda part: build.compile_object(*part), parts(variant, family)))
    name = f"libwarpsmith_sim_{family}.so" if family else "libwarpsmith_sim.so"
    return link(objects, variant, build.BUILD / variant / name)


@cache
def _sanitizer(variant: str) -> dict[str, str]:
    """A sanitizer's run-time library must be in a process before a library that is compiled for it.

    It looks for the function that throws C++ exceptions when it starts: libstdc++ is there, too.
    """
    if variant not in ("asan", "tsan"):
        return {}
    commands = ([build.compiler(), f"-print-file-name={name}"] for name in (f"lib{variant}.so", "libstdc++.so.6"))
    found = ":".join(subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in commands)
    options = f"{build.ENVIRONMENT['TSAN_OPTIONS']}:ignore_noninstrumented_modules=1"
    return {"LD_PRELOAD": found, "TSAN_OPTIONS": options, **FEWER[variant]}


def law(
    built: Path,
    arguments: Sequence[str],
    timeout: float | None = None,
    folder: Path = build.ROOT,
    machine: str = "sm90",
    variant: str = PLAIN,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `pytest --sim` with a library that was built, in `folder`, where a coverage build writes its counts.

    `variables`: more of the environment.

    A crash ends the process: the last line names the test, the machine's message the seed and the thread.
    """
    paths = os.pathsep.join([str(build.ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {VARIABLE: str(built), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, NAMES_IMPORTS: "1"}
    environment |= {SCHEDULES: str(MACHINES[machine].schedules)} | _sanitizer(variant)
    environment |= {CODE: str(MACHINES[machine].code), SIZE: str(MACHINES[machine].multiprocessors)} | variables
    command = ["-c", str(build.ROOT / "pyproject.toml"), "--rootdir", str(build.ROOT)]
    # What a crash or a sanitizer prints goes past pytest.
    command += ["--sim", "-v", "--tb=short", "-p", "no:cacheprovider", "--capture=sys"]
    command += [str(build.ROOT / word) if word.startswith("tests/") else word for word in arguments]
    if not _sanitizer(variant):
        return forked.pytest(command, timeout, folder, build.ENVIRONMENT | environment)
    return build.execute([sys.executable, "-m", "pytest", *command], timeout, folder, environment)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Files of the repository whose modules a run of a law imported, as tests/conftest.py prints them; a crash none."""
    return {name for line in re.findall(f"^{IMPORTED}(.*)$", done.stdout, re.M) for name in line.split()}


def failures(done: subprocess.CompletedProcess[str]) -> str:
    """What a run of a law printed of its failures: the beginnings, where the causes stand."""
    _, title, text = done.stdout.partition("= FAILURES =")
    return f"{(title + text)[:6000] or done.stdout[-6000:]}\n{done.stderr[:2000]}"


def load() -> None:
    """Makes the library this process's op library. Before anything imports warpsmith."""
    import torch

    os.environ[VARIABLE] = path = os.environ.get(VARIABLE) or str(library())
    torch.ops.load_library(path)
    from warpsmith.testing import sim

    sim.Machine().configure()


if __name__ == "__main__":
    try:
        print(library())
    except (build.BuildError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from None
