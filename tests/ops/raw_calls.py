"""Valid calls of every raw op, recorded while the package makes them: from the specs of this folder, the options that
specs leave out, and a step of every optimizer."""

import functools
from collections import defaultdict

import torch
import warpsmith
from torch.utils._python_dispatch import TorchDispatchMode
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.run import run

from tests.ops.public_calls import arguments_of
from tests.ops.test_documented_bytes import specs
from tools import families

SCHEMAS = {
    schema.name.removeprefix("warpsmith::"): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("warpsmith::")
}
SMALL = 5000  # elements of a case
_alive = []  # whose addresses are in tables of recorded calls


def copied(value):
    """New memory with the same strides for each tensor, but for tables, which hold addresses."""
    if isinstance(value, (list, tuple)):
        return [copied(v) for v in value]
    if not isinstance(value, torch.Tensor) or value.dtype == torch.int64 and value.dim() == 1 and value.numel() > 2:
        return value
    if 0 in value.stride() or value.is_meta:
        return value.detach()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


class Recorder(TorchDispatchMode):
    """Keeps the positional arguments of every call of an op of the library, as they were before it."""

    def __init__(self):
        super().__init__()
        self.calls = defaultdict(list)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "warpsmith":
            defaults = [a.default_value for a in op._schema.arguments[len(args) :]]
            self.calls[op._schema.name.split("::")[1]].append(copied((*args, *defaults)))
        return op(*args, **(kwargs or {}))


def _specs():
    for spec in specs().values():
        for case in spec.cases:
            if 0 not in case.shape and torch.Size(case.shape).numel() < SMALL:
                run(spec.op, spec, case, make_inputs(spec, case))


def _in_place():
    """What writes over its arguments, or takes memory for a gradient."""
    for row in families.rows("GATED"):
        given = {n: t.requires_grad_() for n, t in arguments_of(row.name).items()}
        getattr(warpsmith, row.name)(**{n: t * 1 for n, t in given.items()}, inplace_backward=True).sum().backward()
    given = arguments_of("rope")
    warpsmith.rope(**given, inplace=True)
    given = arguments_of("cross_entropy")
    for reduction in ("mean", "none"):
        logits = given["logits"].clone().requires_grad_() * 1
        loss = warpsmith.cross_entropy(logits, given["target"], reduction=reduction, inplace_backward=True)
        loss.sum().backward()
    given = {n: t.float().requires_grad_() for n, t in arguments_of("linear").items() if n != "activation"}
    for activation in (None, "relu"):
        main_grad = torch.zeros(given["weight"].shape)
        warpsmith.linear(**given, activation=activation, main_grad=main_grad).sum().backward()
    given = {n: t.float().requires_grad_() for n, t in arguments_of("gated_linear").items()}
    main_grads = tuple(torch.zeros(given[n].shape) for n in ("gate_weight", "up_weight"))
    warpsmith.gated_linear(**given, main_grads=main_grads).sum().backward()
    given = arguments_of("linear_cross_entropy")
    for reduction in ("mean", "none"):
        hidden, weight = (given[n].float().requires_grad_() for n in ("hidden", "weight"))
        more = {"main_grad": torch.zeros_like(weight), "reduction": reduction}
        loss = warpsmith.linear_cross_entropy(hidden, weight, given["target"], **more)
        (loss * 2).sum().backward()


def _optimizers():
    classes = [c for n in warpsmith.optim.__all__ if isinstance(c := getattr(warpsmith.optim, n), type)]
    for kind in classes:
        if not issubclass(kind, torch.optim.Optimizer):
            continue
        params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
        more = {"others": "adamw"} if kind is warpsmith.optim.Muon else {}
        optimizer, ema = kind(params, lr=0.1, **more), warpsmith.optim.EMA(params, 0.5)
        if not more:
            optimizer.fuse(ema=ema, zero_grads=kind is not warpsmith.optim.LAMB)
        _alive.extend((optimizer, ema))
        guard = warpsmith.amp.GradScaler("cpu")
        for clips in (False, True):
            for p in params:
                p.grad = torch.randn(p.shape)
                _alive.append(p.grad)
            guard.scale(torch.zeros(()))
            guard.unscale_(optimizer)
            if clips:
                guard.clip_(optimizer, 1.0)
            guard.step(optimizer)
            guard.update()
        warpsmith.optim.EMA(params, 0.5).update()
        warpsmith.optim.clip_grad_norm_(params, 1.0)
    warpsmith.adamw(**arguments_of("adamw"))


def _below_the_package():
    """Ops that the package calls among several ranks, on a GPU, or in compiled code alone."""
    raw = torch.ops.warpsmith
    grads, scale, found = [torch.randn(5, 3), torch.randn(7)], torch.ones(()), torch.zeros(())
    raw.grad_norm_chunk_elems(grads[0], 22)
    raw.grad_norm_finish(raw.grad_norm_partials(grads, 2.0, 22, scale), 2.0, False)
    _alive.extend(grads)
    raw.grad_check_table(raw.grad_table(grads), 2, False, 2.0, scale, 1.0, found, torch.zeros(2, dtype=torch.int64))
    raw.rank_mean(torch.randn(4, 6), torch.randn(6), 1, [torch.zeros(6), torch.zeros(6)])
    raw.linear_cross_entropy_scaled(torch.randn(5, 3), torch.tensor(2.0), torch.tensor(3.0), torch.bfloat16)
    x, dy, pair = torch.randn(4, 3, 2), torch.randn(4, 3, 2), torch.rand(2, 3)
    of_ranks = torch.stack([raw.batch_norm_statistics(t) for t in (x, x + 1)])
    for relu in (False, True):
        found = raw.batch_norm_forward_of_ranks(x, dy, *pair, torch.rand(3), torch.rand(3), of_ranks, 0.1, 1e-5, relu)
        given = dy, x, *pair, *found[1:]
        sums = raw.batch_norm_sums(*given, relu, True, True)[0]
        raw.batch_norm_backward_of_ranks(*given, torch.stack([sums, sums]), of_ranks, relu, True, False)
    weights, biases = [torch.randn(n, 3) for n in (4, 2)], [torch.randn(4), torch.randn(2)]
    raw.linear_siblings_input_gradient(raw.linear_siblings(torch.randn(5, 3), weights, biases), weights)
    for scaling in range(3):
        raw.scaled_linear_cast(torch.randn(32, 16), scaling, True, True)
    raw.fp8_scale(raw.fp8_amax(torch.randn(5, 3), True), torch.float8_e5m2, True)
    ones, weight = torch.ones(5, 3), torch.tensor([1.0, 0.5, 0.25])  # whose y has the same bytes in every dtype
    raw.rms_norm_fp8(ones, weight, 1e-5, 0.0)
    raw.add_rms_norm_fp8(ones, ones, weight, 1e-5, 0.0)
    raw.layer_norm_fp8(ones, weight, weight, 1e-5)
    raw.add_layer_norm_fp8(ones, ones, weight, weight, 1e-5)
    raw.swiglu_fp8(64 * ones, ones * weight, False)
    for row in families.rows("GATED"):
        tanh = (False,) if "tanh" in row.arguments else ()
        getattr(raw, f"{row.name}_backward_with_output_")(*(torch.randn(5, 8) for _ in range(3)), *tanh)


@functools.cache
def recorded():
    """{op: its calls}. What only traced code calls has the arguments of its eager form."""
    torch.manual_seed(0)
    with Recorder() as recorder:
        _specs()
        _in_place()
        _optimizers()
        _below_the_package()
    calls = dict(recorder.calls)
    for name, schema in SCHEMAS.items():
        forward = name.removesuffix("_inference") + "_forward"
        if name not in calls and forward in calls and same_arguments(schema, SCHEMAS[forward]):
            calls[name] = calls[forward]
    calls["linear_cross_entropy_rows"] = calls["linear_cross_entropy_forward"]
    calls["cross_entropy"] = [[*call, False] for call in calls["cross_entropy_forward"]]
    return calls


def same_arguments(a, b):
    return [(x.name, str(x.type)) for x in a.arguments] == [(x.name, str(x.type)) for x in b.arguments]


def few_calls(name, most=4):
    """Calls of an op in which every optional argument that is ever given is given once."""
    left = {i for call in recorded()[name] for i, v in enumerate(call) if v is not None}
    found = []
    while left and len(found) < most:
        best = max(recorded()[name], key=lambda call: (sum(call[i] is not None for i in left), _least_size(call)))
        found.append(best)
        left -= {i for i, v in enumerate(best) if v is not None}
    return found


def _least_size(call):
    """At most 2: a size of 1 fits where another would not."""
    return min([2, *(size for t in call if isinstance(t, torch.Tensor) for size in t.shape)])
