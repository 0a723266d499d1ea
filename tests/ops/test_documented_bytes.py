"""What a docstring, and after it the op's page, says an op moves is what its benchmark divides by, and the sim counts
its accesses."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import warpsmith
from warpsmith.testing import OpSpec
from warpsmith.testing.checks.kernels import bytes_cases

from tools import families

OPS = sorted(row.name for row in families.rows())
# Heads in a case, by the words of the docstring. Docstrings with other words count elements of the case's shape.
HEADS = {"``q`` and ``k``": lambda case: case.shape[-2] + case.options.get("k_heads", max(1, case.shape[-2] // 2))}
FAMILY = {row.name: row.family for row in families.rows()}
# Bound by products of matrices, not by memory: their docstrings name no bytes.
# Results are of another width: the law's floor counts bytes.
IN_BYTES = {row.name for row in families.rows("QUANTIZE", "IMAGE", "MAX_POOL")}
COMPUTE_BOUND = {row.name for row in families.rows("ATTENTION", "LINEAR", "LINEAR_LOSS", "COMPOSED")}


@functools.cache
def specs():
    """{op: its spec} of all test modules beside this one."""
    found = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        if "op_tests(" in path.read_text() and path != Path(__file__):
            for value in vars(importlib.import_module(f"tests.ops.{path.stem}")).values():
                if isinstance(spec := getattr(value, "spec", value), OpSpec):
                    found[spec.name] = spec
    return found


def spec_of(op):
    return specs()[op]


def documented(op):
    """(forward, backward, what is counted) of the docstring's sentence."""
    text = " ".join(inspect.getdoc(getattr(warpsmith, op)).split())
    found = re.search(
        r"Moves (\d+) elements of memory for each of (.+?``)(?! and ``)(?: forward and (\d+) backward)?[ .;]", text
    )
    assert found, f"{op}: no sentence 'Moves N elements of memory for each of ..' in the docstring"
    return int(found[1]), int(found[3] or found[1]), found[2]


@pytest.mark.parametrize("op", [op for op in OPS if op not in COMPUTE_BOUND | IN_BYTES | {"adamw", "cross_entropy"}])
def test_docstring_and_benchmark_agree(op):
    forward, backward, counted = documented(op)
    spec = spec_of(op)
    case = next(c for c in spec.cases if not c.dtypes and not c.options.get("packed"))
    elements = torch.Size(case.shape).numel()
    if counted in HEADS:
        elements = elements // case.shape[-2] * HEADS[counted](case)
    unit = elements * case.dtype.itemsize
    assert dict(spec.floor_bytes(case)) == {"forward": forward * unit, "backward": backward * unit}


def test_cross_entropy_moves_a_logit_in_and_its_gradient_out():
    text = " ".join(inspect.getdoc(warpsmith.cross_entropy).split())
    assert "Moves 2 elements of memory for each logit forward and backward together" in text
    case = next(c for c in spec_of("cross_entropy").cases if not c.dtypes)
    unit = torch.Size(case.shape).numel() * case.dtype.itemsize
    assert sum(spec_of("cross_entropy").floor_bytes(case).values()) == 2 * unit


@pytest.mark.parametrize("op", sorted({*OPS} - COMPUTE_BOUND - {"adamw"}))
def test_the_sim_counts_bytes(op):
    assert bytes_cases(spec_of(op))
