"""What torch's flight recorder says of this rank: collectives that have not completed, also those of DDP in C++."""

from __future__ import annotations

import json
from typing import Any

import torch._C._distributed_c10d as c10d

# torch's dump functions: that of all backends, and NCCL's. Which of them exist depends on version and build.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_MOST = 3  # collectives that a line names


def pending() -> str:
    """The collectives that have begun and not completed, oldest first, in words. Empty where there are none, or no
    recorder: torch keeps one unless TORCH_FR_BUFFER_SIZE is 0.

    Example:
        >>> pending()
        ''
    """
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            if entries := json.loads(dump(True, True)).get("entries"):
                return _words(entries)
        except (RuntimeError, TypeError, ValueError):  # another version's, or none of its backend's
            continue
    return ""


def _words(entries: list[dict[str, Any]]) -> str:
    """Of the recorder's entries.

    Example:
        >>> _words([{"profiling_name": "nccl:all_reduce", "collective_seq_id": 7, "input_dtypes": ["Float"],
        ...          "input_sizes": [[3]], "process_group": ["0", "default_pg"], "record_id": 1}])
        'all_reduce #7 of Float (3,) (default_pg)'
    """
    entries = sorted((e for e in entries if not e.get("retired")), key=lambda e: e.get("record_id", 0))
    found = [_entry(e) for e in entries[:_MOST]]
    return ", ".join(found) + (f" and {len(entries) - _MOST} more" if len(entries) > _MOST else "")


def _entry(entry: dict[str, Any]) -> str:
    dtypes, sizes = entry.get("input_dtypes") or [], entry.get("input_sizes") or []
    tensors = ", ".join(f"{dtype} {tuple(size)}" for dtype, size in zip(dtypes, sizes, strict=False))
    op = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    group = (entry.get("process_group") or ["?"])[-1]
    return f"{op} #{entry.get('collective_seq_id')}" + (f" of {tensors}" if tensors else "") + f" ({group})"
