"""Seconds of a rank's compute, and of the tensor-parallel collectives inside it."""

from __future__ import annotations

import dataclasses

from warpsmith.distributed.plan.cluster import Cluster
from warpsmith.distributed.plan.gpus import KERNELS, Gpu
from warpsmith.distributed.plan.layout import Layout
from warpsmith.distributed.plan.model import Model

HALF = 2  # bytes of a 16-bit element


@dataclasses.dataclass(frozen=True)
class Pass:
    """Seconds of one direction of one layer, or of the head, for one micro-batch."""

    matmul: float
    attention: float
    memory_bound: float
    exposed_tensor: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound + self.exposed_tensor

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Pass:
        return Pass(*(factor * a for a in dataclasses.astuple(self)))


def _roofline(gpu: Gpu, flops: float, moved_bytes: float, rate: float = 0.0) -> float:
    return max(flops / (rate or gpu.matmul_flops), moved_bytes / gpu.copy_bytes_per_s)


def _product(gpu: Gpu, rows: float, columns: float, inner: float, float8: bool = False) -> float:
    """Seconds of one matrix product."""
    moved = HALF * (rows * columns + rows * inner + columns * inner)
    return _roofline(gpu, 2 * rows * columns * inner, moved, gpu.float8_flops if float8 else gpu.matmul_flops)


def _matrices(model: Model, layout: Layout) -> list[tuple[float, float]]:
    """(columns, inner) of a rank's share of each matrix of a layer."""
    t = layout.tensor
    return [
        ((model.query + model.key_value) / t, model.hidden),
        (model.hidden, model.query / t),
        (model.up / t, model.hidden),
        (model.hidden, model.intermediate / t),
    ]


def _attention(model: Model, layout: Layout, gpu: Gpu) -> tuple[float, float]:
    """Seconds of attention without its projections, forward and backward."""
    tokens = layout.micro_batch * model.sequence
    flops = 4 * tokens * model.sequence * model.query / layout.tensor
    if layout.attention != "eager":
        rate = gpu.flash_flops if layout.attention == "flash" else gpu.cudnn_flops
        forward = flops * (0.5 if model.causal else 1.0) / rate
        return forward, 2.5 * forward  # the backward makes the scores again: five products for two
    # Passes over the scores: forward writes them, softmax reads and writes, the second product reads; the backward
    # reads probabilities for dv, writes their gradient, reads both and writes in softmax, reads for dq and dk. Dropout
    # reads and writes them once more each way, with a mask of a byte.
    scores = tokens * model.sequence * model.heads / layout.tensor
    forward = _roofline(gpu, flops, 0) + scores * (8 + 5 * model.dropout) / gpu.copy_bytes_per_s
    backward = _roofline(gpu, 2 * flops, 0) + scores * (14 + 5 * model.dropout) / gpu.copy_bytes_per_s
    return forward, backward


def _memory_bound(model: Model, layout: Layout, gpu: Gpu) -> tuple[float, float]:
    """Seconds of norms with residuals, rotary embedding and activation, forward and backward."""
    kernels = KERNELS[layout.kernels]
    tokens = layout.micro_batch * model.sequence
    t = layout.tensor
    rows = 2 * tokens * model.hidden / (t if layout.sequence_parallel else 1)  # elements of both norms
    rotated = tokens * (model.query + model.key_value / 2) / t * model.rotary
    hidden = tokens * model.intermediate / t
    if model.gated:
        activation = hidden * 6 / kernels.gated_forward, hidden * 10 / kernels.gated_backward
    else:
        activation = hidden * 4 / kernels.gelu_forward, hidden * 6 / kernels.gelu_backward
    forward = rows * (8 / kernels.norm_forward + 1 * model.dropout) + rotated * 4 / kernels.rope + activation[0]
    backward = rows * (8 / kernels.norm_backward + 5 * model.dropout) + rotated * 4 / kernels.rope + activation[1]
    return forward / gpu.copy_bytes_per_s, backward / gpu.copy_bytes_per_s


def _tensor_collective(model: Model, layout: Layout, cluster: Cluster) -> float:
    """Seconds of one of the two collectives that a layer's direction has."""
    tensor_bytes = layout.micro_batch * model.sequence * model.hidden * HALF
    if layout.sequence_parallel:
        kinds = ("reduce_scatter", "all_gather")
        return sum(cluster.collective_s(kind, tensor_bytes, ranks=layout.tensor) for kind in kinds)
    return cluster.collective_s("all_reduce", tensor_bytes, ranks=layout.tensor)


def layer(model: Model, layout: Layout, cluster: Cluster) -> tuple[Pass, Pass]:
    """Forward and backward of one layer for one micro-batch; the backward has what it computes again."""
    gpu = cluster.gpu
    float8 = model.dtype == "float8"
    tokens = layout.micro_batch * model.sequence
    shapes = _matrices(model, layout)
    forward_matmul = sum(_product(gpu, tokens, n, k, float8) for n, k in shapes)
    backward_matmul = sum(_product(gpu, tokens, k, n, float8) + _product(gpu, n, k, tokens, float8) for n, k in shapes)
    attention, memory = _attention(model, layout, gpu), _memory_bound(model, layout, gpu)
    collectives = 2 * _tensor_collective(model, layout, cluster)
    forward = Pass(forward_matmul, attention[0], memory[0], _exposed(collectives, forward_matmul, layout))
    backward = Pass(backward_matmul, attention[1], memory[1], _exposed(collectives, backward_matmul, layout))
    if float8:  # casts to float8 with a scale of the whole tensor: two reads and a write, 5 bytes an element
        casts = [sum(tokens * k + n * k for n, k in shapes), sum(tokens * (n + k) + n * k for n, k in shapes)]
        forward += Pass(0.0, 0.0, 5 * casts[0] / gpu.copy_bytes_per_s, 0.0)
        backward += Pass(0.0, 0.0, 5 * casts[1] / gpu.copy_bytes_per_s, 0.0)
    if layout.checkpoint == "full":
        backward += forward
    elif layout.checkpoint == "half":
        backward += Pass(forward_matmul / 2, 0.0, forward.memory_bound, 0.0)
    elif layout.checkpoint == "attention" and layout.attention == "eager":
        backward += Pass(0.0, attention[0], 0.0, 0.0)
    return forward, backward


def _exposed(collectives: float, matmul: float, layout: Layout) -> float:
    """What of tensor-parallel collectives no matrix product hides: all, or the first of as many pieces as ranks."""
    if not layout.overlap_tensor:
        return collectives
    first = collectives / layout.tensor
    return first + max(0.0, collectives - first - matmul)


def head(model: Model, layout: Layout, cluster: Cluster) -> tuple[Pass, Pass]:
    """Forward and backward of the last layer and the loss, for one micro-batch."""
    gpu, kernels = cluster.gpu, KERNELS[layout.loss or layout.kernels]
    tokens, classes = layout.micro_batch * model.sequence, model.vocabulary / layout.tensor
    product = _product(gpu, tokens, classes, model.hidden)
    loss = tokens * classes * 4 / kernels.loss / gpu.copy_bytes_per_s
    collective = _tensor_collective(model, layout, cluster)
    return Pass(product, 0.0, loss / 2, 0.0), Pass(2 * product, 0.0, loss / 2, collective)
