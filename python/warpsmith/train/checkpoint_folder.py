"""A folder of checkpoints, each whole or absent: written aside, synced, renamed; verified when read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from warpsmith.train import safetensors_file

FORMAT = 1
_MANIFEST = "manifest.json"
_UNFINISHED, _REMOVED = ".unfinished-", ".removed-"
Files = dict[str, dict[str, Tensor] | bytes]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read. What was there before is as it was.

    Example:
        >>> raise CheckpointError("step 3: disk full")
        Traceback (most recent call last):
        ...
        warpsmith.train.checkpoint_folder.CheckpointError: step 3: disk full
    """


def found(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, oldest step first, not yet verified."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _parts(path.name)), key=lambda path: _parts(path.name) or ())


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    parts = _parts(path.name)
    assert parts is not None
    return parts[0]


def _parts(name: str) -> tuple[int, int] | None:
    """Step, and how often it was saved before: a step that is saved again gets a name of its own, so that the earlier
    checkpoint stands until the new one does."""
    match = re.fullmatch(r"step-(\d{8,})(?:\.(\d+))?", name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def write(folder: Path, step: int, files: Files, keep: int, refused: Iterable[str] = ()) -> Path:
    """Adds a checkpoint, then drops all but the newest ``keep`` and those that were refused.

    Raises:
        CheckpointError: it could not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"Checkpointer: step {step}: another process writes into {folder}: give each job its own folder"
                ) from error
            for path in folder.iterdir():  # what a killed process left
                if path.name.startswith((_UNFINISHED, _REMOVED)):
                    shutil.rmtree(path, ignore_errors=True)
            return _write_locked(folder, step, files, keep, set(refused))
    except OSError as error:
        there = ", ".join(path.name for path in found(folder)) or "none"
        raise CheckpointError(
            f"Checkpointer: step {step}: {folder}: {error.strerror or error} (there already: {there})"
        ) from error


def _write_locked(folder: Path, step: int, files: Files, keep: int, refused: set[str]) -> Path:
    again = [(_parts(path.name) or (0, 0))[1] for path in found(folder) if step_of(path) == step]
    name = f"step-{step:08d}" + (f".{max(again) + 1}" if again else "")
    temporary, target = folder / (_UNFINISHED + name), folder / name
    temporary.mkdir()
    try:
        entries = {file: safetensors_file.write_file(temporary / file, content) for file, content in files.items()}
        manifest = {"format": FORMAT, "step": step, "files": entries}
        safetensors_file.write_file(temporary / _MANIFEST, _sealed(manifest))
        _sync_folder(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder)
    good = [path for path in found(folder) if path.name not in refused]
    for path in set(found(folder)) - set(good[-keep:]):
        removed = folder / (_REMOVED + path.name)
        path.rename(removed)  # first: a half-deleted folder must not have a checkpoint's name
        shutil.rmtree(removed, ignore_errors=True)
    return target


def read(path: Path) -> Files:
    """The files of one checkpoint. All are opened before one is read: then a writer may drop the checkpoint.

    Raises:
        ValueError, OSError: something in it is missing or not what was written.
    """
    step = step_of(path)
    manifest = _unsealed((path / _MANIFEST).read_bytes())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{_MANIFEST}: expected format {FORMAT}, got {manifest.get('format')}")
    if manifest["step"] != step:
        raise ValueError(f"{_MANIFEST}: expected step {step}, got {manifest['step']}")
    if any(Path(name).name != name for name in manifest["files"]):
        raise ValueError(f"{_MANIFEST}: expected names of files, got {list(manifest['files'])}")
    with ExitStack() as stack:
        opened = {name: stack.enter_context(open(path / name, "rb", buffering=0)) for name in manifest["files"]}
        return {
            name: safetensors_file.read_file(opened[name], name, entry) for name, entry in manifest["files"].items()
        }


def why(error: BaseException) -> str:
    """An error of ``read`` in a few words."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return str(error)


def _sealed(manifest: dict[str, Any]) -> bytes:
    """JSON, and behind it a line with its sha256."""
    text = json.dumps(manifest, indent=1).encode()
    return text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def _unsealed(content: bytes) -> dict[str, Any]:
    text, _, seal = content.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != seal:
        raise ValueError(f"{_MANIFEST}: expected its own sha256 in the last line, got another")
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
