"""Images on their way into a model, in plain torch operations."""

from collections.abc import Sequence

import torch
from torch import Tensor


def normalize_image(
    x: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    flip: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """``(x / 255 - mean) / std`` by channel, in float32 (float64 for that), channels first."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if flip is not None:
        x = torch.where(flip[:, None, None, None], x.flip(2), x)
    of_mean, of_std = (torch.tensor(list(values), dtype=wide, device=x.device) for values in (mean, std))
    return ((x.to(wide) / 255 - of_mean) / of_std).to(dtype).permute(0, 3, 1, 2)
