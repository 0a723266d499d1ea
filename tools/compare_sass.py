"""Says whether two builds hold the same kernels, instruction by instruction, as a change that only moves code must.

    python tools/compare_sass.py before/libwarpsmith_ops.so build/libwarpsmith_ops.so
    python tools/compare_sass.py before/objects build/objects        # folders: all their *.o files

Compares the machine code of every architecture, encodings included. A kernel is known by its symbol, without the source
file's name, which the compiler writes into the symbols of an unnamed namespace. The order of kernels and files does not
count, nor do line numbers. Exit status 1: they differ. Needs cuobjdump (tools/sim/cuda.py says where from).
"""

import argparse
import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "sim"))
import cuda

Code = Counter[tuple[str, str, str]]  # architecture, symbol, digest of the instructions
UNNAMED = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")


def kernels(listing: Iterable[str]) -> Code:
    """The functions in what `cuobjdump -sass` prints."""
    found: Code = Counter()
    architecture = symbol = ""
    instructions = hashlib.sha256()

    def end() -> None:
        if symbol:
            found[architecture, symbol, instructions.hexdigest()] += 1

    for line in listing:
        if m := re.match(r"\s*Function : (\S+)", line):
            end()
            symbol, instructions = UNNAMED.sub("unnamed", m[1]), hashlib.sha256()
        elif m := re.match(r"\s*code for (\S+)", line):
            end()
            architecture, symbol = m[1], ""
        elif symbol and "/*" in line:  # an instruction, or the second half of its encoding
            instructions.update(UNNAMED.sub("unnamed", " ".join(line.split())).encode())
    end()
    return found


def code_of(build: Path) -> Code:
    """The kernels of a library, or of the objects in a folder."""
    found: Code = Counter()
    for file in sorted(build.rglob("*.o")) if build.is_dir() else [build]:
        command = [str(cuda.cuobjdump()), "-sass", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stderr
            found += kernels(process.stdout)
            error = process.stderr.read()
        if process.returncode and "does not contain device code" not in error:
            raise SystemExit(f"{' '.join(command)}\n{error}")
    return found


def differences(before: Code, after: Code) -> list[str]:
    """A line for each kernel that is not the same in both."""
    had, has = ({key[:2] for key in code} for code in (before, after))
    found = []
    for name in sorted({key[:2] for key in [*(before - after), *(after - before)]}):
        what = "other instructions" if name in had and name in has else f"only {'before' if name in had else 'after'}"
        found.append(f"{' '.join(name)}: {what}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if not cuda.cuobjdump():
        raise SystemExit(cuda.NO_CUOBJDUMP)
    with ThreadPoolExecutor() as pool:
        before, after = pool.map(code_of, (arguments.before, arguments.after))
    found = differences(before, after)
    print("\n".join(found))
    for name, code in (("before", before), ("after", after)):
        count = Counter(architecture for architecture, _, _ in code.elements())
        print(f"{name}: " + (", ".join(f"{n} kernels for {a}" for a, n in sorted(count.items())) or "no kernels"))
    print(f"{len(found)} kernels differ" if found else "the same instructions")
    return 1 if found or not before else 0


if __name__ == "__main__":
    sys.exit(main())
