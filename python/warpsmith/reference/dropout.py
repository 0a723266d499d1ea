from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], key: list[Tensor], rounds: int = 10) -> list[Tensor]:
    """Philox4x32 on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64 bits, of which the sign is one
        c0, c1, c2, c3 = (p1 >> 32) & _WORD ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) & _WORD ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def dropout_mask(seed: Tensor, shape: Sequence[int], p: float, first: int = 0) -> Tensor:
    """Which elements of a tensor of ``shape`` are kept, by the dropout mask that all ops of the package share.

    ``seed``: int64, shape (2,), the words (seed, offset). Element ``e`` of the contiguous tensor takes lane ``e % 8``
    of the Philox4x32-10 call with counter ``(e / 8, offset)`` and key ``seed``; the lanes are the 16-bit halves of the
    four words, low half first. It is kept where its lane is at least ``65536 p``, rounded (half up). ``first``: the
    number of the first element, where ``shape`` is the end of a tensor.
    """
    end = first + torch.Size(shape).numel()
    call = torch.arange(first // 8, (end + 7) // 8, device=seed.device)
    key, offset = seed[0], seed[1]
    counter = [call & _WORD, call >> 32, (offset & _WORD).expand_as(call), ((offset >> 32) & _WORD).expand_as(call)]
    words = philox(counter, [key & _WORD, (key >> 32) & _WORD])
    lanes = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    return (lanes.flatten()[first % 8 :][: end - first] >= int(p * 65536 + 0.5)).view(shape)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """``x / (1 - p)`` where :func:`dropout_mask` keeps, else zero; rounds once if ``x`` is float32 or wider."""
    scale = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(dropout_mask(seed, x.shape, p), x * scale, torch.zeros_like(x))
