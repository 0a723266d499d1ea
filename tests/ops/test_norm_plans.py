"""warpsmith.plan for the norm family: every plan covers its row and fits the chip; bad problems are named."""

import pytest
import torch
import warpsmith

ADD = ("add_rms_norm", "add_layer_norm", "dropout_add_rms_norm", "dropout_add_layer_norm")
OPS = ("rms_norm", "layer_norm", *ADD)
COLUMNS = [*range(1, 300), *(2**k + d for k in range(7, 19) for d in (-8, 0, 8)), 768, 12288, 100_000]


def check(plan, rows, columns):
    for c in (plan["forward"], plan["backward"]):
        assert c["why"]
        assert c["threads"] % 32 == 0
        assert 32 <= c["threads"] <= 1024
        assert c["shared_bytes"] <= 227 * 1024 - 512
        assert c["blocks"] >= 1
        assert c["blocks"] % c["cluster"] == 0
        if c["scope"] == "group":
            assert 32 % c["threads_a_row"] == 0
        else:
            assert c["threads_a_row"] == c["threads"] * c["cluster"]
        if c["kernel"] != "looped":
            assert c["threads_a_row"] * c["vectors_a_thread"] * c["vector_elems"] >= columns
            at_once = c["blocks"] // c["cluster"] * c["rows_together"]
            at_once *= c["threads"] // c["threads_a_row"] if c["scope"] == "group" else 1
            assert c["kernel"] in ("batches", "ring") or at_once >= rows
    assert plan["partial_rows"] >= plan["backward"]["blocks"] // plan["backward"]["cluster"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [1, 5, 1000, 200_000])
def test_every_plan_covers_its_row_and_fits_the_chip(op, rows):
    for columns in COLUMNS:
        for dtype in ("float32", "bfloat16"):
            streams = {dtype, "float32"} if op in ADD else {None}
            for stream in streams:
                for code in (80, 90):
                    problem = {} if stream is None else {"residual_dtype": stream}
                    plan = warpsmith.plan(op, rows=rows, columns=columns, dtype=dtype, code_capability=code, **problem)
                    check(plan, rows, columns)
                    assert code == 90 or plan["forward"]["cluster"] == plan["backward"]["cluster"] == 1
                    assert code == 90 or plan["forward"]["kernel"] not in ("shared", "resident")


@pytest.mark.parametrize(
    ("problem", "forward", "backward"),
    [
        ({"rows": 131072, "columns": 128}, "warp", "ring"),
        ({"rows": 65536, "columns": 768}, "warp", "batches"),
        ({"rows": 16384, "columns": 4096}, "registers", "batches"),
        ({"rows": 1024, "columns": 12288}, "resident", "batches"),
        ({"rows": 8192, "columns": 12288}, "shared", "batches"),
        ({"rows": 8, "columns": 262144}, "looped", "looped"),
        ({"rows": 8, "columns": 1023}, "looped", "looped"),
        ({"rows": 8, "columns": 1024, "aligned": False}, "looped", "looped"),
    ],
)
def test_plan_says_which_kernel_runs_and_why(problem, forward, backward):
    plan = warpsmith.plan("rms_norm", **problem, dtype=torch.bfloat16)
    assert (plan["forward"]["kernel"], plan["backward"]["kernel"]) == (forward, backward)
    assert plan["forward"]["why"]
    assert plan["partial_rows"] >= plan["backward"]["blocks"] // plan["backward"]["cluster"]


def test_wide_rows_stay_on_the_chip_where_there_are_clusters():
    """Up to 65,536 columns in one kernel launch of one pass over the row, forward."""
    for columns in (16384, 32768, 65536):
        plan = warpsmith.plan("layer_norm", rows=64, columns=columns, dtype="bfloat16")
        assert plan["forward"]["kernel"] == ("block" if columns == 16384 else "registers")


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [64, 128, 256, 512, 768, 1024])
def test_short_rows_that_fill_lanes_have_their_own_kernel(op, columns):
    for rows in (1, 7, 10**6):
        plan = warpsmith.plan(op, rows=rows, columns=columns, dtype="bfloat16")["forward"]
        assert (plan["kernel"], plan["shared_bytes"]) == ("warp", 0)
        assert plan["threads_a_row"] * plan["vectors_a_thread"] * plan["vector_elems"] == columns
        for change in ({"dtype": "float32"}, {"affine_as_x": False}, {"columns": columns + 8}):
            other = warpsmith.plan(op, **{"rows": rows, "columns": columns, "dtype": "bfloat16", **change})["forward"]
            in_a_block = op == "layer_norm" and change == {"columns": 1032}
            assert other["kernel"] == ("block" if in_a_block else "registers")


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("problem", [{"rows": 4096, "columns": 8192}, {"rows": 8192, "columns": 12288}])
def test_rows_lie_in_shared_memory_where_that_was_measured(op, problem):
    plan = warpsmith.plan(op, **problem, dtype="bfloat16")["forward"]
    assert plan["kernel"] == "shared"
    assert plan["shared_bytes"] == 2 * problem["columns"]
    assert plan["threads_a_row"] * plan["vectors_a_thread"] * plan["vector_elems"] == problem["columns"]
    assert plan["blocks"] == problem["rows"]
    changes = ({"dtype": "float32"}, {"affine_as_x": False}, {"code_capability": 80}, {"columns": 8200})
    less_memory = [{"max_shared_bytes": 99 * 1024}] if op == "rms_norm" else []
    for change in (*changes, *less_memory):
        other = warpsmith.plan(op, **{**problem, "dtype": "bfloat16", **change})["forward"]
        in_a_block = op == "layer_norm" and change == {"columns": 8200}
        assert other["kernel"] == ("block" if in_a_block else "registers")


@pytest.mark.parametrize("columns", [1032, 1280, 1600, 2560, 4096, 4104, 5120, 7168, 12296, 16384])
def test_rows_of_layer_norm_lie_in_the_registers_of_a_block(columns):
    for rows in (1, 7, 10**6):
        plan = warpsmith.plan("layer_norm", rows=rows, columns=columns, dtype="float16")["forward"]
        assert (plan["kernel"], plan["blocks"], plan["shared_bytes"]) == ("block", rows, 0)
        assert plan["threads_a_row"] * plan["vectors_a_thread"] * plan["vector_elems"] >= columns
    for change in ({"dtype": "float32"}, {"affine_as_x": False}):
        problem = {"rows": 64, "columns": columns, "dtype": "float16", **change}
        assert warpsmith.plan("layer_norm", **problem)["forward"]["kernel"] in ("registers", "looped")


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_that_the_chip_holds_at_once_are_asked_for_together(op):
    """An H200 holds 1,056 rows: two blocks a multiprocessor, four rows each. Up to 528 rows have a block each."""
    for rows, kernel in ((528, "shared"), (529, "resident"), (1056, "resident"), (1057, "shared")):
        plan = warpsmith.plan(op, rows=rows, columns=12288, dtype="bfloat16")["forward"]
        assert plan["kernel"] == kernel
        if kernel == "resident":
            assert (plan["blocks"], plan["rows_together"], plan["shared_bytes"]) == (264, 4, 4 * 2 * 12288)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_all_rows_of_a_length_have_their_sums_in_one_order(op):
    """All kernels add a row in the same order. At 12288 columns a kernel with the row in registers would not."""
    for rows in (1, 396, 397, 528, 529, 1056, 1057, 10**6):
        for columns, vectors in ((8192, 4), (12288, 6)):
            plan = warpsmith.plan(op, rows=rows, columns=columns, dtype="bfloat16")["forward"]
            assert (plan["threads_a_row"], plan["vectors_a_thread"]) == (256, vectors)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"columns": 8}, "rows: expected a value, got none"),
        ({"rows": 0, "columns": 8}, "rows: expected an integer >= 1, got 0"),
        ({"rows": 2**70, "columns": 8}, f"rows: expected an integer <= {2**40}, got {2**70}"),
        ({"rows": -(2**70), "columns": 8}, "rows: expected an integer >= 1, got -"),
        ({"rows": 2**63 - 1, "columns": 8}, f"rows: expected an integer <= {2**40}, got"),
        ({"rows": 1, "columns": "8"}, "columns: expected an integer, got '8'"),
        ({"rows": 1, "columns": 8, "dtype": "int8"}, "dtype: expected float32, float16 or bfloat16"),
        ({"rows": 1, "columns": 8, "cols": 8}, "expected arguments among .*, got cols"),
    ],
)
def test_bad_plans_are_named(op, problem, message):
    with pytest.raises(ValueError, match=f"^plan: {op}: {message}"):
        warpsmith.plan(op, **problem)


def test_an_unknown_op_has_no_plan():
    with pytest.raises(ValueError, match="plan: op: expected one of .*rms_norm.*, got nothing"):
        warpsmith.plan("nothing")


def test_only_ops_with_a_residual_have_a_stream():
    with pytest.raises(ValueError, match="got residual_dtype"):
        warpsmith.plan("layer_norm", rows=1, columns=8, residual_dtype="float32")


@pytest.mark.parametrize("op", ADD)
@pytest.mark.parametrize("columns", [128, 512, 768, 4096, 16384])
def test_beside_a_wider_stream_vectors_are_16_bytes_of_it(op, columns):
    """Its asynchronous copies pass the L1 cache: a vector of two accesses would fetch every 32-byte sector twice."""
    for dtype, stream, elems in (("bfloat16", "float32", 4), ("bfloat16", "bfloat16", 8), ("float32", "float32", 4)):
        plan = warpsmith.plan(op, rows=65536, columns=columns, dtype=dtype, residual_dtype=stream)
        assert plan["backward"]["kernel"] == "ring" or (dtype == stream and plan["backward"]["kernel"] == "batches")
        assert plan["backward"]["vector_elems"] == elems
