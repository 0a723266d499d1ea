"""Bugs planted in real kernels and launchers, each with the test that must fail. A bug is here because all passed once.

    python tools/sim/kernel_bugs.py            # all, one after the other
    python tools/sim/kernel_bugs.py newton     # those whose name contains this

A bug changes copies of files; the sources that include them are compiled against the copies, in the build that CI uses
for the family's other tests, and the named test is run until its first failure: a test of the family's C++ program, or
checks of the law on the simulated kernels. tests/test_planted_bugs.py does it too.
Bugs of the machine's own checks are in tests/sim/planted_*.cpp, where a bug costs no compilation.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import library

import build


@dataclass(frozen=True)
class Bug:
    name: str
    family: str
    file: str  # below csrc
    changes: tuple[tuple[str, str], ...]  # text that occurs once in the file, and what takes its place
    test: str  # its name in tests/sim/sim_<family>.cpp, or what `python -m pytest --sim` is to run: "tests/ops/... -k"
    noticed_as: str  # part of what the test prints
    variant: str = "coverage"  # the plain build of CI
    flags: tuple[str, ...] = ("--seeds", "2", "--random", "20")  # of the C++ program
    code: int = 90
    also: tuple[tuple[str, str, str], ...] = ()  # of other files: the file, text, and what takes its place

    @property
    def by_law(self) -> bool:
        return self.test.startswith("tests/")

    def texts(self) -> dict[Path, str]:
        """The changed files."""
        found: dict[Path, str] = {}
        for name, old, new in (*((self.file, *change) for change in self.changes), *self.also):
            file = build.ROOT / "csrc" / name
            text = found.get(file) or file.read_text()
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: '{old}' occurs {text.count(old)} times in {file}")
            found[file] = text.replace(old, new)
        return found


BUGS = (
    Bug(
        "proxy_fence_before_a_bulk_load_dropped",
        "cross_entropy",
        "kernels/cross_entropy/forward.cuh",
        (("device::fence_async_shared();", ""),),
        "persistent_blocks",
        "bulk load: overwrites shared memory that ordinary stores wrote",
    ),
    Bug(
        "cluster_start_barrier_dropped",
        "norm",
        "kernels/norm/forward.cuh",
        (
            ("if constexpr (S == Scope::cluster) device::cluster_arrive();", ""),
            ("if constexpr (S == Scope::cluster) device::cluster_wait();", ""),
        ),
        "add_rms_norm_rows_of_a_cluster",
        "that block has not started",
    ),
    Bug(
        "int_offset_of_an_output",
        "norm",
        "kernels/norm/batches.cuh",
        (
            (
                "int64_t element = first_row * p.columns + lane_column;",
                "int element = static_cast<int>(first_row * p.columns + lane_column);",
            ),
        ),
        "rms_norm_far_rows",
        "dx",
    ),
    Bug(
        "alignment_of_weight_and_bias_not_looked_at",
        "norm",
        "kernels/norm/norm.cu",
        (
            (
                "on_16_bytes(p.residual_out) && on_16_bytes(p.weight) && on_16_bytes(p.bias)",
                "on_16_bytes(p.residual_out)",
            ),
        ),
        "rms_norm_misaligned_and_strided_rows",
        "misaligned address",
    ),
    Bug(
        "found_inf_ignored_with_amsgrad",
        "optim",
        "kernels/optim/step.cuh",
        (
            (
                "if (p.found_inf && *p.found_inf != 0.0f) return;",
                "if (kMost != 0b111 && p.found_inf && *p.found_inf) return;",
            ),
        ),
        "random_lists",
        "tensor 0",
        flags=("--seeds", "2", "--random", "200"),  # few cases draw both an optimizer of three states and found_inf
    ),
    Bug(
        "end_of_a_sequence_taken_as_inside",
        "rope",
        "kernels/rope/rotary.cuh",
        (("token < device::load(p.cu_seqlens + entry + 1)", "token <= device::load(p.cu_seqlens + entry + 1)"),),
        "rope_positions",
        "expected nan",
    ),
    Bug(
        "newton_step_dropped",
        "norm",
        "kernels/norm/row.cuh",
        (("return error == error ? fmaf(0.5f * y, error, y) : y;", "return error == error ? y : y;"),),
        "rms_norm_precise_rstd",
        "rstd of",
    ),
    Bug(
        "product_not_rounded_by_name",
        "cross_entropy",
        "kernels/cross_entropy/row.cuh",
        (("__fmul_rn(zero, x.s)", "zero * x.s"),),
        "entropy_of_rows_that_are_hard",
        "entropy: expected",
        variant="tsan",
    ),
)


# Launchers that ask the device what it is, not what code runs on it: run as code of sm_80 on a device of sm_90, the
# launch is refused. Where the refusal is gone as well, the kernel's waits are compiled out, and its results are wrong.
LAUNCHERS = {
    "norm": ("kernels/norm/norm.cu", "= device.code_capability;", "= 90;"),
    "cross_entropy": ("kernels/cross_entropy/cross_entropy.cu", "device.code_capability,", "90,"),
    "activation": ("device/launch.h", "programmatic_dependent = code >= kSm90;", "programmatic_dependent = true;"),
}
REFUSAL = ("device/launch.h", "if (code_capability >= kSm90) return {};", "if (code_capability) return {};")
BUGS += tuple(
    Bug(
        f"launcher_asks_the_device_and_{'is_refused' if refused else 'launches'}",
        family,
        file,
        ((old, new),),
        f"tests/ops -k 'sim- and error_law and {family}'",
        "expected code of sm_90 or newer for" if refused else "",
        code=80,
        also=() if refused else (REFUSAL,),
    )
    for family, (file, old, new) in LAUNCHERS.items()
    for refused in (True, False)
)


def parts(bug: Bug) -> Iterable[build.Part]:
    """What is built to look for the bug: the family's program, or the library."""
    if bug.by_law:
        return library.parts(bug.variant, bug.family)
    (test,) = build.tests_of(bug.family)
    return build.parts(test, bug.variant)


def noticed(bug: Bug) -> tuple[bool, str]:
    folder = build.BUILD / f"bug-{bug.name}-{os.getpid()}"
    try:
        objects = build.changed_objects(parts(bug), bug.texts(), folder, bug.family if bug.by_law else "")
        if bug.by_law:
            made = library.link(objects, bug.variant, folder / "libwarpsmith_sim.so")
            result = library.law(made, ["-x", *shlex.split(bug.test)], 300, folder, bug.code, bug.variant)
        else:
            made = build.link(objects, bug.variant, folder / f"sim_{bug.family}")
            arguments = ["--test", bug.test, "--stop", *bug.flags, "--code", str(bug.code)]
            result = build.run(made, arguments, timeout=300, folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    printed = result.stdout + result.stderr
    return result.returncode != 0 and bug.noticed_as in printed, printed


def main() -> int:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = 0
    for bug in BUGS:
        if part not in bug.name:
            continue
        started = time.perf_counter()
        good, text = noticed(bug)
        survivors += not good
        spent = time.perf_counter() - started
        print(
            f"{'noticed ' if good else 'SURVIVED'} {bug.name} [{bug.family} {bug.variant}] {spent:.1f} s",
            flush=True,
        )
        if not good:
            print(text[:2000])
    return survivors != 0


if __name__ == "__main__":
    sys.exit(main())
