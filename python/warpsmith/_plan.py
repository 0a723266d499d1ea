from __future__ import annotations

from typing import Any

from warpsmith import _C


def plan(op: str, **problem: Any) -> dict[str, Any]:
    """Says which kernel would run for a problem, and why, without running it. Needs no GPU.

    Args:
        op: name of the op, for example ``"rms_norm"``.
        problem: sizes and dtypes of the op; a missing or unknown one is named in the error.

    Returns:
        A dict of plain values, the kernel's name, its launch configuration, and ``why``, a sentence.

    Raises:
        ValueError: an op without a chooser, or a problem that does not fit it.

    Example:
        >>> import warpsmith
        >>> warpsmith.plan("rms_norm", rows=16384, columns=4096, dtype="bfloat16")["forward"]["kernel"]
        'registers'
    """
    return _C.plan(op, **problem)
