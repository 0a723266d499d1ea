"""What users write in their scripts: names, defaults, what is imported when."""

import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import warpsmith
from warpsmith.distributed import plan


def test_names_of_ops_are_functions_everywhere():
    for name in warpsmith.ops.__all__:
        value = getattr(warpsmith, name)
        assert getattr(warpsmith.ops, name) is value
        assert callable(value)
        if inspect.isfunction(value):
            assert callable(getattr(warpsmith.reference, name))


def test_no_module_of_nn_shadows_a_function():
    for name in warpsmith.ops.__all__:
        assert not inspect.ismodule(getattr(warpsmith.nn, name, None)), name


LAZY = """
import sys, torch, warpsmith
loaded = {m.split(".")[1] for m in sys.modules if m.startswith("warpsmith.")}
assert not loaded & {"testing", "reference", "integrations", "tools"}, loaded
x = torch.ones(2, 4)
assert torch.equal(warpsmith.reference.rms_norm(x), warpsmith.rms_norm(x))
assert warpsmith.testing.Case((2,)).shape == (2,)
assert "warpsmith.testing" in sys.modules and "warpsmith.reference" in sys.modules
"""


def test_reference_and_testing_are_imported_when_asked_for():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'warpsmith' has no attribute 'no_such_thing'"):
        warpsmith.no_such_thing  # noqa: B018


RMS_NORMS = ("rms_norm", "add_rms_norm", "dropout_add_rms_norm", "qk_norm_rope")
LAYER_NORMS = ("layer_norm", "add_layer_norm", "dropout_add_layer_norm")


def defaults(function):
    return {k: p.default for k, p in inspect.signature(function).parameters.items()}


def test_one_rule_of_defaults():
    """Torch's: ``eps`` None for an RMS norm and 1e-5 for other norms, ``approximate="none"``, ``p=0.5``."""
    rule = {
        **dict.fromkeys(RMS_NORMS, None),
        **dict.fromkeys(LAYER_NORMS, 1e-5),
        "batch_norm": 1e-5,
        "group_norm": 1e-5,
    }
    for name in warpsmith.ops.__all__:
        if inspect.isfunction(getattr(warpsmith, name)) and name != "adamw":
            found = defaults(getattr(warpsmith, name))
            assert ("eps" in found) == (name in rule) and found.get("eps") == rule.get(name), name
            assert found.get("approximate", "none") == "none" and found.get("p", 0.5) == 0.5, name


def of_one_meaning():
    """Pairs of public functions and classes that take the same arguments."""
    for room in ("nn", "optim", "amp"):
        ours, theirs = getattr(warpsmith, room), getattr(torch, room)
        shared = [name for name in ours.__all__ if hasattr(theirs, name) and name != "functional"]
        yield from ((getattr(ours, name), getattr(theirs, name)) for name in shared)
    yield warpsmith.optim.clip_grad_norm_, torch.nn.utils.clip_grad_norm_
    for name in filter(str.islower, warpsmith.ops.__all__):
        yield getattr(warpsmith, name), getattr(warpsmith.reference, name)
        for prefix in ("context_parallel_", "vocab_parallel_"):
            if hasattr(warpsmith.distributed, prefix + name):
                yield getattr(warpsmith, name), getattr(warpsmith.distributed, prefix + name)
    if importlib.util.find_spec("transformers"):
        yield warpsmith.patch, importlib.import_module("warpsmith.integrations.transformers").patch
    yield warpsmith.nn.NormLinear, warpsmith.rms_norm
    yield warpsmith.nn.Attention, warpsmith.qk_norm_rope
    snake = {
        re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.replace("PE", "pe")): name
        for name in warpsmith.nn.__all__
        if name != "functional"
    }
    modules = {key.lower(): getattr(warpsmith.nn, name) for key, name in snake.items()}
    yield from ((modules[name], getattr(warpsmith, name)) for name in modules.keys() & set(warpsmith.ops.__all__))


def test_a_default_is_the_same_wherever_an_argument_is():
    flags = {"bias", "sink", "causal", "attention"}  # of modules; tensors of their ops, or other kinds
    count = 0
    for a, b in of_one_meaning():
        ours, other = ({k: v for k, v in defaults(f).items() if v is not inspect.Parameter.empty} for f in (a, b))
        shared = ours.keys() & other.keys() - flags
        assert {k: ours[k] for k in shared} == {k: other[k] for k in shared}, (a, b)
        count += len(shared)
    assert count > 200
    of_lion, of_lamb = defaults(warpsmith.optim.Lion), defaults(warpsmith.optim.LAMB)
    assert [of_lion[k] for k in ("lr", "betas", "weight_decay", "maximize", "seed")] == [1e-4, (0.9, 0.99), 0, False, 0]
    assert [of_lamb[k] for k in ("lr", "betas", "eps", "weight_decay")] == [1e-3, (0.9, 0.999), 1e-6, 0.01]


def test_the_rule_of_defaults_holds_in_cpp():
    headers = Path(__file__).resolve().parents[1] / "csrc/include/warpsmith"
    text = "".join((headers / f"{name}.h").read_text(encoding="utf-8") for name in ("norm", "activation", "rope"))
    eps = {**dict.fromkeys(RMS_NORMS, "std::nullopt"), **dict.fromkeys(LAYER_NORMS, "1e-5")}
    p = dict.fromkeys(("dropout_add", "dropout_add_rms_norm", "dropout_add_layer_norm"), "0.5")
    for names, argument in ((eps, r"eps(?:ilon)?"), (p, "p")):
        for name, expected in names.items():
            arguments = re.search(rf"^inline [^;{{]*?\b{name}\((.*?)\) {{$", text, re.MULTILINE | re.DOTALL)
            assert arguments, name
            assert re.findall(rf"double>? {argument} = ([^,)]+)", arguments[1]) == [expected], name
    assert set(re.findall(r"bool tanh = (\w+)[,)]", text)) == {"false"}  # approximate="none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_an_rms_norm_without_eps_takes_torchs(dtype):
    x = torch.full((2, 8), 1e-4, dtype=dtype)
    zeros, weight = torch.zeros_like(x), torch.ones(8, dtype=dtype)
    expected = torch.nn.functional.rms_norm(x, (8,))
    cos, sin = torch.ones(2, 4, dtype=dtype), torch.zeros(2, 4, dtype=dtype)
    for found in (
        warpsmith.rms_norm(x),
        warpsmith.add_rms_norm(x, zeros)[0],
        warpsmith.dropout_add_rms_norm(x, zeros, p=0.0)[0],
        warpsmith.nn.AddRMSNorm(8, dtype=dtype)(x, zeros)[0],
        warpsmith.qk_norm_rope(x[:, None], x[:, None], weight, weight, cos, sin)[0][:, 0],
    ):
        torch.testing.assert_close(found, expected)


def plannable():
    with pytest.raises(ValueError) as refused:
        warpsmith.plan("no such op")
    return str(refused.value).split("one of ")[1].split(", got ")[0].split(", ")


def test_plan_lists_its_keys():
    ops = plannable()
    assert "linear_log_prob" in ops and "rms_norm" in ops
    for op in ops:
        keys = warpsmith.plan(op)["keys"]
        assert keys and all(isinstance(v, str) and v for v in keys.values())
        needed = {k: 8 for k, v in keys.items() if "may be left out" not in v}
        assert needed and warpsmith.plan(op, **needed)
    assert warpsmith.plan("linear_log_prob")["keys"]["rows"] == "an integer >= 0"
    assert warpsmith.plan("linear_log_prob", rows=4096, classes=128256)["chunks"] >= 1
    assert warpsmith.plan("nn.functional.rms_norm")["keys"].keys() >= {"dtype", "device"}


def other_ways_to_make():
    """The methods of public classes that make one from something else."""
    for room in ("optim", "amp", "train", "nn", "distributed", "distributed.plan", "testing"):
        module = importlib.import_module(f"warpsmith.{room}")
        for name in module.__all__:
            members = vars(thing).items() if inspect.isclass(thing := getattr(module, name)) else ()
            for key, member in members:
                made = getattr(getattr(member, "__func__", None), "__annotations__", {}).get("return")
                if isinstance(member, (classmethod, staticmethod)) and key[0] != "_" and made == name:
                    yield thing, key


def from_lambda_lr():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5)
    return scheduler, {"total_steps": 7, "scaler": warpsmith.amp.GradScaler("cpu")}


def of_gpu():
    timed = plan.Timed("all_reduce", 4, 4, 2**26, 1e-3)
    cluster = plan.Cluster.of("H200")
    rates = {f.name: getattr(cluster, f.name) / 2 for f in fields(cluster) if f.type == "float"}
    del rates["network_bytes_per_s"]
    return cluster.gpu, {"gpu": cluster.gpu, "ranks_per_host": 4, "timed": (timed,), "source": "here", **rates}


SIZES = {"layers": 3, "hidden": 64, "heads": 4, "vocabulary": 100, "sequence": 32, "intermediate": 96, "kv_heads": 2}
FLAGS = {f.name: not f.default for f in fields(plan.Model) if f.type == "bool"}
OF_MODEL = {**SIZES, "head_dim": 8, "dtype": "float8", "parameter_count": 1234, **FLAGS}


def module_of(config=None):
    module = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(50, 8), "layers": torch.nn.ModuleList([torch.nn.Linear(8, 8)])}
    )
    module.config = config
    return module


GIVEN = {
    "DeviceLR.from_lambda_lr": [from_lambda_lr],
    "Cluster.of": [of_gpu],
    "Model.from_config": [lambda: ({}, OF_MODEL)],
    "Model.from_module": [lambda: (module_of(), OF_MODEL), lambda: (module_of({}), OF_MODEL)],
}


def test_another_way_to_make_an_object_hands_on_what_it_is_given():
    ways = {f"{cls.__name__}.{name}": getattr(cls, name) for cls, name in other_ways_to_make()}
    assert ways.keys() == GIVEN.keys()
    for name, make in ways.items():
        for given in GIVEN[name]:
            source, options = given()
            called = {k: v for k, v in options.items() if v is not source}
            made = make(source, **called)
            assert {k: getattr(made, k) for k in options} == options, name
