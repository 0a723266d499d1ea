"""What a module's op would refuse, its constructor refuses, and not the first step. The arguments come from the
signatures."""

from __future__ import annotations

import inspect
import math
import re

import numpy as np
import pytest
import torch
import warpsmith

VALUES = {
    "-1": -1,
    "-5": -5,
    "0": 0,
    "1": 1,
    "0.5": 0.5,
    "3": 3,
    "-0.5": -0.5,
    "True": True,
    "None": None,
    "nan": math.nan,
    "inf": math.inf,
    "1e39": 1e39,
    "1e-40": 1e-40,
    "2**63": 2**63,
    "2**2000": 2**2000,
    "text": "False",
    "mean": "mean",
    "tanh": "tanh",
    "list": [1],
    "window": (-5, 0),
    "beyond": (2**63, 0),
    "three": (1, 2, 3),
    "tensor": torch.ones(3),
    "learned": torch.tensor(0.5, requires_grad=True),
    "numpy": np.float32(0.25),
    "int64": torch.int64,
    "float32": torch.float32,
}
X, TARGET = torch.randn(6, 8), torch.arange(6) % 5
HEADS, ANGLES = torch.randn(1, 6, 2, 8), torch.randn(6, 4)
# Of each class: arguments of its constructor, and those of its first call.
MODULES = {
    "AddLayerNorm": ({"normalized_shape": 8}, (X, X)),
    "AddRMSNorm": ({"normalized_shape": 8}, (X, X)),
    "Attention": (
        {"embed_dim": 16, "num_heads": 2, "qk_norm": True},
        (torch.randn(1, 6, 16), ANGLES.cos(), ANGLES.sin()),
    ),
    "BiasGELU": ({"num_features": 8}, (X,)),
    "CrossEntropyLoss": ({}, (X.double(), TARGET)),  # it does not know the dtype: what fits float64 alone is made
    "DropoutAdd": ({}, (X, X)),
    "DropoutAddLayerNorm": ({"normalized_shape": 8}, (X, X)),
    "DropoutAddRMSNorm": ({"normalized_shape": 8}, (X, X)),
    "LayerNorm": ({"normalized_shape": 8}, (X,)),
    "LinearCrossEntropyHead": ({"in_features": 8, "out_features": 5}, (X, TARGET)),
    "QKNormRoPE": ({"head_dim": 8}, (HEADS, HEADS, ANGLES.cos(), ANGLES.sin())),
    "RMSNorm": ({"normalized_shape": 8}, (X,)),
    "RotaryEmbedding": ({"dim": 8}, (HEADS, HEADS)),
    "SwiGLUMLP": ({"hidden_size": 8, "intermediate_size": 16}, (X,)),
}
# What an input must fit, so that the first call may still refuse it; and what is no scalar, or left to torch's modules.
SIZES = {"normalized_shape", "num_features", "in_features", "hidden_size", "embed_dim", "num_heads", "head_dim", "dim"}
SIZES |= {"max_positions", "out_features", "max_bytes"}
TORCHS = {"device", "dtype", "elementwise_affine", "size_average", "reduce", "weight", "scaling"}
CASES = [
    (name, parameter)
    for name in MODULES
    for parameter in inspect.signature(getattr(warpsmith.nn, name)).parameters
    if parameter not in TORCHS and not (parameter == "bias" and name != "Attention")
]


def test_every_module_is_in_the_table():
    modules = {n for n in warpsmith.nn.__all__ if isinstance(getattr(warpsmith.nn, n), type)}
    assert modules == set(MODULES)


def is_kept(kind, value):
    """Whether a value is of the kind that an annotation names, or stands for one."""
    kinds = {"bool": bool, "str": str, "float": (int, float, np.floating), "int": int}
    return isinstance(value, kinds[kind]) and (kind == "bool" or not isinstance(value, bool)) if kind in kinds else True


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_what_the_first_call_refuses_is_not_made(name, parameter):
    module, (given, inputs) = getattr(warpsmith.nn, name), MODULES[name]
    *kinds, none = f"{inspect.signature(module).parameters[parameter].annotation} | None".split(" | ")
    made = 0
    for what, value in VALUES.items():
        try:
            layer = module(**given | {parameter: value})
        except (TypeError, ValueError) as error:
            message = str(error)
            named = r"\w+" if parameter in SIZES or parameter == "window_size" else parameter
            assert re.match(rf"{name}: {named}: expected .*, got ", message), (what, message)
            continue
        made += 1
        assert any(is_kept(kind, value) for kind in kinds) or value is None, what
        if parameter not in SIZES:
            layer(*inputs)
    assert made or parameter in SIZES
