"""The raw ops of gradient norms, with the fakes of those that traced code may call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._library import call_raw, raw, register_fake


def _check_lists(op: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        _check.refuse(op, "tensors", "at least one tensor", "none")
    for i, t in enumerate(tensors):
        _check.same_device(op, f"tensors[{i}]", t, tensors[0])


def _fake_norm(tensors: list[Tensor], p: float) -> tuple[Tensor, Tensor]:
    _check_lists("grad_norm", tensors)
    wide = any(t.dtype == torch.float64 for t in tensors)
    dtypes = (torch.float64 if wide else torch.float32, torch.float64)
    norm, power_sum = (tensors[0].new_empty((), dtype=dtype) for dtype in dtypes)
    return norm, power_sum


def _fake_clip(tensors: list[Tensor], norm: Tensor, max_norm: float) -> None:
    _check_lists("clip_grads", tensors)
    _check.same_device("clip_grads", "norm", norm, tensors[0])


register_fake("grad_norm", _fake_norm)
register_fake("clip_grads", _fake_clip)


def norm_and_power_sum(tensors: Sequence[Tensor], p: float) -> tuple[Tensor, Tensor]:
    """The norm of dense tensors of one device, in float32 (float64 beside a float64 tensor); and its sum in float64."""
    return call_raw(raw.grad_norm.default, list(tensors), p)


# What the chunks of a norm begin at in a tensor: all lengths that a chunk may have divide it
# (csrc/kernels/optim/grad_norm.h). So the chunks of a tensor that is cut there are those of the whole one.
CUT_ELEMS = {"cpu": 16 * 1024, "cuda": 64 * 1024}


def chunk_elems(like: Tensor, total_elems: int) -> int:
    """The elements of a chunk on the device of ``like``, for so many on all ranks."""
    elems: int = raw.grad_norm_chunk_elems.default(like, total_elems)
    return elems


def partial_power_sums(tensors: Sequence[Tensor], p: float, total_elems: int) -> Tensor:
    """The float64 sums of the chunks of dense tensors of one device, of ``total_elems`` on all ranks."""
    return call_raw(raw.grad_norm_partials.default, list(tensors), p, total_elems)


def norm_of_partials(partials: Tensor, p: float, wide: bool) -> tuple[Tensor, Tensor]:
    """What ``norm_and_power_sum`` gives, from all chunks in order; ``wide``: for a norm in float64."""
    return call_raw(raw.grad_norm_finish.default, partials, p, wide)


def clip_in_place(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies dense tensors of one device by ``min(1, max_norm / (norm + 1e-6))``."""
    call_raw(raw.clip_grads.default, list(tensors), norm, max_norm)
