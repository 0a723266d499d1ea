"""quantize_fp8 and dequantize_fp8 under the law, in which bytes are integers: equal to the reference's, bit for bit."""

import torch
import warpsmith
from warpsmith.reference.quantize import dequantize_fp8 as dequantize_reference
from warpsmith.reference.quantize import finite_amax
from warpsmith.reference.quantize import quantize_fp8 as quantize_reference
from warpsmith.testing import BadInput, Case, OpSpec, op_tests

from tests.ops.public_calls import but, raw_ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
raw = torch.ops.warpsmith


def as_bytes(t):
    return t.view(torch.uint8) if t is not None and t.itemsize == 1 else t


def bytes_of(quantize):
    """The bytes and scales of a call; counts are tested apart, since a batch adds them up."""
    return lambda **arguments: tuple(map(as_bytes, quantize(**arguments)[:4]))


def scale_shape(case):
    """Of given scales."""
    if case.options.get("scaling") == "tensor":
        return ()
    return (*case.shape[:-1], 1) if case.options.get("transpose", "no") == "no" else (case.shape[-1], 1)


def inputs(case, rng):
    x = rng.normal(case.shape) * rng.normal((*case.shape[:-1], 1)).exp()
    o = case.options
    scale = rng.uniform(scale_shape(case), 0.003, 0.02) * o["given"] if "given" in o else None
    return {
        "x": x,
        "scaling": o.get("scaling", "row"),
        "dtype": o.get("to", E4M3),
        "scale": scale,
        "transpose": o.get("transpose", "no"),
        "power_of_two": o.get("power_of_two", True),
    }


def case(shape, dtype=BF16, **options):
    return Case(shape, dtype, options=options, dtypes={"scale": FP32} if "given" in options and dtype != FP32 else {})


KINDS = [{"scaling": s, "transpose": t} for s in ("row", "tensor", "block", "block2d") for t in ("no", "also", "only")][
    1:
]
GIVEN = [
    {"scaling": "row"}, {"scaling": "row", "transpose": "only"}, {"scaling": "tensor"},
    {"scaling": "tensor", "transpose": "also"}, {"scaling": "tensor", "transpose": "only"},
]  # fmt: skip
WIDTHS = (1, 8, 127, 128, 256, 1000, 1024, 1032, 4096, 8200)
# TransformerEngine's: tests/cpp/operator/test_cast_transpose.cu, test_cast_float8blockwise.cu, the small ones.
PUBLISHED = ((120, 130), (8, 8), (1, 3221), (233, 1), (148, 67), (1, 16), (65, 96), (99, 51), (1024, 1), (16, 51))
COPIED = [  # whose bytes are counted
    *(Case((3, width), dtype) for width in (64, 1024, 4096) for dtype in (BF16, FP32)),
    Case((1, 16_384), FP32),  # too long for registers
    *(case(shape, dtype, **kind) for shape in ((144, 104), (34, 264)) for dtype in (BF16, FP32) for kind in KINDS),
    *(case((132, 104), FP32, given=50, **kind) for kind in GIVEN),  # scales so large that nothing is out of range
]
CASES = [
    *(Case((5, width), dtype) for width in WIDTHS for dtype in (BF16, FP32)),
    *(Case((5, width), FP16) for width in (64, 1000)),
    Case((2, 3, 64), BF16),
    Case((64,), BF16),
    Case((700, 4), FP32),
    *COPIED,
    *(case((131, 37), dtype, **kind) for dtype in (BF16, FP16, FP32) for kind in KINDS),
    *(case((2, 70, 40), dtype, power_of_two=False, to=E5M2, **kind) for dtype in (BF16, FP32) for kind in KINDS),
    *(case((33, 48), dtype, given=1, to=to, **kind) for dtype, to in ((FP16, E4M3), (FP32, E5M2)) for kind in GIVEN),
    *(case(shape, BF16, scaling=s, transpose="also") for shape in PUBLISHED for s in ("tensor", "block")),
]


def floor_bytes(case):
    """x, and each kind of bytes; scales of rows and blocks, which have the dimensions of x."""
    n, (rows, columns), o = torch.Size(case.shape).numel(), case.shape, case.options
    kind = o.get("scaling", "row")
    kinds = {"no": "d", "also": "dt", "only": "t"}[o.get("transpose", "no")]
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    scales = {
        "row": {"d": rows, "t": columns},
        "block": {"d": rows * across, "t": columns * down},
        "block2d": {"d": down * across, "t": down * across},
    }
    made = 0 if o.get("given") or kind == "tensor" else sum(scales[kind][k] for k in kinds)
    beside = 4 * columns if o.get("given") and o.get("transpose") == "only" and kind == "row" else 0
    given = 4 * rows if o.get("given") and kind == "row" and not beside else 0
    return {"forward": n * case.dtype.itemsize + n * len(kinds) + 4 * made + beside + given}


def bytes_beside(case, inputs):
    """What no block can scale alone reads x twice, and the second time maxima (raised by atomics, which do not count);
    the scale of a tensor is written. Known scales and maxima are read by every thread, of rows and columns in squares
    once a square; a given scale is not written. A row too long for registers is read twice."""
    (rows, columns), o, unit = case.shape, case.options, case.dtype.itemsize
    kind, how, given = o.get("scaling", "row"), o.get("transpose", "no"), "given" in o
    dtype = str(case.dtype).removeprefix("torch.")
    plan = warpsmith.plan(
        "quantize_fp8", rows=rows, columns=columns, dtype=dtype, scaling=kind, transpose=how, given=given
    )
    x, vector = rows * columns * unit, 16 // unit
    read, written = 0, 0
    if plan["amax_pass"]:
        read += x
        written += 4 * (kind == "tensor")
    elif plan["kernel"] == "segments" and plan["segment"] > 4 * 512 * vector:
        read += x
    known = given or plan["amax_pass"]
    if given and kind == "row":  # counted as results, which are read
        results = 4 * (rows if how == "no" else columns)
        written -= results
    if plan["amax_pass"] and plan["kernel"] == "segments":
        read += 4 * plan["blocks"] * plan["threads"]
    elif known and plan["kernel"] == "segments":
        segments = rows if kind == "row" else -(-rows * columns // plan["segment"])
        read += 4 * segments * plan["threads_a_segment"]
    elif known:
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        if kind == "tensor":
            read += 4 * plan["blocks"] * plan["threads"]
        else:
            read += 4 * ((how != "only") * rows * across + (how != "no") * columns * down)
    return {"forward": (read, written)}


def arguments(g):
    return {k: g[k] for k in ("x", "scaling", "dtype", "scale", "transpose", "power_of_two")}


QUANTIZE = OpSpec(
    name="quantize_fp8",
    op=bytes_of(warpsmith.quantize_fp8),
    reference=bytes_of(quantize_reference),
    inputs=inputs,
    cases=CASES,
    outputs=("data", "scale", "transposed", "transposed_scale"),
    laid_out=("x",),
    batched=("x",),
    edge_inputs=("x",),
    float64_devices=(),
    opcheck={**raw_ops("quantize_fp8"), raw.fp8_amax.default: lambda g: (g["x"], True)},
    traced="warpsmith::quantize_fp8",
    floor_bytes=floor_bytes,
    bytes_beside=bytes_beside,
    bytes_cases=COPIED,
    bad_inputs=[
        BadInput("dtype", but(x=lambda g: g["x"].double()), "x: expected float32, float16 or bfloat16, got float64"),
        BadInput(
            "scale_shape", but(scale=lambda g: g["x"].new_ones(3, dtype=FP32)), r"scale: expected shape \(.*\), got"
        ),
        BadInput("scale_dtype", but(scale=lambda g: g["x"][..., :1].double()), "scale: expected float32, got float64"),
        BadInput(
            "scale_computed",
            but(scaling=lambda g: "block", scale=lambda g: g["x"][..., :1].float()),
            "scale: expected None: these scales are computed, got a tensor",
        ),
        BadInput(
            "scale_device",
            but(scale=lambda g: torch.ones(*g["x"].shape[:-1], 1, device="meta")),
            "scale: expected a(.*) tensor",
            fake=False,
        ),
    ],
)
TestQuantizeFp8 = op_tests(QUANTIZE)


# ---- what the raw ops have beside: column sums in the pass of the bytes, and maxima alone


def with_sums(x, scaling):
    number = ("row", "tensor", "block", "block2d").index(scaling)
    data, _, transposed, _, _, sums = raw.quantize_fp8(x, None, number, 1, E4M3, True, True)
    return as_bytes(data), as_bytes(transposed), sums


def plain_sums(x, scaling):
    data, _, transposed, _, _ = quantize_reference(x, scaling, transpose="also")
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return as_bytes(data), as_bytes(transposed), (rows if x.dtype == torch.float64 else rows.float()).sum(0)


TestColumnSums = op_tests(
    OpSpec(
        name="column_sums_of_quantize_fp8",
        op=with_sums,
        reference=plain_sums,
        inputs=lambda case, rng: {"x": rng.normal(case.shape), "scaling": case.options.get("scaling", "tensor")},
        cases=[
            *(Case(shape, dtype) for shape in ((131, 37), (7, 264), (300, 8)) for dtype in (BF16, FP16, FP32)),
            *(Case((2, 70, 40), BF16, options={"scaling": s}) for s in ("row", "block", "block2d")),
        ],
        outputs=("data", "transposed", "sums"),
        laid_out=("x",),
        edge_inputs=(),
        float64_devices=(),
        random_cases=100,
    )
)


def amax_reference(x, by_row):
    return finite_amax(x, -1) if by_row else finite_amax(x, tuple(range(x.dim()))).reshape(())


TestFp8Amax = op_tests(
    OpSpec(
        name="fp8_amax",
        op=lambda x, by_row: raw.fp8_amax(x, by_row),
        reference=amax_reference,
        inputs=lambda case, rng: {"x": rng.normal(case.shape), "by_row": case.options.get("by_row", False)},
        cases=[
            *(Case(shape, dtype) for shape in ((131, 37), (7, 264), (2, 300, 8)) for dtype in (BF16, FP16, FP32)),
            *(Case((2, 70, 140), dtype, options={"by_row": True}) for dtype in (BF16, FP32)),
        ],
        laid_out=("x",),
        edge_inputs=(),
        zero_sizes=False,  # torch has no maximum of nothing: test_quantize_values.py
        float64_devices=(),
        traced="warpsmith::fp8_amax",
        random_cases=100,
    )
)


# ---- back


def dequantized(dequantize):
    def call(data, scale, dtype):
        if dequantize is dequantize_reference:
            return dequantize(data.view(E4M3), scale, dtype)
        return dequantize(warpsmith.Fp8Tensor(data.view(E4M3), scale, None, None, None), dtype)

    return call


def dequantize_inputs(case, rng):
    kind, shape = case.options.get("scaling", "row"), case.shape
    rows, across = torch.Size(shape[:-1]).numel(), -(-shape[-1] // BLOCK)
    scales = {
        "row": (*shape[:-1], 1),
        "tensor": (),
        "block": (*shape[:-1], across),
        "block2d": (-(-rows // BLOCK), across),
    }
    return {
        "data": rng.integers(shape, 0, 256).to(torch.uint8),
        "scale": rng.uniform(scales[kind], 0.01, 2.0),
        "dtype": case.options.get("to", FP32),
    }


# Without torch's opcheck, which multiplies its inputs: torch has no product of 8-bit floats.
DEQUANTIZE = OpSpec(
    name="dequantize_fp8",
    op=dequantized(warpsmith.dequantize_fp8),
    reference=dequantized(dequantize_reference),
    oracle=lambda case, data, scale, dtype: dequantized(dequantize_reference)(data, scale.float(), dtype).double(),
    inputs=dequantize_inputs,
    cases=[
        *(Case((5, width)) for width in (1, 64, 127, 1000, 4096)),
        *(
            Case((140, 300), options={"scaling": s, "to": to})
            for s in ("row", "tensor", "block", "block2d")
            for to in (FP32, BF16, FP16)
        ),
        Case((2, 3, 64)),
        Case((64,)),
    ],
    laid_out=("data",),
    batched=("data", "scale"),
    edge_inputs=(),
    float64_devices=(),
    traced="warpsmith::dequantize_fp8",
    floor_bytes=lambda case: {"forward": 5 * torch.Size(case.shape).numel()},
    bytes_beside=lambda case, inputs: {"forward": (4 * case.shape[0] * -(-case.shape[1] // 4), 0)},
    bytes_cases=[Case((5, 64)), Case((5, 1000)), Case((5, 4096))],
    bad_inputs=[
        BadInput("scale_shape", but(scale=lambda g: g["scale"].new_ones(3)), r"scale: expected shape \(\), of rows"),
        BadInput("scale_dtype", but(scale=lambda g: g["scale"].half()), "scale: expected float32, got float16"),
    ],
)
TestDequantizeFp8 = op_tests(DEQUANTIZE)
