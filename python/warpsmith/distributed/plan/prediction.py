"""Puts compute, collectives, pipeline and stragglers together."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from warpsmith._core import checks
from warpsmith.distributed.plan import compute, memory
from warpsmith.distributed.plan.cluster import Cluster
from warpsmith.distributed.plan.gpus import OPTIMIZER_SHARE
from warpsmith.distributed.plan.layout import GATHER, PRECISIONS, WIRE, Layout
from warpsmith.distributed.plan.model import Model

# Published over predicted: the lowest and highest ratio of all published runs, which a test computes anew.
PUBLISHED = {"step": (0.8569, 1.5564), "memory": (0.8841, 1.3716), "scaling": (0.9593, 0.9911)}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What ``predict`` returns. ``print`` it for the table.

    Attributes:
        times: seconds by part: compute (matrix products, attention, memory-bound), what of the collectives is not
            hidden (tensor, pipeline, data), the slowdown of compute that hides the rest, bubble, optimizer, stragglers.
        memory: bytes by part, of the rank that holds most.
        goodput: share of the time in which the job makes progress that no failure undoes.

    Example:
        >>> model = Model(layers=32, hidden=4096, heads=32, vocabulary=128256, sequence=8192, gated=True)
        >>> found = predict(model, Cluster.of("H100"), Layout(data=8, sharding=3))
        >>> abs(sum(found.times.values()) - found.step_s) < 1e-9
        True
    """

    model: Model
    cluster: Cluster
    layout: Layout
    times: dict[str, float]
    memory: dict[str, float]
    goodput: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.times.values())

    @property
    def memory_bytes(self) -> float:
        """Of the rank that holds most."""
        return sum(self.memory.values())

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job, failures not counted."""
        return self.layout.sequences * self.model.sequence / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOP/s as a share of the GPUs' peak, as papers count them."""
        flops = self.model.flops_per_token * self.tokens_per_s
        return flops / (self.cluster.gpu.peak_flops * self.layout.ranks)

    @property
    def fits(self) -> bool:
        """Whether the counted bytes are at most 90 % of the GPU's memory."""
        return self.memory_bytes <= 0.9 * self.cluster.gpu.memory_bytes

    def __str__(self) -> str:
        (low, high), layout = PUBLISHED["step"], self.layout
        where = f"{layout.data} data x {layout.tensor} tensor x {layout.pipeline} pipeline"
        lines = [
            f"{layout.ranks} x {self.cluster.gpu.name} ({where}), {self.model.parameters / 1e9:.2f} G parameters, "
            f"{layout.sequences} x {self.model.sequence} tokens a step; rates: {self.cluster.source}",
            f"step        {_seconds(self.step_s)}   (published runs took {low:.2f} to {high:.2f} times "
            f"their prediction: {_seconds(self.step_s * low).strip()} to {_seconds(self.step_s * high).strip()})",
        ]
        lines += [f"  {name:<16} {_seconds(s)}  {s / self.step_s:6.1%}" for name, s in self.times.items() if s > 0]
        per_rank = self.tokens_per_s / layout.ranks
        lines.append(f"speed       {self.tokens_per_s:,.0f} tokens/s, {per_rank:,.0f} a GPU, MFU {self.mfu:.1%}")
        low, high = PUBLISHED["memory"]
        lines.append(
            f"memory      {self.memory_bytes / 1e9:.1f} GB of {self.cluster.gpu.memory_bytes / 1e9:.0f} (published "
            f"runs took {low:.2f} to {high:.2f} times their prediction)"
            + ("" if self.fits else ": does not fit, or only just")
        )
        lines += [f"  {name:<16} {value / 1e9:8.2f} GB" for name, value in self.memory.items() if value > 0]
        lines.append(f"failures    {self.goodput:.1%} of the time is left (restart {self.cluster.restart_s:g} s)")
        return "\n".join(lines)

    def plot(self, path: Any = None, ranks: Sequence[int] = ()) -> Any:
        """Draws step time by part, and efficiency by ranks in the band of the published runs' errors (matplotlib).

        Returns the figure; writes it to ``path``.

        Example:
            >>> model = Model(layers=12, hidden=768, heads=12, vocabulary=50304, sequence=1024)
            >>> figure = predict(model, Cluster.of("H100"), Layout(data=8)).plot()
            >>> len(figure.axes)
            2
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        names = [name for name, s in self.times.items() if s > 0]
        left.barh(names[::-1], [1e3 * self.times[name] for name in names][::-1], color="#1a73e8")
        left.set_xlabel("ms of a step")
        found = scaling(self.model, self.cluster, self.layout, ranks)
        shares, counts = efficiency(found), [p.layout.ranks for p in found]
        band = [[share * side for share in shares] for side in PUBLISHED["scaling"]]
        right.fill_between(counts, *band, color="#1a73e8", alpha=0.2, linewidth=0)
        right.plot(counts, shares, marker="o", color="#1a73e8")
        right.set_xscale("log")
        right.set_ylim(0, 1.1)
        right.set_xlabel("ranks")
        right.set_ylabel("tokens/s a GPU, of the first")
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _seconds(s: float) -> str:
    return f"{s:8.2f} s " if s >= 10 else f"{1e3 * s:8.1f} ms"


def queued(pieces: int, sending: float, computing: float) -> float:
    """What is left of ``pieces`` messages that are sent one after another while as many pieces are computed, each
    message as soon as its piece is there: the last message, and where sending is slower, its lag."""
    return sending + max(0.0, (pieces - 1) * (sending - computing))


def _data_parallel(
    model: Model, layout: Layout, cluster: Cluster, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """Seconds of collectives over data-parallel ranks in a step: exposed, and hidden behind compute."""
    if layout.data == 1:
        return 0.0, 0.0
    in_host = max(1, cluster.ranks_per_host // layout.tensor)
    layers = -(-model.layers // layout.pipeline)
    if layout.interleave > 1:
        # A pipeline with chunks takes as many micro-batches as ranks through a chunk before the next chunk: so long has
        # a layer's collective until that of the next layer is there.
        turns = min(layout.pipeline, layout.micro_batches)
        forward_s, backward_s = turns * forward_s, turns * backward_s
    own = memory.parameters_of_rank(model, layout) / layers

    def seconds(kind: str, element_bytes: int) -> float:
        return cluster.collective_s(kind, own * element_bytes, ranks=layout.data, in_host=in_host)

    exposed = total = 0.0
    if layout.sharding == 3:
        gather, scatter = (
            seconds("all_gather", GATHER[layout.gather]),
            seconds("reduce_scatter", WIRE[layout.wire]),
        )
        both = gather + scatter
        total = layout.micro_batches * layers * (gather + both)
        exposed = layout.micro_batches * (queued(layers, gather, forward_s) + queued(layers, both, backward_s))
    elif layout.sharding == 0:
        reduce = seconds("all_reduce", WIRE[layout.wire])
        total, exposed = layers * reduce, queued(layers, reduce, backward_s)
    else:
        scatter, gather = seconds("reduce_scatter", WIRE[layout.wire]), seconds("all_gather", GATHER[layout.gather])
        total = layers * (scatter + gather)
        exposed = queued(layers, scatter, backward_s)
        exposed += queued(layers, gather, forward_s) if layout.overlap_gather else layers * gather
    return (exposed, total - exposed) if layout.overlap_data else (total, 0.0)


def slowest(ranks: int) -> float:
    """Expected largest of so many standard normal numbers (Blom's approximation)."""
    return statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def goodput(cluster: Cluster, ranks: int) -> float:
    """Share of the time that is left by checkpoints, work lost and restarts, with the best interval between checkpoints
    (Young, 1974: the root of 2 x checkpoint / failure rate)."""
    rate = cluster.failures_per_gpu_hour * ranks / 3600
    if rate == 0:
        return 1.0
    interval = math.sqrt(2 * cluster.checkpoint_s / rate)
    lost = cluster.checkpoint_s / interval + rate * (interval / 2 + cluster.restart_s)
    return max(0.0, 1 - lost)


def predict(model: Model, cluster: Cluster, layout: Layout) -> Prediction:
    """Predicts time and memory of a training step from the rates of a cluster. Runs nothing.

    ``step = m slowest + (p - 1) / v mean + tensor + data + optimizer``, times the slowest of all ranks: ``m``
    micro-batches pass the slowest of ``p`` pipeline ranks, which hold ``v`` chunks of layers each, and the pipeline
    fills and drains once. A matrix product takes the longer of its FLOPs and its bytes, other operations the bytes that
    they must move, at measured rates (``gpus.py``). Collectives follow ``Cluster.collective_s``; those of layers queue
    behind each other and hide behind the compute of the next layer, which they slow down by the multiprocessors that
    they take.

    Not in it: the host's time to launch, tokens of unequal documents, data loading, congestion of the network, context
    and expert parallelism.

    Args:
        model: what is trained.
        cluster: on what; ``Cluster.of("H100")``, or ``calibrate()`` for the machine at hand.
        layout: how.

    Returns:
        A ``Prediction``, which prints as a table with the error that these formulas have on published runs.

    Raises:
        TypeError: an argument that is none of these.
        ValueError: more pipeline chunks than layers, more tensor-parallel ranks than heads, float8 on a GPU without.

    Source: the alpha-beta model is Hockney's (1994), the bubble Narayanan et al.'s (arXiv 2104.04473).

    Example:
        >>> model = Model(layers=12, hidden=768, heads=12, vocabulary=50304, sequence=1024, tied=True)
        >>> found = predict(model, Cluster.of("H200"), Layout(micro_batch=64))
        >>> found.fits
        True
    """
    for name, value, kind in (("model", model, Model), ("cluster", cluster, Cluster), ("layout", layout, Layout)):
        if not isinstance(value, kind):
            checks.refuse_type("predict", name, f"a plan.{kind.__name__}", value)
    if layout.pipeline * layout.interleave > model.layers:
        raise ValueError(
            f"predict: layout: expected at most {model.layers} chunks for {model.layers} layers, got "
            f"{layout.pipeline} pipeline ranks x {layout.interleave}"
        )
    if model.heads % layout.tensor:
        expected = f"tensor at most {model.heads}, the heads, and a divisor of them"
        raise ValueError(f"predict: layout: expected {expected}, got {layout.tensor}")
    if model.dtype == "float8" and not cluster.gpu.float8_flops:
        raise ValueError(f"predict: model: expected a 16-bit dtype on {cluster.gpu.name}, got float8")
    forward, backward = compute.layer(model, layout, cluster)
    head = sum(compute.head(model, layout, cluster), compute.Pass(0.0, 0.0, 0.0, 0.0))
    m, p, v = layout.micro_batches, layout.pipeline, layout.interleave
    layers = -(-model.layers // p)
    last = (forward + backward) * layers + head  # the slowest pipeline rank: it has the head too
    mean = ((forward + backward) * model.layers + head).total / p
    steady = last * m
    exposed, hidden = _data_parallel(model, layout, cluster, forward.total, backward.total)
    in_host = layout.tensor * layout.data * p <= cluster.ranks_per_host
    message = layout.micro_batch * model.sequence * model.hidden * compute.HALF / layout.tensor
    sends = 0.0 if p == 1 else 2 * v * m * cluster.send_s(message, in_host)
    own = memory.parameters_of_rank(model, layout) / (layout.data if layout.sharding else 1)
    moved = PRECISIONS[layout.precision][3]
    times = {
        "matrix products": steady.matmul,
        "attention": steady.attention,
        "memory-bound": steady.memory_bound,
        "tensor parallel": steady.exposed_tensor,
        "pipeline sends": sends,
        "bubble": (p - 1) / v * mean,
        "data parallel": exposed,
        "slowed compute": hidden * cluster.collective_sms,
        "optimizer": own * moved / OPTIMIZER_SHARE / cluster.gpu.copy_bytes_per_s,
    }
    times["stragglers"] = sum(times.values()) * cluster.spread * slowest(layout.ranks)
    return Prediction(model, cluster, layout, times, memory.parts(model, layout), goodput(cluster, layout.ranks))


def scaling(
    model: Model, cluster: Cluster, layout: Layout, ranks: Sequence[int] = (), *, strong: bool = False
) -> list[Prediction]:
    """Predicts the same layout with more data-parallel ranks.

    Args:
        model, cluster, layout: as of ``predict``; tensor and pipeline stay.
        ranks: numbers of ranks, multiples of tensor x pipeline; default: 1, 2, 4, ... replicas up to 10,000 ranks.
        strong: the sequences of a step stay those of ``layout``, so that each rank has fewer micro-batches; otherwise
            each rank's work stays.

    Raises:
        ValueError: ranks that tensor x pipeline does not divide; ``strong`` with ranks among which the sequences of a
            step cannot be shared out evenly.

    Example:
        >>> model = Model(layers=32, hidden=4096, heads=32, vocabulary=128256, sequence=8192, gated=True)
        >>> found = scaling(model, Cluster.of("H100"), Layout(sharding=3, micro_batch=2), (8, 128))
        >>> first, last = efficiency(found)
        >>> first == 1.0 and 0.9 < last < 1.0
        True
    """
    checks.flags("scaling", strong=strong)
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence):
        checks.refuse_type("scaling", "ranks", "a list of numbers of ranks", ranks)
    for count in ranks:
        checks.refuse_non_int("scaling", "ranks", count)
    replica = layout.tensor * layout.pipeline
    chosen = list(ranks) or [replica * 2**k for k in range(14) if replica * 2**k <= 10_000] or [replica]
    found = []
    for count in chosen:
        if count < replica or count % replica:
            raise ValueError(f"scaling: ranks: expected multiples of {replica} (tensor x pipeline), got {count}")
        micro_batches, data = layout.micro_batches, count // replica
        if strong:
            micro_batches, left = divmod(layout.sequences, layout.micro_batch * data)
            if left or not micro_batches:
                raise ValueError(
                    f"scaling: ranks: expected replicas that divide {layout.sequences // layout.micro_batch} "
                    f"micro-batches of a step, got {data}"
                )
        changed = dataclasses.replace(layout, data=data, micro_batches=micro_batches)
        found.append(predict(model, cluster, changed))
    return found


def efficiency(found: Sequence[Prediction]) -> list[float]:
    """Tokens per second and rank, as a share of the first prediction's.

    Example:
        >>> model = Model(layers=12, hidden=768, heads=12, vocabulary=50304, sequence=1024)
        >>> efficiency(scaling(model, Cluster.of("H100"), Layout(), (1,)))
        [1.0]
    """
    rates = [p.tokens_per_s / p.layout.ranks for p in found]
    return [rate / rates[0] for rate in rates]
