"""The vectors from a card: packed in golden.txt.xz for the repository, as lines for the program and for readers.

    python tools/gpu/conformance/vectors.py pack build/golden.txt      # what `conformance record` wrote
    python tools/gpu/conformance/vectors.py add build/new.txt          # replaces or adds the primitives of that file
    python tools/gpu/conformance/vectors.py unpack build/golden.txt
    python tools/gpu/conformance/vectors.py summary                    # of each primitive: vectors, and a hash of them

`xz -dc golden.txt.xz` shows the lines as well; two summaries beside each other say what a change of the file changes.
"""

import hashlib
import lzma
import sys
from pathlib import Path

PACKED = Path(__file__).with_name("golden.txt.xz")


def text() -> str:
    return lzma.decompress(PACKED.read_bytes()).decode()


def pack(lines: str) -> None:
    PACKED.write_bytes(lzma.compress(lines.encode(), check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME))


def by_primitive(lines: str) -> dict[str, list[str]]:
    """Lines of each primitive, in order; those that name the machine under "#"."""
    found: dict[str, list[str]] = {}
    for line in lines.splitlines():
        found.setdefault("#" if line.startswith("#") else line.split()[0], []).append(line)
    return found


def added(lines: str, new: str) -> str:
    """The lines with the primitives of `new` in the place of their old ones, or at the end."""
    merged = by_primitive(lines) | {name: found for name, found in by_primitive(new).items() if name != "#"}
    return "\n".join(line for found in merged.values() for line in found) + "\n"


def summary(lines: str) -> str:
    rows = []
    for name, found in by_primitive(lines).items():
        digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]
        rows.append(found[0] if name == "#" else f"{name} {len(found)} {digest}")
    return "\n".join(rows)


def unpacked(folder: Path) -> Path:
    """A file with the lines, in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path, lines = folder / "golden.txt", text()
    if not path.exists() or path.read_text() != lines:
        path.write_text(lines)
    return path


def main(argv: list[str]) -> int:
    match argv:
        case ["pack", name]:
            pack(Path(name).read_text())
        case ["add", name]:
            pack(added(text(), Path(name).read_text()))
        case ["unpack", name]:
            Path(name).write_text(text())
        case ["summary"]:
            print(summary(text()))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
