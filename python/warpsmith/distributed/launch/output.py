"""Messages and progress bars of one job instead of one for each rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from warpsmith._core import checks


class RankFilter(logging.Filter):
    """Lets a record pass on rank 0, and on every rank if it is a warning or has ``extra={"all_ranks": True}``.

    Example:
        >>> record = logging.LogRecord("train", logging.INFO, "", 0, "step 1", (), None)
        >>> RankFilter(0, 2).filter(record), RankFilter(1, 2).filter(record)
        (True, False)
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        checks.sizes("RankFilter", 0, rank=rank)
        checks.sizes("RankFilter", rank + 1, world_size=world_size)
        self.rank, self.world_size = rank, world_size

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank, record.world_size = self.rank, self.world_size
        return self.rank == 0 or record.levelno >= logging.WARNING or getattr(record, "all_ranks", False)


def rank_logger(name: str, rank: int, world_size: int, level: int) -> logging.Logger:
    """The logger of that name with one handler of ours, which writes to standard error and names the rank."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    for handler in [h for h in logger.handlers if any(isinstance(f, RankFilter) for f in h.filters)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RankFilter(rank, world_size))
    handler.setFormatter(
        logging.Formatter("%(asctime)s rank %(rank)d/%(world_size)d %(levelname)s %(name)s: %(message)s")
    )
    logger.addHandler(handler)
    logger.propagate = False
    return logger


def progress(rank: int, iterable: Iterable[Any] | None, options: dict[str, Any]) -> Any:
    """A tqdm bar that only rank 0 shows."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("progress: tqdm is not installed: pip install tqdm", name="tqdm") from error
    return tqdm(iterable, **{"disable": rank != 0, **options})
