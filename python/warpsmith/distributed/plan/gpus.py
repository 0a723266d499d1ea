"""What GPUs do: rates that were measured, each with its source.

Nothing in this file was fitted to the runs of docs/plan_published.py.
"""

from __future__ import annotations

import dataclasses
import math

from warpsmith._core import checks

# Measured on one H200 (recording 2026-11-22-2150-nvidia-h200 and the project's first measurements of
# 2026-11-20, torch 2.11): 60 matrix products of 8192 x 8192 x 8192 in a row, where power limits the clock, as shares of
# the best single product that others found on the same GPU (stas00/ml-engineering, compute/accelerator/README.md: 794.5
# TFLOP/s in bfloat16 and 1453.4 in float8). The shares are used for all GPUs alike.
SUSTAINED, SUSTAINED_FLOAT8 = 735.2 / 794.5, 1285 / 1453.4
COPY_SHARE = 4.265 / 4.8  # a copy of 4 GiB on the H200, of the data sheet's bandwidth
# Causal attention at 4,096 tokens and head dimension 128, forward and backward together, as a share of sustained matrix
# products, on the same H200: torch 2.11's flash implementation, and cuDNN's. FLOPs of the unmasked half count.
FLASH_SHARE, CUDNN_SHARE = 283.0 / 735.2, 507.0 / 735.2


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates of one GPU, in FLOP/s, bytes and bytes per second.

    Args:
        name: of the GPU.
        peak_flops: of the data sheet, 16-bit, without sparsity: what MFU is a share of.
        matmul_flops: of large 16-bit matrix products in a row.
        float8_flops: of the same in float8; 0: the GPU has none.
        flash_flops: of torch's flash attention; FLOPs of masked scores do not count.
        cudnn_flops: of cuDNN's attention, or any other that is as fast.
        memory_bytes: of the GPU.
        copy_bytes_per_s: of a large copy, reads and writes counted.
        link_bytes_per_s: that NCCL reaches between GPUs of a host, in one direction ("bus bandwidth").

    Example:
        >>> gpu = GPUS["H100"]
        >>> round(gpu.matmul_flops / gpu.peak_flops, 2)
        0.74
    """

    name: str
    peak_flops: float
    matmul_flops: float
    float8_flops: float
    flash_flops: float
    cudnn_flops: float
    memory_bytes: float
    copy_bytes_per_s: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            checks.refuse_type("Gpu", "name", "a name", self.name)
        for field in dataclasses.fields(self)[1:]:
            value, least = getattr(self, field.name), ">=" if field.name == "float8_flops" else ">"
            fits = (lambda x: 0 <= x < math.inf) if least == ">=" else (lambda x: 0 < x < math.inf)
            checks.number("Gpu", field.name, value, f"a finite number {least} 0", fits)


def _gpu(
    name: str, peak: float, best: float, best8: float, gib: float, bandwidth: float, link: float, flash: float = 0.0
) -> Gpu:
    matmul = best * SUSTAINED
    return Gpu(
        name=name,
        peak_flops=peak * 1e12,
        matmul_flops=matmul * 1e12,
        float8_flops=best8 * SUSTAINED_FLOAT8 * 1e12,
        flash_flops=(flash or matmul * FLASH_SHARE) * 1e12,
        cudnn_flops=(flash or matmul * CUDNN_SHARE) * 1e12,
        memory_bytes=gib * 1e9,
        copy_bytes_per_s=bandwidth * COPY_SHARE * 1e12,
        link_bytes_per_s=link * 1e9,
    )


# Peak, memory and bandwidth: NVIDIA's data sheets. Best matrix products: stas00/ml-engineering, as above. Links:
# A100: 227 GB/s fits vTrain's all-reduce tables of 8 A100 (VIA-Research/vTrain, trace/a100). H200: 354 GB/s, all-reduce
# of 1 GiB on four H200, measured by us; H100 has the same NVLink, for which a maintainer of NCCL gives about 370
# (NVIDIA/nccl-tests#212). B200: twice that, as its NVLink; not measured. A100's attention: FlashAttention-2 (arXiv
# 2307.08691) reaches 50 to 73 % of the peak there; the middle.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 312, 271.2, 0, 80, 2.039, 227, flash=0.615 * 312),
        _gpu("H100", 989, 794.5, 1402.6, 80, 3.35, 354),
        _gpu("H200", 989, 794.5, 1453.4, 141, 4.8, 354),
        _gpu("B200", 2250, 1745, 3432.5, 180, 8.0, 708),
    )
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Shares of the copy rate that memory-bound operations reach, counted in the fewest bytes they could move."""

    norm_forward: float
    norm_backward: float
    rope: float
    gated_forward: float
    gated_backward: float
    gelu_forward: float
    gelu_backward: float
    loss: float
    loss_bytes: float  # of memory for each logit while the loss and its gradient are computed


# Measured on the H200 (recording 2026-11-22-2150-nvidia-h200): add_rms_norm, swiglu and bias_gelu of
# 16384 x 4096, rope of 4 x 4096 x 32 x 128, cross_entropy of 4096 x 128256, bfloat16. Memory of the loss: the peaks of
# linear + cross-entropy of that size, 5.87 and 1.99 GiB.
KERNELS = {
    "eager": Kernels(0.729, 0.414, 0.077, 0.593, 0.559, 0.281, 0.630, 0.073, 12),
    "compiled": Kernels(0.944, 0.757, 0.857, 1.0, 1.0, 0.735, 0.649, 0.371, 4),
    "warpsmith": Kernels(0.973, 0.961, 0.957, 1.0, 1.0, 1.0, 0.951, 0.933, 2),
}
# AdamW and the norm of gradients over 1e9 float32 parameters on the H200, of the copy rate: torch's fused ones 0.81.
OPTIMIZER_SHARE = 0.81
# Step times of one script on H200s of different days (benchmarks/results.csv, train_gpt: torch in the six runs of
# 2026-11-22 and 23): their standard deviation, as a share.
SPREAD = 0.012
# Multiprocessors that NCCL takes while it overlaps with compute: 16 (Megatron-Core's documentation of its DDP options,
# NVLink and InfiniBand together) of the 132 of an H100.
COLLECTIVE_SMS = 16 / 132
