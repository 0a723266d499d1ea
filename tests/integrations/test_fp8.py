"""amp.fp8 behind patch, for every family of transformers that patch knows."""

import gc

import pytest
import torch
import warpsmith
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations.families import ALL, FAMILIES, inputs_of, small_model


class Layers(TorchDispatchMode):
    """How many forwards of 8-bit layers ran, how many of them cast x, and how many producers did."""

    count = casts = producers = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        is_layer = op in LAYERS
        self.count += is_layer
        self.casts += is_layer and args[ARGUMENTS.index("x_data")] is None
        self.producers += op._schema.name.endswith("_fp8")
        return op(*args, **(kwargs or {}))


LAYERS = [getattr(torch.ops.warpsmith, f"scaled_linear_{form}").default for form in ("forward", "inference")]
ARGUMENTS = [a.name for a in LAYERS[0]._schema.arguments]


def step(model, family):
    with Layers() as layers:
        loss = model(**inputs_of(family)).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients, layers.count


def cosine(a, b):
    a, b = (torch.cat([t.flatten() for t in g.values()]).double() for g in (a, b))
    return float(nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("family", ALL)
def test_layers_of_a_patched_model(family):
    model = small_model(family)
    parameters = {name: id(p) for name, p in model.named_parameters()}
    with warpsmith.patch(model):
        plain_loss, plain, _ = step(model, family)
        done = warpsmith.amp.fp8(model, emulate=True)
        loss, gradients, count = step(model, family)
        if not done.replaced:
            assert not any(type(m) is nn.Linear and m.out_features % 16 == 0 for m in model.modules())
            return
        assert count == len(done.replaced), "layers are read, not called"
        assert plain.keys() == gradients.keys()
        assert loss != plain_loss and float(loss) == pytest.approx(float(plain_loss), rel=0.1)
        routed = any("expert" in name for name, _ in model.named_modules())  # a token may change its expert
        assert cosine(plain, gradients) > (0.9 if routed else 0.97)
        done.undo()
        again, exact, _ = step(model, family)
        assert again == plain_loss and all(torch.equal(exact[n], plain[n]) for n in plain)
    assert parameters == {name: id(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_undoing_does_not_matter(family):
    model = small_model(family)
    plain_loss, plain, _ = step(model, family)
    for first in ("fp8", "patch"):
        patched, done = warpsmith.patch(model), warpsmith.amp.fp8(model)
        for one in (done, patched) if first == "fp8" else (patched, done):
            one.undo()
        loss, gradients, count = step(model, family)
        assert loss == plain_loss and count == 0 and all(torch.equal(gradients[n], plain[n]) for n in plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "cohere"])
def test_producers_cast_what_projections_read(family, dtype, monkeypatch):
    model = small_model(family).to(dtype)
    blocks = model.config.num_hidden_layers
    with warpsmith.patch(model):
        done = warpsmith.amp.fp8(model)
        with Layers() as layers:
            model(**inputs_of(family)).loss.detach()
        # of what attention gives, and of geglu; behind attention Cohere's mlp finds no longer what both read
        casts = (2 if family in ("gemma2", "cohere") else 1) * blocks
        assert (layers.producers, layers.casts) == (4 * blocks - casts, casts)
        loss, gradients, _ = step(model, family)
        monkeypatch.setattr("warpsmith.integrations._parts.reads_rows", lambda layer: False)
        with Layers() as layers:
            model(**inputs_of(family)).loss.detach()
        assert (layers.producers, layers.casts) == (0, 4 * blocks)
        without, expected, _ = step(model, family)
        monkeypatch.undo()
        assert loss == without and all(torch.equal(gradients[n], expected[n]) for n in expected)
        for quiet in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
            with quiet, Layers() as layers:
                model(**inputs_of(family))
            assert layers.producers == 0
        done.undo()
        for recipe in ("tensor", "block", warpsmith.amp.Fp8Recipe("row", power_of_two=False)):
            done = warpsmith.amp.fp8(model, recipe)
            with Layers() as layers:
                model(**inputs_of(family)).loss.backward()
            assert layers.producers == 0
            done.undo()


@pytest.mark.parametrize("family", ["vit", "modernbert"])
def test_sums_with_layer_norms_cast_what_mlps_read(family, monkeypatch):
    model = small_model(family)
    with warpsmith.patch(model):
        done, found = warpsmith.amp.fp8(model), []
        for producers in (model.config.num_hidden_layers, 0):
            with Layers() as layers:
                model(**inputs_of(family))
            assert layers.producers == producers
            loss, gradients, _ = step(model, family)
            found.append({"loss": loss, **gradients})
            monkeypatch.setattr("warpsmith.integrations._parts.reads_rows", lambda layer: False)
        done.undo()
    assert all(torch.equal(found[0][name], t) for name, t in found[1].items())


def test_producers_change_no_bit_of_a_training(monkeypatch):
    """Steps of an optimizer, two micro-batches each, the second one's blocks checkpointed."""

    def train(**options):
        model = small_model("llama").to(torch.bfloat16).train()
        losses = []
        with warpsmith.patch(model):
            done = warpsmith.amp.fp8(model, **options)
            optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(2):
                for micro_batch in range(2):
                    if micro_batch:
                        model.gradient_checkpointing_enable({"use_reentrant": False})
                    loss = model(**inputs_of("llama"), use_cache=False).loss
                    loss.backward()
                    losses.append(loss.detach())
                    model.gradient_checkpointing_disable()
                optimizer.step()
                optimizer.zero_grad()
            counts = done.counts()
            done.undo()
        return losses, counts, list(model.parameters())

    found = train(), train(recompute=False), train(recompute="all")
    monkeypatch.setattr("warpsmith.integrations._parts.reads_rows", lambda layer: False)
    expected, expected_counts, plain = train(recompute=False)
    for losses, counts, parameters in found:
        assert losses == expected and counts == expected_counts
        assert all(torch.equal(a, b) for a, b in zip(parameters, plain, strict=True))


def kept_bytes(model, tokens):
    """What a forward keeps for its backward beyond the parameters, by storages."""
    parameters, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t  # so that none is freed and its address given to another
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens, labels=tokens, use_cache=False).loss
    return loss, sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in parameters)


@pytest.mark.parametrize("recompute", ["all", True, False])
@pytest.mark.parametrize("grad", [True, False], ids=["trained", "frozen"])
def test_what_a_layer_keeps(recompute, grad):
    """Beyond a patched model in bfloat16, which makes the outputs of its norms and of SwiGLU again: a byte an element
    of what the four products of a layer read; of the SwiGLU's alone where they are made again, or of none; and their
    scales."""
    model = small_model("llama").to(torch.bfloat16).train()
    size, tokens = model.config, torch.randint(model.config.vocab_size, (2, 64))
    for name, p in model.named_parameters():
        p.requires_grad_(grad or "proj" not in name)
    rows, layers = tokens.numel(), size.num_hidden_layers
    with warpsmith.patch(model, linear=True):
        _, plain = kept_bytes(model, tokens)
        done = warpsmith.amp.fp8(model, recompute=recompute)
        loss, kept = kept_bytes(model, tokens)
        x, h = (n * rows for n in (size.hidden_size, size.intermediate_size))
        if grad:
            of_down, of_others = layers * (h + 4 * rows), layers * (3 * x + 3 * 4 * rows)
            assert kept - plain == of_down * (recompute != "all") + of_others * (not recompute)
        else:
            assert kept <= plain
        loss.backward()
        done.undo()


def tensors():
    return [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]


@pytest.mark.parametrize("recompute", [None, False, True, "all"])
@pytest.mark.parametrize("family", ALL)
def test_a_step_leaves_nothing_but_its_loss(family, recompute):
    """No Python object holds an activation when its backward has run, and no cycle waits for the collector."""
    model = small_model(family)
    with warpsmith.patch(model):
        if recompute is not None:
            warpsmith.amp.fp8(model, emulate=True, recompute=recompute)
        for _ in range(2):
            step(model, family)
        gc.collect()
        gc.disable()
        try:
            before = {id(t) for t in tensors()}
            loss = model(**inputs_of(family)).loss
            loss.backward()
            kept = [t.shape for t in tensors() if id(t) not in before and t.grad_fn is not None and t is not loss]
            assert not kept
            del loss
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert not [o.shape for o in gc.garbage if isinstance(o, torch.Tensor) and id(o) not in before]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
