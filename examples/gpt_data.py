"""The data of train_gpt.py: the bytes of any files, cut into batches that are a function of (seed, step)."""

import hashlib
import math
import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import torch
from gpt_ranks import Ranks, UserError  # beside this file
from torch import Tensor


def read_data(path: Path | None, out: Path | None = None) -> tuple[bytes, bytes, str]:
    """(train, validation, description): bytes of the files under `path`, a tenth of the files held out for validation.

    Which files are held out depends on their relative names alone. A single file is cut at nine tenths. What lies in
    `out` is the run's own, and not data.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(f.parts)]
    else:
        root = path
        if not root.exists():
            raise UserError(f"--data: expected a file or a folder, got {root} (no such path)")
        files = [root] if root.is_file() else [f for f in root.rglob("*") if f.is_file()]
        files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)]
        if out is not None and root.is_dir():
            own = out.resolve()
            files = [f for f in files if not f.resolve().is_relative_to(own)]
    names = {f: os.fsencode(f.relative_to(root).as_posix()) for f in files}
    files = sorted((f for f in files if f.stat().st_size > 0), key=lambda f: hashlib.sha256(names[f]).digest())
    if not files:
        raise UserError(f"--data: expected text, got {root} with no file that holds any")
    texts = [f.read_bytes() for f in files]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts, held_out = [texts[0][cut:], texts[0][:cut]], 1
    else:
        held_out = math.ceil(len(texts) / 10)
    # A zero byte marks the end of a file.
    validation, train = (b"\0".join(part) for part in (texts[:held_out], texts[held_out:]))
    sizes = f"{len(train) / 1e6:.2f} MB to train, {len(validation) / 1e6:.2f} MB to validate"
    return train, validation, f"{len(files):,} file(s) of {root}: {sizes}"


class Data:
    """Batches as a function of (seed, step): a rank takes its rows of the global batch."""

    def __init__(self, s: SimpleNamespace, path: Path | None, ranks: Ranks, out: Path | None = None) -> None:
        self.s, self.ranks = s, ranks
        self.random = s.tokens == "random"
        if self.random:
            self.description, self.sha256 = f"random tokens below {s.vocab:,}", "random"
            return
        train, validation, self.description = read_data(path, out)
        for name, part in (("train", train), ("validate", validation)):
            if len(part) <= s.context:
                raise UserError(f"--data: expected more than --context {s.context} bytes to {name} on, got {len(part)}")
        if s.vocab < 256:
            raise UserError(f"--vocab: expected at least 256 for bytes, got {s.vocab}")
        self.sha256 = hashlib.sha256(train + validation).hexdigest()
        self.train, self.validation = (torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (train, validation))

    def batch(self, step: int) -> Tensor:
        """The rows [batch / ranks, context + 1] of this rank in training step `step`."""
        torch.manual_seed(self.s.seed * 1_000_003 + step)
        if self.random:
            rows = torch.randint(self.s.vocab, (self.s.batch, self.s.context + 1))
        else:
            starts = torch.randint(len(self.train) - self.s.context, (self.s.batch,))
            rows = self.rows(self.train, starts)
        return self.place(rows)

    def validation_batches(self, count: int) -> list[Tensor]:
        """`count` batches, spread evenly over the validation text, the same at every call."""
        if self.random:
            return [self.batch(-1 - i) for i in range(count)]
        last = len(self.validation) - self.s.context - 1
        starts = torch.linspace(0, last, count * self.s.batch, dtype=torch.float64).long()
        return [self.place(self.rows(self.validation, part)) for part in starts.split(self.s.batch)]

    def rows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self.s.context + 1)]

    def place(self, rows: Tensor) -> Tensor:
        rows = rows.chunk(self.ranks.world)[self.ranks.rank]
        if self.ranks.device.type == "cuda":  # from pageable memory the copy would make the host wait
            rows = rows.pin_memory()
        return rows.to(self.ranks.device, non_blocking=True).long()
