"""What multi-tensor optimizers share: which tensors take part in a step, and whether the addresses known of them still
hold."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check

_gradient = attrgetter("grad")
_kind = attrgetter("dtype", "device", "shape")
_group_params = itemgetter("params")

NO_GRADIENT = 0
NO_ELEMENTS = 16  # torch gives an empty tensor the address 0, which stands for no gradient here
_ABSENT = -1  # in a list of addresses as torch gives them


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself. For code without autograd."""
    if not hasattr(t, "to_local"):
        return t
    part = t.to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective may still be on its way


def all_params(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The parameters of all groups in their order."""
    return list(chain.from_iterable(map(_group_params, groups)))


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects; tensors must not be compared by ``==``."""
    return len(a) == len(b) and all(map(is_, a, b))


def without_gradients(params: Sequence[Tensor]) -> bool:
    """Whether no parameter has a gradient."""
    return {type(None)}.issuperset(map(type, map(_gradient, params)))


def describe(groups: Sequence[dict[str, Any]], index: int) -> str:
    """Where the parameter of this index (in ``all_params``) stands, and its name if the optimizer was given names."""
    for g, group in enumerate(groups):
        size = len(group["params"])
        if index < size:
            names = group.get("param_names")
            return f"param_groups[{g}]['params'][{index}]" + (f" ({names[index]})" if names else "")
        index -= size
    raise IndexError(index)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether equal positions in memory hold elements of equal indices."""
    return a.shape == b.shape and all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Gradients:
    """The addresses of the gradients of some parameters, as they were at the last look.

    A look costs about 0.2 us a parameter, so a gradient is examined only where its address is new or its strides are
    unusual. One with other strides than its parameter is copied; the copy lives until the next look.
    """

    def __init__(self, op: str, groups: Sequence[dict[str, Any]], indices: Sequence[int]) -> None:
        params = all_params(groups)
        self._op = op
        self._groups = groups
        self._indices = indices
        self._params = [params[i] for i in indices]
        self._locals = [local(p) for p in self._params]
        self._distributed = not same_objects(self._params, self._locals)
        self._strides = list(map(Tensor.stride, self._locals))
        self._kinds = list(map(_kind, self._locals))
        self._contiguous = all(map(Tensor.is_contiguous, self._locals))
        self._seen: list[int] = []
        self._copies: list[Tensor] = []
        self.addresses: list[int] = []

    def look(self) -> None:
        """Reads the addresses again: `addresses` stays the same list where none has changed. When this raises, nothing
        has changed."""
        grads = list(map(_gradient, self._params))
        if self._distributed:
            grads = [None if g is None else local(g) for g in grads]
        try:
            seen = list(map(Tensor.data_ptr, grads))
            usual = self._usual_strides(grads)
        except (TypeError, RuntimeError):  # a parameter without a gradient, or with a sparse one
            for i, g in enumerate(grads):
                if g is not None and g.layout != torch.strided:
                    self._check(i, g)
            seen = [_ABSENT if g is None else g.data_ptr() for g in grads]
            usual = self._usual_strides(grads)
        if usual and seen == self._seen:
            return
        addresses, copies = [], []
        if usual and self._alike(grads, seen):
            addresses = [a or NO_ELEMENTS for a in seen]
        else:
            known = self._seen if usual and self._seen else [None] * len(seen)
            for i, grad in enumerate(grads):
                if seen[i] == known[i]:
                    addresses.append(self.addresses[i])
                elif grad is None:
                    addresses.append(NO_GRADIENT)
                else:
                    self._check(i, grad)
                    if not same_layout(grad, self._locals[i]):
                        grad = torch.empty_like(self._locals[i]).copy_(grad)
                        copies.append(grad)
                    addresses.append(grad.data_ptr() or NO_ELEMENTS)
        if addresses != self.addresses:
            self.addresses = addresses
        self._seen, self._copies = seen if usual else [], copies

    def _alike(self, grads: Sequence[Tensor | None], seen: Sequence[int]) -> bool:
        """Whether all are there with the dtype, device and shape of their parameters: the quick way to see it."""
        return not self._distributed and _ABSENT not in seen and list(map(_kind, grads)) == self._kinds

    def _usual_strides(self, grads: Sequence[Tensor | None]) -> bool:
        if self._contiguous:
            try:
                return all(map(Tensor.is_contiguous, grads))  # type: ignore[arg-type]
            except TypeError:
                return all(g is None or g.is_contiguous() for g in grads)
        return all(g is None or g.stride() == s for g, s in zip(grads, self._strides, strict=True))

    def _check(self, i: int, grad: Tensor) -> None:
        param, part = self._params[i], self._locals[i]
        argument = describe(self._groups, self._indices[i]) + ".grad"
        if grad.layout != torch.strided:
            _check.refuse(self._op, argument, "a dense gradient", str(grad.layout).removeprefix("torch."))
        _check.same_dtype(self._op, argument, grad, part)
        _check.same_device(self._op, argument, grad, part)
        if part is not param:
            expected, got = (getattr(t, "placements", None) for t in (param, param.grad))
            if expected != got:
                _check.refuse(self._op, argument, f"placements {expected}", str(got))
        _check.same_shape(self._op, argument, grad, part.shape)


def words(addresses: Sequence[int]) -> Tensor:
    """Addresses as an int64 tensor on the CPU, of its own memory."""
    return torch.frombuffer(array("q", addresses), dtype=torch.int64)
