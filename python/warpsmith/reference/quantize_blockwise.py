import torch
from torch import Tensor

BLOCK = 256


def dynamic_map(signed: bool) -> Tensor:
    """The values of the 256 codes of 8-bit optimizer states, ascending, float32.

    0, 1, and in each of seven decades below 1 the middles of n equal parts of [0.1, 1] of the decade; n doubles from 1
    to 64 for each sign, or from 2 to 128. Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        n = 2**decade * (1 if signed else 2)
        middles = [(2 * n + 18 * k + 9) / (20 * n * 10 ** (6 - decade)) for k in range(n)]
        values += middles + ([-m for m in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def quantize_blockwise(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """The codes (uint8) of a contiguous float32 tensor, and the scale of each block of 256 elements.

    A scale is the largest magnitude of its block; a code is that of the value nearest to element / scale, of two at
    the same distance the lower one. Without sign, 0 alone has code 0.
    """
    values = dynamic_map(signed)
    blocks = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)
    x = torch.where(scales[:, None] == 0, torch.zeros_like(blocks), blocks / scales[:, None])
    codes = torch.bucketize(x, (values[:-1] + values[1:]) * 0.5)
    codes = codes if signed else torch.where((codes == 0) & (x > 0), 1, codes)
    return codes.flatten()[: value.numel()].view(value.shape).to(torch.uint8), scales


def dequantize_blockwise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The float32 values of codes: that of the map times the scale of the block."""
    of_elements = scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)
    return dynamic_map(signed)[codes.long()] * of_elements
