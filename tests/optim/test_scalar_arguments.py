"""Scalars of a wrong kind or out of range, for each public function and constructor, read off its signature."""

import inspect
import itertools
import math
import re
from contextlib import nullcontext

import pytest
import torch
import warpsmith
from warpsmith import amp, distributed, optim
from warpsmith.distributed import plan

HUGE = 2**2000
OF_KIND = {
    "float": ("0.1", True, [0.5], torch.ones(2), math.nan, HUGE, {}, -1.0),
    "int": ("1", True, 1.5, [1], torch.ones(2), math.nan, HUGE, {}, -1),
    "bool": ("False", 2, 1.5, [True], torch.tensor(True), math.nan, {}),
    "str": (3, True, ["none"], torch.ones(2), math.nan, "nonsense"),
}
NOT_CALLED = {
    **dict.fromkeys((amp.Overflow, plan.Prediction, plan.Timed), "a record that the package makes"),
    **dict.fromkeys((amp.Fp8Layers, amp.Fp8Report), "fp8 and fp8_report make it"),
    distributed.Context: "init makes it",
    distributed.Watch: "watch makes it",
}
TAKEN = {  # (name, parameter): values that mean something
    ("SGD", "dampening"): (-1.0,),
    ("ResumableSampler", "seed"): (-1,),
    ("init", "seed"): (-1, HUGE),  # it is hashed
    **{(name, "dim"): (-1,) for name in ("shard_sequence", "unshard_sequence")},
    ("context_parallel_attention", "softmax_scale"): (-1.0,),
    **{(f"vocab_parallel_{name}", "ignore_index"): (-1,) for name in ("cross_entropy", "linear_cross_entropy")},
    ("Gpu", "name"): ("nonsense",),
    ("Cluster", "source"): ("nonsense",),
}
OTHERS_SAY = {  # (name, parameter): torch refuses these, with its own words
    ("GradScaler", "growth_factor"): (-1.0,),
    ("GradScaler", "device"): ("nonsense",),
    ("StepGuard", "device"): ("nonsense",),
    ("reduction_plan", "device"): OF_KIND["str"],
    ("calibrate", "device"): OF_KIND["str"],
}
ZERO = {  # (name, parameter) whose value 0 has no meaning, so that it is refused
    **{("Layout", name): 0 for name in ("data", "tensor", "pipeline", "micro_batch", "micro_batches", "interleave")},
    **{("Model", name): 0 for name in ("layers", "hidden", "heads", "vocabulary", "sequence")},
    **{("GradScaler", name): 0 for name in ("hysteresis", "growth_interval")},
    ("DeviceLR", "total_steps"): 0,
    ("ShardedOptimizer", "bucket_cap_mb"): 0.0,
    ("init", "timeout_s"): 0.0,
    ("watch", "timeout_s"): 0.0,
}
OPTIMIZERS = (optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW, optim.Lion, optim.RMSprop, optim.LAMB)
MODEL = {"layers": 2, "hidden": 64, "heads": 32, "vocabulary": 100, "sequence": 16}


def params():
    return [torch.nn.Parameter(torch.ones(2))]


def planned():
    return {"model": plan.Model(**MODEL), "cluster": plan.Cluster.of("H100"), "layout": plan.Layout()}


def rows():
    return {"logits": torch.zeros(2, 4), "target": torch.zeros(2, dtype=torch.int64)}


REQUIRED = {  # by function: what a right call needs
    **{optimizer: lambda: {"params": params()} for optimizer in OPTIMIZERS},
    optim.Muon: lambda: {"params": [torch.nn.Parameter(torch.ones(2, 3))]},
    optim.EMA: lambda: {"params": params()},
    optim.clip_grad_norm_: lambda: {"parameters": params(), "max_norm": 1.0},
    optim.grad_norm: lambda: {"parameters": params()},
    optim.float32_states: dict,
    amp.GradScaler: lambda: {"device": "cpu"},
    amp.StepGuard: dict,
    amp.Fp8Recipe: dict,
    amp.fp8: lambda: {"model": torch.nn.Linear(16, 16)},
    amp.fp8_report: lambda: {"model": torch.nn.Linear(16, 16), "batch": torch.zeros(2, 16)},
    amp.fp8_state: lambda: {"model": torch.nn.Linear(16, 16)},
    amp.load_fp8_state: lambda: {"model": torch.nn.Linear(16, 16), "state": {}},
    amp.DeviceLR: lambda: {"optimizer": optim.SGD(params()), "lr_lambda": amp.schedules.constant(), "total_steps": 4},
    amp.schedules.constant: dict,
    amp.schedules.linear: lambda: {"total_steps": 4},
    amp.schedules.cosine: lambda: {"total_steps": 4},
    amp.schedules.wsd: lambda: {"total_steps": 4, "decay_steps": 1},
    amp.schedules.inverse_sqrt: lambda: {"warmup_steps": 4},
    distributed.RankFilter: lambda: {"rank": 0, "world_size": 2},
    distributed.ResumableSampler: lambda: {"length": 8, "seed": 0, "rank": 0, "world_size": 2},
    distributed.ShardedOptimizer: lambda: {"params": params(), "optimizer_class": optim.SGD},
    distributed.ShardedState: dict,
    distributed.accurate_hook: dict,
    distributed.reduction_plan: dict,
    distributed.init: lambda: {"device": "cpu"},
    distributed.watch: dict,
    distributed.shard_sequence: lambda: {"t": torch.zeros(2, 4)},
    distributed.unshard_sequence: lambda: {"t": torch.zeros(2, 4)},
    distributed.context_parallel_attention: lambda: {name: torch.zeros(1, 4, 2, 8) for name in "qkv"},
    distributed.vocab_parallel_cross_entropy: rows,
    distributed.vocab_parallel_linear_cross_entropy: lambda: {
        "hidden": torch.zeros(2, 8),
        "weight": torch.zeros(4, 8),
        "target": rows()["target"],
    },
    plan.Model: lambda: MODEL,
    plan.Layout: dict,
    plan.Cluster: lambda: {"gpu": plan.GPUS["H100"]},
    plan.Gpu: lambda: {f: getattr(plan.GPUS["H100"], f) for f in inspect.signature(plan.Gpu).parameters},
    plan.calibrate: lambda: {"device": "cpu", "matmul": 8, "repeats": 1, "sizes": (8,)},
    plan.predict: planned,
    plan.scaling: planned,
    **dict.fromkeys((plan.efficiency, plan.fit_link), dict),
}
NEED_RANKS = {
    *(distributed.ShardedOptimizer, distributed.reduction_plan, distributed.context_parallel_attention),
    *(distributed.shard_sequence, distributed.unshard_sequence),
    *(distributed.vocab_parallel_cross_entropy, distributed.vocab_parallel_linear_cross_entropy),
}


def kind_of(parameter):
    """The kind of a scalar; None for a parameter that is none."""
    names = re.split(r"\s*\|\s*", str(getattr(parameter.annotation, "__name__", parameter.annotation)))
    return next((name for name in names if name in OF_KIND), None)


def scalars():
    for function in REQUIRED:
        for parameter in inspect.signature(function).parameters.values():
            if (kind := kind_of(parameter)) is not None:
                yield function, parameter.name, kind


SCALARS = list(scalars())


def refused(function, name, value):
    with distributed.init(device="cpu") if function in NEED_RANKS else nullcontext():
        try:
            function(**{**REQUIRED[function](), name: value})
        except (ValueError, TypeError) as error:
            form = rf"{function.__name__}(\.\w+)?: (rank \d+ of \d+: )?{name}(\[\d+\])?: expected .+, got .+"
            return None if re.fullmatch(form, str(error), re.DOTALL) and len(str(error)) < 400 else str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_every_public_callable_is_here():
    modules = (optim, amp, amp.schedules, distributed, plan)
    public = {getattr(m, name) for m in modules for name in m.__all__ if callable(getattr(m, name))}
    assert public == {*REQUIRED, *NOT_CALLED}
    names = {(function.__name__, name) for function, name, _ in SCALARS}
    assert names >= {*TAKEN, *OTHERS_SAY, *ZERO} and len(names) > 120


@pytest.mark.parametrize(
    "function", [f for f in REQUIRED if any(f is g for g, *_ in SCALARS)], ids=lambda f: f.__name__
)
def test_a_wrong_scalar_is_refused_in_the_one_form(function):
    wrong = {}
    for name, kind in ((name, kind) for f, name, kind in SCALARS if f is function):
        key = (function.__name__, name)
        values = (*OF_KIND[kind], ZERO[key]) if key in ZERO else OF_KIND[kind]
        skipped = {repr(value) for value in (*TAKEN.get(key, ()), *OTHERS_SAY.get(key, ()))}
        for value in values:
            if repr(value) not in skipped and (said := refused(function, name, value)) is not None:
                wrong[name, repr(value)[:20]] = said[:300]
    assert not wrong


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
@pytest.mark.parametrize(
    "betas", [0.9, "ab", (0.9,), (0.9, "0.9"), (0.9, True), (0.9, math.nan), (0.9, HUGE), [0.9, -1]]
)
def test_betas(optimizer, betas):
    if "betas" in inspect.signature(optimizer).parameters:
        with pytest.raises((ValueError, TypeError), match=rf"^{optimizer.__name__}: betas: expected two numbers in"):
            optimizer(params(), betas=betas)


@pytest.mark.parametrize("keep", [3, "abc", ["a", 1], torch.ones(2), math.nan])
def test_keep_fp32(keep):
    with pytest.raises(ValueError, match="^Lion: keep_fp32: expected a sequence of patterns"):
        optim.Lion(params(), keep_fp32=keep)


def test_groups_and_states_are_refused_as_by_the_constructor():
    optimizer = optim.SGD(params(), momentum=0.9)
    with pytest.raises(TypeError, match="^SGD: lr: expected a number >= 0, got the str '0.1'"):
        optimizer.add_param_group({"params": params(), "lr": "0.1"})
    state = optimizer.state_dict()
    state["param_groups"][0]["nesterov"] = "False"
    with pytest.raises(TypeError, match="^SGD: nesterov: expected True or False, got the str 'False'"):
        optimizer.load_state_dict(state)
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["nesterov"] is False


def test_ranks_that_do_not_divide_the_heads():
    with pytest.raises(
        ValueError, match="^predict: layout: expected tensor at most 32, the heads, and a divisor of them"
    ):
        plan.predict(**{**planned(), "layout": plan.Layout(tensor=3)})


def test_the_last_step_of_a_schedule_has_the_final_factor():
    s = amp.schedules
    for total in (0, 1, 5):
        for final in (0.0, 0.25):
            for warmup in range(total + 1):
                for f in (s.linear, s.cosine):
                    assert f(total, warmup, final)(total) == final
                for decay in range(total - warmup + 1):
                    assert s.wsd(total, decay, warmup, final)(total) == final
                    assert total == decay + warmup or s.wsd(total, decay, warmup, final)(total - decay - 1) == 1


@pytest.mark.parametrize("make", [warpsmith.amp.StepGuard, lambda: amp.GradScaler("cpu", init_scale=4.0)])
def test_sparse_gradients_are_refused_before_they_are_unscaled(make):
    embedding, scaler = torch.nn.Embedding(5, 2, sparse=True), make()
    optimizer = torch.optim.SGD([embedding.weight, dense := torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scaler.scale(embedding(torch.tensor([1, 1])).sum() + dense.sum()).backward()
    before = [p.grad.to_dense().clone() for p in (embedding.weight, dense)]
    with pytest.raises(ValueError, match=r"^GradScaler.clip_: gradient 0: expected a dense tensor, got sparse_coo"):
        scaler.clip_(optimizer, 1.0)
    assert all(torch.equal(p.grad.to_dense(), b) for p, b in zip((embedding.weight, dense), before, strict=True))
    scaler.step(optimizer)  # without clipping, as torch's
    assert dense[0].item() == pytest.approx(0.9)


OF_TORCH = [name for name in optim.__all__ if hasattr(torch.optim, name)]


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_pair_of_numbers_is_refused_where_torch_refuses_it(name):
    """At and around the bounds of each."""
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    defaults = {k: p.default for k, p in inspect.signature(ours).parameters.items()}
    shared = [k for k in inspect.signature(theirs).parameters if isinstance(defaults.get(k), (bool, int, float))]
    values = {k: (False, True) if isinstance(defaults[k], bool) else (-0.5, 0.0, 0.5, 1.0) for k in shared}
    for pair in itertools.combinations(shared, 2):
        for given in itertools.product(*map(values.get, pair)):
            refused = []
            for cls in (ours, theirs):
                try:
                    cls([torch.nn.Parameter(torch.ones(4, 4))], **dict(zip(pair, given, strict=True)))
                    refused.append(False)
                except ValueError:
                    refused.append(True)
            assert refused[0] or not refused[1], dict(zip(pair, given, strict=True))
