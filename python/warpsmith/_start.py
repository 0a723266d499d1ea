"""The first thing that ``import warpsmith`` does: it loads the library, or says what is wrong, and leaves a mark in the
keys of compiled graphs."""

from __future__ import annotations

import sys

from warpsmith._core.load import load_library


def _runs_as_tool() -> bool:
    """Whether this is `python -m warpsmith`, of which Python has imported no more than the package so far."""
    words = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in words[:-1] and words[words.index("-m") + 1] == "warpsmith"


def _load_or_explain() -> None:
    try:
        load_library()
    except ImportError:
        if not _runs_as_tool():
            raise
        # `python -m warpsmith info` is there to explain exactly this; the package itself cannot be imported.
        from warpsmith.cli import main

        raise SystemExit(main(sys.argv[1:])) from None


def _mark_compiled_graphs() -> None:
    """Adds the version to the keys of torch.compile's caches. They hold the names of ops alone: after an upgrade a
    cached graph would go on with the schemas and the gradients of the version before."""
    from torch.compiler import config

    from warpsmith._version import __version__

    mark = f"[warpsmith {__version__}]"
    tag = config.cache_key_tag
    if mark in tag:
        return
    config.cache_key_tag = tag + mark
    # In torch 2.13, not yet in 2.11, what is assigned holds in the assigning thread alone, and graphs are compiled in
    # others too. What the environment gives holds in all; torch has read it by now, so the value it keeps is changed.
    entry = vars(config).get("_config", {}).get("cache_key_tag")
    if hasattr(entry, "env_value_default"):
        entry.env_value_default = tag + mark


_load_or_explain()
_mark_compiled_graphs()
