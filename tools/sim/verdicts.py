"""Keys of verdicts: what a check of a sim program depended on. The same key, the same outcome."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import store

import build

HERE = Path(__file__).parent
SHARED = (HERE / "build.py", HERE / "store.py", HERE / "verdicts.py")


def key(kind: str, programs: Sequence[str], arguments: Any, tools: Iterable[Path]) -> str:
    """kind: of the check. programs: their keys. tools: the files, beside those that all share, that make the check."""
    sources = store.digests([*SHARED, *tools], build.ROOT)
    return store.key(kind, [*programs], arguments, sources, build.ENVIRONMENT, store.machine())
