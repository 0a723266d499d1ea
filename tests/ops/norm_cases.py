"""What the tests of the norm family share: cases, inputs, bad inputs, and the spec of an op from its schema."""

import torch
from warpsmith.testing import Case, sim

from tests.ops.public_calls import floor_bytes, op_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STREAM = {"residual": FP32}


# More rows than the blocks of a small machine, so that a block takes several; rows of a cluster; and of one length that
# a block cannot hold.
TURNS = [
    Case((rows, columns), BF16) for rows, columns in ((130, 16), (136, 128), (30, 264), (21, 1032), (19, 33), (7, 4104))
]
TURNS += [Case((3, 12296), BF16), Case((1, 16392), BF16), Case((40, 520), FP32), Case((5, 8192), FP16)]


def cases_without_residual(mixed, *affine):
    """The case table of a norm alone: widths around vectors and warps, `mixed` dtypes, `affine` cases, long rows."""
    widths = (1, 2, 7, 8, 16, 33, 128, 255, 256, 257, 768, 1024, 1025, 2048, 4096, 5120)
    return [
        *(Case((5, width), dtype) for width in widths for dtype in (BF16, FP32)),
        *(Case((5, width), FP16) for width in (1, 8, 257, 768, 4096)),
        *(Case((3, 4, width), FP64) for width in (1, 33, 256)),
        *(Case((6, width), dtype, dtypes=mixed) for width in (64, 257, 1024) for dtype in (BF16, FP16)),
        *affine,
        Case((700, 96), BF16),
        Case((300, 1000), FP32),
        Case((2, 3, 5, 64), BF16),
        Case((768,), FP32),
        Case((2, 16384), BF16),
        *TURNS,
        Case((5, 12288), BF16),
        Case((1, 32776), FP32),
        Case((1, 262144), BF16),
        Case((2, 100001), FP32),
    ]


def cases(widths, fp16=(1, 257, 768)):
    """The case table with a residual: widths around vectors and warps, mixed dtypes, long rows."""
    return [
        *(Case((5, width), dtype) for width in widths for dtype in (BF16, FP32)),
        *(Case((5, width), FP16) for width in fp16),
        *(Case((3, 4, width), FP64) for width in (1, 33)),
        *(Case((6, 257), dtype, dtypes=STREAM) for dtype in (BF16, FP16)),
        *(Case((6, 768), dtype, dtypes={**STREAM, "weight": FP32, "bias": FP32}) for dtype in (BF16, FP16)),
        Case((6, 256), BF16, dtypes={"weight": FP32, "bias": FP32}),
        *(Case((6, 768), dtype, options={"affine": False}) for dtype in (BF16, FP32)),
        Case((700, 96), BF16),
        Case((768,), FP32),
        *TURNS,
        Case((2, 10001), FP32),
        Case((1, 65536), BF16, dtypes=STREAM),
    ]


CASES = cases((1, 2, 7, 8, 33, 256, 257, 768, 1024, 4096))
FEW_CASES = cases((1, 7, 8, 257, 768), fp16=(257,))
GRADCHECK_CASES = [Case((3, 5), FP64), Case((2, 4), FP64, options={"affine": False})]


def inputs(case, rng, *, bias, seed=False):
    """x, residual, weight, and what the op has of bias and dropout."""
    columns = case.shape[-1]
    affine = case.options.get("affine", True)
    made = {"x": rng.normal(case.shape), "residual": rng.normal(case.shape, mean=0.5)}
    made["weight"] = rng.normal((columns,), mean=1.0, std=0.3) if affine else None
    if bias:
        made["bias"] = rng.normal((columns,)) if affine else None
    if seed:
        made["p"] = case.options.get("p", 0.25)
    made["eps"] = 1e-5
    if seed:
        made["seed"] = rng.integers((2,), 0, 2**62)
    return made


def wide_enough(draw, st, case):
    """The deviations of two or three columns are all rounding, now and then, and what they divide with it."""
    return case.but(shape=(*case.shape[:-1], max(8, case.shape[-1])))


def plan_of(case, name, residual):
    dtype = str(case.dtype).removeprefix("torch.")
    problem = {"rows": torch.Size(case.shape[:-1]).numel(), "columns": case.shape[-1], "dtype": dtype}
    return sim.plan(name, **problem, **({"residual_dtype": dtype} if residual else {}))


def groups_of(config):
    """Groups of threads of a cluster that work on rows side by side."""
    return config["threads"] * config["cluster"] // config["threads_a_row"]


def has_a_formula(case, name, residual, dropout):
    """Whether `bytes_beside` is for a case: rows that lie on the chip, in 16 bits where elements are dropped, and as
    many short ones as fill warps."""
    if case.options or case.dtypes or case.dtype == FP64 or (dropout and case.dtype == FP32):
        return False
    plan = plan_of(case, name, residual)
    whole = torch.Size(case.shape[:-1]).numel() % (plan["forward"]["rows_together"] * groups_of(plan["forward"])) == 0
    kernels = plan["forward"]["kernel"], plan["backward"]["kernel"]
    return "looped" not in kernels and (kernels[0] != "warp" or whole)


def bytes_beside(name, layer, residual, dropout):
    """Forward: weight and bias once a group of rows, and where a row lies in the registers of a block four elements of
    it by every thread; the statistics of a row are written for a backward. Backward: the weight once a unit, the
    statistics by every thread of a row (in batches by every warp), partial sums, written and read, and the gradients
    made of them. The seed by every thread, in the ring once for each vector."""

    def beside(case, _):
        rows, columns = torch.Size(case.shape[:-1]).numel(), case.shape[-1]
        row, parameters, seed = columns * case.dtype.itemsize, 2 if layer else 1, 16 * dropout
        plan = plan_of(case, name, residual)
        forward, backward = plan["forward"], plan["backward"]
        full, rest = divmod(rows, forward["rows_together"] * groups_of(forward))
        groups = full * groups_of(forward) + min(rest, groups_of(forward))
        first = forward["threads"] * 8 * (forward["kernel"] == "block")
        read = rows * first + parameters * groups * row + forward["blocks"] * forward["threads"] * seed
        statistics, partials = parameters * rows * 4, parameters * plan["partial_rows"] * columns * 4
        readers, seeds = backward["threads_a_row"], rows * columns // backward["vector_elems"]
        if backward["kernel"] == "batches":
            readers, seeds = readers // 32, backward["blocks"] * backward["threads"]
        weights = plan["partial_rows"] * groups_of(backward) * row
        read_backward = weights + partials + statistics * readers + seeds * seed
        written = partials + parameters * row
        return {"forward": (read, statistics), "inference": (read, 0), "backward": (read_backward, written)}

    return beside


def spec_of(name, **more):
    """The spec of an op of the family: what its schema says, and ``more``."""
    names = [a.name for a in getattr(torch.ops.warpsmith, name).default._schema.arguments]
    residual, dropout = "residual" in names, "seed" in names

    rows = ("x", "residual") if residual else ("x",)
    made = {
        "differentiable": tuple(n for n in ("x", "residual", "weight", "bias") if n in names),
        "outputs": ("y", "residual_out") if residual else ("y",),
        "laid_out": rows,
        "double_backward": True,
        "func_transforms": True,
        "sim_elements": 65_000,
        "repeated_cases": [Case((700, 96), FP32)],  # of which CPU threads share the rows
        "redraw": wide_enough,
        "bytes_beside": bytes_beside(name, "bias" in names, residual, dropout),
        "bytes_cases": [c for c in more["cases"] if has_a_formula(c, name, residual, dropout)],
        "floor_bytes": floor_bytes(4 if residual else 2, 5 if dropout else 4 if residual else 3),
    }
    if not dropout:
        made["batched"] = rows
    return op_spec(name, **made, **more)
