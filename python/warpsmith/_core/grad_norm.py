"""Gradient norms: the raw ops, with the fakes of those that traced code may call; the checks of arguments and tensors;
and what becomes of the sums of several devices and ranks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import call_raw, raw, register_fake
from warpsmith._core.tensor_list import moved


def _check_lists(op: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        checks.refuse(op, "tensors", "at least one tensor", "none")
    for i, t in enumerate(tensors):
        checks.same_device(op, f"tensors[{i}]", t, tensors[0])


def _fake_norm(tensors: list[Tensor], p: float) -> tuple[Tensor, Tensor]:
    _check_lists("grad_norm", tensors)
    wide = any(t.dtype == torch.float64 for t in tensors)
    dtypes = (torch.float64 if wide else torch.float32, torch.float64)
    norm, power_sum = (tensors[0].new_empty((), dtype=dtype) for dtype in dtypes)
    return norm, power_sum


def _fake_clip(tensors: list[Tensor], norm: Tensor, max_norm: float) -> None:
    _check_scalars("clip_grads", tensors, norm=norm)


def _check_scalars(op: str, tensors: Sequence[Tensor], **scalars: Tensor) -> None:
    _check_lists(op, tensors)
    for name, t in scalars.items():
        checks.same_device(op, name, t, tensors[0])


def _fake_check(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_scalars("grad_check", a.tensors, scale=a.scale, found_inf=a.found_inf, bad_counts=a.bad_counts)
    return *_fake_norm(a.tensors, a.p), a.tensors[0].new_empty((), dtype=torch.float32)


def _fake_unscale(tensors: list[Tensor], inv_scale: Tensor, found_inf: Tensor, bad_counts: Tensor) -> None:
    _check_scalars("unscale_grads", tensors, inv_scale=inv_scale, found_inf=found_inf, bad_counts=bad_counts)


register_fake("grad_norm", _fake_norm)
register_fake("clip_grads", _fake_clip)
register_fake("grad_check", _fake_check, named=True)
register_fake("unscale_grads", _fake_unscale)


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


def partial_power_sums(
    tensors: Sequence[Tensor], p: float, total_elems: int, scale: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """The float64 sums of the chunks of dense tensors of one device, of ``total_elems`` on all ranks.

    ``scale``: by what the tensors were multiplied. Squares then overflow only where those of the unscaled ones would.
    ``known``: the sums without a scale, taken before: chunks whose sum is finite are not read.
    """
    return call_raw(raw.grad_norm_partials.default, list(tensors), p, total_elems, scale, known)


def norm_of_partials(partials: Tensor, p: float, wide: bool) -> tuple[Tensor, Tensor]:
    """What ``norm_and_power_sum`` gives, from all chunks in order; ``wide``: for a norm in float64."""
    return call_raw(raw.grad_norm_finish.default, partials, p, wide)


def clip_in_place(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies dense tensors of one device by ``min(1, max_norm / (norm + 1e-6))``."""
    call_raw(raw.clip_grads.default, list(tensors), norm, max_norm)
    _written(tensors)


def _written(tensors: Sequence[Tensor]) -> None:
    """Counts a write in place, as torch's own operations do: what is known of the values before does not hold."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(list(tensors))


class Checked(NamedTuple):
    """What :func:`check_gradients` finds out about dense tensors of one device."""

    norm: Tensor  # once they are divided by the scale; dtype as norm_and_power_sum's
    power_sum: Tensor  # of the scaled ones, float64
    grad_scale: Tensor  # float32: scale / min(1, max_norm / (norm + 1e-6)); the scale itself where nothing is clipped
    found_inf: Tensor  # float32: 1 where the norm is not finite, else 0
    bad_counts: Tensor  # int64, one a tensor: elements that are not finite; all 0 where the norm is finite


def check_gradients(
    tensors: Sequence[Tensor],
    p: float,
    scale: Tensor,
    max_norm: float,
    total_elems: int = 0,
    known: Tensor | None = None,
) -> Checked:
    """Reads dense tensors of one device once, and a second time only where their norm is not finite. With ``known``,
    the :func:`partial_power_sums` of ``total_elems`` without a scale, reads only chunks whose sum is not finite."""
    found_inf = torch.empty((), dtype=torch.float32, device=scale.device)
    bad_counts = torch.zeros(len(tensors), dtype=torch.int64, device=scale.device)
    arguments = (list(tensors), p, scale, max_norm, found_inf, bad_counts, total_elems, known)
    norm, power_sum, grad_scale = call_raw(raw.grad_check.default, *arguments)
    return Checked(norm, power_sum, grad_scale, found_inf, bad_counts)


class GradientTable(NamedTuple):
    """Where dense tensors of one device lie, on that device. It holds addresses, not references."""

    words: Tensor
    size: int  # how many tensors
    wide: bool  # one of them is float64


def table_of_gradients(tensors: Sequence[Tensor]) -> GradientTable:
    wide = any(t.dtype == torch.float64 for t in tensors)
    return GradientTable(call_raw(raw.grad_table.default, list(tensors)), len(tensors), wide)


def check_table(
    table: GradientTable, p: float, scale: Tensor, max_norm: float, found_inf: Tensor, bad_counts: Tensor
) -> Checked:
    """:func:`check_gradients` of tensors that are where they were. Writes ``found_inf``; and ``bad_counts`` where the
    norm is not finite."""
    arguments = (table.words, table.size, table.wide, p, scale, max_norm, found_inf, bad_counts)
    norm, power_sum, grad_scale = call_raw(raw.grad_check_table.default, *arguments)
    return Checked(norm, power_sum, grad_scale, found_inf, bad_counts)


def unscale_in_place(tensors: Sequence[Tensor], inv_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies dense tensors of one device by ``inv_scale``. Returns ``found_inf`` and ``bad_counts``, as
    :class:`Checked` has them, of what is stored."""
    found_inf = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
    bad_counts = torch.zeros(len(tensors), dtype=torch.int64, device=inv_scale.device)
    call_raw(raw.unscale_grads.default, list(tensors), inv_scale, found_inf, bad_counts)
    _written(tensors)
    return found_inf, bad_counts


_FUSED = (1.0, 2.0, math.inf)


def norm_order(op: str, norm_type: float) -> float:
    if not (isinstance(norm_type, str) and norm_type == "inf"):  # torch's functions take the name too
        checks.number(op, "norm_type", norm_type, "1, 2 or inf", lambda p: p in _FUSED)
    return float(norm_type)


def largest_norm(op: str, max_norm: float | Tensor) -> float:
    if isinstance(max_norm, Tensor):
        checks.same_shape(op, "max_norm", max_norm, max_norm.shape if max_norm.numel() == 1 else ())
        max_norm = max_norm.item()
    checks.number(op, "max_norm", max_norm, "a number >= 0", lambda m: m >= 0)
    return float(max_norm)


def refuse_unfit(op: str, tensors: Sequence[Tensor]) -> None:
    for i, t in enumerate(tensors):
        argument = f"gradient {i}"
        if t.layout != torch.strided:
            checks.refuse(op, argument, "a dense tensor", str(t.layout).removeprefix("torch."))
        if t.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            checks.refuse(op, argument, "a floating dtype", checks.dtype_text(t.dtype))
        if t.dtype == torch.float64 and t.device.type == "cuda":
            checks.refuse(op, argument, "float32, float16 or bfloat16 on CUDA", "float64")


def shared_out(t: Any) -> Any:
    """The mesh over which a DTensor lies and the dimensions of it along which ranks hold different parts."""
    placements = getattr(t, "placements", None)
    if placements is None:
        return None
    dims = tuple(d for d, placement in enumerate(placements) if not placement.is_replicate())
    return (t.device_mesh, dims) if dims else None


def whole_sums(t: Any) -> Any:
    """A DTensor whose ranks hold summands has no norm before they are added."""
    placements = getattr(t, "placements", ())
    if not any(p.is_partial() for p in placements):
        return t
    from torch.distributed.tensor import Replicate

    return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in placements])


def combined(sums: list[Tensor], p: float) -> Tensor:
    if len(sums) == 1:
        return sums[0]
    stacked = torch.stack([moved(s, sums[0].device) for s in sums])
    return stacked.max() if p == math.inf else stacked.sum()
