"""Bytes that a rank holds."""

from __future__ import annotations

import dataclasses

from warpsmith.distributed.plan.gpus import KERNELS
from warpsmith.distributed.plan.layout import GATHER, PRECISIONS, Layout
from warpsmith.distributed.plan.model import Model


def parameters_of_rank(model: Model, layout: Layout) -> float:
    """Of the rank that has most: the first pipeline rank's layers and embedding, before sharding."""
    layers = -(-model.layers // layout.pipeline)
    share = model.layers * model.layer_parameters
    rest = model.parameters - share if layout.pipeline == 1 else model.vocabulary * model.hidden
    return (share * layers / model.layers + rest) / layout.tensor


def layer_activations(model: Model, layout: Layout) -> float:
    """Bytes that one layer keeps for its backward, of one micro-batch, in 16 bits.

    Korthikanti et al. (arXiv 2205.05198), equations 1 to 4, taken apart: both norms' inputs, the inputs of all matrix
    products, q, k and v, the activation's input, scores where attention is eager, and masks of dropout.
    """
    tokens, t = layout.micro_batch * model.sequence, layout.tensor
    whole = 2 * 4 * model.hidden + 2 * model.hidden * model.dropout  # norms' inputs and outputs; masks of a byte
    split = 2 * (2 * model.query + model.key_value + model.up + model.intermediate)
    scores = (4 + model.dropout) * model.heads * model.sequence if model.dropout else 2 * model.heads * model.sequence
    entry = 2 * model.hidden  # a layer's input
    per_token = whole / (t if layout.sequence_parallel else 1) + split / t
    if layout.checkpoint == "full":
        return tokens * entry / (t if layout.sequence_parallel else 1)
    if layout.checkpoint == "half":
        kept = (2 * model.query + model.key_value + model.up + 2 * model.hidden) / 2 + model.query
        return tokens * (entry + 2 * kept / t)
    if layout.attention == "eager" and layout.checkpoint == "none":
        per_token += scores / t
    return tokens * per_token


def parts(model: Model, layout: Layout) -> dict[str, float]:
    """Bytes by part, of the rank that holds most: weights, gradients, optimizer, activations, loss, gathered.

    The allocator's blocks, NCCL's buffers and the CUDA context are not counted.
    """
    weight, gradient, state, _ = PRECISIONS[layout.precision]
    own, d = parameters_of_rank(model, layout), layout.data
    layers = -(-model.layers // layout.pipeline)
    # 1F1B: the first rank has as many micro-batches in flight as ranks follow; interleaved chunks add some.
    in_flight: float = min(layout.pipeline, layout.micro_batches)
    if layout.interleave > 1:
        in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.interleave)
    activations = layer_activations(model, layout) * layers * in_flight
    if layout.checkpoint in ("full", "half"):  # the layer that is computed again
        activations += layer_activations(model, dataclasses.replace(layout, checkpoint="none"))
    tokens = layout.micro_batch * model.sequence
    logits = tokens * model.vocabulary / layout.tensor * KERNELS[layout.loss or layout.kernels].loss_bytes
    gathered = 0.0
    if layout.sharding == 3 and d > 1:  # the layer at work and the next one
        gathered = 2 * GATHER[layout.gather] * model.layer_parameters / layout.tensor
        gathered += GATHER["bfloat16"] * model.vocabulary * model.hidden / layout.tensor
    return {
        "weights": own * weight / (d if layout.sharding >= 3 else 1),
        "gradients": own * gradient / (d if layout.sharding >= 2 else 1),
        "optimizer": own * state / (d if layout.sharding >= 1 else 1),
        "activations": activations,
        "loss": logits if layout.pipeline == 1 else 0.0,
        "gathered": gathered,
    }
