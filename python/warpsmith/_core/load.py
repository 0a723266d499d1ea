"""Loads the op library, exactly once and with one message for each thing that can be wrong."""

import importlib.util
import re
from pathlib import Path

MINIMUM_TORCH = (2, 11)
REINSTALL = "install the package again with `pip install .` in the environment that holds torch"


def _require_torch() -> None:
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ImportError(f"warpsmith: torch is missing or broken ({error}); install torch >= 2.11") from error
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and (int(found[1]), int(found[2])) < MINIMUM_TORCH:
        raise ImportError(f"warpsmith: expected torch >= 2.11, got {torch.__version__}; upgrade torch")


def library_path() -> Path:
    """Path of the op library, beside the compiled ``_C``. In an editable install that is not the source folder."""
    spec = importlib.util.find_spec("warpsmith._C")
    if spec is None or spec.origin is None:
        raise ImportError(f"warpsmith: the compiled module _C is missing; {REINSTALL}")
    suffix = ".dylib" if spec.origin.endswith("darwin.so") else ".so"
    return Path(spec.origin).with_name("libwarpsmith_ops" + suffix)


def load_library() -> None:
    """Loads the op library unless a program (a LibTorch host, a reloaded module) has loaded it already: a second copy
    of the same schemas would end the process in a static initialiser."""
    _require_torch()
    import torch

    if hasattr(torch.ops.warpsmith, "rms_norm_forward"):
        return
    path = library_path()
    if not path.exists():
        raise ImportError(f"warpsmith: {path.name} is missing beside the compiled module; {REINSTALL}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"warpsmith: {path.name} does not load into torch {torch.__version__}: {error}; {REINSTALL}"
        ) from error
