"""Models of torch's modules after ``warpsmith.patch``: in every use that a model has."""

import copy
import io
import pickle
import warnings
from collections import Counter

import pytest
import torch
import warpsmith
from torch import nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
from torch.nn.parallel import DistributedDataParallel
from warpsmith.integrations.patch import TESTED, Patched
from warpsmith.testing.distributed import multirank

from tests.dispatched import Dispatched

from .laws import assert_close, assert_law_of_the_mean
from .test_patch_hooks import GLOBALS_OF_CALLS, OF_CALLS, Recorder, id_of, warnings_of_torch

WIDTH = 32


class Encoder(nn.Module):
    """Every kind of torch's modules that are replaced, with dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        options = {"dropout": dropout, "batch_first": True}
        layer = {**options, "activation": "gelu"}
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, **layer), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 64, norm_first=True, **layer), 2)
        self.attention = nn.MultiheadAttention(WIDTH, 4, **options)
        self.head = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Dropout(dropout), nn.Linear(64, 11)
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens):
        x = self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0)
        x = self.decoder(x, x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.loss(self.head(x).flatten(0, 1), tokens.flatten())


TOKENS = torch.randint(1, 11, (4, 7), generator=torch.Generator().manual_seed(1))
TOKENS[1, -2:] = 0
CLASSES = {
    *("Linear", "LayerNorm", "RMSNorm", "Sequential", "MultiheadAttention", "CrossEntropyLoss"),
    *("TransformerEncoderLayer", "TransformerDecoderLayer"),
}


def encoder(**options):
    torch.manual_seed(0)
    return Encoder(**options)


def gradients(model, tokens=TOKENS):
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(tokens)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def is_patched(model):
    return [n for n, m in model.named_modules() if getattr(m.forward, "of_warpsmith", False)]


def test_what_is_replaced_is_said_and_undone():
    model = encoder()
    before, state, types = gradients(model), model.state_dict(), [type(m) for m in model.modules()]
    done = warpsmith.patch(model)
    assert done.replaced.keys() == CLASSES and not done.kept and not done.unchecked
    with torch.inference_mode(), warpsmith.patch(encoder()) as inside:
        assert inside.replaced == done.replaced and not inside.kept
    assert "TransformerEncoderLayer: warpsmith.add_layer_norm and linear (2)" in repr(done)
    assert_close(gradients(model), before)
    assert all(t.data_ptr() == state[n].data_ptr() for n, t in model.state_dict().items())
    patched = [type(m) for m in model.modules()]
    again = warpsmith.patch(model)
    assert again.kept == dict.fromkeys(CLASSES, "it is patched already") and not again.replaced
    again.undo()
    assert [type(m) for m in model.modules()] == patched
    done.undo()
    done.undo()
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(t, before[n]) for n, t in gradients(model).items())


OF_SWITCH = {
    "norms": {"LayerNorm", "RMSNorm"},
    "rope": set(),
    "mlp": {"Sequential"},
    "attention": {"MultiheadAttention"},
    "linear": {"Linear"},
    "loss": {"CrossEntropyLoss"},
}
LAYERS = {"TransformerEncoderLayer", "TransformerDecoderLayer"}


@pytest.mark.parametrize("switch", OF_SWITCH)
def test_a_switch_leaves_its_parts(switch, monkeypatch):
    monkeypatch.setattr("warpsmith.ops._linear._MAY_BE_TORCHS", False)  # `linear` hands plain layers to torch
    model = encoder()
    expected = gradients(model)
    with warpsmith.patch(model, **{switch: False}) as done:
        assert done.replaced.keys() == CLASSES - OF_SWITCH[switch] and not done.kept
        assert_close(gradients(model), expected)
    only = {name: name == switch for name in OF_SWITCH}
    with warpsmith.patch(model, **only) as done, Dispatched() as ops:
        assert done.replaced.keys() == OF_SWITCH[switch] | (LAYERS if switch in ("norms", "mlp") else set())
        assert_close(gradients(model), expected)
    assert {name.split("_forward")[0] for name in ops.names} & {"linear", "add_layer_norm", "attention"} == {
        *(["linear"] if switch in ("linear", "mlp") else []),
        *(["add_layer_norm"] if switch == "norms" else []),
        *(["attention"] if switch == "attention" else []),
    } - ({"attention"} if model.attention.dropout else set())


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


LOADED = {
    "torch.save": saved,
    **{f"pickle {n}": lambda m, n=n: pickle.loads(pickle.dumps(m, protocol=n)) for n in range(2, 6)},
}


@pytest.mark.parametrize("way", LOADED)
def test_what_is_loaded_is_not_patched_and_can_be(way):
    model = encoder()
    expected, types = gradients(model), [type(m) for m in model.modules()]
    with warpsmith.patch(model):
        loaded = LOADED[way](model)
        assert [type(m) for m in loaded.modules()] == types
        with warpsmith.patch(loaded) as done:
            assert done.replaced.keys() == CLASSES
            assert_close(gradients(loaded), expected)
        other = encoder()
        other.load_state_dict(model.state_dict())
        model.load_state_dict(other.state_dict())


def test_a_deep_copy_is_patched_until_undo():
    model = encoder()
    expected = gradients(model)
    done = warpsmith.patch(model)
    copied = copy.deepcopy(model)
    names = is_patched(model)
    assert names and is_patched(copied) == names
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_close(gradients(copied), expected)
    done.undo()
    assert not is_patched(copied)
    assert all(torch.equal(t, expected[n]) for n, t in gradients(copied).items())
    with warpsmith.patch(copied) as again:
        assert is_patched(copied) == names and again.replaced.keys() == CLASSES


class Calls(Recorder):
    """torch's first backward hook sees the gradients of the last op, whichever that is: its calls alone are counted."""

    def __init__(self, model, kind):
        super().__init__(model, kind)
        self.part = slice(0) if "backward_hook" in kind and "full" not in kind else slice(None)


def hooked(model, kind, options, names=None):
    return Calls(model, kind).of_modules(lambda: gradients(model)["loss"], options, names)


@warnings_of_torch
@pytest.mark.parametrize("way", OF_CALLS, ids=id_of)
def test_a_hook_is_called_as_without_the_patch(way):
    """On all modules at once, and on each alone, where everything beside it may be fused."""
    model = encoder()
    expected, loss = hooked(model, *way)
    assert expected
    with warpsmith.patch(model) as done:
        found, ours = hooked(model, *way)
        assert found == expected and not done.kept
        torch.testing.assert_close(ours, loss, rtol=1e-3, atol=1e-4)
        for name, _ in model.named_modules():
            found, _ = hooked(model, *way, names=[name])
            assert found == Counter({key: n for key, n in expected.items() if key[0] == name}), name


@warnings_of_torch
@pytest.mark.parametrize("kind", GLOBALS_OF_CALLS)
def test_a_hook_on_all_modules_that_are(kind):
    model, found = encoder(), []
    for patched in (False, True):
        if patched:
            warpsmith.patch(model)
        found.append(Calls(model, kind).of_all(lambda: gradients(model)))
    assert found[0] == found[1]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_compiled_without_graph_breaks(after):
    model = encoder(dropout=0.0)
    expected = gradients(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if after:
        gradients(compiled)
    with warpsmith.patch(compiled if after else model) as done:
        assert done.replaced.keys() == CLASSES
        found = gradients(compiled)
    assert_close({n.removeprefix("_orig_mod."): t for n, t in found.items()}, expected)
    torch._dynamo.reset()


def test_after_the_patch_dtype_and_device_may_change():
    model = encoder(dropout=0.0)
    expected = gradients(copy.deepcopy(model).bfloat16())
    exact = gradients(copy.deepcopy(model).bfloat16().double())
    warpsmith.patch(model)
    assert_law_of_the_mean(gradients(model.bfloat16()), expected, exact)
    out = model.to("meta").head(torch.ones(2, WIDTH, device="meta", dtype=torch.bfloat16))
    assert out.is_meta and out.shape == (2, 11)
    with torch.device("meta"):
        made = Encoder()
    done = warpsmith.patch(made)
    assert done.unchecked.keys() == CLASSES - {"CrossEntropyLoss"} and not done.kept


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_under_ddp(rank, world_size, after):
    tokens = TOKENS.roll(rank, 0)[: 2 + rank]
    expected = gradients(DistributedDataParallel(encoder(dropout=0.0)), tokens)
    model = encoder(dropout=0.0)
    if not after:
        assert warpsmith.patch(model).replaced.keys() == CLASSES
    ddp = DistributedDataParallel(model)
    if after:
        assert warpsmith.patch(ddp).replaced.keys() == CLASSES
    assert_close(gradients(ddp, tokens), expected)


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_under_fsdp2(rank, world_size, after):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def sharded(model):
        for layer in (*model.encoder.layers, *model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def whole(model):
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in gradients(model).items()}

    model = encoder(dropout=0.0)
    expected = gradients(copy.deepcopy(model))
    if not after:
        done = warpsmith.patch(model)
    model = sharded(model)
    if after:
        done = warpsmith.patch(model)
        assert "its weights are sharded" in done.unchecked.values()
    assert done.replaced and not done.kept
    with Dispatched() as ops:
        found = whole(model)
    assert ops.has("add_layer_norm") and ops.has("attention") and ops.has("linear")
    assert_close(found, expected)
    done.undo()
    assert not is_patched(model)
    assert_close(whole(model), expected)


@multirank(2, timeout_s=200)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_under_fsdp1(rank, world_size, after, original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = encoder(dropout=0.0)
    expected = gradients(copy.deepcopy(model))["loss"]
    if not after:
        assert warpsmith.patch(model).replaced.keys() == CLASSES
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
    if after:
        done = warpsmith.patch(sharded)
        assert done.replaced.keys() == CLASSES and "its weights are sharded" in done.unchecked.values()
    loss = sharded(TOKENS)
    loss.backward()
    torch.testing.assert_close(loss, expected)


class Lora(nn.Module):
    """A linear layer and its low-rank adapter, as PEFT makes them."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(base_layer.in_features, 2, False),
            nn.Linear(2, base_layer.out_features, False),
        )

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_adapters_stay(after):
    """In a sequence and in a transformer layer, whose linear layers are not plain any more."""
    model = encoder()
    done = None if after else warpsmith.patch(model)
    torch.manual_seed(2)
    model.head[1], model.encoder.layers[0].linear1 = Lora(model.head[1]), Lora(model.encoder.layers[0].linear1)
    done = done or warpsmith.patch(model)
    found = gradients(model)
    assert "head.1.lora_A.weight" in found and "head.1.base_layer.weight" not in found
    assert type(model.head[1]) is Lora and not done.kept
    done.undo()
    assert_close(found, gradients(model))


class Linear4bit(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class OwnNorm(nn.LayerNorm):
    """With the forward of its base."""


def test_what_is_not_torchs_is_left_and_named():
    model = nn.Sequential(Linear4bit(8, 8), nn.GELU(), OwnNorm(8), nn.Linear(8, 8), nn.Conv1d(1, 1, 1))
    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: x + 1
    model.append(replaced)
    nn.utils.parametrizations.weight_norm(model.append(nn.Linear(8, 8))[-1])
    x = torch.randn(1, 8)
    expected = model(x)
    with warpsmith.patch(model) as done:
        assert done.kept == {
            "Linear4bit": "it is a Linear with a forward of its own",
            "Linear": "somebody else has replaced its forward",
            "ParametrizedLinear": "it is parametrized",
        }
        assert done.replaced == {"OwnNorm": "warpsmith.layer_norm (1)", "Linear": "warpsmith.linear (1)"}
        torch.testing.assert_close(model(x), expected)


def test_a_layer_whose_blocks_are_others_is_kept():
    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return 2 * super()._ff_block(x)

    model, x = Layer(WIDTH, 4, 64, dropout=0.0), torch.randn(3, 2, WIDTH)
    expected = model(x)
    with warpsmith.patch(model) as done:
        assert done.kept == {"Layer": "its _ff_block is not torch's"}
        torch.testing.assert_close(model(x), expected)


def test_other_norms_and_activations_in_a_layer():
    for change in (
        lambda m: setattr(m, "norm1", nn.RMSNorm(WIDTH)),
        lambda m: setattr(m, "norm2", nn.Identity()),
        lambda m: setattr(m, "activation", nn.Tanh()),
        lambda m: setattr(m, "linear1", nn.Sequential(m.linear1, nn.Tanh())),
        lambda m: setattr(m, "self_attn", copy.deepcopy(m.self_attn).requires_grad_(False)),
    ):
        for norm_first in (False, True):
            torch.manual_seed(0)
            model = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, norm_first=norm_first)
            x = torch.randn(3, 2, WIDTH)
            for early in (True, False):
                layer = copy.deepcopy(model)
                if early:
                    change(layer)
                with warpsmith.patch(layer):
                    if not early:
                        change(layer)
                    found = layer(x)
                torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_under_transforms(transform):
    model = encoder(dropout=0.0).head
    x, parameters = torch.randn(5, WIDTH), {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    transforms = {
        "grad": lambda: torch.func.grad(loss)(parameters, x),
        "vmap": lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x),
        "jvp": lambda: {"out": torch.func.jvp(lambda x: loss(parameters, x), (x,), (x,))[1]},
    }
    expected = transforms[transform]()
    with warpsmith.patch(model):
        assert_close(transforms[transform](), expected)


class Heads(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_calls_of_scaled_dot_product_attention():
    x, model, text = torch.randn(1, 2, 8, 8), Heads(), "warpsmith.attention, in this process"
    expected = model(x)
    assert not warpsmith.patch(nn.Linear(2, 2)).replaced.get("scaled_dot_product_attention")
    first, second = warpsmith.patch(model), warpsmith.patch(Heads())
    assert first.replaced == second.replaced == {"scaled_dot_product_attention": text}
    first.undo()
    ours = warpsmith.attention(x, x, x, layout="bhsd", causal=True, causal_align="top_left")
    assert current_flash_attention_impl() == "warpsmith" and torch.equal(model(x), ours)
    second.undo()
    assert current_flash_attention_impl() is None and torch.equal(model(x), expected)
    torch.testing.assert_close(ours, expected)
    assert not warpsmith.patch(model, attention=False).replaced
    activate_flash_attention_impl("warpsmith")  # the program's own
    try:
        assert warpsmith.patch(model).kept == {"scaled_dot_product_attention": "it is patched already"}
        assert current_flash_attention_impl() == "warpsmith"
    finally:
        restore_flash_attention_impl()


def test_bad_arguments_are_refused():
    for bad in (3, nn.Linear, None):
        with pytest.raises(ValueError, match="^patch: model: expected a torch.nn.Module, got"):
            warpsmith.patch(bad)
    model = encoder()
    for name in (*OF_SWITCH, "logits"):
        with pytest.raises(TypeError, match=f"^patch: {name}: expected"):
            warpsmith.patch(model, **{name: "yes"})
    assert not is_patched(model)


def test_a_version_outside_the_tested_range_is_a_warning(monkeypatch):
    monkeypatch.setitem(TESTED, "torch", ("1.0", "1.13"))
    with pytest.warns(UserWarning, match=f"^patch: torch: tested with 1.0 to 1.13, this is {torch.__version__[:4]}"):
        warpsmith.patch(nn.Linear(2, 2))
    monkeypatch.setitem(TESTED, "torch", ("2.0", "99.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warpsmith.patch(nn.Linear(2, 2))


def test_a_patch_that_fails_changes_nothing(monkeypatch):
    model = encoder()
    types, theirs = [type(m) for m in model.modules()], Patched.patch_module

    def fail(done, module, ours):
        if isinstance(module, nn.RMSNorm):
            raise MemoryError
        theirs(done, module, ours)

    monkeypatch.setattr(Patched, "patch_module", fail)
    with pytest.raises(MemoryError):
        warpsmith.patch(model)
    assert [type(m) for m in model.modules()] == types
