"""Checkpoints that are whole or absent: safetensors and JSON, verified when read, the newest two kept.

`<folder>/step-00000200/` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and `manifest.json`, which
has the length and sha256 of the others. All four are written under a temporary name, synced to disk, and renamed
together: whenever the process dies, what stands under a checkpoint's own name is complete. Nothing here pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch as safetensors
from torch import Tensor, nn
from torch.optim import Optimizer

NAMES = ("model.safetensors", "optimizer.safetensors", "state.json")


class CheckpointError(Exception):
    """A checkpoint could not be written, or none could be read; the message is for the user."""


def pack(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, bytes]:
    """The contents of a checkpoint, by file name. `state` is any JSON; the key "ties" is added to it."""
    weights, ties = split_ties(model.state_dict())
    moments = {
        f"{index}.{name}": value.to("cpu", copy=True)
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    text = json.dumps(state | {"ties": ties}, indent=1)
    return dict(zip(NAMES, (safetensors.save(weights), safetensors.save(moments), text.encode()), strict=True))


def unpack(files: dict[str, bytes], model: nn.Module, optimizer: Optimizer) -> None:
    """Load what `pack` made. Learning rates and the like stay as the optimizer was built."""
    weights = safetensors.load(files["model.safetensors"])
    ties = json.loads(files["state.json"])["ties"]
    model.load_state_dict(weights | {name: weights[owner] for name, owner in ties.items()})
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in safetensors.load(files["optimizer.safetensors"]).items():
        index, name = key.split(".", 1)
        entries.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})


def split_ties(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """CPU copies of every tensor once, and {other name: name} for those that share one (safetensors refuses them)."""
    kept: dict[str, Tensor] = {}
    owner: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = owner.setdefault(tensor.data_ptr(), name)
        if first == name:
            kept[name] = tensor.to("cpu", copy=True)
        else:
            ties[name] = first
    return kept, ties


def write(folder: Path, step: int, files: dict[str, bytes]) -> None:
    """Add a checkpoint and drop all but the newest two. When that fails, the older ones are as they were."""
    target, temporary = folder / f"step-{step:08d}", folder / ".unfinished"
    entries = {name: {"bytes": len(f), "sha256": hashlib.sha256(f).hexdigest()} for name, f in files.items()}
    manifest = json.dumps({"format": 1, "files": entries}, indent=1).encode()
    shutil.rmtree(temporary, ignore_errors=True)  # a killed process may have left one
    try:
        temporary.mkdir(parents=True)
        for name, content in (files | {"manifest.json": manifest}).items():
            write_synced(temporary / name, content)
        sync_folder(temporary)
        shutil.rmtree(target, ignore_errors=True)  # exists only if it was corrupt and an older one was resumed
        temporary.rename(target)
        sync_folder(folder)
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        left = ", ".join(path.name for path in found(folder)) or "none"
        raise CheckpointError(f"checkpoint of step {step}: {folder}: {e.strerror} (there already: {left})") from e
    keep = [path for path in found(folder) if step_of(path) <= step][-2:]
    for path in set(found(folder)) - set(keep):
        shutil.rmtree(path, ignore_errors=True)


def read(folder: Path, say: Callable[[str], None]) -> dict[str, bytes]:
    """The newest checkpoint that verifies; `say` is told which newer ones did not, and why."""
    problems = []
    for path in reversed(found(folder)):
        try:
            files = read_verified(path)
        except (OSError, ValueError, KeyError, TypeError) as e:
            problems.append(f"{path.name} is corrupt ({e})")
            continue
        for problem in problems:
            say(f"checkpoint {problem}: using {path.name}")
        return files
    raise CheckpointError(f"no usable checkpoint in {folder}: {'; '.join(problems) or 'there is none'}")


def read_verified(path: Path) -> dict[str, bytes]:
    """The files of one checkpoint; raises when anything in it is not what was written."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest["format"] != 1:
        raise ValueError(f"manifest.json: expected format 1, got {manifest['format']}")
    files = {}
    for name in NAMES:
        content, expected = (path / name).read_bytes(), manifest["files"][name]
        if len(content) != expected["bytes"]:
            raise ValueError(f"{name}: expected {expected['bytes']} bytes, got {len(content)}")
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise ValueError(f"{name}: expected the manifest's sha256, got another")
        files[name] = content
    return files


def found(folder: Path) -> list[Path]:
    """All checkpoints by name, oldest first, not yet verified."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdigit()), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name[5:])


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
