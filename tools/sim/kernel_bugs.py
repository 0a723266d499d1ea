"""Bugs planted in real kernels and launchers, each with the test that must fail. A bug is here because all passed once.

    python tools/sim/kernel_bugs.py            # all, one after the other
    python tools/sim/kernel_bugs.py newton     # those whose name contains this

A bug changes a copy of one file; the sources that include it are compiled against the copy, in the build that CI uses
for the family's other tests, and the named test is run until its first failure. tests/test_planted_bugs.py does it too.
Bugs of the machine's own checks are in tests/sim/planted_*.cpp, where a bug costs no compilation.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import build

CSRC = build.ROOT / "csrc"


@dataclass(frozen=True)
class Bug:
    name: str
    family: str
    file: str  # below csrc/kernels
    changes: tuple[tuple[str, str], ...]  # text that occurs once in the file, and what takes its place
    test: str
    noticed_as: str  # part of what the test prints
    variant: str = "coverage"  # the plain build of CI
    flags: tuple[str, ...] = ("--seeds", "2", "--random", "20")


BUGS = (
    Bug(
        "proxy_fence_before_a_bulk_load_dropped",
        "cross_entropy",
        "cross_entropy/forward.cuh",
        (("device::fence_async_shared();", ""),),
        "persistent_blocks",
        "bulk load: overwrites shared memory that ordinary stores wrote",
    ),
    Bug(
        "cluster_start_barrier_dropped",
        "norm",
        "norm/forward.cuh",
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
        "norm/batches.cuh",
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
        "norm/norm.cu",
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
        "optim/step.cuh",
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
        "rope/rotary.cuh",
        (("token < device::load(p.cu_seqlens + entry + 1)", "token <= device::load(p.cu_seqlens + entry + 1)"),),
        "rope_positions",
        "expected nan",
    ),
    Bug(
        "newton_step_dropped",
        "norm",
        "norm/row.cuh",
        (("return error == error ? fmaf(0.5f * y, error, y) : y;", "return error == error ? y : y;"),),
        "rms_norm_precise_rstd",
        "rstd of",
    ),
    Bug(
        "product_not_rounded_by_name",
        "cross_entropy",
        "cross_entropy/row.cuh",
        (("__fmul_rn(zero, x.s)", "zero * x.s"),),
        "entropy_of_rows_that_are_hard",
        "entropy: expected",
        variant="tsan",
    ),
)


def program(bug: Bug, folder: Path) -> Path:
    """The family's program with the bug in it. What does not include the file is compiled as always."""
    (test,) = build.tests_of(bug.family)
    original = CSRC / "kernels" / bug.file
    text = original.read_text()
    for old, new in bug.changes:
        if text.count(old) != 1:
            raise ValueError(f"{bug.name}: '{old}' occurs {text.count(old)} times in {original}")
        text = text.replace(old, new)
    shadow = folder / "kernels" / bug.file
    shadow.parent.mkdir(parents=True, exist_ok=True)
    shadow.write_text(text)
    objects = []
    for source, flags, usual in build.parts(test, bug.variant):
        if original in build.dependencies(source, flags):
            changed = shadow if source == original else source
            flags = ["-w", f"-I{folder}", *flags]
            objects.append(build.compile_object(changed, flags, folder, keep=False))
        else:
            objects.append(build.compile_object(source, flags, usual))
    return build.link(objects, bug.variant, folder / test.stem)


def noticed(bug: Bug) -> tuple[bool, str]:
    folder = build.BUILD / f"bug-{bug.name}-{os.getpid()}"
    try:
        made = program(bug, folder)
        result = build.run(made, ["--test", bug.test, "--stop", *bug.flags], timeout=300, folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = result.stdout + result.stderr
    return result.returncode != 0 and bug.noticed_as in text, text


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
            f"{'noticed ' if good else 'SURVIVED'} {bug.name} [sim_{bug.family} {bug.variant}] {spent:.1f} s",
            flush=True,
        )
        if not good:
            print(text[:2000])
    return survivors != 0


if __name__ == "__main__":
    sys.exit(main())
