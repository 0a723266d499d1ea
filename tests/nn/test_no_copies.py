"""Modules of warpsmith.nn run ops and products on what they get, copy no activation on the way, and wait for none."""

import inspect

import pytest
import torch
import warpsmith
from warpsmith.train import sync_audit

from tests.dispatched import Copies, other_defaults

TOKENS, WIDTH = 32, 16


def rows(width=WIDTH):
    """Rows that a slice leaves apart, as a product of several layers at once gives them."""
    return torch.randn(TOKENS, width + 8, requires_grad=True)[:, 4 : 4 + width]


def pixels():
    return rows().unflatten(0, (2, 4, -1)).movedim(-1, 1)


def heads(count):
    return rows(3 * WIDTH)[None, :, : count * 8].unflatten(-1, (count, 8))


def angles():
    rotary = warpsmith.nn.RotaryEmbedding(8, max_positions=TOKENS)
    return rotary.cos, rotary.sin


def packed():
    return {"cu_seqlens": torch.tensor([0, 5, TOKENS], dtype=torch.int32), "max_seqlen": TOKENS - 5}


LABELS = torch.arange(TOKENS) % WIDTH
# By module: its constructor's arguments, and the arguments of calls.
CALLS = {
    "AddLayerNorm": [((WIDTH,), lambda: (rows(), rows()))],
    "AddRMSNorm": [((WIDTH,), lambda: (rows(), rows()))],
    "BatchNorm2d": [((WIDTH,), lambda: (pixels(), pixels()))],
    "BiasGELU": [((WIDTH,), lambda: (rows(),))],
    "ConvBNReLU": [((WIDTH, WIDTH, 1), lambda: (pixels(), pixels()))],
    "CrossEntropyLoss": [((), lambda: (rows(), LABELS))],
    "DropoutAdd": [((0.5,), lambda: (rows(), rows()))],
    "DropoutAddLayerNorm": [((WIDTH,), lambda: (rows(), rows()))],
    "DropoutAddRMSNorm": [((WIDTH,), lambda: (rows(), rows()))],
    "GatedMLP": [((WIDTH, 24), lambda: (rows(), rows()))],
    "LayerNorm": [((WIDTH,), lambda: (rows(),))],
    "Linear": [((WIDTH, 24), lambda: (rows(), rows(24)))],
    "LinearCrossEntropyHead": [((WIDTH, WIDTH), lambda: (rows(), LABELS))],
    "MLP": [((WIDTH, 24), lambda: (rows(),))],
    "NormLinear": [((WIDTH, 24), lambda: (rows(), rows())), ((WIDTH, (24, 8), True), lambda: (rows(),))],
    "QKNormRoPE": [((8,), lambda: (heads(4), heads(2), *angles()))],
    "RMSNorm": [((WIDTH,), lambda: (rows(),))],
    "RotaryEmbedding": [((8, TOKENS), lambda: (heads(4), heads(2)))],
    "SyncBatchNorm": [((WIDTH,), lambda: (pixels(), pixels()))],
    "GroupNorm": [((2, WIDTH), lambda: (pixels(),))],
}
ATTENTION = [
    (options, call)
    for options in ({"qk_norm": True}, {}, {"bias": True, "sink": True})
    for call in (
        lambda: ((rows()[None], *angles()), {}),
        lambda: ((rows()[None],), {}),
        lambda: ((rows(),), packed()),
        lambda: ((rows(), *angles()), packed()),
    )
]
CASES = [(name, arguments, {}, lambda c=c: (c(), {})) for name, calls in CALLS.items() for arguments, c in calls]
CASES += [("Attention", (WIDTH, 2, 1), options, call) for options, call in ATTENTION]
NAMES = sorted({name for name, *_ in CASES})
FUNCTIONS = {
    "batch_norm": lambda: (pixels(), None, None, torch.ones(WIDTH), torch.zeros(WIDTH), True),
    "cross_entropy": lambda: (rows()[None].transpose(1, 2), LABELS[None]),
    "group_norm": lambda: (pixels(), 2),
    "layer_norm": lambda: (rows(), (WIDTH,)),
    "log_softmax": lambda: (rows(), -1),
    "linear": lambda: (rows(), torch.randn(24, WIDTH, requires_grad=True)),
    "max_pool2d": lambda: (pixels(), 2),
    "linear_cross_entropy": lambda: (rows(), torch.randn(WIDTH, WIDTH), LABELS),
    "rms_norm": lambda: (rows(), (WIDTH,)),
    "softmax": lambda: (rows(), -1),
    "scaled_dot_product_attention": lambda: [heads(2).transpose(1, 2) for _ in range(3)],
}


def first_case(name):
    """A module's first case: the arguments of its constructor, by name, and its call."""
    _, given, options, call = next(case for case in CASES if case[0] == name)
    return inspect.signature(getattr(warpsmith.nn, name)).bind(*given, **options).arguments, call


def test_every_module_and_function_is_called_below():
    assert set(NAMES) == set(warpsmith.nn.__all__) - {"functional"}
    module, helpers = warpsmith.nn.functional, {"classes_last", "is_autocast", "linear_fits"}
    ours = {n for n, f in vars(module).items() if n[0] != "_" and getattr(f, "__module__", "") == module.__name__}
    assert FUNCTIONS.keys() == ours - helpers


def copies(function, *given, **more):
    """What is copied forward, and backward, in one call; in another one the host waits for nothing, and what is made
    has the device and dtype of what is given."""
    with Copies(4 * TOKENS) as forward:
        found = function(*given, **more)
    loss = sum(t.sum() for t in (found if isinstance(found, tuple) else (found,)))
    with Copies(4 * TOKENS) as backward:
        loss.backward()
    with sync_audit("cpu") as audit, other_defaults():
        found = function(*given, **more)
        sum(t.sum() for t in (found if isinstance(found, tuple) else (found,))).backward()
    assert audit.total == 0, str(audit)
    return forward.found, backward.found


@pytest.mark.parametrize(("name", "arguments", "options", "call"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_module_copies_no_activation(name, arguments, options, call):
    """The gradients of q, k and v, where the heads were split, meet again in one tensor."""
    module = getattr(warpsmith.nn, name)(*arguments, **options)
    given, more = call()
    split = name == "Attention" and (len(given) > 1 or "qk_norm" in options)
    assert copies(module, *given, **more) == ([], ["cat"] * split)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_copies_no_activation(name):
    assert copies(getattr(warpsmith.nn.functional, name), *FUNCTIONS[name]()) == ([], [])
