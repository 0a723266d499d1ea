"""What checks have shown in this clone before, found again by the content of everything that went into them.

An entry is a small JSON value under a key, in a file of build/store. A failure is never kept. Keys hash contents, never
times of the tree. WARPSMITH_CACHE=off, or pytest's --no-cache, neither reads nor writes. `make clean` removes all.
"""

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "build" / "store"


@dataclass(frozen=True)
class Entry:
    value: Any


def key(kind: str, *parts: Any) -> str:
    """A key for anything that JSON can hold."""
    return hashlib.sha256(json.dumps([kind, *parts], sort_keys=True).encode()).hexdigest()


def get(key: str) -> Entry | None:
    if os.environ.get("WARPSMITH_CACHE") == "off":
        return None
    with contextlib.suppress(OSError):
        return Entry(json.loads((FOLDER / key).read_text()))
    return None


def put(key: str, value: Any) -> None:
    """Written aside and renamed: another process reads a whole entry or none."""
    if os.environ.get("WARPSMITH_CACHE") == "off":
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=FOLDER)
    with os.fdopen(number, "w") as file:
        json.dump(value, file)
    os.replace(temporary, FOLDER / key)


@cache
def _digest(path: str, mtime_ns: int, size: int, inode: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digest(path: Path) -> str:
    """A hash of a file's content; read again when its time, size or inode are others."""
    found = path.stat()
    return _digest(str(path), found.st_mtime_ns, found.st_size, found.st_ino)


def digests(paths: Iterable[Path], root: Path) -> list[tuple[str, str]]:
    """Names, relative to `root` where they lie below it, and hashes of files."""
    named = {str(p.relative_to(root)) if p.is_relative_to(root) else str(p): digest(p) for p in paths}
    return sorted(named.items())


@cache
def machine() -> str:
    """What a run may depend on beside the program: the processor's kind and the C library."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = {line for line in text.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return key("machine", platform.machine(), platform.libc_ver(), sorted(lines))
