"""GPUs and the links between them, and what a collective takes on them."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from warpsmith._core import checks
from warpsmith.distributed.plan.gpus import COLLECTIVE_SMS, GPUS, SPREAD, Gpu

_SHARES = ("collective_sms", "spread")
_RATES = (
    *("network_bytes_per_s", "checkpoint_s", "base_s", "link_latency_s", "network_latency_s"),
    *("failures_per_gpu_hour", "restart_s"),
)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


class Timed(NamedTuple):
    """A collective that was timed: of the whole tensor's bytes over ``ranks``, of which ``in_host`` share a host.

    Example:
        >>> Timed("all_reduce", 4, 4, 2**26, 0.324e-3).seconds
        0.000324
    """

    kind: str
    ranks: int
    in_host: int
    tensor_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts of equal GPUs with two kinds of links.

    A collective of S bytes over n ranks, r of them in each host, takes by the alpha-beta model

    ``t = base + steps * latency + f (n - 1) / n S / B``

    with ``f = 2`` for all-reduce and 1 for reduce-scatter and all-gather (S: the whole tensor), and ``B`` the lower of
    the link inside a host and r times the network of one GPU: each GPU sends through its own adapter. ``steps`` are
    those of a ring, ``n - 1`` or twice as many; an all-reduce may take a tree instead, whose steps between hosts grow
    with log2.

    Where collectives of this kind were ``timed``, inside a host or between hosts, they are taken instead: ``t`` is then
    linear between neighbouring sizes (an alpha and a beta for each), the first time for smaller tensors, and goes on
    with the last slope for larger ones. For another number of ranks its bandwidth part follows ``(n - 1) / n``, and its
    steps the latency of a step.

    Args:
        gpu: its rates.
        ranks_per_host: GPUs of a host.
        network_bytes_per_s: that a GPU's share of the host's network reaches, one direction.
        base_s, link_latency_s, network_latency_s: of a call, of a step inside a host and between hosts. The defaults
            are NCCL's own (src/graph/tuning.cc at commit 01afd20a: ring, protocol "simple").
        collective_sms: share of the multiprocessors that a collective takes from compute that it overlaps with.
        spread: standard deviation of a rank's step time, as a share. A step ends with the slowest rank.
        failures_per_gpu_hour: unexpected ends of the job. The default is Llama 3's: 419 in 54 days on 16,384 H100
            (arXiv 2407.21783).
        restart_s, checkpoint_s: from a failure to the next step, and what a checkpoint takes from training. Nobody
            publishes them; put in yours.
        timed: collectives that were timed; ``calibrate`` fills them in.
        source: where the rates are from, printed with each prediction.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a rate that is not above 0, a share out of range.

    Example:
        >>> cluster = Cluster.of("H100", network_gbit=400)
        >>> milliseconds = 1e3 * cluster.collective_s("all_reduce", 2**30, ranks=8)
        >>> round(milliseconds, 1)
        5.4
    """

    gpu: Gpu
    ranks_per_host: int = 8
    network_bytes_per_s: float = 47e9
    base_s: float = 8.4e-6
    link_latency_s: float = 3.4e-6
    network_latency_s: float = 9.6e-6
    collective_sms: float = COLLECTIVE_SMS
    spread: float = SPREAD
    failures_per_gpu_hour: float = 419 / (54 * 24 * 16384)
    restart_s: float = 600.0
    checkpoint_s: float = 10.0
    timed: tuple[Timed, ...] = ()
    source: str = "table of GPUs"

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            checks.refuse_type("Cluster", "source", "a name", self.source)
        if not isinstance(self.gpu, Gpu):
            checks.refuse_type("Cluster", "gpu", "a Gpu", self.gpu)
        checks.refuse_non_int("Cluster", "ranks_per_host", self.ranks_per_host)
        for name in (*_RATES, *_SHARES):
            checks.refuse_non_number("Cluster", name, getattr(self, name))
        if not 1 <= self.ranks_per_host < 2**63:
            checks.refuse("Cluster", "ranks_per_host", "at least 1", checks.value_text(self.ranks_per_host))
        if not self.network_bytes_per_s > 0:
            raise ValueError(f"Cluster: network_bytes_per_s: expected above 0, got {self.network_bytes_per_s}")
        for name in _RATES[2:]:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Cluster: {name}: expected at least 0 and finite, got {getattr(self, name)}")
        if not self.checkpoint_s > 0:
            raise ValueError(f"Cluster: checkpoint_s: expected above 0, got {self.checkpoint_s}")
        for name in _SHARES:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Cluster: {name}: expected from 0 to below 1, got {getattr(self, name)}")

    @staticmethod
    def of(gpu: str | Gpu, network_gbit: float = 400.0, **more: float) -> Cluster:
        """A cluster of a GPU of the table, with a network of so many Gbit/s for each GPU.

        Of the line rate 94 % are reached: 46 to 48 GB/s of 400 Gbit/s (a maintainer of NCCL, NVIDIA/nccl-tests#290).

        Example:
            >>> Cluster.of("A100", network_gbit=200).network_bytes_per_s
            23500000000.0
        """
        if isinstance(gpu, str):
            if gpu not in GPUS:
                raise ValueError(f"Cluster.of: gpu: expected one of {', '.join(GPUS)}, or a Gpu, got {gpu!r}")
            gpu = GPUS[gpu]
        checks.refuse_non_number("Cluster.of", "network_gbit", network_gbit)
        if not network_gbit > 0:
            raise ValueError(f"Cluster.of: network_gbit: expected above 0, got {network_gbit}")
        return Cluster(gpu=gpu, network_bytes_per_s=network_gbit * 1e9 / 8 * 0.94, **more)  # type: ignore[arg-type]

    def collective_s(self, kind: str, tensor_bytes: float, *, ranks: int, in_host: int | None = None) -> float:
        """Seconds of a collective of the whole tensor's bytes; ``in_host`` ranks of a group share each host.

        Example:
            >>> Cluster.of("H100").collective_s("all_gather", 1e9, ranks=1)
            0.0
        """
        if kind not in COLLECTIVES:
            raise ValueError(f"Cluster.collective_s: kind: expected one of {', '.join(COLLECTIVES)}, got {kind!r}")
        checks.refuse_non_int("Cluster.collective_s", "ranks", ranks, 1)
        if not tensor_bytes >= 0:
            raise ValueError(f"Cluster.collective_s: tensor_bytes: expected at least 0, got {tensor_bytes}")
        if ranks == 1:
            return 0.0
        in_host = max(1, min(ranks, in_host or self.ranks_per_host))
        hosts = math.ceil(ranks / in_host)
        passes = 2 if kind == "all_reduce" else 1
        between = passes * (hosts - 1)
        latency = (passes * (ranks - 1) - between) * self.link_latency_s + between * self.network_latency_s
        of_kind = (t for t in self.timed if t.kind == kind and (t.ranks > t.in_host) == (hosts > 1))
        timed = sorted(of_kind, key=lambda t: t.tensor_bytes)
        if timed:
            known = timed[0]
            crossed = passes * (math.ceil(known.ranks / known.in_host) - 1)
            before = (passes * (known.ranks - 1) - crossed) * self.link_latency_s + crossed * self.network_latency_s
            share = (ranks - 1) / ranks / ((known.ranks - 1) / known.ranks)
            return _between(timed, share * tensor_bytes) + max(0.0, latency - before)
        if kind == "all_reduce":
            tree = 2 * ((in_host - 1) * self.link_latency_s + math.log2(hosts) * self.network_latency_s)
            latency = min(latency, tree)
        bandwidth = self.gpu.link_bytes_per_s if in_host > 1 else math.inf
        if hosts > 1:
            bandwidth = min(bandwidth, in_host * self.network_bytes_per_s)
        return self.base_s + latency + passes * (ranks - 1) / ranks * tensor_bytes / bandwidth

    def send_s(self, message_bytes: float, in_host: bool) -> float:
        """Seconds in which one rank sends a message to another.

        Example:
            >>> round(1e3 * Cluster.of("H100").send_s(47e6, in_host=False), 2)
            1.02
        """
        if in_host:
            return self.base_s + self.link_latency_s + message_bytes / self.gpu.link_bytes_per_s
        return self.base_s + self.network_latency_s + message_bytes / self.network_bytes_per_s


def _between(timed: list[Timed], size: float) -> float:
    """Seconds of a tensor of that size, by the line through the two timed sizes around it."""
    if len(timed) == 1 or size <= timed[0].tensor_bytes:
        return timed[0].seconds * max(1.0, size / timed[0].tensor_bytes)
    after = next((i for i in range(1, len(timed)) if size <= timed[i].tensor_bytes), len(timed) - 1)
    a, b = timed[after - 1], timed[after]
    slope = (b.seconds - a.seconds) / (b.tensor_bytes - a.tensor_bytes)
    return b.seconds + (slope if size < b.tensor_bytes else max(0.0, slope)) * (size - b.tensor_bytes)
