"""Functions of ``torch.nn.functional`` made of others, for a torch that does not have them yet."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from warpsmith._core import checks


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    ignore_index: int | None,
    options: Any,
    **of_loss: Any,
) -> Tensor:
    """torch's definition of the call, without its ``options``."""

    def refuse(argument: str, expected: str, got: str) -> NoReturn:
        checks.refuse("linear_cross_entropy", argument, expected, got)

    if options is not None:
        refuse("options", f"None with torch {torch.__version__}, which has none", f"a {type(options).__name__}")
    if input.dim() not in (1, 2):
        refuse("input", "shape (H) or (N, H)", checks.shape_text(input.shape))
    of_row = linear_weight.shape[:-1]  # logits of a row: classes, and the dimensions of a K-dimensional loss
    of_rows = "..., " if input.dim() == 2 else ""  # a single row has a loss of no dimension
    fits = len(of_row) >= 1 if of_rows else len(of_row) == 1
    if not fits or linear_weight.shape[-1] != input.shape[-1]:
        got = checks.shape_text(linear_weight.shape)
        refuse("linear_weight", f"shape (C, {of_rows}{input.shape[-1]})", got)
    if linear_bias is not None and linear_bias.shape != of_row:
        refuse("linear_bias", f"shape {checks.shape_text(of_row)}", checks.shape_text(linear_bias.shape))
    logits = functional.linear(
        input, linear_weight.flatten(0, -2), None if linear_bias is None else linear_bias.flatten()
    )
    logits = logits.reshape(*input.shape[:-1], *of_row)
    if ignore_index is not None and target.shape == logits.shape:
        refuse("ignore_index", "None beside class probabilities", str(ignore_index))
    return functional.cross_entropy(
        logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **of_loss
    )
