"""torch's own modules with our ops in them and without: outputs, loss and gradients within the law."""

import contextlib
import copy
import itertools
import re

import pytest
import torch
import warpsmith
from torch import nn

from tests.dispatched import Copies, Dispatched

from .laws import assert_close, assert_law_of_the_mean

B, S, T, E = 24, 6, 5, 32
BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16, torch.float64]
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)
PADDED = torch.zeros(B, S, dtype=torch.bool)
PADDED[1, -2:] = True


def rand(*shape):
    return torch.randn(*shape)


def additive(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, float("-inf"))


def modules():
    """name: (module, arguments, keywords, the op that a call in training runs; None where it stays torch's)."""
    cases = {}
    for shape, options in itertools.product(
        [E, (4, 8)], [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-2}]
    ):
        x = [rand(B, S, *((shape,) if shape == E else shape))]
        cases[f"LayerNorm {shape} {options}"] = nn.LayerNorm(shape, **options), x, {}, "layer_norm"
        if "bias" not in options:
            cases[f"RMSNorm {shape} {options}"] = nn.RMSNorm(shape, **options), x, {}, "rms_norm"
    for bias, shape in itertools.product([True, False], [(E,), (S, E), (B, S, E), (0, E)]):
        cases[f"Linear {bias} {shape}"] = nn.Linear(E, 24, bias), [rand(*shape)], {}, "linear"
    acts = [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.GELU("tanh"), nn.SiLU()]
    for act, bias in itertools.product(acts, [True, False]):
        layers = nn.LayerNorm(E), nn.Linear(E, 24, bias), act, nn.Dropout(0.0), nn.Linear(24, E), copy.deepcopy(act)
        cases[f"Sequential {act} {bias}"] = nn.Sequential(*layers), [rand(B, S, E)], {}, "linear"
    cases["Sequential Tanh"] = nn.Sequential(nn.Linear(E, E), nn.Tanh(), nn.Linear(E, E)), [rand(B, E)], {}, "linear"
    targets = torch.tensor([[1, -100, 0, 4], [2, 3, 3, -100], [6, 5, 4, 0]])
    for options in (
        {},
        {"weight": torch.rand(7) + 0.5},
        {"label_smoothing": 0.2, "reduction": "sum"},
        {"reduction": "none", "ignore_index": 3},
    ):
        target = targets.clamp(min=0) if "ignore_index" in options else targets
        cases[f"CrossEntropyLoss {[*options]}"] = (
            nn.CrossEntropyLoss(**options), [rand(3, 7, 4), target], {}, "cross_entropy",
        )  # fmt: skip
    probabilities = rand(3, 7).softmax(-1)
    cases["CrossEntropyLoss probabilities"] = nn.CrossEntropyLoss(), [rand(3, 7), probabilities], {}, None
    return cases


MHA_MASKS = {
    "none": {},
    "boolean": {"attn_mask": CAUSAL},
    "additive": {"attn_mask": additive(CAUSAL)},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "heads": {"attn_mask": additive(CAUSAL).expand(B * 4, S, S) + torch.linspace(-1, 1, B * 4)[:, None, None]},
    "padding": {"key_padding_mask": PADDED},
    "both": {"key_padding_mask": PADDED, "attn_mask": CAUSAL},
    "weights": {"need_weights": True},
    "weights of heads": {"need_weights": True, "average_attn_weights": False, "attn_mask": CAUSAL},
}
MHA_OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "sizes": {"kdim": 24, "vdim": 16},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "odd heads": {"num_heads": 8},  # of 4 elements, which no kernel of ours takes
}


def multihead():
    cases = {}
    for (kind, options), (mask, given), batch_first in itertools.product(
        MHA_OPTIONS.items(), MHA_MASKS.items(), [True, False]
    ):
        options = {"num_heads": 4, **options}
        if mask == "heads" and options["num_heads"] != 4 or mask == "causal hint" and kind in ("bias_kv", "zero"):
            continue  # torch takes none
        if mask not in ("none", "both", "weights") and kind != "plain":
            continue
        module = nn.MultiheadAttention(E, batch_first=batch_first, **options)
        shape = (B, S) if batch_first else (S, B)
        inputs = [rand(*shape, E), rand(*shape, module.kdim), rand(*shape, module.vdim)]
        given = {"need_weights": False, **given}
        op = None if given["need_weights"] or kind == "odd heads" else "attention"
        cases[f"MHA {kind}, {mask}, {batch_first}"] = module, inputs, given, op
    cases["MHA unbatched"] = (
        nn.MultiheadAttention(E, 4),
        [rand(S, E) for _ in range(3)],
        {"need_weights": False},
        ("attention"),
    )
    return cases


LAYER_MASKS = {
    "none": {},
    "boolean": {"src_mask": CAUSAL, "src_key_padding_mask": PADDED},
    "causal": {"src_mask": additive(CAUSAL), "is_causal": True},
}
DECODER_MASKS = {
    "none": {},
    "boolean": {"tgt_mask": CAUSAL, "tgt_key_padding_mask": PADDED, "memory_key_padding_mask": PADDED[:, :T]},
    "causal": {"tgt_mask": additive(CAUSAL), "tgt_is_causal": True, "memory_mask": additive(CAUSAL)[:, :T]},
}


def layers():
    cases = {}
    acts = {"relu": "relu", "gelu": "gelu", "module": nn.GELU(), "function": nn.functional.tanh}
    for norm_first, batch_first, mask in itertools.product([True, False], [True, False], LAYER_MASKS):
        for act, activation in acts.items():
            if act not in ("relu", "gelu") and not (batch_first and mask == "none"):
                continue
            options = {
                "dropout": 0.0 if batch_first else 0.25,  # drawn by torch, the same with our ops
                "norm_first": norm_first,
                "batch_first": batch_first,
                "activation": activation,
                "bias": mask != "causal" or act == "relu",
            }
            x, memory = (rand(*((B, n) if batch_first else (n, B)), E) for n in (S, T))
            name = f"{norm_first}, {batch_first}, {mask}, {act}"
            given = LAYER_MASKS[mask]
            cases[f"Encoder {name}"] = nn.TransformerEncoderLayer(E, 4, 64, **options), [x], given, "add_layer_norm"
            if act == "module":
                continue  # a deep copy of such a decoder layer has relu in torch: its __setstate__ sees no module
            given = DECODER_MASKS[mask]
            cases[f"Decoder {name}"] = (
                nn.TransformerDecoderLayer(E, 4, 64, **options), [x, memory], given, "add_layer_norm",
            )  # fmt: skip
    return cases


def randomize(module):
    generator = torch.Generator().manual_seed(0)
    for name, p in module.named_parameters():
        around_one = "norm" in name and name.endswith("weight") or p.dim() == 1 and name == "weight"
        p.data = torch.randn(p.shape, generator=generator) * 0.1 + around_one
    if getattr(module, "activation", None) is nn.functional.relu:  # rounding must not bring a sum across its kink
        module.linear1.bias.data = 4.0 - 8.0 * (torch.arange(64) % 2)
    return module


torch.manual_seed(0)
CASES = {
    name: (randomize(module), *others) for name, (module, *others) in {**modules(), **multihead(), **layers()}.items()
}


def cast(t, dtype):
    return t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t


def results(module, inputs, given, dtype):
    """Outputs, and the gradients of inputs and parameters by a sum of the outputs with fixed weights."""
    inputs = [cast(t, dtype).clone() for t in inputs]
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    torch.manual_seed(0)
    out = module(*inputs, **{n: cast(t, dtype) for n, t in given.items()})
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    found = {f"out {i}": t.detach() for i, t in enumerate(outs)}
    leaves = {f"input {i}": t for i, t in enumerate(inputs) if t.requires_grad} | dict(module.named_parameters())
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype) for t in outs]
    loss = sum((t * w).sum() for t, w in zip(outs, weights, strict=True))
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return found | {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_obey_the_law(name, dtype, mode, monkeypatch):
    if dtype == torch.float16 and name.startswith("CrossEntropyLoss"):
        pytest.skip("torch has no cross-entropy of float16 on the CPU")
    module, inputs, given, op = CASES[name]
    if op == "linear":  # which hands plain layers to torch
        monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)
    module = copy.deepcopy(module).to(dtype).train(mode == "training")
    rounded = [cast(t, dtype) for t in inputs]
    exact = results(copy.deepcopy(module).double(), rounded, given, torch.float64)
    with Copies(E) as of_torch:
        expected = results(module, rounded, given, dtype)
    state, types = list(module.state_dict()), [type(m) for m in module.modules()]
    with warpsmith.patch(module) as done:
        assert done.replaced and not done.unchecked and not done.kept, done
        with Dispatched() as ops, Copies(E) as of_ours:
            found = results(module, rounded, given, dtype)
        assert list(module.state_dict()) == state
    assert op is None or mode == "evaluation" or ops.has(op), ops.names
    # torch's own attention may lay its output out as torch.nn.MultiheadAttention reads it.
    most = len(of_torch.found) + ops.names.count("attention_forward")
    assert len(of_ours.found) <= most, (of_ours.found, of_torch.found)
    if dtype == torch.float64:
        assert_close(found, expected, rtol=1e-10, atol=1e-12)
    else:
        assert_law_of_the_mean(found, expected, exact)
    after = results(module, rounded, given, dtype)
    assert all(torch.equal(after[n], t) for n, t in expected.items()) and [type(m) for m in module.modules()] == types


@pytest.mark.parametrize("name", [n for n in CASES if re.match("MHA|Encoder|Decoder", n)])
def test_without_gradients_torch_may_take_its_fast_path(name):
    module, inputs, given, _ = CASES[name]
    module = copy.deepcopy(module).eval()
    inputs = inputs[:1] * 3 if name.startswith("MHA") and module.kdim == module.vdim == E else inputs
    with torch.no_grad():
        expected = module(*inputs, **given)
        with warpsmith.patch(module):
            found = module(*inputs, **given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def float32_of_cuda():
    """torch.autocast on the CPU casts to float32 what it casts on CUDA."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("layer_norm", "rms_norm", "softmax.int", "log_softmax.int"):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def kernel(*given, op=op, **options):
            with torch.autocast("cpu", enabled=False):
                return op(*(cast(t, torch.float32) for t in given), **options)

        library.impl(name, kernel, "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("like", "autocast", "stored"),
    [("cpu", BF16, torch.float32), ("cuda", torch.float16, torch.float32), ("cuda", BF16, BF16)],
    ids=str,
)
@pytest.mark.parametrize("name", [n for n in CASES if "float16" not in n])
def test_autocast_gives_the_dtypes_of_torch(name, like, autocast, stored):
    module, inputs, given, _ = CASES[name]
    module, inputs = copy.deepcopy(module).to(stored), [cast(t, stored) for t in inputs]
    exact = results(copy.deepcopy(module).double(), inputs, given, torch.float64)
    with float32_of_cuda() if like == "cuda" else contextlib.nullcontext(), torch.autocast("cpu", autocast):
        try:
            expected = results(module, inputs, given, stored)
        except RuntimeError as error:
            pytest.skip(f"torch: {str(error).splitlines()[0]}")
        with warpsmith.patch(module):
            found = results(module, inputs, given, stored)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert_law_of_the_mean(found, expected, exact)
