"""What multi-tensor optimizers share: which tensors take part in a step, and which gradients fit."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core import checks

# The C function by which torch's own compiled code reads the address of a tensor object, as a number. Not part of
# torch's public interface: without it the watch takes DLPack's, which does the same in six times the time.
ADDRESS_READER: int = getattr(getattr(torch._C._dynamo, "guards", None), "_torchinductor_pyobject_tensor_data_ptr", 0)

# What an address is marked with if it is that of a gradient in another dtype than its parameter's; the dtypes that may
# stand beside each other.
MARKS: dict[torch.dtype, int] = {getattr(torch, name): mark for name, mark in _C.GRADIENT_MARKS.items()}


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself. For code without autograd."""
    if not hasattr(t, "to_local"):
        return t
    part = t.to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective may still be on its way


def whole(t: Tensor | None) -> Tensor | None:
    """All of a DTensor, such as the norm of a sharded gradient, from all ranks; anything else itself."""
    return t.full_tensor() if t is not None and hasattr(t, "full_tensor") else t


def moved(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host waits only for a copy to its own memory, which it is going to read."""
    return t.to(device, non_blocking=device.type != "cpu")


def all_params(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The parameters of all groups in their order."""
    return [p for group in groups for p in group["params"]]


def first_elements(params: Sequence[Tensor]) -> list[int]:
    """The index of each tensor's first element among the elements of all of them, of which each begins at an even one;
    of a DTensor, that of its local part; of a fragment of a tensor what its attribute ``first_element`` says.

    A DTensor that is sharded along its first dimension has the indices it would have in one piece.
    """
    of_fragments = [getattr(p, "first_element", None) for p in params]
    of_others = [n + _offset_of_shard(p) for n, p in zip(numbered([p.numel() for p in params]), params, strict=True)]
    return [other if own is None else own for own, other in zip(of_fragments, of_others, strict=True)]


def numbered(sizes: Sequence[int]) -> list[int]:
    """The first number of each tensor where all elements have one, and the first of a tensor an even one."""
    return [0, *itertools.accumulate(size + size % 2 for size in sizes)][: len(sizes)]


def _offset_of_shard(t: Tensor) -> int:
    mesh, placements = getattr(t, "device_mesh", None), getattr(t, "placements", None)
    if mesh is None or placements is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, begin = compute_local_shape_and_global_offset(t.shape, mesh, placements)
    return sum(at * math.prod(t.shape[d + 1 :]) for d, at in enumerate(begin))


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


def holds_its_elements(t: Tensor) -> bool:
    """Whether memory at the tensor's address holds its elements: not their negatives, and not nothing for zeros."""
    return not (t.is_neg() or t._is_zerotensor())


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of the dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_place(t: Tensor) -> bool:
    """Whether the kernels can read and write a tensor where it lies."""
    return is_dense(t) and holds_its_elements(t)


def has_overlap(t: Tensor) -> bool:
    """Whether elements may share memory: a dimension steps over less than all smaller ones reach."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride <= reach:
            return t.numel() > 0
        reach += (size - 1) * stride
    return False


def checked_gradient(op: str, groups: Sequence[dict[str, Any]], index: int, param: Tensor) -> Tensor:
    """The local part of a parameter's gradient, if it has the device and shape of the parameter's, and its dtype or
    another one of :data:`MARKS`."""
    grad = param.grad
    assert grad is not None
    argument = describe(groups, index) + ".grad"
    if grad.layout != torch.strided:
        checks.refuse(op, argument, "a dense gradient", str(grad.layout).removeprefix("torch."))
    expected, got = (getattr(t, "placements", None) for t in (param, grad))
    if expected != got:
        checks.refuse(op, argument, f"placements {expected}", str(got))
    grad, part = local(grad), local(param)
    if not (grad.dtype in MARKS and part.dtype in MARKS):
        checks.same_dtype(op, argument, grad, part)
    checks.same_device(op, argument, grad, part)
    checks.same_shape(op, argument, grad, part.shape)
    return grad


def entry_of(grad: Tensor, param_dtype: torch.dtype) -> int:
    """What a column of addresses holds of a gradient (csrc/kernels/optim/gradient.h)."""
    if grad.numel() == 0:
        return _C.NO_ELEMENTS
    return grad.data_ptr() | (0 if grad.dtype == param_dtype else MARKS[grad.dtype])


def words(column: bytearray) -> Tensor:
    """64-bit words as an int64 tensor on the CPU, in the same memory."""
    return torch.frombuffer(column, dtype=torch.int64)
