"""rms_norm under the law, and what only it has: default eps, mixed weights, choosers, the module."""

from __future__ import annotations

import pytest
import torch
import warpsmith
from warpsmith.reference.rms_norm import rms_norm as reference
from warpsmith.testing import BadInput, Case, OpSpec, measure, op_tests

from tests.ops.norm_cases import BF16, FP16, FP32, FP64, but, cases_without_residual


def inputs(case, rng):
    columns = case.shape[-1]
    x = rng.normal(case.shape)
    weight = rng.normal((columns,), mean=1.0, std=0.3) if case.options.get("weight", True) else None
    return {"x": x, "weight": weight, "eps": 1e-5, "weight_offset": case.options.get("weight_offset", 0.0)}


def torch_rms_norm(x, weight, eps, weight_offset):
    """Plain PyTorch as users have it: the native op, in the dtypes that it takes."""
    if weight is not None and (weight.dtype != x.dtype or weight_offset):
        return reference(x, weight, eps, weight_offset)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def arguments(good):
    return good["x"], good["weight"], good["eps"], good["weight_offset"]


CASES = cases_without_residual(
    {"weight": FP32},
    *(Case((6, 768), dtype, options={"weight_offset": 1.0}) for dtype in (BF16, FP32)),
    *(Case((6, 768), dtype, options={"weight": False}) for dtype in (BF16, FP32, FP64)),
)

SPEC = OpSpec(
    name="rms_norm",
    op=warpsmith.rms_norm,
    reference=reference,
    baseline=torch_rms_norm,
    inputs=inputs,
    cases=CASES,
    differentiable=("x", "weight"),
    outputs=("y",),
    laid_out=("x",),
    batched=("x",),
    gradcheck_cases=[Case((3, 5), FP64), Case((2, 4), FP64, options={"weight": False})],
    double_backward=True,
    func_transforms=True,
    traced="warpsmith::rms_norm",
    opcheck={
        torch.ops.warpsmith.rms_norm.default: arguments,
        torch.ops.warpsmith.rms_norm_forward.default: arguments,
        torch.ops.warpsmith.rms_norm_inference.default: arguments,
        torch.ops.warpsmith.rms_norm_backward.default: lambda good: (
            torch.ones_like(good["x"]),
            good["x"],
            good["weight"],
            torch.ones(good["x"].shape[:-1].numel(), device=good["x"].device),
            good["weight_offset"],
            True,
            True,
        ),
    },
    bad_inputs=[
        BadInput("integers", but(x=lambda g: g["x"].int()), r"x: expected float32.*got int32"),
        BadInput("none", but(x=lambda g: None), "x: expected a tensor, got None", fake=False),
        BadInput("scalar", but(x=lambda g: g["x"].sum()), "x: expected at least one dimension"),
        BadInput("short weight", but(weight=lambda g: g["weight"][:-1]), r"weight: expected shape \(\d+\), got"),
        BadInput("matrix weight", but(weight=lambda g: g["weight"][None]), r"weight: expected shape \(\d+\), got"),
        BadInput("weight dtype", but(weight=lambda g: g["weight"].half()),
                 "weight: expected bfloat16 or float32, got float16"),
        BadInput("meta weight", but(weight=lambda g: g["weight"].to("meta")), "weight: expected a", fake=False),
        BadInput("negative eps", but(eps=lambda g: -1.0), r"eps: expected a number >= 0, got -1", fake=False),
        BadInput("nan eps", but(eps=lambda g: float("nan")), r"eps: expected a number >= 0, got nan", fake=False),
        BadInput("float64", but(x=lambda g: g["x"].double(), weight=lambda g: g["weight"].double()),
                 "x: expected float32, float16 or bfloat16 on CUDA, got float64", fake=False, devices=("cuda",)),
        BadInput("string", but(x=lambda g: "x"), "", error=RuntimeError, fake=False),
    ],
    floor_bytes=lambda case: {
        "forward": 2 * case.dtype.itemsize * torch.Size(case.shape).numel(),
        "backward": 3 * case.dtype.itemsize * torch.Size(case.shape).numel(),
    },
)  # fmt: skip

TestRmsNorm = op_tests(SPEC)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_default_eps_is_that_of_torch(dtype):
    x = torch.full((2, 64), 1e-4, dtype=dtype)  # small enough for eps to decide the result
    torch.testing.assert_close(warpsmith.rms_norm(x), torch.nn.functional.rms_norm(x, (64,)))


@pytest.mark.filterwarnings("ignore")  # torch's about quantized tensors and compressed rows
@pytest.mark.parametrize(
    ("backend", "change"),
    [
        ("SparseCPU", torch.Tensor.to_sparse),
        ("SparseCsrCPU", torch.Tensor.to_sparse_csr),
        ("QuantizedCPU", lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8)),
    ],
)
def test_what_the_dispatcher_refuses_keeps_torchs_error(backend, change):
    with pytest.raises(NotImplementedError, match=f"'{backend}' backend"):
        warpsmith.rms_norm(change(torch.ones(2, 8)))


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    x, weight, dy = torch.randn(4096, 200), torch.randn(200), torch.randn(4096, 200)

    def run():
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = warpsmith.rms_norm(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(2)
        two = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", [1024, 4096, 65536])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_constant_rows_obey_the_error_law(op, columns, device):
    """The rounding errors of their sums all have one sign."""
    g = torch.Generator().manual_seed(columns)
    x = torch.randn(3, 1, generator=g).expand(3, columns).contiguous().to(device)
    weight, dy = torch.randn(columns, generator=g).to(device), torch.randn(3, columns, generator=g).to(device)

    def norm(x, weight):
        if op == "rms_norm":
            return warpsmith.rms_norm(x, weight, 1e-5)
        return warpsmith.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[0]

    def results(norm, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors[:2]]
        y = norm(*leaves)
        return {"y": y, "x": torch.autograd.grad(y, leaves, tensors[2])[0]}

    def definition(x, weight):
        return reference(x, weight, 1e-5)

    ours, plain = results(norm, x, weight, dy), results(definition, x, weight, dy)
    exact = results(definition, *(t.cpu().double() for t in (x, weight, dy)))
    errors = [measure(name, ours[name], exact[name], plain[name]) for name in exact]
    assert all(e.ok for e in errors), "; ".join(map(str, errors))


def test_rows_at_one_stride_are_not_copied():
    x = torch.randn(6, 5, 96)[..., 8:72]
    x.requires_grad_()
    torch.testing.assert_close(warpsmith.rms_norm(x), reference(x))
    assert warpsmith.rms_norm(x).is_contiguous()


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
    plan = warpsmith.plan("rms_norm", **problem, dtype=BF16)
    assert (plan["forward"]["kernel"], plan["backward"]["kernel"]) == (forward, backward)
    assert plan["forward"]["why"]
    assert plan["partial_rows"] >= plan["backward"]["blocks"] // plan["backward"]["cluster"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [*range(1, 300), *(2**k + d for k in range(9, 19) for d in (-8, 0, 8))])
def test_every_plan_covers_its_row_and_fits_the_chip(columns, dtype):
    plan = warpsmith.plan("rms_norm", rows=1000, columns=columns, dtype=dtype)
    for c in (plan["forward"], plan["backward"]):
        assert c["threads"] % 32 == 0
        assert 32 <= c["threads"] <= 1024
        assert c["threads"] % c["threads_a_row"] == 0 or c["threads_a_row"] == c["threads"] * c["cluster"]
        assert c["shared_bytes"] <= 227 * 1024 - 512
        assert 1 <= c["blocks"] <= 1000 * c.get("cluster", 1)
        if c["kernel"] != "looped":
            assert c["threads_a_row"] * c["vectors_a_thread"] * c["vector_elems"] >= columns


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"columns": 8}, "plan: rms_norm: rows: expected a value, got none"),
        ({"rows": 0, "columns": 8}, "plan: rms_norm: rows: expected an integer >= 1, got 0"),
        ({"rows": 2**70, "columns": 8}, f"plan: rms_norm: rows: expected an integer <= {2**40}, got {2**70}"),
        ({"rows": -(2**70), "columns": 8}, "plan: rms_norm: rows: expected an integer >= 1, got -"),
        ({"rows": 2**63 - 1, "columns": 8}, f"plan: rms_norm: rows: expected an integer <= {2**40}, got"),
        ({"rows": 1, "columns": "8"}, "plan: rms_norm: columns: expected an integer, got '8'"),
        ({"rows": 1, "columns": 8, "dtype": "int8"}, "plan: rms_norm: dtype: expected float32, float16 or bfloat16"),
        ({"rows": 1, "columns": 8, "cols": 8}, "plan: rms_norm: expected arguments among .*, got cols"),
    ],
)
def test_bad_plans_are_named(problem, message):
    with pytest.raises(ValueError, match=message):
        warpsmith.plan("rms_norm", **problem)


def test_an_unknown_op_has_no_plan():
    with pytest.raises(ValueError, match="plan: op: expected one of .*rms_norm.*, got nothing"):
        warpsmith.plan("nothing")
