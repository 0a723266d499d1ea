"""Calls of the ops that treat each row by itself, made from the rows of the families' lists."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import warpsmith

from tools import families

BODIES = ("NORM", "GATED", "BIASED", "UNARY", "SOFTMAX", "DROPOUT")


class RowOp(NamedTuple):
    """call: takes ``rows`` tensors of (..., F), then ``parameters`` tensors of (F,)."""

    call: Callable[..., Any]
    rows: int
    parameters: int


def row_ops(**dropout: Any) -> dict[str, RowOp]:
    """{name: a call}, one for each function of a row; ``dropout``: the options of ops that drop elements."""
    found = {}
    for name, (row, options) in families.forms(*BODIES).items():
        op = getattr(warpsmith, row.name)
        if row.body == "NORM":
            layer, residual, drops = (flag == "true" for flag in row.arguments)
            rows, parameters = 1 + residual, 1 + layer
        else:
            drops = row.body == "DROPOUT"
            rows, parameters = {
                "GATED": (2, 0),
                "BIASED": (1, 1),
                "UNARY": (1, 0),
                "SOFTMAX": (1, 0),
                "DROPOUT": (2, 0),
            }[row.body]
        found[name] = RowOp(functools.partial(op, **options, **dropout if drops else {}), rows, parameters)
        if row.body == "GATED":
            found[name + ", packed"] = RowOp(functools.partial(op, **options), 1, 0)
    return found
