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


def with_imports(key: str) -> str:
    """The key of a check that runs Python: its process's modules are part of it, as the last run for `key` named them.

    Equal keys have equal modules: with these contents a process has imported these files and no other.
    """
    known = store.get(store.key("imports", key))
    paths = [build.ROOT / name for name in (known.value if known else ())]
    return store.key("with imports", key, store.digests(filter(Path.exists, paths), build.ROOT))


def keep_imports(key: str, names: set[str]) -> str:
    """After a run, before its verdict is kept under the key that it returns."""
    assert names, "a check that runs Python imports modules"
    store.put(store.key("imports", key), sorted(names))
    return with_imports(key)
