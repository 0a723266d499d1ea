"""amp.fp8: which layers it takes, delayed scales, states, and what it stands beside."""

import copy
import pickle
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import warpsmith
from torch import nn
from torch.utils.checkpoint import checkpoint
from warpsmith.amp import Fp8Recipe, fp8, fp8_state, load_fp8_state
from warpsmith.ops import _scaled_linear
from warpsmith.reference.quantize import finite_amax, scale_of
from warpsmith.testing.distributed import multirank

from tests.dispatched import Beside

DELAYED = Fp8Recipe("tensor", amax="delayed", history=3, margin=1)
E4M3 = torch.float8_e4m3fn


def small(seed=0, width=32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))


def batch(step, rows=8, width=32):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def train(model, done, optimizer, steps, scaler=None, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = (model(batch(step)) - batch(step + 1000)).square().mean()
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
            done.update()
        else:
            scaler.step(optimizer)
            done.update(scaler.found_inf(optimizer))
            scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", [DELAYED, *map(Fp8Recipe, ("row", "tensor", "block"))], ids=str)
def test_a_layer_copies_and_waits_for_nothing(recipe):
    layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8(layer, recipe)
    for _ in range(2):
        x, dy = (torch.randn(128, 48)[:, :32] for _ in range(2))
        with Beside(128) as beside:
            torch.autograd.grad(layer(x.requires_grad_()), [x, layer[0].weight], dy)
        assert beside.found == []


# ---- which layers


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.odd = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 20)
        self.attention, self.own = (
            nn.MultiheadAttention(32, 2),
            type("Own", (nn.Linear,), {"forward": lambda s, x: x})(32, 32),
        )
        self.double, self.lm_head = nn.Linear(32, 32).double(), nn.Linear(32, 48, bias=False)


def test_layers_that_fit_are_replaced_and_come_back():
    model = Named()
    before = {name: type(m) for name, m in model.named_modules()}
    parameters, state = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    model.up.register_forward_hook(lambda *_: seen.append(1))
    done = fp8(model)
    assert done.replaced == {"up": "row, 32 -> 32"}
    assert done.kept == {
        "odd": "its out_features, 20, are no multiple of 16",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear whose weight is used otherwise",
        "own": "it is a Own whose weight is used otherwise",
        "double": "its weight is float64",
        "lm_head": "it makes logits: head=True of a recipe takes it too",
    }
    assert str(done).startswith("up: row, 32 -> 32\nodd: as it was: its out")
    x = batch(0)
    assert torch.equal(model.up(x), warpsmith.scaled_linear(x, model.up.weight, model.up.bias)) and seen == [1]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert state.keys() == model.state_dict().keys()
    assert fp8(model).kept["up"] == "it is in FP8 already"
    done.undo()
    done.undo()
    assert before == {name: type(m) for name, m in model.named_modules()} and "forward" not in model.up.__dict__
    assert torch.equal(model.up(x), nn.functional.linear(x, model.up.weight, model.up.bias))
    assert list(fp8(model, "block", lambda name, module: name == "lm_head").replaced) == []
    assert list(fp8(model, Fp8Recipe(head=True), lambda name, module: name == "lm_head").replaced) == ["lm_head"]


def test_layers_of_ours_keep_their_residual():
    model = nn.ModuleDict({name: warpsmith.nn.Linear(32, 32, activation=f) for name, f in (("a", None), ("b", "gelu"))})
    done, x = fp8(model), batch(0)
    assert list(done.replaced) == ["a"] and done.kept == {"b": "its product has an activation or a main_grad"}
    y = warpsmith.scaled_linear(x, model["a"].weight, model["a"].bias)
    assert torch.equal(model["a"](x, residual=2 * x), y + 2 * x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model["a"](x, residual=2 * x).dtype == torch.bfloat16
    for residual in (x[0], x.double()):
        with pytest.raises(ValueError, match=r"^linear: residual: expected (shape \(8, 32\)|float32), got "):
            model["a"](x, residual=residual)


def test_layers_read_the_parameters_that_they_have():
    """Not those of the conversion: computed ones, and others that a function puts in their place for a call."""
    made, x = nn.Sequential(nn.Linear(32, 48)), torch.randn(4, 32)
    warpsmith.amp.fp8(made)
    weight, bias = made[0].weight.detach().clone(), made[0].bias.detach().clone()
    others = {"0.weight": 2 * weight, "0.bias": bias + 1}
    expected = warpsmith.scaled_linear(x, 2 * weight, bias + 1)
    assert torch.equal(torch.func.functional_call(made, others, (x,)), expected)
    assert torch.equal(made(x), warpsmith.scaled_linear(x, weight, bias))
    made[0].weight = nn.Parameter(2 * weight)
    made[0].bias = None
    assert torch.equal(made(x), warpsmith.scaled_linear(x, 2 * weight))
    nn.utils.parametrize.register_parametrization(made[0], "weight", nn.Flatten(1))
    made[0].parametrizations.weight.original.data.mul_(2)
    assert torch.equal(made(x), warpsmith.scaled_linear(x, 4 * weight))


def test_copies_are_converted_and_pickles_are_not():
    model = small()
    fp8(model, DELAYED)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batch(0)), model(batch(0)))
    assert copied[0].forward.__self__ is copied[0] and copied[0]._fp8.state is not model[0]._fp8.state
    before = copy.deepcopy(fp8_state(model))
    for call in (fp8_state, lambda m: load_fp8_state(m, before)):
        with pytest.raises(
            ValueError, match="_state: model: expected one that warpsmith.amp.fp8 has converted, got Seq"
        ):
            call(copied)  # not the state of the model that was copied
    done = fp8(copied, "block")
    assert list(done.replaced) == ["0", "2"] and model[0]._fp8.owner.recipe == DELAYED
    done.undo()
    assert torch.equal(copied(batch(0)), small()(batch(0)))
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(batch(0)), small()(batch(0)))
    assert list(fp8(loaded).replaced) == ["0", "2"]


@pytest.mark.parametrize(
    ("card", "scaling"), [((8, 9), "tensor"), ((9, 0), "row"), ((10, 0), "tensor"), ((12, 0), "tensor")]
)
def test_auto_is_what_the_card_has(card, scaling, monkeypatch):
    module = sys.modules["warpsmith.amp.fp8"]  # the function has the name of its module
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for where in (module, _scaled_linear):
        monkeypatch.setattr(where, "capability", lambda device: card)
    model = small()
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setattr(
        module, "Fp8State", lambda device, recomputes=False: _scaled_linear.Fp8State(torch.device("cpu"))
    )
    assert fp8(model).recipe.scaling == scaling


def test_undo_leaves_a_forward_that_is_around_ours():
    model, plain, seen = small(), small(), []
    done, inner = fp8(model), model[0].forward

    def outer(x):
        seen.append(1)
        return inner(x)

    model[0].forward = outer
    done.undo()
    assert torch.equal(model(batch(0)), plain(batch(0))) and seen == [1]
    assert fp8(model).kept == {"0": "somebody else has replaced its forward"}


def test_bad_input():
    model = Named()
    model.lm_head.weight = model.embed.weight
    with pytest.raises(
        ValueError, match=r"fp8: recipe: expected head=False: the weight of lm_head is that of embed, got he"
    ):
        fp8(model, Fp8Recipe(head=True))
    assert "lm_head" in fp8(model).kept
    with pytest.raises(
        ValueError, match=r"fp8: recipe: expected Fp8Recipe.*which the model has, or undo.*got Fp8R.*'tensor'"
    ):
        fp8(model, "tensor")
    for words, call in {
        "fp8: model: expected a torch.nn.Module, got 3": lambda: fp8(3),
        "fp8: recipe: expected an Fp8Recipe or one of": lambda: fp8(small(), "rows"),
        "fp8: recompute: expected one of True, False, all, got some": lambda: fp8(small(), recompute="some"),
        "fp8_state: model: expected one that warpsmith.amp.fp8 has converted, got Seq": lambda: fp8_state(small()),
        "load_fp8_state: state: expected what fp8_state returned, got {}": lambda: load_fp8_state(model, {}),
    }.items():
        with pytest.raises(ValueError, match=f"^{words}"):
            call()


# ---- delayed scales


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("grad_dtype", ["e4m3", "e5m2"])
def test_delayed_scales_follow_the_largest_of_the_last_steps(grad_dtype, power_of_two):
    layer = nn.Sequential(nn.Linear(32, 32))
    recipe = replace(DELAYED, grad_dtype=grad_dtype, power_of_two=power_of_two)
    done, seen = fp8(layer, recipe), []
    for step in range(6):
        scale = 1.0 if step == 2 else 0.01 * (step + 1)
        x, dy = batch(step) * scale, batch(step + 50) * scale
        known = layer[0]._fp8.state.x_scale, layer[0]._fp8.state.dy_scale
        if step == 0:
            assert known == (None, None)
        else:
            largest = torch.stack(seen[-3:]).amax(0) * 2
            scales = map(scale_of, largest, (E4M3, recipe.grad_float8), (power_of_two, power_of_two))
            assert torch.equal(torch.stack(known), torch.stack([*scales]))
        expected = warpsmith.quantize_fp8(x, "tensor", scale=known[0], power_of_two=power_of_two)
        with torch.no_grad():
            layer(100 * x)  # an evaluation leaves no trace
        y = layer(x)
        weight = warpsmith.quantize_fp8(layer[0].weight, "tensor", power_of_two=power_of_two)
        weight = warpsmith.dequantize_fp8(weight)
        assert torch.equal(y, torch.addmm(layer[0].bias, warpsmith.dequantize_fp8(expected), weight.t()))
        y.backward(dy / 2)
        layer(x / 2).backward(dy)  # of two micro-batches the larger
        seen.append(torch.stack([finite_amax(t, (0, 1)).view(()) for t in (x, dy)]))
        done.update()
    saturated = done.counts()["0"]
    assert saturated[0] > 0 and saturated[2] > 0 and saturated[1] == saturated[3] == 0  # of step 2


@pytest.mark.parametrize(("margin", "room"), [({}, 2), ({"margin": 0}, 1), ({"margin": 2}, 4)], ids=str)
def test_how_much_larger_than_the_last_steps_nothing_saturates(margin, room):
    """By default twice as large: of x, and of the gradient, whose largest values of steps differ most."""
    torch.manual_seed(0)
    model, x, dy = nn.Sequential(nn.Linear(32, 32)), torch.randn(16, 32), torch.randn(16, 32)
    done = fp8(model, Fp8Recipe("tensor", amax="delayed", **margin))

    def saturated(factor):
        """In a step of values that are so much larger, which leaves no history."""
        before = done.counts()["0"]
        model(factor * x).backward(factor * dy)
        done.update(found_inf=torch.ones(()))
        return [b > a for a, b in zip(before[::2], done.counts()["0"][::2], strict=True)]

    model(x).backward(dy)
    done.update()
    assert saturated(room) == [False, False] and saturated(2 * room) == [True, True]


def test_a_skipped_step_advances_no_history():
    model, scaler = small(), warpsmith.amp.GradScaler("cpu", init_scale=8.0)
    done, optimizer = fp8(model, DELAYED), warpsmith.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, done, optimizer, 2, scaler)
    before = copy.deepcopy({k: fp8_state(model)[k] for k in ("history", "scales")})
    weights = copy.deepcopy(model.state_dict())
    x = batch(9)
    x[3, 3] = torch.inf
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    done.update(scaler.found_inf(optimizer))
    scaler.update()
    assert scaler.last_skipped and done.counts()["0"][1] == 1
    assert all(torch.equal(before[k], fp8_state(model)[k]) for k in before)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    train(model, done, optimizer, 1, scaler)
    assert not scaler.last_skipped and not torch.equal(before["history"], fp8_state(model)["history"])


def test_what_does_not_run_keeps_its_scales():
    model = small()
    done = fp8(model, DELAYED)
    model(batch(0) * 1e-3).mul(1e-3).sum().backward()
    done.update()
    layer, known = model[2]._fp8.state, [s.clone() for s in (model[2]._fp8.state.x_scale, model[2]._fp8.state.dy_scale)]
    for step in range(2 * DELAYED.history):
        model[0](batch(step)).sum().backward()
        done.update()
    assert torch.equal(torch.stack(known), torch.stack([layer.x_scale, layer.dy_scale])) and max(known) < 0.1


def test_input_of_another_device_changes_nothing():
    model = small()
    done = fp8(model, DELAYED)
    model(batch(0)).sum().backward()
    done.update()
    state = model[0]._fp8.state
    with pytest.raises(ValueError, match="^scaled_linear: weight: expected a tensor on meta"):
        model(batch(0).to("meta"))
    assert model[0]._fp8.state is state and state.x_scale is not None


def test_a_loaded_state_is_all_that_a_used_model_knows():
    model, fresh = small(), small()
    done, its = fp8(model, DELAYED), fp8(fresh, DELAYED)
    state = copy.deepcopy(fp8_state(model))
    model(batch(0)).sum().backward()
    for one in (model, fresh):
        load_fp8_state(one, state)
        one[0](batch(1)).sum().backward()  # the other layer does not run
    done.update()
    its.update()
    assert fp8_state(model)["known"] == fp8_state(fresh)["known"] == [True, False]
    model[0](batch(2) * torch.inf)
    before, state["counts"] = done.counts(), [torch.zeros(4, dtype=torch.int64)] * 2
    del state["history"]
    with pytest.raises(ValueError, match="^load_fp8_state: state: expected what fp8_state returned"):
        load_fp8_state(model, state)
    assert done.counts() == before and before["0"][1] > 0


def test_a_first_step_that_is_skipped_leaves_usable_scales():
    model = small()
    done = fp8(model, DELAYED)
    model(batch(0) * 1e-4).sum().backward()
    done.update(torch.ones(()))
    state = fp8_state(model)
    assert not state["history"].any() and float(state["scales"][0, 0]) < 1e-5


@pytest.mark.parametrize("recipe", [DELAYED, Fp8Recipe()], ids=["delayed", "row"])
def test_a_resumed_run_goes_on_bit_for_bit(recipe, tmp_path):
    def start():
        model = small()
        return model, fp8(model, recipe), warpsmith.optim.AdamW(model.parameters(), lr=1e-2)

    model, done, optimizer = start()
    train(model, done, optimizer, 4)
    with warpsmith.train.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, model=model, optimizer=optimizer, extra={"fp8": fp8_state(model)})
    losses = train(model, done, optimizer, 4, first=4)
    again, done, optimizer = start()
    checkpoints = warpsmith.train.Checkpointer(tmp_path)
    assert checkpoints.load(model=again, optimizer=optimizer) == 4
    load_fp8_state(again, checkpoints.extra["fp8"])
    assert train(again, done, optimizer, 4, first=4) == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    other = nn.Sequential(nn.Linear(32, 32))
    fp8(other, recipe)
    with pytest.raises(
        ValueError, match=r"load_fp8_state: state: expected one of the model's 1 layers, got one of 2, and 2"
    ):
        load_fp8_state(other, fp8_state(model))
    other = small()
    fp8(other, "tensor")
    with pytest.raises(ValueError, match=r"load_fp8_state: state: expected one of the recipe .*, got Fp8Recipe\("):
        load_fp8_state(other, fp8_state(model))


# ---- beside others


def test_one_op_in_a_compiled_graph():
    model, plain, graphs = small(), small(), []
    done = fp8(model, DELAYED)

    def backend(graph, inputs):
        graphs.append([n.target for n in graph.graph.nodes if "warpsmith" in str(n.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    fp8(plain, DELAYED)
    for step in range(3):
        for one in (compiled, plain):
            one(batch(step)).square().sum().backward()
        done.update()
        plain[0]._fp8.owner.update()
    assert graphs[0] == [torch.ops.warpsmith.scaled_linear.default] * 2
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert all(torch.equal(fp8_state(model)[k], fp8_state(plain)[k]) for k in ("history", "scales"))
    torch._dynamo.reset()


def test_recomputed_layers_use_the_scales_of_the_forward():
    found = []
    for recomputed in (False, True):
        model = small()
        done = fp8(model, DELAYED)
        for step in range(3):
            x = batch(step).requires_grad_()
            y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
            y.square().sum().backward()
            done.update()
        found.append([x.grad, *(p.grad for p in model.parameters()), fp8_state(model)["history"]])
    assert all(map(torch.equal, *found))


def test_functions_of_torch_func_leave_no_trace():
    model = small()
    fp8(model, DELAYED)
    names, values = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)

    def loss(*given):
        return torch.func.functional_call(model, dict(zip(names, given, strict=True)), (batch(0),)).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*values)
    assert not model[0]._fp8.state.has_run and not model[0]._fp8.state.x_amax
    loss(*model.parameters()).backward()
    assert all(torch.equal(p.grad, f) for p, f in zip(model.parameters(), found, strict=True))


def test_under_autocast_float32_weights_are_cast_as_they_are():
    model = small()
    fp8(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](batch(0))
    x = batch(0).bfloat16()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, warpsmith.scaled_linear(x, model[0].weight, model[0].bias.bfloat16()))
    y.sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_adapters_of_peft_train_over_a_frozen_base():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "2"], r=4))
    done = fp8(model)
    assert len(done.replaced) == 2 and all(name.endswith("base_layer") for name in done.replaced)
    assert all("no multiple of 16" in why for why in done.kept.values())
    model(batch(0)).square().sum().backward()
    with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
    assert with_gradient and all("lora_" in name for name in with_gradient)


def sharded(rank, model, kind):
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return model


EACH_WAY = [(kind, order) for kind in ("ddp", "fsdp", "optimizer") for order in ("before", "behind")]


@multirank(2, timeout_s=300)
@pytest.mark.parametrize(("kind", "order"), EACH_WAY)
def test_ranks_train_as_one(rank, world_size, kind, order):
    check_ranks_train_as_one(rank, kind, order, torch.device("cpu"))


@pytest.mark.gpu
@multirank(2, backend="nccl", timeout_s=300)
@pytest.mark.parametrize(("kind", "order"), EACH_WAY)
def test_ranks_of_nccl_train_as_one(rank, world_size, kind, order):
    check_ranks_train_as_one(rank, kind, order, torch.device("cuda", torch.cuda.current_device()))


class OneInput(nn.Module):
    """Two layers of one x, each of which adds its gradient of x to the other's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.up = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def __iter__(self):
        return self.children()

    def forward(self, x):
        x = self.first(x)
        return self.gate(x).sigmoid() * self.up(x)


@multirank(2, timeout_s=300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "optimizer"])
def test_ranks_train_layers_of_one_input_as_one(rank, world_size, kind):
    check_ranks_train_as_one(rank, kind, "before", torch.device("cpu"), OneInput)


@multirank(2, timeout_s=300)
@pytest.mark.parametrize("finds", [False, True])
def test_a_layer_of_one_input_that_nobody_uses(rank, world_size, finds):
    """Gradients of the other pass it, and call the hooks of its parameters: the optimizer sees none all the same."""
    model = OneInput()
    fp8(model)
    options = {"lr": 0.1, "weight_decay": 0.5, "find_unused_parameters": finds}
    optimizer = warpsmith.distributed.ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, **options)
    before = [p.detach().clone() for p in model.gate.parameters()]
    x = model.first(batch(rank))
    unused, y = model.gate(x), model.up(x)
    assert y.grad_fn.next_functions[0][0] is unused.grad_fn
    if not finds:
        with pytest.raises(RuntimeError, match="has no gradient: use it in the loss"):
            y.square().mean().backward()
        return
    y.square().mean().backward()
    optimizer.step()
    assert all(map(torch.equal, before, model.gate.parameters()))
    assert not torch.equal(model.up.bias, OneInput().up.bias)


def check_ranks_train_as_one(rank, kind, order, device, small=small):
    """Two ranks with half of the batch each have the weights of one process with all of it: the scales of a tensor's
    rows are of rows, the weight's gradient is not cast, and each element of a mean is rounded once more."""
    recipe, results = Fp8Recipe(wgrad="high"), []
    for alone in (True, False):
        _scaled_linear._kept.clear()
        model = small().to(device)
        if order == "before":
            fp8(model, recipe)
        trained = model if alone else sharded(rank, model, kind)
        if order == "behind":
            fp8(trained, recipe)
        own = kind == "optimizer" and not alone
        if own:
            optimizer = warpsmith.distributed.ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            for micro_batch in range(2):
                x = batch(10 * step + micro_batch).to(device)
                part = x if alone else x[4 * rank : 4 * rank + 4]
                with optimizer.no_sync() if own and micro_batch == 0 else nullcontext():
                    trained(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()])
        assert bool(len(_scaled_linear._kept)) == (alone or kind != "fsdp")  # what is gathered is not kept in 8 bits
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-3)


@multirank(4, timeout_s=300)
def test_scales_take_the_maximum_of_their_group(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = small()
    done = fp8(model, DELAYED, group=groups[rank // 2])
    model(batch(0) * (rank + 1)).sum().backward()
    done.update()
    first = fp8_state(model)["history"][0, 0, 0]
    assert torch.equal(first, finite_amax(batch(0) * (rank // 2 * 2 + 2), (0, 1)).view(()))
