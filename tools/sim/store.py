"""What builds and tests have shown before, found again by the content of everything that went into it.

An entry has a key, a small JSON value, and files. Two kinds of entries exist: compiled objects, and verdicts: that a
check passed. A failure is never stored. Keys hash contents, never paths or times of the tree, so that a fresh clone on
the same machine finds what another clone has left.

The folder is $WARPSMITH_CACHE, else $XDG_CACHE_HOME/warpsmith, else ~/.cache/warpsmith. It belongs to its owner alone
(0700); a folder that others may write to is not used. WARPSMITH_CACHE=off, or pytest's --no-cache, neither reads nor
writes. WARPSMITH_CACHE_MIB (default 3072) bounds its size: the entries that were used least recently go first.

Processes may share it: an entry is written aside and renamed, and read only if its checksum holds. Anything that goes
wrong here (a full disk, a damaged file) makes a miss, never an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MAGIC = b"warpsmith store 1\n"
LIMIT_MIB = 3072
KEPT_SHARE = 0.8  # of the limit, after an eviction
LOOK_BYTES = 64 << 20  # a process looks at the folder's size after its first write, and after so much more
ABANDONED_S = 3600  # a temporary file of that age belongs to a process that was killed


@dataclass(frozen=True)
class Entry:
    value: Any
    files: dict[str, bytes] = field(default_factory=dict)


def folder() -> Path | None:
    """The store's folder, made if it is missing; None if it is off or not safe to use."""
    named = os.environ.get("WARPSMITH_CACHE", "")
    if named == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return _usable(Path(named) if named else Path(base) / "warpsmith")


def _usable(path: Path) -> Path | None:
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was faster
                path.mkdir(mode=0o700)
        found = path.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        _warn(path)
        return None
    return path


@cache
def _warn(path: Path) -> None:
    print(f"warpsmith: {path} is not used: it must belong to you, and others must not write to it", file=sys.stderr)


def key(kind: str, *parts: Any) -> str:
    """A key for anything that JSON can hold."""
    return hashlib.sha256(json.dumps([kind, *parts], sort_keys=True).encode()).hexdigest()


def _path(root: Path, key: str) -> Path:
    return root / key[:2] / key


def get(key: str) -> Entry | None:
    root = folder()
    if root is None:
        return None
    path = _path(root, key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        return _decoded(data)
    except (ValueError, KeyError, TypeError, zlib.error):
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    finally:
        with contextlib.suppress(OSError):
            os.utime(path)  # used now


def _decoded(data: bytes) -> Entry:
    at = len(MAGIC) + 32
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[at:]).digest() != data[len(MAGIC) : at]:
        raise ValueError("damaged")
    head, _, rest = zlib.decompress(data[at:]).partition(b"\n")
    described = json.loads(head)
    files, start = {}, 0
    for name, size in described["files"]:
        files[name] = rest[start : start + size]
        start += size
    return Entry(described["value"], files)


def put(key: str, value: Any, files: Mapping[str, bytes] | None = None) -> bool:
    """Stores an entry; False if that was not possible."""
    root = folder()
    if root is None:
        return False
    files = files or {}
    head = json.dumps({"value": value, "files": [[name, len(data)] for name, data in files.items()]})
    body = zlib.compress(b"\n".join([head.encode(), b"".join(files.values())]), 1)
    path = _path(root, key)
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=path.parent, prefix="new-")
        with os.fdopen(number, "wb") as file:
            file.write(MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    _grown(root, len(body))
    return True


_unseen = LOOK_BYTES  # bytes that this process wrote since it last looked at the folder's size


def _grown(root: Path, count: int) -> None:
    global _unseen
    _unseen += count
    if _unseen >= LOOK_BYTES:
        _unseen = 0
        evict(root, int(os.environ.get("WARPSMITH_CACHE_MIB", LIMIT_MIB)) << 20)


def evict(root: Path, limit: int) -> None:
    """Removes the entries that were used least recently, if all are larger than `limit` bytes together."""
    with contextlib.suppress(OSError), open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process does it now: OSError
        entries = []
        for path in root.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if path.name.startswith("new-"):
                    if time.time() - found.st_mtime > ABANDONED_S:
                        path.unlink()
                    continue
                entries.append((found.st_mtime_ns, found.st_size, path))
        size = sum(s for _, s, _ in entries)
        if size <= limit:
            return
        for _, entry_size, path in sorted(entries):
            if size <= KEPT_SHARE * limit:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            size -= entry_size


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
