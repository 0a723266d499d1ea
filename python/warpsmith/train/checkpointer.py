"""``Checkpointer``: the whole state of a training run, saved while it goes on."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from warpsmith._core import checks
from warpsmith.distributed.exchange import all_gather_bytes, all_gather_json, rank_and_size
from warpsmith.train import checkpoint_folder
from warpsmith.train.checkpoint_folder import CheckpointError, Files
from warpsmith.train.checkpoint_parts import check_model, check_optimizer, check_parts, known_class, load_parts, plain
from warpsmith.train.random_state import random_state, set_random_state
from warpsmith.train.tree import Packer, unpack

_LOG = logging.getLogger("warpsmith.train")
_STATE, _RANKS = "state.json", "ranks.json"


class Checkpointer:
    """Saves and restores a training run: model, optimizer, schedule, scaler, data order, random states of all ranks.

    A checkpoint is a folder ``step-00000200`` of safetensors and JSON. It is written under another name, synced to disk
    and renamed, so whenever the process dies, a checkpoint is whole or absent. A manifest has the length and sha256 of
    every file; ``load`` verifies them and takes the newest checkpoint that is whole. Nothing pickles.

    ``save`` copies the state to the host (from CUDA into pinned memory, without waiting for the device) and returns; a
    thread writes the copies. The next ``save`` waits for that thread. The copies take as much host memory as the state.

    A resumed run goes on bit for bit as the uninterrupted one, given deterministic operators and as many ranks. With
    another number of ranks the data order is that of ``ResumableSampler``, and ranks keep the random states they have.

    Args:
        folder: of this run's checkpoints; it is made when needed. All ranks must see it as one folder.
        keep: how many of the newest checkpoints stay, at least 1.
        process_group: the ranks that train together; default: all. Rank 0 writes; ``save`` and ``load`` are collective.
            The state must be the same on all of them, as under DDP: sharded tensors (FSDP) are refused. The state of a
            ``warpsmith.distributed.ShardedOptimizer`` of the same group is saved whole, for any number of ranks.

    Attributes:
        extra: after ``load``, what ``save`` was given as ``extra``; tensors on the CPU.
        refused: after ``load``, one line for each newer checkpoint that was damaged or half-written.

    Example:
        >>> import tempfile, torch, warpsmith
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = tempfile.TemporaryDirectory()
        >>> with warpsmith.train.Checkpointer(folder.name) as checkpoints:
        ...     start = checkpoints.load(model=model, optimizer=optimizer) or 0
        ...     checkpoints.save(start + 1, model=model, optimizer=optimizer, extra={"best": 0.5})
        >>> later = warpsmith.train.Checkpointer(folder.name)
        >>> later.load(model=model, optimizer=optimizer), later.extra
        (1, {'best': 0.5})
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep: int = 3, *, process_group: ProcessGroup | None = None
    ) -> None:
        checks.refuse_non_int("Checkpointer", "keep", keep, 1)
        if not isinstance(folder, (str, os.PathLike)):
            checks.refuse_type("Checkpointer", "folder", "a path", folder)
        rank_and_size(process_group, "Checkpointer")
        self.folder, self.keep, self.process_group = Path(folder), keep, process_group
        self.extra: Any = None
        self.refused: list[str] = []
        self._refused_names: set[str] = set()
        self._buffers: dict[str, Tensor] = {}
        self._copied: list[torch.cuda.Event] = []  # recorded behind the copies of the save that is under way
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        sampler: Any = None,
        extra: Any = None,
    ) -> None:
        """Saves the state as of now under a step, in the background.

        Args:
            step: at least 0, and not below that of a checkpoint in the folder which ``load`` has not refused.
            model: with or without DistributedDataParallel or ``torch.compile`` around it.
            optimizer, scheduler, scaler, sampler: whatever has ``state_dict`` and ``load_state_dict``.
            extra: tensors, numbers, strings, bytes, None, and lists, tuples and dicts of them. Keys of a dict hold no
                tensor.

        Tensors that are the same view of the same memory are one tensor when they are loaded. Other views, such as
        slices of one tensor, get memory of their own.

        Raises:
            CheckpointError: this save was refused, or the one before could not be written.
            TypeError: a state holds something else; the message has its place. ``step`` is no int, or an argument has
                no ``state_dict``, of which the other ranks do not hear.
        """
        rank, size = rank_and_size(self.process_group)
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        checks.refuse_non_int("Checkpointer.save", "step", step)
        check_parts("Checkpointer.save", given, "state_dict")
        if hasattr(optimizer, "consolidate_state_dict"):  # each rank has a part of the state
            optimizer.consolidate_state_dict(to=0)
        files: Files = {}
        failure: BaseException | None = None
        if rank == 0:  # the others learn from the exchange below whether it went well: no rank may stay behind
            try:
                self.wait()
                self._check_step(step)
                files = self._snapshot(step, size, given, extra)
            except Exception as error:
                failure = error
        reports = self._exchange({"random": Packer(_no_tensors).pack(random_state(), "")}, failure)
        if rank == 0:
            files[_RANKS] = json.dumps([report["random"] for report in reports]).encode()
            self._start(step, files)

    def load(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        sampler: Any = None,
        rng: bool = True,
    ) -> int | None:
        """Restores what is given from the newest whole checkpoint.

        Args:
            model, optimizer, scheduler, scaler, sampler: as for ``save``. What the checkpoint has beyond is left out.
            rng: also restore this rank's random states.

        Returns:
            Its step, or None if the folder holds no checkpoint.

        Raises:
            CheckpointError: the folder holds checkpoints, and none is whole.
            ValueError: the checkpoint is of another model or of an optimizer of another class of ``torch.optim`` or
                ``warpsmith.optim``, or has no state for one that is given. Nothing has changed then. Classes of one
                name in both packages load each other's states.
        """
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        check_parts("Checkpointer.load", given, "load_state_dict")
        path, files = self._agree_on_one()
        if path is None:
            return None
        state = json.loads(_text(files[_STATE]))
        wanted = {name: value for name, value in given.items() if value is not None}
        parts = {}
        for name in (*wanted, "extra"):
            if name not in state["parts"]:
                have = ", ".join(n for n in state["parts"] if n != "extra") or "none"
                raise ValueError(f"Checkpointer.load: {name}: expected a state of it in {path.name}, got {have}")
            tensors = files.get(f"{name}.safetensors", {})
            assert isinstance(tensors, dict)
            parts[name] = unpack(state["parts"][name], tensors)
        if model is not None:
            check_model(path.name, plain(model), parts["model"])
        if optimizer is not None:
            check_optimizer(path.name, optimizer, parts["optimizer"], state.get("optimizer_class"))
        load_parts(wanted, parts)
        self.extra = parts["extra"]
        if rng:
            self._restore_random(path.name, json.loads(_text(files[_RANKS])))
        step: int = state["step"]
        return step

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()  # the exception that ends the block is the one to report

    def _exchange(self, own: dict[str, Any], failure: BaseException | None) -> list[Any]:
        """What each rank gave. Raises on all ranks where rank 0 has failed."""
        reports = all_gather_json({**own, "error": failure and str(failure)}, self.process_group)
        if failure is not None:
            raise failure
        if reports[0]["error"]:
            raise CheckpointError(f"rank 0: {reports[0]['error']}")
        return reports

    def _check_step(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"Checkpointer.save: step: expected at least 0, got {step}")
        newer = [p.name for p in checkpoint_folder.found(self.folder) if checkpoint_folder.step_of(p) > step]
        newer = [name for name in newer if name not in self._refused_names]
        if newer:
            raise CheckpointError(
                f"Checkpointer.save: step: expected one from {newer[-1]} on, which is in {self.folder}, got {step}: "
                "load() it first, or give the run a folder of its own"
            )

    def _snapshot(self, step: int, world_size: int, given: dict[str, Any], extra: Any) -> Files:
        parts: dict[str, Any] = {}
        files: Files = {}
        buffers: dict[str, Tensor] = {}
        devices: set[torch.device] = set()
        for name, value in given.items():
            if value is not None:
                value = (plain(value) if name == "model" else value).state_dict()
                parts[name] = self._pack(name, value, files, buffers, devices)
        parts["extra"] = self._pack("extra", extra, files, buffers, devices)
        self._buffers = buffers
        self._copied = [torch.cuda.Event() for _ in devices]
        for event, device in zip(self._copied, devices, strict=True):
            event.record(torch.cuda.current_stream(device))
        state = {"step": step, "world_size": world_size, "torch": torch.__version__, "parts": parts}
        state["optimizer_class"] = known_class(given["optimizer"])
        files[_STATE] = json.dumps(state, indent=1).encode()
        return files

    def _pack(self, part: str, value: Any, files: Files, buffers: dict[str, Tensor], devices: set[torch.device]) -> Any:
        def host_copy(name: str, tensor: Tensor) -> Tensor:
            key = f"{part} {name}"
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            buffers[key] = buffer.copy_(tensor, non_blocking=True)
            return buffer

        packer = Packer(host_copy)
        try:
            packed = packer.pack(value, "")
        except TypeError as error:
            raise TypeError(f"Checkpointer.save: {part}: {error}") from None
        if packer.tensors:
            files[f"{part}.safetensors"] = packer.tensors
        return packed

    def _start(self, step: int, files: Files) -> None:
        copied = self._copied

        def write() -> None:
            try:
                for event in copied:
                    event.synchronize()
                checkpoint_folder.write(self.folder, step, files, self.keep, self._refused_names)
                self._refused_names = set()
            except BaseException as error:
                _LOG.error("%s", error)  # now: the program may never ask again
                self._error = error

        # Not a daemon: a program that ends after its last save ends when that is on disk.
        self._thread = threading.Thread(target=write, name=f"warpsmith-checkpoint-{step}")
        self._thread.start()

    def _agree_on_one(self) -> tuple[Path | None, Files]:
        """The checkpoint that rank 0 finds whole, as every rank reads it."""
        rank, _ = rank_and_size(self.process_group)
        while True:
            path, files = self._newest_of_rank_0(rank)
            if path is None:
                return None, {}
            problem = ""
            if rank != 0:
                try:
                    files = checkpoint_folder.read(path)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    problem = checkpoint_folder.why(error)
            problems = [text.decode() for text in all_gather_bytes(problem.encode(), self.process_group)]
            if not any(problems):
                break
            dropped = b"" if rank != 0 or os.path.isdir(path) else b"dropped"  # by a writer, after rank 0 has read it
            if not all_gather_bytes(dropped, self.process_group)[0]:
                named = "; ".join(f"rank {r}: {text}" for r, text in enumerate(problems) if text)
                raise CheckpointError(
                    f"Checkpointer.load: {path} is whole for rank 0, but not for others: {named}: expected one folder "
                    "that all ranks see"
                )
        if rank == 0:
            for line in self.refused:
                _LOG.warning("refused %s; using %s", line, path.name)
        return path, files

    def _newest_of_rank_0(self, rank: int) -> tuple[Path | None, Files]:
        """The newest checkpoint that rank 0 finds whole, and on rank 0 its files."""
        path: Path | None = None
        files: Files = {}
        failure: BaseException | None = None
        if rank == 0:
            try:
                self.wait()
                path, files, self.refused = _newest_whole(self.folder)
                self._refused_names = {line.split(":", 1)[0] for line in self.refused}
            except Exception as error:
                failure = error
        choice = self._exchange({"name": path and path.name, "refused": self.refused}, failure)[0]
        self.refused = choice["refused"]
        if choice["name"] is None:
            if self.refused:
                refused = "; ".join(self.refused)
                raise CheckpointError(f"Checkpointer.load: no whole checkpoint in {self.folder}: {refused}")
            return None, {}
        return self.folder / choice["name"], files

    def _restore_random(self, name: str, states: list[Any]) -> None:
        rank, size = rank_and_size(self.process_group)
        if len(states) != size:
            if rank == 0:
                _LOG.warning("%s has the random states of %d ranks, not of %d: they stay", name, len(states), size)
            return
        set_random_state(unpack(states[rank], {}))


def _newest_whole(folder: Path) -> tuple[Path | None, Files, list[str]]:
    while True:
        listed, refused = checkpoint_folder.found(folder), list[str]()
        for path in reversed(listed):
            try:
                return path, checkpoint_folder.read(path), refused
            except (OSError, ValueError, KeyError, TypeError) as error:
                refused.append(f"{path.name}: {checkpoint_folder.why(error)}")
            if checkpoint_folder.found(folder) != listed:  # a writer has dropped it for a newer one
                break
        else:
            return None, {}, refused


def _text(content: dict[str, Tensor] | bytes) -> bytes:
    assert isinstance(content, bytes)
    return content


def _no_tensors(name: str, tensor: Tensor) -> Tensor:
    raise TypeError(f"{name}: expected no tensor")
