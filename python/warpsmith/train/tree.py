"""State dictionaries as JSON and named tensors, and back, without pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpsmith.train.safetensors_file import DTYPES

# A dict with one key of these stands for what JSON lacks.
_TENSOR, _PAIRS, _TUPLE, _FLOAT, _BYTES, _COUNTER = "$tensor", "$dict", "$tuple", "$float", "$bytes", "$counter"

HostCopy = Callable[[str, Tensor], Tensor]


class Packer:
    """Collects the tensors of any number of trees; tensors that are one memory are collected once, as tied weights.

    host_copy: makes the copy that is kept of a tensor, under its name; contiguous, on the CPU.
    """

    def __init__(self, host_copy: HostCopy) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copy = host_copy
        self._names: dict[Any, str] = {}
        self._held: list[Tensor] = []  # while names are given by address, no address may come a second time

    def pack(self, value: Any, path: str) -> Any:
        """JSON for the value.

        Raises:
            TypeError: it holds what neither JSON nor safetensors can; the message has its path.
        """
        if isinstance(value, Tensor):
            return self._pack_tensor(value.detach(), path)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
        if isinstance(value, (bytes, bytearray)):
            return {_BYTES: base64.b64encode(value).decode()}
        if isinstance(value, tuple):
            return {_TUPLE: [self.pack(v, _below(path, i)) for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [self.pack(v, _below(path, i)) for i, v in enumerate(value)]
        if isinstance(value, dict):
            if all(isinstance(k, str) and not k.startswith("$") for k in value) and not isinstance(value, Counter):
                return {k: self.pack(v, _below(path, k)) for k, v in value.items()}
            tag = _COUNTER if isinstance(value, Counter) else _PAIRS
            return {tag: [[self.pack(k, _below(path, "key")), self.pack(v, _below(path, k))] for k, v in value.items()]}
        raise TypeError(
            f"{path}: expected tensors, numbers, strings, bytes, None and lists, tuples and dicts of them, "
            f"got {type(value).__module__}.{type(value).__qualname__}"
        )

    def _pack_tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{path}: expected a plain tensor, got a {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            raise TypeError(f"{path}: expected a dense tensor of a dtype that safetensors has, got {tensor.dtype}")
        memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._names:
            name = self._names[memory]
        else:
            name = self._names[memory] = path
            self._held.append(tensor)
            self.tensors[name] = self._copy(name, tensor)
        # The order of the dimensions in memory is part of a state: channels_last stays so.
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
        return {_TENSOR: name} if order == sorted(order) else {_TENSOR: name, "order": order}


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What ``Packer.pack`` was given; tensors on the CPU."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag == _TENSOR:
        tensor = tensors[value[tag]]
        order = value.get("order")
        return tensor if order is None else _laid_out(tensor, order)
    if tag == _FLOAT:
        return float(value[tag])
    if tag == _BYTES:
        return base64.b64decode(value[tag])
    if tag == _TUPLE:
        return tuple(unpack(v, tensors) for v in value[tag])
    if tag in (_PAIRS, _COUNTER):
        pairs = {unpack(k, tensors): unpack(v, tensors) for k, v in value[tag]}
        return Counter(pairs) if tag == _COUNTER else pairs
    return {k: unpack(v, tensors) for k, v in value.items()}


def _laid_out(tensor: Tensor, order: list[int]) -> Tensor:
    strides, step = [0] * tensor.dim(), 1
    for d in reversed(order):
        strides[d] = step
        step *= tensor.shape[d]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
