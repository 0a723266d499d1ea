"""The processes of a run of train_gpt.py, and the errors that its user sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from warpsmith.distributed import Context, init
from warpsmith.train import CheckpointError


class UserError(Exception):
    """Something the user can put right: printed as one line, exit code 2."""


PROBLEMS = (UserError, CheckpointError, OSError)


class FailedElsewhere(Exception):
    """Rank 0 failed and says why; this rank only has to leave."""


class Ranks:
    """This process's place among those started by torchrun (one, when started without). Leaving it ends the group."""

    def __init__(self, device: str) -> None:
        self.rank, self.world, self.device = 0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.context: Context | None = None
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # With GPUs, gloo still carries the ranks' agreements: they must not wait for the device.
            self.context = init(device=device)
            self.rank, self.world, self.device = self.context.rank, self.context.world_size, self.context.device
        self.first = self.rank == 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.context is not None:
            self.context.close(failed=error is not None)

    def agree(self, value: int) -> int:
        """The largest `value` of all ranks."""
        if self.world == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def mean(self, values: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values)
            values /= self.world
        return values

    def on_first(self, action: Callable[..., Any], *args: Any) -> None:
        """Call `action` on rank 0; when it fails there, no rank goes on."""
        error = None
        if self.first:
            try:
                action(*args)
            except PROBLEMS as e:
                error = e
        if self.agree(int(error is not None)):
            raise error or FailedElsewhere

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def bar(self, total: int, done: int = 0) -> tqdm:
        few = 0.1 if sys.stderr.isatty() else 10.0  # a log file wants few lines
        return tqdm(total=total, initial=done, disable=not self.first, unit="step", mininterval=few, dynamic_ncols=True)
