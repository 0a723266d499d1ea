"""Measures the rates of the machine at hand, and makes a ``Cluster`` of them."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from warpsmith._core import checks
from warpsmith.distributed.plan.cluster import Cluster, Timed
from warpsmith.distributed.plan.gpus import GPUS, Gpu

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # their names since torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
SIZES = (1 << 20, 1 << 23, 1 << 26, 1 << 28)


def fit_link(points: Sequence[tuple[str, int, float, float]]) -> tuple[float, float, float]:
    """Seconds of a step and bytes per second of a link, from collectives that were timed on it.

    ``t = steps latency + f (n - 1) / n S / B``, by least squares of the relative errors; where that makes one of them
    negative, ``latency`` is 0 and ``B`` fits alone, or ``B`` is the largest message's and the rest is latency.

    Args:
        points: (collective, ranks, bytes of the whole tensor, seconds).

    Returns:
        Latency of a step, bandwidth, and the mean of the fit's absolute relative errors.

    Raises:
        ValueError: no points, or a time that is not above 0.

    Example:
        >>> def t(size): return 6 * 1e-5 + 2 * 3 / 4 * size / 1e11
        >>> latency, bandwidth, error = fit_link([("all_reduce", 4, s, t(s)) for s in (1 << 20, 1 << 26)])
        >>> round(1e6 * latency, 3), round(bandwidth / 1e9, 3), error < 1e-9
        (10.0, 100.0, True)
    """
    rows = []
    for kind, ranks, size, seconds in points:
        if not seconds > 0:
            raise ValueError(f"fit_link: points: expected seconds above 0, got {seconds} of {kind}")
        passes = 2 if kind == "all_reduce" else 1
        rows.append((passes * (ranks - 1) / seconds, passes * (ranks - 1) / ranks * size / seconds, seconds))
    if not rows:
        raise ValueError("fit_link: points: expected at least one, got none")
    aa, bb = sum(a * a for a, _, _ in rows), sum(b * b for _, b, _ in rows)
    ab, a1, b1 = sum(a * b for a, b, _ in rows), sum(a for a, _, _ in rows), sum(b for _, b, _ in rows)
    determinant = aa * bb - ab * ab
    latency = inverse = 0.0
    if determinant > 1e-12 * aa * bb:
        latency, inverse = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if latency < 0 or inverse <= 0:
        if inverse <= 0:
            inverse = 1 / max(rows, key=lambda row: row[1] * row[2])[1]
            latency = max(0.0, (a1 - inverse * ab) / aa)
        else:
            latency, inverse = 0.0, b1 / bb
    error = statistics.mean(abs(a * latency + b * inverse - 1) for a, b, _ in rows)
    return latency, 1 / inverse, error


class _Timer:
    """Median seconds of a call on a device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any], in_a_row: int = 1, barrier: bool = False) -> float:
        found = []
        for turn in range(self.repeats + 1):
            if barrier:
                dist.barrier()
            self.wait()
            began = time.perf_counter()
            for _ in range(in_a_row):
                call()
            self.wait()
            if turn:  # the first is the warm-up
                found.append((time.perf_counter() - began) / in_a_row)
        return statistics.median(found)


def _product_s(timer: _Timer, size: int, dtype: torch.dtype) -> float:
    a = torch.randn(size, size, device=timer.device).to(dtype)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return timer.seconds(lambda: torch.mm(a, b, out=out), in_a_row=20 if timer.device.type == "cuda" else 2)


def _attention_s(timer: _Timer, tokens: int, heads: int, dtype: torch.dtype) -> float:
    q, k, v = (torch.randn(1, heads, tokens, 128, device=timer.device).to(dtype).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q.detach())

    def both() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return timer.seconds(both)


def _collectives(
    timer: _Timer, group: Any, ranks: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[tuple[str, int, int, float]]:
    found = []
    for size in sizes:
        each = -(-size // dtype.itemsize // ranks)
        whole = torch.ones(each * ranks, device=timer.device, dtype=dtype)
        part = torch.ones(each, device=timer.device, dtype=dtype)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole, group=group),  # type: ignore[misc]
            "all_gather": lambda whole=whole, part=part: _all_gather(whole, part, group=group),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole, part=part: _reduce_scatter(part, whole, group=group),  # type: ignore[misc]
        }
        for kind, call in calls.items():
            found.append((kind, ranks, each * ranks * dtype.itemsize, timer.seconds(call, barrier=True)))
    return found


def _mean_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    t = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).tolist()


def calibrate(
    device: torch.device | str | None = None,
    *,
    ranks_per_host: int | None = None,
    network_gbit: float = 400.0,
    matmul: int | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
) -> Cluster:
    """Measures this machine and returns it as a ``Cluster``. All ranks of the default process group call it.

    Measured: square matrix products in a row and their spread over the ranks, a copy, and causal attention of torch's
    SDPA, forward and backward. On two ranks and more also ``all_reduce``, ``all_gather`` and ``reduce_scatter`` of each
    size among the ranks of a host, and on several hosts among all ranks. On GPUs in bfloat16, on CPUs in float32.

    Not measured: float8 and cuDNN's attention (the ratios of the table, where it has this GPU), and the network where
    all ranks are on one host (``network_gbit``).

    Args:
        device: default: this rank's GPU where the process group is NCCL's, else the CPU.
        ranks_per_host: default: ``LOCAL_WORLD_SIZE``, which torchrun sets, else all ranks. Ranks of a host are
            neighbours.
        network_gbit: of a GPU's share of the network, where it is not measured.
        matmul: rows of the matrices; default: 8,192 on a GPU, 512 on a CPU.
        sizes: bytes of the tensors in collectives.
        repeats: of each timing, of which the median counts.

    Returns:
        The same ``Cluster`` on every rank, with the timed collectives in it. Its ``source`` says what was measured, and
        how far one latency and one bandwidth for all collectives and sizes are from the times; they serve where nothing
        was timed.

    Raises:
        ValueError: no sizes, repeats below 1, ranks that ``ranks_per_host`` does not divide; on any rank, before
            anything is measured.

    Determinism: it measures time, so figures differ from run to run. It has run on gloo; on NCCL it has not.

    Example:
        >>> here = calibrate("cpu", matmul=64, repeats=1)
        >>> here.gpu.matmul_flops > 0
        True
    """
    checks.refuse_non_int64("calibrate", "repeats", repeats, "an int")
    checks.number("calibrate", "network_gbit", network_gbit, "a number > 0", lambda gbit: gbit > 0)
    for name, number in (("matmul", matmul), ("ranks_per_host", ranks_per_host)):
        if number is not None:
            checks.refuse_non_int64("calibrate", name, number, "an int")
    if isinstance(sizes, int):
        checks.refuse_type("calibrate", "sizes", "a list of bytes", sizes)
    if matmul is not None and matmul < 1:
        raise ValueError(f"calibrate: matmul: expected at least 1, got {matmul}")
    if repeats < 1:
        raise ValueError(f"calibrate: repeats: expected at least 1, got {repeats}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"calibrate: sizes: expected some above 0, got {list(sizes)}")
    world = dist.get_world_size() if dist.is_initialized() else 1
    per_host = ranks_per_host or min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if per_host < 1 or world % per_host:
        raise ValueError(f"calibrate: ranks_per_host: expected a divisor of {world} ranks, got {per_host}")
    if device is None:
        nccl = torch.cuda.is_available() and (world == 1 or dist.get_backend() == "nccl")
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    device = torch.device(device)
    gpu, spread = _gpu_here(_Timer(device, repeats), matmul, world)
    cluster = Cluster.of(gpu, network_gbit, spread=spread, ranks_per_host=per_host)
    source = f"measured, {gpu.name}"
    if world == 1:
        return dataclasses.replace(cluster, source=f"{source}; links: not measured, one rank")
    timer, rank = _Timer(device, repeats), dist.get_rank()
    found: dict[str, float] = {"base_s": 0.0}
    timed: list[Timed] = []
    if per_host > 1:
        groups = [dist.new_group(list(range(first, first + per_host))) for first in range(0, world, per_host)]
        points = _mean_points(_collectives(timer, groups[rank // per_host], per_host, sizes), device)
        latency, bandwidth, error = fit_link(points)
        timed += [Timed(kind, ranks, per_host, size, seconds) for kind, ranks, size, seconds in points]
        found["link_latency_s"] = latency
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(gpu, link_bytes_per_s=bandwidth))
        source += f"; links of {per_host} ranks ({error:.0%} off one alpha and beta)"
    if world > per_host:
        points = _mean_points(_collectives(timer, None, world, sizes), device)
        latency, bandwidth, error = fit_link(points)
        timed += [Timed(kind, ranks, per_host, size, seconds) for kind, ranks, size, seconds in points]
        found |= {"network_latency_s": latency, "network_bytes_per_s": bandwidth / per_host}
        source += f"; network of {world // per_host} hosts ({error:.0%} off one alpha and beta)"
    return dataclasses.replace(cluster, source=source, timed=tuple(timed), **found)  # type: ignore[arg-type]


def _mean_points(
    points: list[tuple[str, int, int, float]], device: torch.device
) -> list[tuple[str, int, float, float]]:
    """With the mean of the ranks' times: the same on all ranks."""
    means = _mean_over_ranks([p[3] for p in points], device)
    return [(kind, ranks, float(size), t) for (kind, ranks, size, _), t in zip(points, means, strict=True)]


def _gpu_here(timer: _Timer, matmul: int | None, world: int) -> tuple[Gpu, float]:
    """Rates of this rank's device, the mean over the ranks, and their spread."""
    device = timer.device
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    size = matmul or (8192 if cuda else 512)
    tokens, heads = (4096, 32) if cuda else (256, 2)
    buffer = torch.ones((1 << 28) if cuda else (1 << 22), device=device)
    target = torch.empty_like(buffer)
    product = _product_s(timer, size, dtype)
    rates = [
        2.0 * size**3 / product,
        2.0 * buffer.numel() * buffer.itemsize / timer.seconds(lambda: target.copy_(buffer)),
        3.5 * 4 * tokens * tokens * heads * 128 / 2 / _attention_s(timer, tokens, heads, dtype),
    ]
    spread = 0.0
    if world > 1:
        mean, square = _mean_over_ranks([product, product * product], device)
        spread = min(0.99, math.sqrt(max(0.0, square - mean * mean)) / mean)
        rates = _mean_over_ranks(rates, device)
    if cuda:
        name, memory = torch.cuda.get_device_name(device), float(torch.cuda.mem_get_info(device)[1])
    else:
        name, memory = "CPU", float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    known = next((gpu for key, gpu in GPUS.items() if cuda and key in name), None)
    flops, copy, attention = rates
    return Gpu(
        name=name,
        peak_flops=known.peak_flops if known else flops,
        matmul_flops=flops,
        float8_flops=flops * known.float8_flops / known.matmul_flops if known else 0.0,
        flash_flops=attention,
        cudnn_flops=max(attention, attention * known.cudnn_flops / known.flash_flops) if known else attention,
        memory_bytes=memory,
        copy_bytes_per_s=copy,
        link_bytes_per_s=known.link_bytes_per_s if known else copy,
    ), spread
