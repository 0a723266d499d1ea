"""Each differentiable C++ function with its optional tensors there and absent equals Python's, gradients one by one."""

import itertools

import pytest
import torch
import warpsmith

SEED = torch.tensor([12, 3])
TARGET = torch.tensor([[0, 7, 2], [5, -100, 1]])
REDUCTIONS = ("none", "mean")  # by their numbers in C++


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def norm(name, **numbers):
    tensors = {n: leaf(2, 3, 40) for n in ("x", "residual")} | {n: leaf(40) for n in ("weight", "bias")}
    tensors["residual"] = (tensors["residual"].detach() + 1).requires_grad_()
    return {**tensors, "seed": SEED, **numbers}, getattr(warpsmith, name)


def angles(**given):
    table = torch.rand(9, 8)
    heads = {"q": leaf(2, 6, 4, 16), "k": leaf(2, 6, 2, 16), "cos": table.cos(), "sin": table.sin(), **given}
    return {**heads, "interleaved": True, "position_offset": 2}


def attention(kv_heads, **given):
    return warpsmith.attention(**given, kv_heads=kv_heads or None, softcap=4.0, return_lse=True)


def cross_entropy(reduction, weight, **given):
    return warpsmith.cross_entropy(**given, class_weight=weight, reduction=REDUCTIONS[reduction])


def linear_cross_entropy(reduction, **given):
    return warpsmith.linear_cross_entropy(**given, reduction=REDUCTIONS[reduction])


def problems():
    """For each name, the arguments of the C++ function (those that it has) and the Python function."""
    yield "rms_norm", *norm("rms_norm", eps=1e-3, weight_offset=1.0)
    yield "layer_norm", *norm("layer_norm", eps=1e-3)
    yield "add_rms_norm", *norm("add_rms_norm", eps=1e-3, weight_offset=1.0)
    yield "add_layer_norm", *norm("add_layer_norm", eps=1e-3)
    yield "dropout_add_rms_norm", *norm("dropout_add_rms_norm", eps=1e-3, weight_offset=1.0, p=0.3, training=True)
    yield "dropout_add_layer_norm", *norm("dropout_add_layer_norm", eps=1e-3, p=0.3, training=True)
    yield "dropout_add", *norm("dropout_add", p=0.3, training=True)
    gate = {"gate": leaf(2, 3, 8), "up": leaf(2, 3, 8), "inplace_backward": False}
    yield "swiglu", gate, warpsmith.swiglu
    yield "reglu", gate, warpsmith.reglu
    yield "geglu", gate, lambda **given: warpsmith.geglu(**given, approximate="tanh")
    for name in ("bias_gelu", "bias_silu", "bias_relu"):
        yield name, {"x": leaf(2, 3, 8), "bias": leaf(8)}, getattr(warpsmith, name)
    yield "relu_squared", {"x": leaf(2, 3, 8)}, warpsmith.relu_squared
    yield "rope", angles(), warpsmith.rope
    weights = {"q_weight": leaf(16), "k_weight": (leaf(16).detach() * 2).requires_grad_(), "eps": 1e-3}
    yield "qk_norm_rope", angles(**weights), warpsmith.qk_norm_rope
    tensors = {"q": leaf(2, 6, 4, 16), "k": leaf(2, 9, 2, 16), "v": leaf(2, 9, 2, 16), "bias": leaf(4, 6, 9)}
    options = {"sink": leaf(4), "seed": SEED, "causal": True, "dropout_p": 0.2, "kv_heads": 0}
    yield "attention", {**tensors, **options}, attention
    linear = {"hidden": leaf(2, 3, 16), "weight": leaf(9, 16), "bias": leaf(9), "target": TARGET.clamp_min(0)}
    yield "linear_log_prob", {**linear, "temperature": 0.7, "save_logits": True}, warpsmith.linear_log_prob
    for number in range(len(REDUCTIONS)):
        sums = {"reduction": number, "label_smoothing": 0.1, "target": TARGET}
        rows = {"logits": leaf(2, 3, 9), "weight": torch.rand(9), "ignore_index": -100, "z_loss": 0.1, "softcap": 5.0}
        yield "cross_entropy", {**rows, **sums}, cross_entropy
        yield "linear_cross_entropy", {**linear, "class_weight": torch.rand(9), **sums}, linear_cross_entropy


PROBLEMS = [pytest.param(*p, id=f"{p[0]}-{i}") for i, p in enumerate(problems())]


def calls(cpp, name, given):
    """The arguments and the leaves among them, for each choice of the optional tensors."""
    arguments = getattr(cpp, name).default._schema.arguments
    given = {a.name: given.get(a.name) for a in arguments}
    optional = [a.name for a in arguments if str(a.type) == "Optional[Tensor]" and given[a.name] is not None]
    if name == "attention":  # without k or v, q has another shape
        optional = [n for n in optional if n not in ("k", "v")]
    for count in range(len(optional) + 1):
        for absent in itertools.combinations(optional, count):
            chosen = {n: None if n in absent else value for n, value in given.items()}
            leaves = {n: v for n, v in chosen.items() if isinstance(v, torch.Tensor) and v.requires_grad}
            yield absent, chosen, leaves


def outputs(function, *arguments, **named):
    torch.manual_seed(5)
    found = function(*arguments, **named)
    return list(found) if isinstance(found, tuple) else [found]


def same(a, b):
    return all(s is t if s is None or t is None else torch.equal(s, t) for s, t in zip(a, b, strict=True))


def python_names(given):
    return {n: v for n, v in given.items() if n not in ("inplace_backward", "position_offsets")}


@pytest.mark.parametrize(("name", "given", "python"), PROBLEMS)
def test_optional_tensors_and_single_gradients(cpp, name, given, python):
    for absent, chosen, leaves in calls(cpp, name, given):
        ours = outputs(getattr(cpp, name), *chosen.values())
        wanted = outputs(python, **python_names(chosen))
        assert same(ours, wanted), absent
        grads = [torch.randn_like(y) for y in wanted]
        for used in [range(len(wanted)), *([i] for i in range(len(wanted)))]:
            for which in [list(leaves.values()), *([t] for t in leaves.values())]:
                found, expected = (
                    torch.autograd.grad(
                        [y[i] for i in used], which, [grads[i] for i in used], retain_graph=True, allow_unused=True
                    )
                    for y in (ours, wanted)
                )
                assert same(found, expected), (absent, used)
        with torch.no_grad():
            assert all(y.grad_fn is None for y in outputs(getattr(cpp, name), *chosen.values()))


@pytest.mark.parametrize(("name", "given"), [pytest.param(*p.values[:2], id=p.id) for p in PROBLEMS])
def test_second_derivatives_are_refused_or_right(cpp, name, given):
    for absent, chosen, leaves in calls(cpp, name, given):
        for n, t in leaves.items():
            found = outputs(getattr(cpp, name), *chosen.values())
            if name == "rope" or (name == "dropout_add" and n == "residual"):  # linear, and lengths stay
                expected = 8 * (t if name == "rope" else found[0])
                torch.testing.assert_close(second_derivative(found, t), expected.detach())
                continue
            with pytest.raises(RuntimeError, match=f"^{name}: second derivatives are not available"):
                pytest.fail(f"{n} without {absent}: {second_derivative(found, t)}")


def second_derivative(outputs, leaf):
    loss = sum(y.square().sum() for y in outputs)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), leaf)[0]
