"""State dictionaries as JSON and named tensors, and back, without pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpsmith.train.safetensors_file import DTYPES, RESERVED

# A dict with one key of these stands for what JSON lacks.
_TENSOR, _PAIRS, _TUPLE, _FLOAT, _BYTES, _COUNTER = "$tensor", "$dict", "$tuple", "$float", "$bytes", "$counter"

HostCopy = Callable[[str, Tensor], Tensor]


class Packer:
    """Collects the tensors of any number of trees under names of their own.

    A tensor's name is the path of keys that leads to it, with a number behind it where another tensor has that name:
    the keys ``1`` and ``"1"`` give ``1`` and ``1#2``. The JSON says which tensor has which name.

    Tensors that are the same view of the same memory are collected once, as tied weights are.

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
            if all(type(k) is str and not k.startswith("$") for k in value) and not isinstance(value, Counter):
                return {k: self.pack(v, _below(path, k)) for k, v in value.items()}
            tag = _COUNTER if isinstance(value, Counter) else _PAIRS
            keys = [Packer(_no_key).pack(k, _below(path, "key")) for k in value]
            if len({unpack(k, {}) for k in keys}) != len(keys):
                raise TypeError(f"{path}: expected keys that differ as plain values, got {list(value)}")
            values = [self.pack(v, _below(path, k)) for k, v in value.items()]
            return {tag: [list(pair) for pair in zip(keys, values, strict=True)]}
        raise TypeError(
            f"{path}: expected tensors, numbers, strings, bytes, None and lists, tuples and dicts of them, "
            f"got {type(value).__module__}.{type(value).__qualname__}"
        )

    def _pack_tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{path}: expected a plain tensor, got a {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.dtype not in DTYPES.values():
            form = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
            raise TypeError(
                f"{path}: expected a dense tensor of a dtype that safetensors has, got {tensor.dtype}, {form}"
            )
        memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        view = (*memory, tensor.is_conj(), tensor.is_neg())  # which change the values, not the memory
        if tensor.numel() and view in self._names:
            name = self._names[view]
        else:
            name = self._names[view] = self._free_name(path)
            self._held.append(tensor)
            self.tensors[name] = self._copy(name, tensor)
        # The order of the dimensions in memory is part of a state: channels_last stays so.
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
        return {_TENSOR: name} if order == sorted(order) else {_TENSOR: name, "order": order}

    def _free_name(self, path: str) -> str:
        name, number = path, 1
        while name in self.tensors or name == RESERVED:
            number += 1
            name = f"{path}#{number}"
        return name


def _no_key(name: str, tensor: Tensor) -> Tensor:
    raise TypeError(f"{name}: expected a key that can be looked up when it is loaded, got a tensor")


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What ``Packer.pack`` was given; tensors on the CPU. A tensor that has several places is one object in all of
    them; ``tensors`` then holds it in the saved order of its dimensions."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag == _TENSOR:
        name, order = value[tag], value.get("order")
        if order is not None:
            tensors[name] = _laid_out(tensors[name], order)
        return tensors[name]
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
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
