"""Every op that drops elements, where no seed is given: torch's generator decides, and a call that drops nothing or is
refused leaves it as it was."""

import inspect

import pytest
import torch
import warpsmith
from torch.utils._pytree import tree_leaves, tree_map

from tests.ops.public_calls import CLASSES, NAMES, TOKENS, arguments_of, floating_of

PLAIN = {
    "attention": warpsmith.attention,
    "attention_varlen": warpsmith.attention_varlen,
    "dropout_add": lambda x, residual: x + residual,
    "dropout_add_layer_norm": warpsmith.add_layer_norm,
    "dropout_add_rms_norm": warpsmith.add_rms_norm,
}
WRONG = {
    "alibi_slopes": torch.ones(CLASSES),
    "bias": torch.ones(CLASSES),
    "cu_seqlens_k": torch.tensor([1, TOKENS], dtype=torch.int32),
    "cu_seqlens_q": torch.tensor([0, 4, 2], dtype=torch.int32),
    "dropout_p": 1.0,
    "eps": -1.0,
    "k": torch.ones(TOKENS, 1, 16),
    "max_seqlen_q": TOKENS - 3,
    "p": 1.5,
    "residual": torch.ones(2, CLASSES),
    "sink": torch.ones(CLASSES),
    "softmax_scale": 1e39,
    "v": torch.ones(TOKENS + 1, 1, 8),
    "weight": torch.ones(CLASSES),
    "window_size": (-5, 0),
}
of_each = pytest.mark.parametrize("name", PLAIN)
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def parameters_of(function):
    return inspect.signature(function).parameters


def call_of(name, device):
    """Calls a function with the op's arguments in float32: outputs and gradients. The op itself drops half of them."""
    function = getattr(warpsmith, name)
    given = {key: value for key, value in arguments_of(name).items() if key != "seed"}
    given = tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, given)
    given = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, given)
    given |= {key: 0.5 for key in ("p", "dropout_p") if key in parameters_of(function)}
    leaves = [t.requires_grad_() for t in floating_of(given).values()]

    def call(function=function, **options):
        outputs = tree_leaves(function(**given | options))
        return [*outputs, *torch.autograd.grad(sum(t.square().sum() for t in outputs), leaves, allow_unused=True)]

    return call


def states(device):
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def same(a, b):
    return all(map(torch.equal, a, b))


def test_every_op_with_a_seed_is_here():
    assert PLAIN.keys() == {name for name in NAMES if "seed" in parameters_of(getattr(warpsmith, name))}


@on_each_device
@of_each
def test_torchs_generator_decides(name, device):
    call = call_of(name, device)
    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert same(first, call()) and same(second, call())
    assert not torch.equal(first[0], second[0])


@on_each_device
@of_each
def test_what_drops_nothing_draws_nothing(name, device):
    call, before, asked = call_of(name, device), states(device), 0

    def plain(**given):
        given |= {"dropout_p": 0.0}
        return PLAIN[name](**{key: value for key, value in given.items() if key in parameters_of(PLAIN[name])})

    seed = torch.ones(2, dtype=torch.int64, device=device)
    for off in ({"p": 0.0}, {"training": False}, {"dropout_p": 0.0}, {"dropout_p": 0.0, "seed": seed}):
        if off.keys() <= parameters_of(getattr(warpsmith, name)).keys():
            assert same(call(**off), call(plain)), off
            asked += 1
    assert same(before, states(device)) and asked == 2


@on_each_device
@of_each
def test_a_refused_call_leaves_the_generator(name, device):
    call, before = call_of(name, device), states(device)
    asked = WRONG.keys() & parameters_of(getattr(warpsmith, name)).keys()
    unread = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q"} if device == "cuda" else set()  # offsets, by the host
    for key in asked - unread:
        wrong = WRONG[key].to(device) if isinstance(WRONG[key], torch.Tensor) else WRONG[key]
        with pytest.raises(ValueError, match=f"^{name}: "):
            call(**{key: wrong})
    assert same(before, states(device)) and len(asked) >= 2


@on_each_device
@of_each
def test_compiled_it_draws_in_the_graph(name, device):
    call = call_of(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(getattr(warpsmith, name), backend="aot_eager", fullgraph=True)
    torch.manual_seed(9)
    expected = call()
    torch.manual_seed(9)
    assert same(expected, call(compiled))
    assert not torch.equal(expected[0], call(compiled)[0])
