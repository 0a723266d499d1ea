"""dropout_add_layer_norm under the law, and what only it has: the mask, its seed, and p at its borders."""

from __future__ import annotations

from functools import partial

import torch
import warpsmith
from warpsmith.reference.dropout_add_layer_norm import dropout_add_layer_norm as reference
from warpsmith.testing import Case, OpSpec, op_tests

from tests.ops import dropout_norm_checks as checks
from tests.ops import norm_cases as norm

ARGUMENTS = ("x", "residual", "weight", "bias", "seed", "p", "eps")


def arguments(good):
    return tuple(good.get(name, 0.0) for name in ARGUMENTS)


def dropped(good):
    return {"seed": good["seed"], "p": good["p"]}


SPEC = OpSpec(
    name="dropout_add_layer_norm",
    op=warpsmith.dropout_add_layer_norm,
    reference=reference,
    inputs=partial(norm.inputs, bias=True, seed=True),
    cases=[*norm.FEW_CASES, *(Case((6, 100), norm.BF16, options={"p": p}) for p in (0.0, 0.9, 1.0))],
    differentiable=("x", "residual", "weight", "bias"),
    outputs=("y", "residual_out"),
    laid_out=("x", "residual"),
    gradcheck_cases=norm.GRADCHECK_CASES,
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::dropout_add_layer_norm",
    opcheck={
        torch.ops.warpsmith.dropout_add_layer_norm.default: arguments,
        torch.ops.warpsmith.dropout_add_layer_norm_forward.default: arguments,
        torch.ops.warpsmith.dropout_add_layer_norm_inference.default: arguments,
        torch.ops.warpsmith.dropout_add_layer_norm_backward.default: lambda good: norm.backward_arguments(
            good, bias=True, **dropped(good)
        ),
    },
    bad_inputs=[*norm.BAD_INPUTS, *norm.BAD_BIAS, *norm.BAD_DROPOUT],
    floor_bytes=norm.floor_bytes(4, 5),
)

TestDropoutAddLayerNorm = op_tests(SPEC)


def affine(columns, device):
    return [torch.linspace(0.5, 2, columns, device=device), torch.linspace(-1, 1, columns, device=device)]


TestDropout = checks.dropout_tests(warpsmith.dropout_add_layer_norm, warpsmith.add_layer_norm, reference, affine)
