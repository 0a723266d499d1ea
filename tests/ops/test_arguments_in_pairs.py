"""Every argument of every public op has its meaning, alone and beside each other one: with another value, outputs and
gradients change, and are those of the op's definition in ``warpsmith.reference``. The host waits
for none of it, and it does not matter of which device and dtype torch makes tensors unless it is told."""

import contextlib
import inspect
import math
from functools import partial
from itertools import combinations, product

import pytest
import torch
import warpsmith
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from warpsmith import reference
from warpsmith.testing import bitwise_equal
from warpsmith.train import sync_audit

from tests.dispatched import Beside, Dispatched, other_defaults
from tests.ops.public_calls import CLASSES, NAMES, NOT_DIFFERENTIABLE, TOKENS, WIDTH, arguments_of, floating_of

OTHER = dict.fromkeys(("eps", "softmax_scale", "label_smoothing", "z_loss", "weight_offset", "momentum"), 0.25)
OTHER |= dict.fromkeys(("softcap", "temperature", "beta1", "beta2", "weight_decay", "lr", "dropout_p"), 0.5)
OTHER |= {"p": 0.25, "ignore_index": 0, "window_size": (1, 1), "approximate": "tanh"}
OTHER |= {"reduction": "sum", "causal_align": "top_left", "position_offset": torch.tensor([1, 2]), "causal": True}
OTHER |= {"interleaved": True, "maximize": True, "num_groups": 2, "mean": (0.1,) * 3, "std": (0.4,) * 3}
OTHER |= {"dtype": torch.float32, "flip": torch.tensor([True, False])}
# How an op computes, where, and what else it gives: the laws of the ops ask for these.
HOW = {"deterministic", "inplace", "inplace_backward", "check_labels", "return_stats", "return_lse", "max_chunk_bytes"}
HOW |= {"max_bytes", "dw_dtype", "save_logits", "main_grad", "main_grads", "max_seqlen_q", "max_seqlen_k", "layout"}
HOW |= {"ceil_mode", "dilation", "groups", "kernel_size", "padding", "stride"}  # give results of another shape
HOW |= {"kv_heads", "found_inf", "mode", "process_group", "sharding", "max_seqlen", "batch_invariant"}
OF_8_BITS = {"dequantize_fp8", "quantize_fp8", "scaled_linear"}
# Functions of several ranks, here on one: by name the op that they compute.
ON_RANKS = {n: n.split("_parallel_")[-1] for n in warpsmith.distributed.__all__ if "_parallel_" in n}

# Refuse a second derivative.
ONCE = {"attention", "attention_varlen", "cross_entropy", "linear_cross_entropy", "linear_log_prob"}
NEEDED = {"cu_seqlens_q", "k", "max_seqlen_k", "max_seqlen_q", "seed", "v"}  # though they have a default
# What torch computes forward and backward in a call, and beside an argument.
BY_TORCH = {
    "conv2d": (["convolution", "add"], ["convolution_backward"]),
    "conv2d bare": (["convolution"], ["convolution_backward"]),
    "conv2d activation": (["convolution", "add", "relu"], ["threshold_backward", "convolution_backward"]),
    "linear_log_prob temperature": ([], ["div"] * 3),
    "linear bare": (["mm"], ["mm", "mm"]),
    "matmul_symmetric": ([], ["add", "mm"]),
}

# What an argument needs that it may say something: another one changed, or not.
ONLY = {"momentum": ("training", True), "causal_align": ("causal", False)}
ONLY |= dict.fromkeys(("p", "seed"), ("training", False))


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def function_of(name: str):
    return getattr(warpsmith.distributed if name in ON_RANKS else warpsmith, name)


def base_of(name: str) -> dict:
    """A call in which each argument has something to change: sequences of other lengths, and more keys than queries."""
    base = arguments_of(ON_RANKS.get(name, name))
    angles = torch.outer(torch.arange(2.0 * TOKENS), torch.linspace(0.3, 1, WIDTH // 2)).double()
    offsets = torch.tensor([0, 2, TOKENS], dtype=torch.int32)
    if "cos" in base:
        base |= {"cos": angles.cos(), "sin": angles.sin(), "cu_seqlens": offsets}
    if "seed" in inspect.signature(function_of(name)).parameters:
        base["seed"] = torch.tensor([1, 2])
    if name == "normalize_image":
        base["x"] = torch.arange(96, dtype=torch.uint8).view(2, 4, 4, 3)
    if name == "context_parallel_attention":
        base |= {"causal": True, "dropout_p": 0.25, "mode": "ulysses"}
    if name.startswith("attention"):
        base |= {
            "causal": True,
            "dropout_p": 0.25,
            "k": rows(TOKENS + 3, 1, WIDTH),
            "v": rows(TOKENS + 3, 1, WIDTH, seed=2),
        }
    if name == "attention_varlen":
        base |= {"cu_seqlens_k": offsets + torch.tensor([0, 2, 3], dtype=torch.int32), "max_seqlen_k": TOKENS + 3}
    return base


def others_of(name: str, base: dict) -> dict:
    """Another value of each argument."""
    heads = base["q"].shape[-2] if "q" in base else 0
    tensors = {
        "bias": rows(heads, 1, TOKENS + 3) if heads else rows(CLASSES),
        "alibi_slopes": rows(heads).abs().float(),
    }
    tensors |= {"sink": rows(heads), "class_weight": rows(CLASSES).abs(), "residual": rows(TOKENS, CLASSES)}
    tensors |= {"gate_bias": rows(CLASSES), "up_bias": rows(CLASSES), "grad_scale": torch.tensor(4.0)}
    tensors |= {"max_exp_avg_sqs": [rows(TOKENS, WIDTH).square() + 3], "up": None}
    found = {}
    for option, parameter in inspect.signature(function_of(name)).parameters.items():
        value = base.get(option)
        if option in HOW or (name in ON_RANKS and option == "cu_seqlens"):
            continue
        if isinstance(value, Tensor) and value.is_floating_point():
            found[option] = value + rows(*value.shape, seed=5).abs()
        elif option == "target":
            found[option] = (value + 1) % CLASSES
        elif option.startswith("cu_seqlens"):
            found[option] = value + torch.tensor([0, 1, 0], dtype=torch.int32)
        elif isinstance(value, Tensor):
            found[option] = value + 5
        elif isinstance(value, list) and value:
            found[option] = [t + 1 for t in value]
        else:
            known = tensors if option in tensors else OTHER | {"activation": "silu" if name == "group_norm" else "relu"}
            found[option] = (
                not base.get(option, parameter.default) if isinstance(parameter.default, bool) else known[option]
            )
    return found


def loss_of(t: Tensor) -> Tensor:
    factors = torch.arange(1, 1 + t.numel(), device=t.device).to(t.dtype).view(t.shape).cos()
    return (t * (factors + t if t.dtype == torch.float64 else factors)).sum()


def result(function, name: str, given: dict, create_graph: bool = False) -> list[Tensor]:
    """Outputs, what was written, and gradients, with a graph those of their squares, too, where they are not refused;
    of a loss without its statistics."""
    taken = inspect.signature(function).parameters
    given = tree_map(
        lambda t: t.clone() if isinstance(t, Tensor) else t, {k: v for k, v in given.items() if k in taken}
    )
    learned = [t.requires_grad_() for t in floating_of(given).values() if name != "adamw"]
    found = [t for t in tree_leaves(function(**given)) if isinstance(t, Tensor)]
    found = found[:1] if name.endswith("cross_entropy") else found
    if learned:
        loss = sum(map(loss_of, (t for t in found if t.requires_grad)))
        grads = torch.autograd.grad(loss, learned, allow_unused=True, create_graph=create_graph)
        found += (grads := [t for t in grads if t is not None])
        if create_graph:
            with contextlib.suppress(RuntimeError):
                squares = sum(t.square().sum() for t in grads)
                found += torch.autograd.grad(squares, learned, allow_unused=True, materialize_grads=True)
    written = [given[k] for k in ("params", "running_mean", "running_var", "exp_avgs", "exp_avg_sqs") if k in given]
    return [t.detach() for t in (*tree_leaves(written), *found) if t is not None]


def differs(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) != len(b) or any(
        (s.shape, s.dtype) != (t.shape, t.dtype) or not torch.allclose(s, t) for s, t in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def one_rank():
    with warpsmith.distributed.init(device="cpu"):
        yield


@pytest.mark.parametrize("name", [*(n for n in NAMES if n not in OF_8_BITS), *ON_RANKS])
def test_each_argument_alone_and_in_pairs(name, one_rank):
    base = base_of(name)
    others = others_of(name, base)
    changes = [(), *((o,) for o in others), *combinations(others, 2)]
    found = {}
    for options in changes:
        given = base | {o: others[o] for o in options}
        found[options] = result(function_of(name), name, given)
        if len(options) < 2 and name not in ON_RANKS:
            with sync_audit("cpu") as audit, other_defaults():
                again = result(function_of(name), name, given)
            assert audit.total == 0, f"{options}: {audit}"
            assert all(map(torch.equal, again, found[options])), options
        expected = result(getattr(reference, ON_RANKS.get(name, name)), name, given)
        torch.testing.assert_close(found[options], expected, msg=lambda m, o=options: f"{o}: {m}")
    for options in filter(None, found):
        for said, beside in zip(options, (options[1:], options[:1]) if options[1:] else ((),), strict=True):
            only, there = ONLY.get(said, ("", False))
            silent = (only in beside) != there
            assert silent != differs(found[options], found[beside]), f"{said} beside {beside}"


@pytest.mark.parametrize("name", [n for n in NAMES if n not in OF_8_BITS])
def test_each_tensor_left_out_beside_each_argument(name):
    """Gradients are the same ones under ``create_graph``, and theirs in turn those of the definition."""
    function, base = function_of(name), base_of(name)
    others = others_of(name, base)
    parameters = inspect.signature(function).parameters
    absent = [o for o, t in base.items() if isinstance(t, Tensor) and parameters[o].default is None and o != "seed"]
    for out, other in product((None, *absent), (None, *others)):
        given = base | ({other: others[other]} if other else {}) | ({out: None} if out else {})
        try:
            found = result(function, name, given)
        except ValueError:  # what goes with another argument
            assert out
            continue
        expected = result(getattr(reference, name), name, given, True)
        with Beside(math.inf) as told:
            twice = result(function, name, given, True)
        assert told.found == [], (other, out)
        assert (len(twice) == len(expected)) != (name in ONCE), (other, out)
        for of, a in (("eager", found), ("create_graph", twice)):
            message = f"{other} without {out}: {of}: "
            torch.testing.assert_close(a, expected[: len(a)], rtol=1e-6, atol=1e-6, msg=lambda m, of=message: of + m)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if "inplace_backward" in inspect.signature(function_of(n)).parameters]
)
def test_what_is_overwritten_may_have_the_negative_bit(name):
    def gradients(inplace: bool) -> tuple[Tensor, ...]:
        given = arguments_of(name)
        leaves = {n: t.requires_grad_() for n, t in floating_of(given).items()}
        computed = {n: torch._neg_view(-t) for n, t in leaves.items()}
        loss = getattr(warpsmith, name)(**given | computed, inplace_backward=inplace).cos().sum()
        return torch.autograd.grad(loss, [*leaves.values()])

    try:
        found = gradients(True)
    except ValueError as refused:
        assert "negative bit" in str(refused)
    else:
        assert all(map(torch.equal, found, gradients(False)))


@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "adamw"])
def test_nothing_is_copied_or_looked_at_on_the_way_to_a_kernel(name, padded):
    """Nor on the way back: torch makes no tensor, writes to none and tells the host nothing, with rows apart and not,
    beside each argument."""

    def given_as(t):
        t = t.bfloat16() if isinstance(t, Tensor) and t.dtype == torch.float64 else t
        if not padded or not isinstance(t, Tensor) or t.dim() < 2:
            return t
        return t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., : t.shape[-1]].copy_(t)

    function, base = function_of(name), arguments_of(name) if name in OF_8_BITS else base_of(name)
    others = {} if name in OF_8_BITS else others_of(name, base)
    for option, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, bool) and option in HOW - {"batch_invariant", "check_labels"}:
            others[option] = not parameter.default
    changes = {None: {}, **{o: {o: value} for o, value in others.items()}}
    if not padded:  # which torch's linear layer is not given
        parameters = inspect.signature(function).parameters
        changes["bare"] = {o: None for o in base if parameters[o].default is None and o not in NEEDED}
    for option, changed in changes.items():
        given = tree_map(given_as, {**base, **changed})
        learned = []
        for key, t in {} if name in NOT_DIFFERENTIABLE else floating_of(given).items():
            t = t.requires_grad_()
            given[key] = given_as(t.clone()) if "inplace" in str(option) else t.view_as(t)
            learned.append(torch.autograd.graph.get_gradient_edge(given[key]))
        with Beside(TOKENS) as forward:
            made = [t for t in tree_leaves(function(**given)) if isinstance(t, Tensor) and t.requires_grad]
        upstream = [given_as(torch.rand_like(t)) for t in made]
        with Beside(TOKENS) as backward:
            torch.autograd.grad(made, learned, upstream, allow_unused=True) if made else ()
        expected = BY_TORCH.get(f"{name} {option}", BY_TORCH.get(name, ([], [])))
        assert (forward.found, backward.found) == expected, option


@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*NOT_DIFFERENTIABLE, *OF_8_BITS) and "atten" not in n])
def test_a_backward_makes_no_gradient_that_nobody_wants(name):
    """Attention makes those of q, k and v together."""
    base = base_of(name)
    base |= {o: t for o, t in others_of(name, base).items() if isinstance(t, Tensor) and o not in base}
    for key in floating_of(base):
        given = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, base)
        leaf = given[key].requires_grad_()
        made = [t for t in tree_leaves(function_of(name)(**given)) if isinstance(t, Tensor) and t.requires_grad]
        with Dispatched() as ops:
            grad = torch.autograd.grad(made, leaf, [torch.ones_like(t) for t in made])[0]
        assert [t.shape for t in ops.made if t.data_ptr() != grad.data_ptr()] == [], key


IN_EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
WITH_GRADIENTS = pytest.mark.parametrize("name", [n for n in NAMES if n not in (*NOT_DIFFERENTIABLE, *OF_8_BITS)])


def learning_calls(name: str, dtype: torch.dtype):
    """(arguments, tensors with a gradient) of calls in a dtype; losses also row by row."""
    base = tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype == torch.float64 else t, base_of(name))
    leaves = [t.requires_grad_() for t in floating_of(base).values()]
    yield base, leaves
    if "reduction" in inspect.signature(function_of(name)).parameters:
        yield base | {"reduction": "none"}, leaves


def total(made) -> Tensor:
    return 3 * sum(t.float().square().sum() for t in tree_leaves(made) if isinstance(t, Tensor) and t.requires_grad)


@IN_EACH_DTYPE
@WITH_GRADIENTS
def test_graphs_can_be_walked_twice(name, dtype):
    """With the same bits, which a later walk leaves as they are."""
    for given, leaves in learning_calls(name, dtype):
        loss = total(function_of(name)(**given))
        walks, copies = [], []
        for again in (True, True, False):
            grads = torch.autograd.grad(loss, leaves, retain_graph=again, allow_unused=True)
            walks.append([t for t in grads if t is not None])
            copies.append([t.clone() for t in walks[-1]])
        for found in (*walks[:2], *copies[1:], walks[2]):
            assert all(map(bitwise_equal, found, copies[0]))


@IN_EACH_DTYPE
@WITH_GRADIENTS
def test_checkpoints_and_offloaded_tensors_change_no_bit(name, dtype):
    """Nor which elements are dropped."""
    for given, leaves in learning_calls(name, dtype):
        call, results = partial(function_of(name), **given | ({"seed": None} if "seed" in given else {})), []

        def offloaded(call=call):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return call()

        for way in (call, partial(checkpoint, call, use_reentrant=False), offloaded):
            torch.manual_seed(0)
            results.append(torch.autograd.grad(total(way()), leaves, allow_unused=True))
        for found in results[1:]:
            assert all(a is b is None or bitwise_equal(a, b) for a, b in zip(results[0], found, strict=True))
