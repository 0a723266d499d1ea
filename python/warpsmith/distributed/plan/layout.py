"""How a training step is laid out over ranks."""

from __future__ import annotations

import dataclasses

from warpsmith._core import checks
from warpsmith.distributed.plan.gpus import KERNELS

CHECKPOINTS = ("none", "attention", "half", "full")
ATTENTION = ("eager", "flash", "cudnn")
WIRE = {"float32": 4, "bfloat16": 2, "float16": 2}
GATHER = {"bfloat16": 2, "float16": 2, "float8": 1}
# Bytes of weight, gradient and optimizer state for each parameter, and what AdamW with clipping moves for it.
PRECISIONS = {"master": (2, 4, 12, 34), "autocast": (4, 4, 8, 32), "bf16": (2, 2, 4, 16)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks = data x tensor x pipeline. Tensor-parallel ranks are neighbours in a host, then data, then pipeline.

    Args:
        data, tensor, pipeline: ranks in each direction.
        micro_batch: sequences that go through the model at once.
        micro_batches: of a rank in one step (gradient accumulation; what fills a pipeline).
        sharding: over data-parallel ranks: 0 nothing (DDP), 1 optimizer states, 2 and gradients, 3 and weights (FSDP).
        interleave: chunks of layers that a pipeline rank holds.
        checkpoint: what the backward computes again: ``"none"``; ``"attention"``, the scores of eager attention;
            ``"half"``, half of the matrix products and all between them (torchtitan's "selective op"); ``"full"``.
        sequence_parallel: norms and residuals are split over tensor-parallel ranks as well.
        kernels: ``"eager"``, ``"compiled"`` or ``"warpsmith"``, for all that is no matrix product.
        loss: the same for the loss; default: as ``kernels``.
        attention: ``"eager"`` (scores in memory), ``"flash"`` (torch's SDPA) or ``"cudnn"`` (or as fast).
        precision: ``"master"``: 16-bit weights, float32 gradients, masters and states; ``"autocast"``: float32 weights;
            ``"bf16"``: all in 16 bits.
        wire: dtype of gradients between ranks; ``accurate_hook`` sends ``"bfloat16"``.
        gather: dtype in which sharded weights travel.
        overlap_data, overlap_gather, overlap_tensor: gradients travel behind the backward; weights of sharding 1 and 2
            behind the next forward; tensor-parallel collectives behind matrix products, in as many pieces as ranks.

    Raises:
        ValueError: a count below 1, a name that is not listed here, ``interleave`` without a pipeline.

    Example:
        >>> Layout(data=48, tensor=8, pipeline=6).ranks
        2304
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    sharding: int = 0
    interleave: int = 1
    checkpoint: str = "none"
    sequence_parallel: bool = False
    kernels: str = "compiled"
    loss: str = ""
    attention: str = "flash"
    precision: str = "autocast"
    wire: str = "float32"
    gather: str = "bfloat16"
    overlap_data: bool = True
    overlap_gather: bool = False
    overlap_tensor: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "micro_batch", "micro_batches", "interleave"):
            checks.count("Layout", name, getattr(self, name), "an int of at least 1", 1)
        for name, allowed in (
            ("sharding", (0, 1, 2, 3)),
            ("checkpoint", CHECKPOINTS),
            ("kernels", tuple(KERNELS)),
            ("loss", ("", *KERNELS)),
            ("attention", ATTENTION),
            ("precision", tuple(PRECISIONS)),
            ("wire", tuple(WIRE)),
            ("gather", tuple(GATHER)),
        ):
            checks.one_of("Layout", name, getattr(self, name), allowed)
        for name in ("sequence_parallel", "overlap_data", "overlap_gather", "overlap_tensor"):
            checks.flags("Layout", **{name: getattr(self, name)})
        if self.interleave > 1 and self.pipeline == 1:
            raise ValueError(f"Layout: interleave: expected 1 without a pipeline, got {self.interleave}")

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.data * self.tensor * self.pipeline

    @property
    def sequences(self) -> int:
        """Of one step, over all ranks."""
        return self.data * self.micro_batch * self.micro_batches
