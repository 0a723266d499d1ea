#!/usr/bin/env python3
"""Stands before a compiler in CMake's builds of the package, and takes from the store what a clone has compiled.

    CMAKE_CXX_COMPILER_LAUNCHER=$PWD/tools/sim/launcher.py CMAKE_CUDA_COMPILER_LAUNCHER=$PWD/tools/sim/launcher.py \\
        pip install --no-build-isolation .

`make` sets both where they are not set. What a source included the last times it was compiled with the same command is
in the store; where all these files have the contents that they had then, so has the object. Any other call (linking,
sources outside the project, more than one of them) goes to the compiler as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import store

ROOT = Path(__file__).resolve().parents[2]
# What else steers a compiler.
VARIABLES = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "CUDAHOSTCXX",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "SOURCE_DATE_EPOCH",
)
MOST_LISTS = 8  # of included files that are remembered for one command


def option(command: list[str], name: str) -> str:
    """What follows an option; empty without it."""
    return command[command.index(name) + 1] if name in command[:-1] else ""


def source_of(command: list[str]) -> Path | None:
    """The one source of the project that a command compiles into an object with a list of what it includes."""
    named = {name: option(command, name) for name in ("-o", "-MF", "-MT", "-c")}
    source = Path(named["-c"])
    whole = all(named.values()) and source.is_absolute() and source.is_relative_to(ROOT) and source.is_file()
    return source if whole and named["-o"] == named["-MT"] else None


def version(compiler: str) -> str:
    """Of the compiler, and of the host compiler that nvcc calls."""
    texts = []
    for command in (
        [compiler, "--version"],
        *([[os.environ.get("CXX", "g++"), "--version"]] if "nvcc" in compiler else []),
    ):
        texts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return "\n".join(texts)


def included(listing: str) -> list[str]:
    """The files of a make rule."""
    text = listing.replace("\\\n", " ").split(": ", 1)[1].replace("\\ ", "\0")
    return [word.replace("\0", " ") for word in text.split()]


def named(path: str) -> str:
    """A path as it reads in every clone."""
    return path.replace(str(ROOT), "@")


def object_key(command_key: str, paths: list[str]) -> str | None:
    """Of the object that the command makes of these files as they are now; None if one is gone."""
    try:
        return store.key("object", command_key, [(p, store.digest(Path(p.replace("@", str(ROOT), 1)))) for p in paths])
    except OSError:
        return None


def run(command: list[str]) -> int:
    source = source_of(command)
    if source is None or store.folder() is None:
        return subprocess.run(command).returncode
    variables = {name: named(os.environ.get(name, "")) for name in VARIABLES}
    command_key = store.key("command", version(command[0]), [named(word) for word in command[1:]], variables)
    target, listing = Path(option(command, "-o")), Path(option(command, "-MF"))
    known = store.get(command_key)
    lists = known.value if known else []
    for paths in lists:
        key = object_key(command_key, paths)
        if entry := store.get(key) if key else None:
            target.write_bytes(entry.files["o"])
            here = [p.replace("@", str(ROOT), 1).replace(" ", "\\ ") for p in paths]
            listing.write_text(f"{target}: " + " \\\n ".join(here) + "\n")
            return 0
    started = time.time()
    status = subprocess.run(command).returncode
    if status or not listing.exists():
        return status
    paths = [named(path) for path in included(listing.read_text())]
    key = object_key(command_key, paths)
    # A file that was edited meanwhile: which of its states was compiled?
    if key and all(os.stat(path).st_mtime < started for path in included(listing.read_text())):
        store.put(key, named(str(source)), {"o": target.read_bytes()})
        store.put(command_key, [paths, *(other for other in lists if other != paths)][:MOST_LISTS])
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
