"""The biased activations under the law."""

import pytest
import torch
import warpsmith
from warpsmith.testing import Case, op_tests, sim

from benchmarks.bench_activation import function_of
from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, floor_bytes, op_spec
from tools import families

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIXED = {"bias": FP32}

# Columns around a vector, a tile of a warp and of a block; rows below and above those of a block.
CASES = [
    *(Case((5, width), dtype) for width in (1, 7, 8, 33, 256, 264) for dtype in (BF16, FP32)),
    *(Case((3, 2, 96), dtype) for dtype in (FP16, FP64)),
    *(Case((6, 64), dtype, dtypes=MIXED) for dtype in (BF16, FP16)),
    Case((300, 24), BF16),
    *(Case((150, 96), dtype) for dtype in (BF16, FP32)),  # an odd number of turns of a small machine's blocks
    Case((70, 1000), FP32),
    Case((70, 2056), BF16),
    Case((768,), FP32),
]
FEW_CASES = CASES[::2]  # for ops that share the body


EXACT = {"approximate": "none"}
EXACT_CASES = [Case((5, 136), dtype, options=EXACT) for dtype in (BF16, FP32, FP16, FP64)]
ROWS = families.rows("BIASED")
FORMS = families.forms("BIASED")


def bytes_beside(case, _):
    """The bias, once a row forward and once a row of threads backward; one float a column and row block of partial
    sums, written and read; the gradient of the bias."""
    columns = case.shape[-1]
    rows, bias = torch.Size(case.shape[:-1]).numel(), columns * case.dtype.itemsize
    problem = {"rows": rows, "columns": columns, "dtype": str(case.dtype).removeprefix("torch.")}
    backward = sim.plan("bias_gelu", **problem)["backward"]
    rows_of_threads = backward["row_blocks"] * (backward["threads"] // backward["width"])
    partials = backward["row_blocks"] * columns * 4
    return {"forward": (rows * bias, 0), "backward": (rows_of_threads * bias + partials, partials + bias)}


def spec_of(row):
    """A row with a flag has all cases, and those of its other function; another has few."""
    name, function = row.name, function_of(row)
    argument = "approximate" if "tanh" in row.arguments else None
    reference = getattr(warpsmith.reference, name)

    def baseline(x, bias, **options):
        return reference(x, bias, **options) if bias.dtype != x.dtype else function(x + bias, **options)

    def inputs(case, rng):
        made = {"x": rng.normal(case.shape, std=2.0), "bias": rng.normal(case.shape[-1:])}
        return made if argument is None else {**made, argument: case.options.get(argument, "tanh")}

    return op_spec(
        name=name,
        baseline=baseline,
        inputs=inputs,
        cases=FEW_CASES if argument is None else CASES + EXACT_CASES,
        differentiable=("x", "bias"),
        outputs=("y",),
        laid_out=("x",),
        batched=("x",),
        sim_far=False,  # blocks of rows lie along y and z: sim_activation_far.cpp has their last ones
        gradcheck_cases=[Case((3, 5), FP64), *EXACT_CASES[-1:]],
        repeated_cases=[Case((4096, 50), FP32)],  # of which CPU threads share the rows
        double_backward=True,
        func_transforms=True,
        bad_inputs=[NO_FLOAT64_ON_CUDA],
        floor_bytes=floor_bytes(2, 3),
        bytes_beside=bytes_beside,
    )


for _row in ROWS:
    globals()[f"Test_{_row.name}"] = op_tests(spec_of(_row))


@pytest.mark.parametrize("columns", [*range(1, 20), 33, 96, 768, 1000, 4096, 5120, 12288, 2**20, 100001])
def test_every_plan_covers_its_problem(columns):
    for rows in (1, 7, 16384):
        for dtype in ("float32", "bfloat16"):
            plan = warpsmith.plan("bias_gelu", rows=rows, columns=columns, dtype=dtype)
            for c in (plan["forward"], plan["backward"]):
                assert c["width"] * c["vector_elems"] * c["tiles"] >= columns
                assert c["width"] * c["vector_elems"] * (c["tiles"] - 1) < columns
                assert c["blocks"] == c["tiles"] * c["row_blocks"]
            assert plan["forward"]["row_blocks"] * (256 // plan["forward"]["width"]) >= rows
            assert plan["backward"]["row_blocks"] <= max(1, 5 * 132 // plan["backward"]["tiles"])
