"""What a scaler asks of all gradients of an optimizer, on any mix of devices and meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.grad_norm import check_gradients, combined, shared_out, unscale_in_place, whole_sums
from warpsmith._core.gradient_sums import Joined, known_sums
from warpsmith._core.tensor_list import all_params, describe, in_place, local, moved


class Gradient(NamedTuple):
    """A gradient, and the number of its parameter among those of all groups."""

    number: int
    values: Tensor  # of a sparse gradient its values
    param: Tensor


class BadCounts(NamedTuple):
    """How many elements of some gradients are not finite."""

    indices: tuple[int, ...]
    counts: Tensor  # int64, one an index


class Verdict(NamedTuple):
    """What is known about gradients once they were read. Tensors are on the scale's device."""

    found_inf: Tensor  # float32: 1 if a gradient is not finite once it is unscaled, on any device or rank, else 0
    bad: dict[torch.device, list[BadCounts]]
    norm: Tensor  # of the unscaled gradients
    grad_scale: Tensor  # by which a step divides to unscale and clip at once


def gradients(op: str, optimizer: torch.optim.Optimizer) -> list[Gradient]:
    """The gradients of an optimizer; those of all other dtypes and layouts are refused."""
    found = []
    for index, p in enumerate(all_params(optimizer.param_groups)):
        grad = p.grad
        if grad is None or grad._is_zerotensor():
            continue
        if grad.is_sparse:
            if not grad.is_coalesced():  # summands that are finite may have a sum that is not
                p.grad = grad = grad.coalesce()
            grad = grad._values()
        wide_on_cuda = grad.dtype == torch.float64 and grad.device.type == "cuda"
        if wide_on_cuda or grad.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            where = describe(optimizer.param_groups, index) + ".grad"
            expected = "float32, float16, bfloat16, or float64 on the CPU"
            checks.refuse(op, where, expected, checks.dtype_text(grad.dtype))
        found.append(Gradient(index, grad, p))
    return found


class _Group(NamedTuple):
    """Gradients of one device that are shared out over ranks in one way."""

    device: torch.device
    shared: Any
    indices: tuple[int, ...]
    parts: list[Tensor]  # dense
    originals: list[Tensor]


def groups(grads: Sequence[Gradient], prepared: Callable[[Tensor], Tensor]) -> Iterator[_Group]:
    found: dict[Any, list[tuple[int, Tensor]]] = {}
    for index, grad, _ in grads:
        whole = prepared(grad)
        part = local(whole)
        found.setdefault((part.device, shared_out(whole)), []).append((index, part))
    for (device, shared), members in found.items():
        originals = [part for _, part in members]
        parts = [t if in_place(t) else t.resolve_neg().contiguous() for t in originals]
        yield _Group(device, shared, tuple(index for index, _ in members), parts, originals)


def _over_ranks(t: Tensor, shared: Any, operation: str) -> Tensor:
    if shared is None:
        return t
    from torch.distributed._functional_collectives import all_reduce

    mesh, dims = shared
    for d in dims:
        t = all_reduce(t, operation, (mesh, d))
    return t


def largest(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    here = [moved(f, device) for f in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax()


@torch.no_grad()
def check(grads: Sequence[Gradient], scale: Tensor, p: float = math.inf, max_norm: float = math.inf) -> Verdict:
    """Reads every gradient once; for p = 2 none where their sums of squares are known, and finite."""
    if p == 2 and (known := known_sums([g.param for g in grads])) is not None:
        return _check_known(grads, scale, max_norm, known)
    sums, flags = [], []
    bad: dict[torch.device, list[BadCounts]] = {}
    for group in groups(grads, whole_sums):
        checked = check_gradients(group.parts, p, moved(scale, group.device), max_norm)
        # A maximum over ranks may lose a NaN: ranks tell each other whether they found one.
        flags.append(_over_ranks(checked.found_inf, group.shared, "max"))
        sums.append(_over_ranks(checked.power_sum, group.shared, "max" if p == math.inf else "sum"))
        bad.setdefault(group.device, []).append(BadCounts(group.indices, checked.bad_counts))
    found_inf = largest(flags, scale.device)
    if len(sums) == 1 and group.shared is None:
        norm, grad_scale = (moved(t, scale.device) for t in (checked.norm, checked.grad_scale))
        return Verdict(found_inf, bad, norm, grad_scale)
    total = moved(combined(sums, p), scale.device)
    wide = any(g.values.dtype == torch.float64 for g in grads)
    norm = (total.sqrt() if p == 2 else total).to(torch.float64 if wide else torch.float32)
    return judged(Verdict(found_inf, bad, norm, scale), norm, scale, max_norm)


def _check_known(grads: Sequence[Gradient], scale: Tensor, max_norm: float, known: Joined) -> Verdict:
    tensors, device = [g.values for g in grads], grads[0].values.device
    checked = check_gradients(tensors, 2.0, moved(scale, device), max_norm, known.total_elems, known.of_all)
    bad = {device: [BadCounts(tuple(g.number for g in grads), checked.bad_counts)]}
    found_inf, norm, grad_scale = (
        moved(t, scale.device) for t in (checked.found_inf, checked.norm, checked.grad_scale)
    )
    return Verdict(found_inf, bad, norm, grad_scale)


@torch.no_grad()
def check_elements(grads: Sequence[Gradient], scale: Tensor) -> Verdict:
    """:func:`check` where nobody asks for the norm: only an element that is not finite is a reason to skip."""
    known = known_sums([g.param for g in grads], any_chunks=True)
    if known is None:
        return check(grads, scale)
    verdict = _check_known(grads, scale, math.inf, known)
    (counts,) = (part.counts for parts in verdict.bad.values() for part in parts)
    return verdict._replace(found_inf=moved(counts.any().float(), scale.device))  # the norm may be infinite before


@torch.no_grad()
def judged(verdict: Verdict, norm: Tensor, scale: Tensor, max_norm: float) -> Verdict:
    """The verdict with another norm of the scaled gradients."""
    norm = (moved(norm, scale.device).double() / scale.double()).to(norm.dtype)
    found_inf = torch.maximum(verdict.found_inf, (~norm.isfinite()).float())
    factor = max_norm / (norm + 1e-6)
    grad_scale = torch.where(factor < 1, scale.double() / factor.double(), scale.double()).float()
    return Verdict(found_inf, verdict.bad, norm, grad_scale)


def check_to_clip(
    optimizer: torch.optim.Optimizer, grads: Sequence[Gradient], scale: Tensor, p: float, max_norm: float
) -> Verdict:
    """:func:`check`, with the norm of all ranks of an optimizer that holds a part of each gradient."""
    of_scaled = getattr(optimizer, "_norm_of_scaled", None)
    norm_of_all_ranks = getattr(optimizer, "grad_norm", None)
    if norm_of_all_ranks is None:
        return check(grads, scale, p, max_norm)
    norm = norm_of_all_ranks(p) if of_scaled is None else of_scaled(p, scale)
    return judged(check_elements(grads, scale), norm, scale, max_norm)


@torch.no_grad()
def unscale(grads: Sequence[Gradient], inv_scale: Tensor) -> tuple[Tensor, dict[torch.device, list[BadCounts]]]:
    """Multiplies every gradient by ``inv_scale`` in place. Returns what :class:`Verdict` has of found_inf and bad."""
    flags = []
    bad: dict[torch.device, list[BadCounts]] = {}
    for group in groups(grads, lambda t: t):
        found, counts = unscale_in_place(group.parts, moved(inv_scale, group.device))
        for original, part in zip(group.originals, group.parts, strict=True):
            if part is not original:
                original.copy_(part)
        flags.append(_over_ranks(found, group.shared, "max"))
        bad.setdefault(group.device, []).append(BadCounts(group.indices, counts))
    return largest(flags, inv_scale.device), bad
