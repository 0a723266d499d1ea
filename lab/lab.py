"""Builds and runs an experiment of this folder on a GPU machine, from the repository's root.

    python lab/lab.py                       # the experiments, each with its question
    python lab/lab.py norm_lengths          # builds it, then runs it; of several all are built first
    python lab/lab.py --build norm_lengths  # needs nvcc, no GPU
    python lab/lab.py --arch sm_80 norm_lengths

An experiment is a .cu whose first line is `// Question: ...`. Lines `// links: <source>` name further sources, lines
`// runs: [-D<name>=<value> ...] [arguments]` its runs; each different set of -D is a program of its own. Tables go to
build/lab as well.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I", "csrc"]


@dataclass(frozen=True)
class Run:
    defines: tuple[str, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Experiment:
    source: Path
    question: str
    links: tuple[str, ...]
    runs: tuple[Run, ...]

    def program(self, run: Run) -> Path:
        """Where the program of a run is built."""
        suffix = "".join(f"_{define.removeprefix('-D')}" for define in run.defines)
        return ROOT / "build" / "lab" / f"{self.source.stem}{suffix}"

    def command(self, run: Run, arch: str) -> list[str]:
        number = arch.removeprefix("sm_")
        sources = [str(self.source.relative_to(ROOT)), *self.links]
        target = ["-o", str(self.program(run))]
        return ["nvcc", *FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}", *run.defines, *sources, *target]


def experiment(source: Path) -> Experiment:
    text = source.read_text()
    asked = re.match(r"// Question: (.+)\n", text)
    if not asked:
        sys.exit(f"{source.name}: its first line is not '// Question: ...'")
    runs = []
    for line in re.findall(r"^// runs:(.*)$", text, re.M) or [""]:
        words = shlex.split(line)
        defines = tuple(word for word in words if word.startswith("-D"))
        runs.append(Run(defines, tuple(word for word in words if not word.startswith("-D"))))
    return Experiment(source, asked[1], tuple(re.findall(r"^// links: (\S+)$", text, re.M)), tuple(runs))


def experiments() -> dict[str, Experiment]:
    return {source.stem: experiment(source) for source in sorted(HERE.glob("*.cu"))}


def build(chosen: list[Experiment], arch: str) -> None:
    """All programs side by side."""
    programs = {e.program(run): e.command(run, arch) for e in chosen for run in e.runs}
    (ROOT / "build" / "lab").mkdir(parents=True, exist_ok=True)
    jobs = {program: subprocess.Popen(command, cwd=ROOT) for program, command in programs.items()}
    if failed := [program.name for program, job in jobs.items() if job.wait()]:
        sys.exit(f"do not compile: {', '.join(failed)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = experiments()
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an experiment")
    parser.add_argument("--build", action="store_true", help="no run")
    parser.add_argument("--arch", default="sm_90a")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no lab/{unknown.pop()}.cu; there are: {', '.join(known)}")
    if not arguments.names:
        for name, e in known.items():
            print(f"{name:16} {e.question}")
        return 0
    chosen = [known[name] for name in arguments.names]
    build(chosen, arguments.arch)
    failed = 0
    for e in chosen if not arguments.build else []:
        for run in e.runs:
            program = e.program(run)
            print(f"== {program.name} {' '.join(run.arguments)}", flush=True)
            done = subprocess.run([program, *run.arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            print(done.stdout, flush=True)
            program.with_name("_".join([program.name, *run.arguments]) + ".txt").write_text(done.stdout)
            failed += done.returncode != 0
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
