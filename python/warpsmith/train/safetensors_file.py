"""Reads and writes safetensors files, with their sha256 taken on the way and one copy of the data in memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PIECE_BYTES = 16 << 20
_HEADER_LIMIT_BYTES = 100 << 20
RESERVED = "__metadata__"  # in the header, the entry that is no tensor
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Hashed:
    """A file beneath, and the length and sha256 of what passed through."""

    def __init__(self, file: Any) -> None:
        self._file, self._hash, self.bytes = file, hashlib.sha256(), 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, content: bytes | memoryview) -> None:
        """Writes all of it."""
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            self._file.write(piece)
            self._hash.update(piece)
            self.bytes += len(piece)

    def read_into(self, target: memoryview) -> None:
        """Fills the target.

        Raises:
            ValueError: the file ends before.
        """
        start = 0
        while start < len(target):
            count = self._file.readinto(target[start : start + _PIECE_BYTES])
            if not count:
                raise ValueError(f"ends after {self.bytes} bytes")
            self._hash.update(target[start : start + count])
            self.bytes += count
            start += count


def write(file: Hashed, tensors: dict[str, Tensor]) -> None:
    """Writes contiguous CPU tensors, the widest dtype first, so that each lies at a multiple of its element's size."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    offset = 0
    for name in names:
        end = offset + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_bytes_of(tensors[name]))


def read(file: Hashed, length_bytes: int) -> dict[str, Tensor]:
    """The tensors of a file of that length, in memory of their own.

    Raises:
        ValueError: it is not a safetensors file, or is shorter.
    """
    start = bytearray(8)
    file.read_into(memoryview(start))
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > min(length_bytes - 8, _HEADER_LIMIT_BYTES):
        raise ValueError(f"its header has {header_bytes} bytes")
    text = bytearray(header_bytes)
    file.read_into(memoryview(text))
    header = json.loads(text)
    header.pop(RESERVED, None)
    tensors, offset = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        elements = math.prod(entry["shape"])
        dtype = DTYPES[entry["dtype"]]
        end = offset + elements * dtype.itemsize
        # Before the memory is asked for: a damaged header may name a tensor of any size.
        if entry["data_offsets"] != [offset, end] or end > length_bytes - 8 - header_bytes or elements < 0:
            raise ValueError(f"{name} does not lie where its shape says")
        tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        file.read_into(_bytes_of(tensors[name]))
        offset = end
    if file.bytes != length_bytes:
        raise ValueError(f"{length_bytes - file.bytes} bytes belong to no tensor")
    return tensors


def write_file(path: Path, content: dict[str, Tensor] | bytes) -> dict[str, Any]:
    """Writes a file of tensors or of bytes and syncs it to disk; its length and sha256."""
    with open(path, "xb") as raw:
        file = Hashed(raw)
        if isinstance(content, bytes):
            file.write(content)
        else:
            write(file, content)
        raw.flush()
        os.fsync(raw.fileno())
    return {"bytes": file.bytes, "sha256": file.sha256}


def read_file(raw: FileIO, name: str, expected: dict[str, Any]) -> dict[str, Tensor] | bytes:
    """The tensors of an unbuffered ``.safetensors`` file, or the bytes of another one.

    Raises:
        ValueError: its length or sha256 is not the expected one.
    """
    size = os.fstat(raw.fileno()).st_size
    if size != expected["bytes"]:
        raise ValueError(f"{name}: expected {expected['bytes']} bytes, got {size}")
    file = Hashed(raw)
    content: dict[str, Tensor] | bytes
    try:
        if name.endswith(".safetensors"):
            content = read(file, size)
        else:
            buffer = bytearray(size)
            file.read_into(memoryview(buffer))
            content = bytes(buffer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from error
    if file.sha256 != expected["sha256"]:
        raise ValueError(f"{name}: expected the manifest's sha256, got another")
    return content


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; numpy, which torch can do without, would be the other way."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
