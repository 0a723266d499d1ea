"""In-tree PEP 517 backend: scikit-build-core, told where torch is.

The op library needs torch's stable headers and ``libtorch.so``, not an importable torch. They are looked for in this
order, and what was found is printed:

1. ``WARPSMITH_TORCH_DIR``, the directory of a torch package;
2. the torch that this interpreter can import (no build isolation);
3. the site-packages of the environment that started the build: under pip's isolation imports are hidden, but
   ``sysconfig`` still names it;
4. only if there is none, ``torch>=2.11`` becomes a build requirement.
"""

import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

from scikit_build_core import build as _build

MINIMUM_TORCH = (2, 11)
_HEADER = "include/torch/csrc/stable/library.h"


def _version(torch: Path) -> tuple[int, int] | None:
    """Major and minor of a torch package, read from its version.py without importing it."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _candidates() -> list[Path]:
    found = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent)
    found += [Path(sysconfig.get_paths()[key]) / "torch" for key in ("platlib", "purelib")]
    return found


def _refuse(message: str) -> NoReturn:
    # SystemExit, not an exception: pip shows its one line, which a traceback through pip's hooks would bury.
    raise SystemExit(f"warpsmith: {message}")


def find_torch() -> Path | None:
    """The torch package to build against, or None."""
    named = os.environ.get("WARPSMITH_TORCH_DIR")
    if named:
        torch, version = Path(named), _version(Path(named))
        if version is not None and version < MINIMUM_TORCH:
            _refuse(f"WARPSMITH_TORCH_DIR: expected torch >= 2.11, got {version[0]}.{version[1]} in {named}")
        if not (torch / _HEADER).exists():
            _refuse(f"WARPSMITH_TORCH_DIR: expected the directory of a torch package with {_HEADER}, got {named}")
        return torch
    for torch in _candidates():
        version = _version(torch)
        if version is None or not (torch / _HEADER).exists():
            continue
        if version >= MINIMUM_TORCH:
            return torch
        print(f"warpsmith: ignoring torch {version[0]}.{version[1]} at {torch}: expected 2.11 or newer")
    return None


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        return 8.0


def _configure() -> None:
    torch = find_torch()
    if torch is None:
        _refuse("no torch >= 2.11 found; install torch first or set WARPSMITH_TORCH_DIR")
    print(f"warpsmith: building against {torch}")
    os.environ["WARPSMITH_TORCH_DIR"] = str(torch)
    # A kernel file takes at most about 2 GiB to compile for two architectures.
    jobs = max(1, min(os.cpu_count() or 1, int(_memory_gib() / 2)))
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs))


def _requires(base: list[str]) -> list[str]:
    return base if find_torch() else [*base, "torch>=2.11"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _requires(_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _requires(_build.get_requires_for_build_editable(config_settings))


get_requires_for_build_sdist = _build.get_requires_for_build_sdist
build_sdist = _build.build_sdist
prepare_metadata_for_build_wheel = _build.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _build.prepare_metadata_for_build_editable


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _configure()
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _configure()
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
