from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.grad_norm import (
    clip_in_place,
    combined,
    largest_norm,
    norm_and_power_sum,
    norm_of_partials,
    norm_order,
    partial_power_sums,
    refuse_unfit,
    shared_out,
    whole_sums,
)
from warpsmith._core.gradient_sums import known_sums
from warpsmith._core.tensor_list import in_place, local, moved


def _total(tensors: Sequence[Tensor], p: float) -> Tensor:
    """The norm over all devices and ranks, on the first tensor's device."""
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        part, shared = t, None
        if type(t) is not Tensor:
            summed = whole_sums(t)
            part, shared = local(summed), shared_out(summed)
        groups.setdefault((part.device, shared), []).append(part if in_place(part) else part.resolve_neg().contiguous())
    sums, norm = [], None
    for (_, shared), parts in groups.items():
        norm, power_sum = norm_and_power_sum(parts, p)
        if shared is not None:
            from torch.distributed._functional_collectives import all_reduce

            mesh, dims = shared
            for d in dims:
                power_sum = all_reduce(power_sum, "max" if p == math.inf else "sum", (mesh, d))
            norm = None
        sums.append(power_sum)
    if len(sums) == 1 and norm is not None:
        return norm
    total = combined(sums, p)
    wide = any(t.dtype == torch.float64 for t in tensors)
    return (total.sqrt() if p == 2 else total).to(torch.float64 if wide else torch.float32)


def _with_gradients(parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that have a gradient, and the gradients."""
    all_params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = [(p, p.grad) for p in all_params if p.grad is not None]
    found = [(p, g) for p, g in found if not g._is_zerotensor()]  # zeros without memory: nothing to add or to scale
    return [p for p, _ in found], [g for _, g in found]


def _norm(params: Sequence[Tensor], grads: Sequence[Tensor], p: float) -> Tensor:
    known = known_sums(params) if p == 2 else None
    if known is None:
        return _total(grads, p)
    sums = partial_power_sums(grads, p, known.total_elems, None, known.of_all)
    return norm_of_partials(sums, p, any(g.dtype == torch.float64 for g in grads))[0]


@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    r"""The norm of the gradients of all parameters, as of one vector.

    .. math::
        \Big(\sum_i |g_i|^p\Big)^{1/p}, \qquad p \in \{1, 2, \infty\}

    Two launches for any number of tensors of any mix of dtypes on a device (and one that writes their table for every
    2,040 words of it). Sums are float32 within pieces of at most 65,536 elements, and float64 over them, whatever the
    gradients' dtype.

    Args:
        parameters: tensors or one tensor; those without a gradient do not count. Gradients: float32, float16, bfloat16,
            float64 on the CPU; any strides, any devices. DTensors: the norm is that of the whole tensors, by an
            all-reduce of one number for each way in which they are sharded; every rank must call.
        norm_type: 1, 2 or ``inf``.

    Returns:
        a scalar tensor on the first gradient's device: float32, or float64 if a gradient is. 0 without gradients. Reads
        every gradient once; of gradients whose sums :func:`warpsmith.distributed.accurate_hook` has kept, nothing, for
        the same bits. NaN and infinite elements make it NaN or infinite. Deterministic: the order of sums is
        fixed by the sizes (across ranks: by the backend's all-reduce). The host does not wait.

    Raises:
        ValueError: another ``norm_type``, a sparse, complex or integer gradient.

    Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2013; definition as
    torch.nn.utils.get_total_norm.

    Example:
        >>> import torch, warpsmith
        >>> p = torch.zeros(2, requires_grad=True)
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> warpsmith.optim.grad_norm([p])
        tensor(5.)
    """
    p = norm_order("grad_norm", norm_type)
    params, grads = _with_gradients(parameters)
    refuse_unfit("grad_norm", grads)
    return _norm(params, grads, p) if grads else torch.tensor(0.0)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Scales the gradients of all parameters in place so that their norm is at most ``max_norm``.

    .. math::
        g \leftarrow g \, \min\Big(1, \frac{\text{max\_norm}}{\|g\| + 10^{-6}}\Big)

    Takes the place of ``torch.nn.utils.clip_grad_norm_``. Other than torch's, the norm is float32 also of 16-bit
    gradients, and gradients that need no scaling are not written: the kernel returns where the factor is 1.

    Args:
        parameters, norm_type: as for :func:`grad_norm`.
        max_norm: a number >= 0.
        error_if_nonfinite: raise where the norm is NaN or infinite. The host then waits for the device.
        foreach: accepted, without effect.

    Returns:
        the norm before clipping, as :func:`grad_norm` gives it. Where it is NaN, so are the gradients afterwards; where
        it is infinite, finite gradients become 0 and others NaN.

    Reads every gradient once, for the norm (none where :func:`warpsmith.distributed.accurate_hook` has kept the sums),
    and reads and writes it again only where the factor is not 1. Deterministic.

    Raises:
        ValueError: a negative or NaN ``max_norm``, another ``norm_type``, a sparse, complex or integer gradient.
        RuntimeError: ``error_if_nonfinite`` and such a norm. Nothing has changed then.

    Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2013; definition as
    ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> import torch, warpsmith
        >>> p = torch.zeros(2, requires_grad=True)
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> warpsmith.optim.clip_grad_norm_([p], max_norm=1.0)
        tensor(5.)
        >>> p.grad
        tensor([0.6000, 0.8000])
    """
    op = "clip_grad_norm_"
    p = norm_order(op, norm_type)
    max_norm = largest_norm(op, max_norm)
    checks.flags(op, error_if_nonfinite=error_if_nonfinite, foreach=foreach is not None and foreach)
    params, grads = _with_gradients(parameters)
    if not grads:
        return torch.tensor(0.0)
    refuse_unfit(op, grads)
    norm = _norm(params, grads, p)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"{op}: expected a finite norm of the gradients, got {norm.item()}")
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in map(local, grads):
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        here = moved(norm, device)
        dense = []
        for part in parts:
            if in_place(part):
                dense.append(part)
            else:
                part.mul_((max_norm / (here + 1e-6)).clamp(max=1.0))
        if dense:
            clip_in_place(dense, here, max_norm)
    return norm
