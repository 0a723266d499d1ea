"""Ops that treat each row by itself, on DTensors: each rank computes its rows, with the bits of the whole tensor."""

import functools
import warnings

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import run_ranks

from tests.ops.row_ops import RowOp, row_ops
from tools import families


def in_place(op, *tensors):
    return op(*(t * 1 for t in tensors), inplace_backward=True)


# Of two rows some rank holds one, and of one some rank none.
ROW_OPS = row_ops(p=0.5, training=False)
OPS = {
    **ROW_OPS,
    "rms_norm, offset": RowOp(lambda x, w: warpsmith.rms_norm(x, w, 1e-6, 1.0), 1, 1),
    "dropout_add, none": RowOp(lambda x, r: warpsmith.dropout_add(x, r, 0.0), 2, 0),
    **{
        f"{row.name}, in place": RowOp(functools.partial(in_place, getattr(warpsmith, row.name)), 2, 0)
        for row in families.rows("GATED")
    },
}
SHAPE = (3, 2, 8)


def inputs_of(name):
    _, rows, parameters = OPS[name]
    g = torch.Generator().manual_seed(len(name))
    return [torch.randn(SHAPE if i < rows else SHAPE[-1:], generator=g) for i in range(rows + parameters)]


def placements():
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"first": Shard(0), "second": Shard(1), "columns": Shard(2), "whole": Replicate(), "sums": Partial()}


def run(name, tensors):
    """(outputs, gradients of the sum of their squares) of an op."""
    leaves = [t.requires_grad_() for t in tensors]
    found = OPS[name][0](*leaves)
    found = found if isinstance(found, tuple) else (found,)
    sum(y.square().sum() for y in found).backward()
    return [y.detach() for y in found], [t.grad for t in leaves]


def compare(mesh, name, placement):
    """Problems of one op beside the same op on whole tensors."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    whole = inputs_of(name)
    rows = OPS[name][1]

    def spread(i, t):
        if i >= rows:
            return distribute_tensor(t, mesh, [Replicate()])
        if placement.is_partial():
            return DTensor.from_local(t / 2, mesh, [placement], run_check=False)
        return distribute_tensor(t, mesh, [placement])

    shared = [spread(i, t) for i, t in enumerate(whole)]
    outputs, gradients = run(name, [t.detach() for t in shared])
    expected, expected_gradients = run(name, whole)
    kept = placement if placement.is_shard() and placement.dim < 2 else Replicate()
    problems = []
    for i, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        if got.placements != (kept,) or got.shape != want.shape or got.stride() != want.stride():
            problems.append(f"{name}: output {i}: {got.placements}, {got.shape}, {got.stride()}")
        if not torch.equal(got.full_tensor(), want):
            problems.append(f"{name}: output {i} differs")
    for i, (got, want) in enumerate(zip(gradients, expected_gradients, strict=True)):
        got = got.full_tensor()
        right = torch.equal(got, want) if i < rows else torch.allclose(got, want, rtol=1e-5, atol=1e-5)
        if not right:
            problems.append(f"{name}: gradient {i}: {(got - want).abs().max():g}")
    return problems


def all_ops(mesh):
    return {(name, where): compare(mesh, name, placement) for name in OPS for where, placement in placements().items()}


def sends_nothing(mesh):
    """Collectives of a forward and a backward of rows that are shared out, and the placements of the gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    x = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(SHAPE[-1:]), mesh, [Replicate()]).requires_grad_()
    dy = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)])
    with CommDebugMode() as sent:
        warpsmith.rms_norm(x, w).backward(dy)
    return sent.get_total_counts(), str(x.grad.placements), str(w.grad.placements)


def compiled(mesh):
    """Whether the module in one graph gives the bits and the placements that it gives eagerly."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(1)])
    norm = warpsmith.nn.RMSNorm(SHAPE[-1])
    norm.weight = nn.Parameter(distribute_tensor(torch.rand(SHAPE[-1:]), mesh, [Replicate()]))
    found = []
    for module in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        norm.weight.grad = None
        y = module(x)
        y.square().sum().backward()
        found.append((y.placements, norm.weight.grad.placements, y.full_tensor(), norm.weight.grad.full_tensor()))
    (eager, traced) = found
    return eager[:2] == traced[:2] and all(map(torch.equal, eager[2:], traced[2:]))


def sequence_parallel(mesh):
    """Largest differences of a model under tensor parallelism with our norms, and with torch's, from the whole one."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def model(norms):
        torch.manual_seed(3)
        return nn.ModuleDict(
            {
                "norm": norms.RMSNorm(8, eps=1e-6),
                "up": nn.Linear(8, 12),
                "down": nn.Linear(12, 8),
                "last": norms.LayerNorm(8),
            }
        )

    def loss_of(m, x):
        return m["last"](m["down"](torch.relu(m["up"](m["norm"](x))))).square().mean()

    found = []
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    for norms in (warpsmith.nn, nn):
        plain, parallel = model(norms), model(norms)
        plan = {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "last": SequenceParallel(),
        }
        parallelize_module(parallel, mesh, plan)
        parallelize_module(parallel["up"], mesh, ColwiseParallel())
        expected, got = loss_of(plain, x), loss_of(parallel, x.chunk(mesh.size(), 1)[mesh.get_local_rank()])
        expected.backward()
        got.backward()
        differences = [float((got.full_tensor() - expected).abs())]
        for (name, p), q in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None, name
            differences.append(float((p.grad.full_tensor() - q.grad).abs().max()))
        found.append(max(differences))
    return found


def refusals(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)])
    found = []
    for weight in (torch.ones(8), distribute_tensor(torch.ones(7), mesh, [Replicate()])):
        with pytest.raises(ValueError, match="rms_norm") as error:
            warpsmith.rms_norm(x, weight)
        found.append(str(error.value))
    plain = torch.randn(6, 8)
    head = distribute_tensor(torch.randn(5, 8), mesh, [Shard(0)])
    labels = torch.zeros(6, dtype=torch.int64)
    calls = (
        lambda: warpsmith.linear_cross_entropy(plain.clone().requires_grad_(), head, labels),
        lambda: warpsmith.linear_log_prob(plain, head, labels),
        lambda: warpsmith.rms_norm(plain, x[0, 0]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"weight: expected a plain tensor, .* got a DTensor with placements \("):
            call()
    for dropping in (warpsmith.dropout_add, lambda x, r, p: warpsmith.dropout_add_rms_norm(x, r, None, p)):
        with pytest.raises(
            ValueError, match="x: expected no DTensor where elements are dropped, got one on DeviceMesh"
        ):
            dropping(x, x, 0.5)
    return found


def all_parts(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,))
    return tuple(part(mesh) for part in (all_ops, sends_nothing, compiled, sequence_parallel, refusals))


@pytest.fixture(scope="module")
def results():
    return run_ranks(all_parts, 2, timeout_s=120)


@pytest.mark.parametrize("where", ["first", "second", "columns", "whole", "sums"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_on_dtensors_is_the_op_on_whole_tensors(results, name, where):
    assert [problems[name, where] for problems, *_ in results] == [[], []]


def test_rows_that_are_shared_out_cost_no_communication(results):
    for _, (sent, x, weight), *_ in results:
        assert sent == 0
        assert "Shard(dim=0)" in x
        assert "Partial" in weight


def test_compiled_in_one_graph(results):
    assert [same for *_, same, _, _ in results] == [True, True]


def test_norms_under_sequence_parallelism(results):
    for *_, (ours, theirs), _ in results:
        assert ours < 1e-5
        assert theirs < 1e-5


def test_wrong_dtensors_are_refused_on_all_ranks(results):
    for *_, (plain, length) in results:
        assert "weight: expected a DTensor on the mesh of x, DeviceMesh" in plain
        assert "got a tensor of this rank alone" in plain
        assert "weight: expected shape (8), got (7)" in length
