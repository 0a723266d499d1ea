"""Each differentiable C++ function equals Python's in every bit, with its optional tensors there and absent.

Gradients are asked for one by one, of all outputs and of each. What a function refuses has Python's words.
"""

import functools
import itertools

import pytest
import torch
import warpsmith

from tools import families

SEED = torch.tensor([12, 3])
TARGET = torch.tensor([[0, 7, 2], [5, -100, 1]])
CU_SEQLENS = torch.tensor([0, 2, 6], dtype=torch.int32)
REDUCTIONS = ("none", "mean", "sum")  # by their numbers in C++
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


@pytest.fixture(autouse=True)
def python_calls_the_op(monkeypatch):
    """Python hands plain linear layers to torch, whose bias gradient adds up in another order."""
    monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def norm(name, **numbers):
    tensors = {n: leaf(2, 3, 40) for n in ("x", "residual")} | {n: leaf(40) for n in ("weight", "bias")}
    tensors["residual"] = (tensors["residual"].detach() + 1).requires_grad_()
    return {**tensors, "seed": SEED, **numbers}, getattr(warpsmith, name)


def angles(**given):
    table = torch.rand(9, 8)
    heads = {"q": leaf(2, 6, 4, 16), "k": leaf(2, 6, 2, 16), "cos": table.cos(), "sin": table.sin(), **given}
    return {"interleaved": True, "position_offset": 2, **heads}


def packed_angles(**given):
    heads = {"q": leaf(6, 4, 16), "k": leaf(6, 2, 16), "cu_seqlens": CU_SEQLENS}
    return angles(**heads, interleaved=False, position_offset=0, **given)


def rope(position_offset, position_offsets=None, **given):
    return warpsmith.rope(**given, position_offset=position_offset if position_offsets is None else position_offsets)


def attention_varlen(cu_seqlens, max_seqlen, **given):
    lengths = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": max_seqlen}
    return warpsmith.attention_varlen(**given, **lengths, causal=True, return_lse=True)


def attention(kv_heads, **given):
    return warpsmith.attention(**given, kv_heads=kv_heads or None, softcap=4.0, return_lse=True)


def cross_entropy(reduction, weight, **given):
    return warpsmith.cross_entropy(**given, class_weight=weight, reduction=REDUCTIONS[reduction])


def scaled_linear(scaling, e5m2, high, **given):
    grad_dtype, wgrad = "e5m2" if e5m2 else "e4m3", "high" if high else "fp8"
    recipe = warpsmith.amp.Fp8Recipe(("row", "tensor", "block")[scaling], grad_dtype=grad_dtype, wgrad=wgrad)
    return warpsmith.scaled_linear(**given, recipe=recipe)


def linear_cross_entropy(reduction, **given):
    return warpsmith.linear_cross_entropy(**given, reduction=REDUCTIONS[reduction])


def batch_norm(relu, **given):
    return warpsmith.batch_norm(
        **{"running_mean": None, "running_var": None, **given}, activation="relu" if relu else None
    )


def group_norm(silu, **given):
    return warpsmith.group_norm(**given, activation="silu" if silu else None)


def softmax(name, x, wide):
    return getattr(warpsmith, name)(x, dtype=torch.float32 if wide and x.dtype.itemsize == 2 else None)


def of_layers(name):
    """A function of layers, with the number of its activation."""

    def call(activation, **given):
        return getattr(warpsmith, name)(**given, activation=ACTIVATIONS[activation])

    return call


PIXELS = ("batch_norm", "group_norm")


def problems():
    """For each name, the arguments of the C++ function (those that it has) and the Python function."""
    yield "rms_norm", *norm("rms_norm", eps=1e-3, weight_offset=1.0)
    yield "rms_norm", *norm("rms_norm", eps=None, weight_offset=0.0)
    yield "layer_norm", *norm("layer_norm", eps=1e-3)
    yield "add_rms_norm", *norm("add_rms_norm", eps=1e-3, weight_offset=1.0)
    yield "add_layer_norm", *norm("add_layer_norm", eps=1e-3)
    yield "dropout_add_rms_norm", *norm("dropout_add_rms_norm", eps=1e-3, weight_offset=1.0, p=0.3, training=True)
    yield "dropout_add_layer_norm", *norm("dropout_add_layer_norm", eps=1e-3, p=0.3, training=True)
    yield "dropout_add", *norm("dropout_add", p=0.3, training=True)
    pixels = {"x": leaf(2, 6, 3, 5), "residual": leaf(2, 6, 3, 5).detach().neg().requires_grad_()}
    channels = {"weight": leaf(6), "bias": leaf(6).detach().neg().requires_grad_()}
    running = {"running_mean": torch.rand(6), "running_var": torch.rand(6)}
    for training, relu in itertools.product((True, False), (True, False)):
        yield "batch_norm", {**pixels, **channels, **running, "training": training, "relu": relu}, batch_norm
    for silu in (True, False):
        yield "group_norm", {"x": pixels["x"], "num_groups": 2, **channels, "eps": 1e-3, "silu": silu}, group_norm
    sizes = {"stride": (2, 1), "padding": (1, 0), "ceil_mode": True}
    yield "max_pool2d", {"x": pixels["x"], "kernel_size": (3, 2), **sizes}, warpsmith.max_pool2d
    gate = {"gate": leaf(2, 3, 8), "up": leaf(2, 3, 8), "inplace_backward": False}
    for row in families.rows("GATED"):
        tanh = {"approximate": "tanh"} if "tanh" in row.arguments else {}
        yield row.name, gate, functools.partial(getattr(warpsmith, row.name), **tanh)
    for row in families.rows("BIASED"):
        yield row.name, {"x": leaf(2, 3, 8), "bias": leaf(8)}, getattr(warpsmith, row.name)
    for row in families.rows("UNARY"):
        yield row.name, {"x": leaf(2, 3, 8)}, getattr(warpsmith, row.name)
    for row in families.rows("SOFTMAX"):
        for x in (leaf(2, 3, 8), leaf(2, 3, 8).detach().half().requires_grad_()):
            yield row.name, {"x": x, "wide": x.dtype == torch.half}, functools.partial(softmax, row.name)
    yield "rope", angles(), rope
    yield "rope", angles(interleaved=False, position_offset=0, position_offsets=torch.tensor([3, 0])), rope
    yield "rope", packed_angles(), rope
    weights = {"q_weight": leaf(16), "k_weight": (leaf(16).detach() * 2).requires_grad_(), "eps": 1e-3}
    yield "qk_norm_rope", angles(**weights), warpsmith.qk_norm_rope
    yield "qk_norm_rope", packed_angles(**weights), warpsmith.qk_norm_rope
    tensors = {"q": leaf(2, 6, 4, 16), "k": leaf(2, 9, 2, 16), "v": leaf(2, 9, 2, 16), "bias": leaf(4, 6, 9)}
    options = {"sink": leaf(4), "seed": SEED, "causal": True, "dropout_p": 0.2, "kv_heads": 0}
    yield "attention", {**tensors, **options}, attention
    plain = {"causal": False, "dropout_p": 0.0}
    yield "attention", {"q": leaf(2, 6, 8, 16), "kv_heads": 2, **plain}, attention
    yield "attention", {"q": leaf(2, 6, 3, 4, 16), "kv_heads": 0, **plain}, attention
    packed = {"q": leaf(6, 4, 16), "k": leaf(6, 2, 16), "v": leaf(6, 2, 16).detach().add(1).requires_grad_()}
    yield "attention_varlen", {**packed, "cu_seqlens": CU_SEQLENS, "max_seqlen": 4}, attention_varlen
    layer = {"x": leaf(2, 3, 16), "weight": leaf(9, 16), "bias": leaf(9), "residual": leaf(2, 3, 9)}
    layers = {"w1": leaf(9, 16), "b1": leaf(9), "w2": leaf(5, 9), "b2": leaf(5)}
    gated = {"gate_weight": leaf(9, 16), "up_weight": leaf(9, 16).detach().neg().requires_grad_()}
    gated |= {"gate_bias": leaf(9), "up_bias": leaf(9).detach().neg().requires_grad_()}
    for number in range(len(ACTIVATIONS)):
        yield "linear", {**layer, "activation": number}, of_layers("linear")
        if number:
            yield "mlp", {"x": leaf(2, 3, 16), **layers, "activation": number}, of_layers("mlp")
            yield "gated_linear", {"x": leaf(2, 3, 16), **gated, "activation": number}, of_layers("gated_linear")
    whole = {"x": leaf(2, 3, 16), "weight": leaf(32, 16), "bias": leaf(32)}
    for number in range(3):
        yield "scaled_linear", {**whole, "scaling": number, "e5m2": number == 1, "high": number == 2}, scaled_linear
    yield "matmul_symmetric", {"x": leaf(2, 3, 16)}, warpsmith.matmul_symmetric
    linear = {"hidden": leaf(2, 3, 16), "weight": leaf(9, 16), "bias": leaf(9), "target": TARGET.clamp_min(0)}
    yield "linear_log_prob", {**linear, "temperature": 0.7, "save_logits": True}, warpsmith.linear_log_prob
    yield "linear_log_prob", {**linear, "temperature": 1.0, "save_logits": False}, warpsmith.linear_log_prob
    for number in range(len(REDUCTIONS)):
        sums = {"reduction": number, "label_smoothing": 0.1, "target": TARGET}
        rows = {"logits": leaf(2, 3, 9), "weight": torch.rand(9), "ignore_index": -100, "z_loss": 0.1, "softcap": 5.0}
        yield "cross_entropy", {**rows, **sums}, cross_entropy
        plain = {
            "ignore_index": 2,
            "z_loss": 0.0,
            "softcap": 0.0,
            "label_smoothing": 0.0,
            "target": TARGET.clamp_min(0),
        }
        yield "cross_entropy", {**rows, **sums, **plain}, cross_entropy
        for chunk in (None, 100):
            chunks = {"class_weight": torch.rand(9), "max_chunk_bytes": chunk}
            yield "linear_cross_entropy", {**linear, **chunks, **sums}, linear_cross_entropy


PROBLEMS = [pytest.param(*p, id=f"{p[0]}-{i}") for i, p in enumerate(problems())]


def calls(cpp, name, given):
    """The arguments and the leaves among them, for each choice of the optional tensors, all of them first."""
    arguments = getattr(cpp, name).default._schema.arguments
    given = {a.name: given.get(a.name) for a in arguments}
    optional = [a.name for a in arguments if str(a.type) == "Optional[Tensor]" and given[a.name] is not None]
    # Without some q has another shape; running statistics are there together or not.
    optional = [n for n in optional if n not in ("k", "v", "cu_seqlens", "running_mean", "running_var")]
    for count in range(len(optional) + 1):
        for absent in itertools.combinations(optional, count):
            chosen = {n: None if n in absent else value for n, value in given.items()}
            leaves = {n: v for n, v in chosen.items() if isinstance(v, torch.Tensor) and v.requires_grad}
            yield absent, chosen, leaves
            for name in leaves if not absent else ():  # beside frozen ones
                frozen = {n: v.detach() if n in leaves and n != name else v for n, v in chosen.items()}
                yield absent, frozen, {name: leaves[name]}


def outputs(function, *arguments, **named):
    torch.manual_seed(5)
    found = function(*arguments, **named)
    return list(found) if isinstance(found, tuple) else [found]


def same(a, b):
    return all(s is t if s is None or t is None else torch.equal(s, t) for s, t in zip(a, b, strict=True))


def assert_equal(cpp, name, python, chosen, leaves):
    """Outputs, and the gradients of each leaf alone and of all."""
    ours = outputs(getattr(cpp, name), *chosen.values())
    wanted = outputs(python, **{n: v for n, v in chosen.items() if n != "inplace_backward"})
    assert same(ours, wanted)
    grads = [torch.randn_like(y) for y in wanted]
    for used in [range(len(wanted)), *([i] for i in range(len(wanted)))]:
        for which in [list(leaves.values()), *([t] for t in leaves.values())]:
            found, expected = (
                torch.autograd.grad(
                    [y[i] for i in used], which, [grads[i] for i in used], retain_graph=True, allow_unused=True
                )
                for y in (ours, wanted)
            )
            assert same(found, expected), used


@pytest.mark.parametrize(("name", "given", "python"), PROBLEMS)
def test_optional_tensors_and_single_gradients(cpp, name, given, python):
    for _, chosen, leaves in calls(cpp, name, given):
        assert_equal(cpp, name, python, chosen, leaves)
        with torch.no_grad():
            assert all(y.grad_fn is None for y in outputs(getattr(cpp, name), *chosen.values()))


@pytest.mark.parametrize(("name", "given", "python"), PROBLEMS)
def test_an_undefined_tensor_is_an_absent_one(cpp, undefined, name, given, python):
    for _, chosen, leaves in calls(cpp, name, given):
        if None in chosen.values():
            assert_equal(cpp, name, python, chosen, leaves)


@pytest.mark.parametrize(("name", "given", "python"), [p for p in PROBLEMS if "gate" in p.values[1]])
def test_gradients_over_the_inputs(cpp, name, given, python):
    for _, chosen, leaves in calls(cpp, name, given):
        expected = python(**{n: v for n, v in chosen.items() if n != "inplace_backward"})
        dy = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, [*leaves.values()], dy)
        computed = {n: t * 1 for n, t in leaves.items()}
        y = getattr(cpp, name)(*(chosen | computed | {"inplace_backward": True}).values())
        found = torch.autograd.grad(y, [*computed.values()], dy, retain_graph=True)
        assert torch.equal(y, expected) and same(found, wanted)
        assert [t.data_ptr() for t in found] == [t.data_ptr() for t in computed.values()]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


BESIDE = ("residual", "weight", "bias")  # may be float32 where x has 16 bits, in norms and biased activations
DTYPES = [(torch.float64, None), (torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]


def in_dtypes(given, dtype, beside):
    """Class weights stay float32, but in float64."""
    found = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            of_classes = "weight" in name and not value.requires_grad
            to = torch.promote_types(dtype, torch.float32) if of_classes else (name in BESIDE and beside) or dtype
            value = value.detach().to(to).requires_grad_(value.requires_grad)
        found[name] = value
    return found


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "given", "python"), PROBLEMS)
def test_other_dtypes(cpp, name, given, python, dtypes):
    dtype, beside = dtypes
    if name == "scaled_linear" and dtype == torch.float64:
        pytest.skip("casts to 8 bits have no float64")
    mixes = (name.endswith("_norm") and name not in PIXELS) or name.startswith("bias_")
    _, chosen, leaves = next(calls(cpp, name, in_dtypes(given, dtype, beside if mixes else None)))
    assert_equal(cpp, name, python, chosen, leaves)


@pytest.mark.parametrize(("name", "given"), [pytest.param(*p.values[:2], id=p.id) for p in PROBLEMS])
def test_second_derivatives_are_refused_or_right(cpp, name, given):
    for absent, chosen, leaves in calls(cpp, name, given):
        for n, t in leaves.items():
            found = outputs(getattr(cpp, name), *chosen.values())
            passed_on = name in ("dropout_add", "linear") or (name == "batch_norm" and not given["relu"])
            if name == "matmul_symmetric":
                expected = second_derivative([t @ t.mT], t)
                torch.testing.assert_close(second_derivative(found, t), expected)
                continue
            if name == "rope" or (passed_on and n == "residual"):  # linear, and lengths stay
                expected = 8 * (t if name == "rope" else found[0])
                torch.testing.assert_close(second_derivative(found, t), expected.detach())
                continue
            with pytest.raises(
                RuntimeError, match=f"^{name.removesuffix('_varlen')}: second derivatives are not available"
            ):
                pytest.fail(f"{n} without {absent}: {second_derivative(found, t)}")


def second_derivative(outputs, leaf):
    loss = sum(y.square().sum() for y in outputs)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), leaf)[0]


def refusals():
    """A function's name, its base arguments with some of them changed, and the words of the error."""
    base = {name: given for name, given, _ in reversed([*problems()])}
    for name in (n for n in base if n.endswith("_norm") and n not in PIXELS):
        yield name, base[name] | {"weight": leaf(3)}, r"weight: expected shape \(40\), got \(3\)$"
    yield "batch_norm", base["batch_norm"] | {"running_var": None}, "running_var: expected a tensor beside running_mean"
    yield "group_norm", base["group_norm"] | {"num_groups": 4}, "num_groups: expected a divisor of 6 channels, got 4"
    yield "max_pool2d", base["max_pool2d"] | {"padding": (2, 0)}, "padding: expected at most half of the kernel's size"
    yield "rms_norm", base["rms_norm"] | {"eps": -1.0}, "eps: expected a finite number >= 0, got -1"
    for name in ("dropout_add_rms_norm", "dropout_add"):
        yield name, base[name] | {"p": 1.5, "seed": None}, r"p: expected a number in \[0, 1\], got 1\.5"
    yield "swiglu", base["swiglu"] | {"inplace_backward": True}, "gate: expected a computed tensor for inplace_backward"
    yield (
        "swiglu",
        base["swiglu"] | {"gate": leaf(2, 3), "up": None},
        "gate: expected an even last dimension when there",
    )
    for name in (n for n in base if n.startswith("bias_")):
        yield name, base[name] | {"bias": leaf(3)}, "bias: expected shape"
    yield "relu_squared", {"x": torch.ones(3, dtype=torch.int32)}, "x: expected float32"
    for name in ("softmax", "log_softmax"):
        yield name, base[name] | {"x": torch.ones(3, dtype=torch.int32)}, "x: expected float32"
    heads = base["rope"]
    yield (
        "rope",
        heads | {"k": leaf(2, 5, 2, 16)},
        r"k: expected the shape of q but for its heads, \(2, 6, 4, 16\), got",
    )
    yield "rope", heads | {"position_offset": 4}, "position_offset: expected positions from 0 to 8"
    yield "rope", heads | {"cos": leaf(9, 8)}, "cos: expected a tensor that requires no gradient"
    yield "qk_norm_rope", base["qk_norm_rope"] | {"q_weight": leaf(15)}, r"q_weight: expected shape \(16\), got \(15\)"
    yield "qk_norm_rope", base["qk_norm_rope"] | {"sin": leaf(9, 8)}, "sin: expected a tensor that requires no gradient"
    yield "attention", base["attention"] | {"v": leaf(2, 8, 2, 16)}, "v: expected 9 tokens, got 8"
    yield "attention", base["attention"] | {"dropout_p": 1.0}, r"dropout_p: expected a number in \[0, 1\), got 1"
    sums = base["linear_cross_entropy"]
    yield "linear_cross_entropy", sums | {"reduction": 3}, r"reduction: expected none, mean or sum \(0, 1 or 2"
    losses = base["linear_log_prob"]
    yield "linear_log_prob", losses | {"bias": leaf(8)}, r"bias: expected shape \(9\), got \(8\)$"
    yield "linear_log_prob", losses | {"target": TARGET + 9}, r"target: expected classes in \[0, 9\), got 9 at pos"
    yield "cross_entropy", base["cross_entropy"] | {"target": TARGET.abs()}, r"target: expected classes in \[0, 9\)"


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize(("name", "given", "words"), [pytest.param(*r, id=f"{r[0]}-{r[2][:9]}") for r in refusals()])
def test_bad_input_is_named_and_draws_nothing(cpp, name, given, words, graded):
    _, chosen, _ = next(calls(cpp, name, given))
    before = torch.random.get_rng_state()
    with torch.set_grad_enabled(graded or "requires no gradient" in words or "computed tensor" in words):
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            getattr(cpp, name)(*chosen.values())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ["dropout_add", "dropout_add_layer_norm"])
def test_no_dropout_outside_of_training(cpp, name):
    _, chosen, _ = next(calls(cpp, name, norm(name, eps=1e-3, p=0.9, training=False)[0]))
    assert torch.equal(outputs(getattr(cpp, name), *chosen.values())[-1], chosen["x"] + chosen["residual"])


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_forward_mode_is_refused(cpp, name):
    _, chosen, leaves = next(calls(cpp, name, norm(name, eps=1e-3, weight_offset=0.0)[0]))
    last = list(leaves)[-2]  # x, or the residual
    plain = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in chosen.items()}
    with torch.autograd.forward_ad.dual_level():
        plain[last] = torch.autograd.forward_ad.make_dual(plain[last], torch.ones_like(plain[last]))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            getattr(cpp, name)(*plain.values())


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_wanted_gradients_are_computed(cpp, wanted):
    tensors = {"x": leaf(2, 3, 40), "weight": leaf(40)}
    given = {n: t.detach().requires_grad_(n == wanted) for n, t in tensors.items()}
    y, expected = cpp.rms_norm(*given.values(), None, 0.0), warpsmith.rms_norm(*tensors.values())
    up = torch.randn_like(y)
    y.backward(up)
    assert torch.equal(given[wanted].grad, torch.autograd.grad(expected, tensors[wanted], up)[0])
    assert all(t.grad is None for n, t in given.items() if n != wanted)
