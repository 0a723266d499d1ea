"""Waits until gloo's worker threads have let go of the tensors of their last collective."""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LOOKS = 2  # in a row: one look reads the threads one after the other, and one may hand over to another meanwhile
_PAUSE_S = 0.0005


def wait_until_idle(timeout_s: float = 10.0, tasks: str = "/proc/self/task") -> bool:
    """Whether all worker threads of gloo in this process sleep, within the timeout. True where none are known.

    A collective wakes the thread that waits for it before gloo's worker drops the tensors. On a busy machine the worker
    may be late by the whole rest of the program. It then frees a tensor that has a Python object while the interpreter
    ends, and the process aborts ("terminate called without an active exception"). Ending the process group does not
    wait for the workers as long as something else holds the group, such as DistributedDataParallel. torch has no call
    that waits for them, but Linux tells which threads sleep, and a worker that sleeps has nothing left to drop.

    Example:
        >>> wait_until_idle()
        True
    """
    deadline = time.monotonic() + timeout_s
    quiet = 0
    while quiet < _LOOKS:
        quiet = 0 if _busy(Path(tasks)) else quiet + 1
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)  # without the interpreter's lock, which a worker may need
    return True


def _busy(tasks: Path) -> bool:
    if not tasks.is_dir():  # not Linux
        return False
    for task in tasks.iterdir():
        try:
            # "17 (name) S 1 ...": the state follows the name.
            _, _, rest = (task / "stat").read_text().partition("(")
        except OSError:  # the thread has ended
            continue
        name, _, state = rest.rpartition(") ")
        if name == _NAME and state[0] != "S":
            return True
    return False
