"""Layers of one x in 8-bit floats: each adds its gradient of x, in its product, to the sum of those behind it. What is
asked of the graph must be what layers would give that each had x to themselves."""

import itertools
import os
import weakref

import pytest
import torch
import warpsmith
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from warpsmith.amp import Fp8Recipe
from warpsmith.ops import _shared_casts
from warpsmith.ops.linear import Fp8State
from warpsmith.testing import bitwise_equal
from warpsmith.testing.sim import is_loaded, torch_device

from tests.dispatched import Dispatched

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["sim-"] if is_loaded() else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = [{}, {"scaling": "tensor"}, {"scaling": "block"}, {"wgrad": "high"}, {"grad_dtype": "e5m2"}]
RAW = torch.ops.warpsmith.scaled_linear_backward
ROWS, WIDTH, OUTS = 40, 48, (32, 16, 64)


class Sums(Dispatched):
    def given(self):
        """Of each backward, whether it was given a sum."""
        return [len(args) > 17 and args[17] is not None for op, args in self.calls if "backward" in op._schema.name]


class Siblings:
    """Layers of one x, which a product by two has made; ``alone`` gives each a view of x of its own."""

    def __init__(self, recipe="row", dtype=FP32, device="cpu", rows=ROWS, alone=False):
        g = torch.Generator().manual_seed(7)
        self.recipe = recipe if isinstance(recipe, (str, Fp8Recipe)) else Fp8Recipe(**recipe)
        leaves = [torch.randn(rows, WIDTH, generator=g), *(torch.randn(n, WIDTH, generator=g) / 7 for n in OUTS)]
        self.leaf, *self.weights = (torch.nn.Parameter(t.to(device, dtype)) for t in leaves)
        self.dys = [torch.randn(rows, n, generator=g).to(device, dtype) for n in OUTS]
        self.x, self.alone = self.leaf * 2, alone

    def __call__(self, i):
        x = self.x.view_as(self.x) if self.alone else self.x
        return warpsmith.scaled_linear(x, self.weights[i], recipe=self.recipe)

    def backward(self, ys):
        """Of layers by their numbers. Gradients of the leaf and of all weights, zeros for what has none."""
        torch.autograd.backward(list(ys.values()), [self.dys[i] for i in ys])
        return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in (self.leaf, *self.weights)]


def both(**given):
    return Siblings(**given), Siblings(**given, alone=True)


def check_close(found, expected, dtype=FP32):
    """Gradients of weights have the same bits; that of x is rounded less often."""
    assert all(map(bitwise_equal, found[1:], expected[1:]))
    unit = torch.finfo(dtype).eps * expected[0].abs().max()
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2 * unit.item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 17, ROWS])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_sums_are_as_near_as_those_of_torch(recipe, dtype, rows, device):
    given = {"recipe": recipe, "dtype": dtype, "device": torch_device(device.strip("-")), "rows": rows}
    here, alone = both(**given)
    with Sums() as sums:
        found = here.backward({i: here(i) for i in range(3)})
    assert sums.given() == [False, True, True]
    expected = alone.backward({i: alone(i) for i in range(3)})
    assert all(map(bitwise_equal, found[1:], expected[1:]))
    parts = []
    for i in range(3):  # of the same bytes, in float32
        x, weight = ((2 * here.leaf).float().detach(), here.weights[i].float().detach())
        x.requires_grad_()
        emulate = given["device"] != "cuda"
        y = warpsmith.scaled_linear(x, weight, recipe=here.recipe, emulate=emulate)
        parts += torch.autograd.grad(y, x, here.dys[i].float())
    exact = 2 * torch.stack(parts).double().sum(0)
    ours, torchs = ((t.double() - exact).abs().max() for t in (found[0], expected[0]))
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert ours <= torchs + 2 * unit
    if dtype == BF16 and rows == ROWS and given["device"] == "cpu":  # rounded three times, not five
        assert (found[0].double() - exact).square().mean() < (expected[0].double() - exact).square().mean()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("recipe", ["row", "block"])
def test_layers_run_in_any_order_and_are_used_in_any(recipe, order):
    here, alone = both(recipe=recipe)
    ys, others = ({i: call(i) for i in order} for call in (here, alone))
    first = here.backward({i: ys[i] for i in range(3)})
    check_close(first, alone.backward(others))
    again = Siblings(recipe=recipe)
    ys = {i: again(i) for i in order}
    assert all(map(bitwise_equal, first, again.backward({i: ys[i] for i in reversed(order)})))


@pytest.mark.parametrize("used", [u for n in (1, 2) for u in itertools.combinations(range(3), n)], ids=str)
def test_some_outputs_are_not_used(used):
    here, alone = both()
    ys, others = ([call(i) for i in range(3)] for call in (here, alone))
    found, expected = here.backward({i: ys[i] for i in used}), alone.backward({i: others[i] for i in used})
    check_close(found, expected)
    assert [w.grad is not None for w in here.weights] == [i in used for i in range(3)]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_that_nobody_uses_are_not_called(kind):
    here, alone = both()
    seen = []
    getattr(here.weights[1], kind)(lambda t: seen.append(t))
    ys = [here(i) for i in range(3)]
    with Sums() as sums:
        found = here.backward({0: ys[0], 2: ys[2]})
    assert not seen and sums.given() == [False, True]
    check_close(found, alone.backward({i: alone(i) for i in (0, 2)}))
    here, alone = both()
    getattr(here.weights[1], kind)(lambda t: seen.append(t))
    check_close(here.backward({i: here(i) for i in range(3)}), alone.backward({i: alone(i) for i in range(3)}))
    assert len(seen) == 1 and isinstance(seen[0], torch.Tensor)


def test_an_output_is_used_twice_and_x_beside_its_layers():
    found = []
    for call in both():
        y = [call(i) for i in range(3)]
        loss = (y[0] * y[1].detach()[:, :1]).sum() + (y[0].cos().sum() + y[1].sum() * y[2].mean()) + call.x.sin().sum()
        loss.backward()
        found.append([t.grad for t in (call.leaf, *call.weights)])
    check_close(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_repeat_and_graphs_may_be_kept(device):
    here = Siblings(dtype=BF16, device=torch_device(device.strip("-")))
    ys = {i: here(i) for i in range(3)}
    leaves = [here.leaf, *here.weights]
    ask = lambda **more: torch.autograd.grad([*ys.values()], leaves, here.dys, **more)  # noqa: E731
    first = ask(retain_graph=True)
    assert all(map(bitwise_equal, first, ask(retain_graph=True)))
    assert all(map(bitwise_equal, first, ask()))
    with pytest.raises(RuntimeError, match="second time"):
        ask()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_parts_of_the_graph_are_asked_for_one_by_one(order, keeps):
    """A layer through whose node others' gradients have passed still has what its own backward needs, once."""
    here, alone = both()
    x, ys, others = here.x, [here(i) for i in range(3)], [alone(i) for i in range(3)]
    for i in order:
        leaves = [x, here.weights[i]]
        found = torch.autograd.grad(ys[i], leaves, here.dys[i], retain_graph=keeps)
        expected = torch.autograd.grad(others[i], [alone.x, alone.weights[i]], alone.dys[i])
        assert all(map(bitwise_equal, found, expected))
    for i in range(3):
        if keeps:
            torch.autograd.grad(ys[i], here.weights[i], here.dys[i])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(ys[i], here.weights[i], here.dys[i])


def test_a_weight_may_change_once_its_layer_has_run():
    """The sum of the others passes a node that has been freed, and whose weight a step has changed."""
    here, alone = both()
    found, expected = [], []
    for call, grads in ((here, found), (alone, expected)):
        ys = [call(i) for i in range(3)]
        for i in (1, 0, 2):
            grads += torch.autograd.grad(ys[i], [call.x, call.weights[i]], call.dys[i])
            with torch.no_grad():
                call.weights[i].mul_(2)
    assert all(map(bitwise_equal, found, expected))


def test_a_second_derivative_is_refused():
    here = Siblings()
    ys = [here(i) for i in range(2)]
    (dx,) = torch.autograd.grad([y.sum() for y in ys], here.leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="scaled_linear"):
        dx.sum().backward()
    ys[0].sum().backward(retain_graph=True)
    (dx,) = torch.autograd.grad(ys[1].sum(), here.leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="scaled_linear"):
        dx.sum().backward()


def test_hooks_of_x_see_the_whole_sum():
    totals = []
    for call in both():
        seen = []
        y = [call(0)]
        call.x.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        call.x.retain_grad()
        y += [call(i) for i in (1, 2)]
        call.backward(dict(enumerate(y)))
        assert len(seen) == 1 and torch.equal(call.x.grad, seen[0])
        totals.append(seen[0])
    torch.testing.assert_close(*totals)


def test_x_is_changed_between_two_layers():
    """Where a layer keeps x torch refuses, and no layer reads the other's x."""
    for recipe in ("row", "block"):
        here, alone = both(recipe=recipe)
        grads = []
        for call in (here, alone):
            ys = [call(0), call(1)]
            call.x.mul_(3)
            ys += [call(2)]
            if recipe == "block":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    call.backward(dict(enumerate(ys)))
            else:
                grads.append(call.backward(dict(enumerate(ys))))
        if grads:
            check_close(*grads)


def test_x_becomes_another_leaf_between_two_layers():
    here = Siblings()
    first = here(0)
    x = here.x.detach_().requires_grad_()
    second = here(1)
    second.backward(here.dys[1])
    assert x.grad is not None and here.leaf.grad is None
    first.backward(here.dys[0])
    assert here.leaf.grad is not None


def test_values_of_x_are_those_of_x():
    """x.data is another tensor for the second layer: its y is of that."""
    here = Siblings()
    first = here(0)
    other = torch.randn(ROWS, WIDTH)
    here.x.data = other
    second = here(1)
    assert torch.equal(second, warpsmith.scaled_linear(other, here.weights[1]))
    found, expected = here.backward({0: first, 1: second}), Siblings()
    expected = expected.backward({0: expected(0)})
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("recipe", ["row", "block"])
def test_a_forward_without_a_backward_frees_its_graph(recipe):
    here, factor = Siblings(recipe=recipe), torch.full((ROWS, WIDTH), 2.0)
    here.x = here.leaf * factor
    kept, factor = StorageWeakRef(factor.untyped_storage()), None
    ys = [here(i) for i in range(3)]
    nodes = [weakref.ref(y.grad_fn) for y in ys]
    assert _shared_casts.of_gradients.held
    del ys[2]
    assert not _shared_casts.of_gradients.held and nodes[2]() is None
    ys.clear()
    assert all(n() is None for n in nodes)
    assert not kept.expired()
    here.x = None
    assert kept.expired()


def test_x_is_not_kept_longer_than_without():
    here = Siblings()
    ys, storage = [here(i) for i in range(3)], StorageWeakRef(here.x.untyped_storage())
    here.x = None
    assert storage.expired() and not _shared_casts.of_gradients.held
    with Sums() as sums:
        here.backward(dict(enumerate(ys)))
    assert sums.given() == [False, True, True]


def test_outputs_live_on_in_what_is_made_of_them():
    """A view of y, or an op that keeps it: so a layer's y is often all that is left when the next one runs."""
    here = Siblings()
    ys = [here(i).view(2, -1) for i in range(2)] + [here(2).sin()]
    with Sums() as sums:
        sum(y.sum() for y in ys).backward()
    assert sums.given() == [False, True, True]


def test_others_have_no_sum():
    """A leaf, a parameter's own gradient alone, a forward without gradients, another x, a step between."""
    here = Siblings()
    leaf = here.leaf.detach().requires_grad_()
    for x in (leaf, leaf.detach()):
        with Sums() as sums:
            sum(warpsmith.scaled_linear(x, w).sum() for w in here.weights).backward()
        assert sums.given() == [False] * 3 and not _shared_casts.of_gradients.held
    with torch.no_grad():
        here(0)
    assert not _shared_casts.of_gradients.held
    first = here(0)
    warpsmith.optim.SGD(here.weights, lr=0.0).step()
    assert not _shared_casts.of_gradients.held
    second, other = here(1), warpsmith.scaled_linear(here.x * 1, here.weights[0])
    with Sums() as sums:
        (first.sum() + second.sum() + other.sum() + here(2).sum()).backward()
    assert sums.given() == [False] * 4


def test_a_frozen_base_adds_too():
    found = []
    for call in both():
        for w in call.weights[:2]:
            w.requires_grad_(False)
        with Sums() as sums:
            found.append(call.backward({i: call(i) for i in range(3)}))
        assert sums.given() == ([False] * 3 if call.alone else [False, True, True])
    check_close(*found)


def test_delayed_scales_add_too():
    here = Siblings(recipe=Fp8Recipe("tensor", amax="delayed"))
    state = Fp8State(torch.device("cpu"))
    state.x_scale, state.dy_scale = torch.tensor(0.25), torch.tensor(0.5)
    ys = [warpsmith.scaled_linear(here.x, w, recipe=here.recipe, state=state) for w in here.weights]
    with Sums() as sums:
        sum(y.sum() for y in ys).backward()
    assert sums.given() == [False, True, True]


@pytest.mark.parametrize("first", [True, False], ids=["all", "first not used"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_layers_anew(reentrant, first):
    grads = []
    for anew in (False, True):
        here = Siblings()

        def block(x, here=here):
            here.x = x * 1
            y = [here(i) for i in range(3)]
            loss = (y[1].sum() * y[2]).sin().sum()
            return loss + y[0].sum() if first else loss

        x = here.leaf * 2
        loss = checkpoint(block, x, use_reentrant=reentrant) if anew else block(x)
        loss.backward()
        grads.append([t.grad for t in (here.leaf, *here.weights) if t.grad is not None])
    assert len(grads[0]) == 3 + first and all(map(bitwise_equal, *grads))


def test_a_checkpoint_ends_between_two_layers():
    grads = []
    for call in both():
        first = checkpoint(lambda x, call=call: call(0), call.x, use_reentrant=False)
        ys = {0: first, 1: call(1), 2: call(2)}
        grads.append(call.backward(ys))
    check_close(*grads)


@pytest.mark.parametrize("recipe", ["row", "tensor", "block"])
def test_several_gradients_in_one(recipe):
    found = []
    for call in both(recipe=recipe):
        ys = [call(i) for i in range(3)]
        dys = [torch.stack([d, 2 * d, d.flip(0)]) for d in call.dys]
        found.append(torch.autograd.grad(ys, [call.leaf, *call.weights], dys, is_grads_batched=True))
    check_close(*found)


def test_autocast_shares_an_x_of_its_dtype():
    here = Siblings(dtype=BF16)
    weights = [w.detach().float().requires_grad_() for w in here.weights]
    with torch.autocast("cpu", BF16):
        ys = [warpsmith.scaled_linear(here.x, w) for w in weights]
    with Sums() as sums:
        sum(y.float().sum() for y in ys).backward()
    assert sums.given() == [False, True, True] and all(w.grad.dtype == FP32 for w in weights)
    wide = here.leaf.detach().float().requires_grad_() * 2
    with torch.autocast("cpu", BF16):
        ys = [warpsmith.scaled_linear(wide, w) for w in weights]
    with Sums() as sums:
        sum(y.float().sum() for y in ys).backward()
    assert sums.given() == [False] * 3  # each has a cast of x of its own


@pytest.mark.gpu
def test_streams_wait_for_each_others_sums():
    given = {"device": "cuda", "rows": 4096, "dtype": BF16}
    expected = Siblings(**given)
    expected = expected.backward({i: expected(i) for i in range(3)})
    for _ in range(3):
        here, ys = Siblings(**given), {}
        torch.cuda.synchronize()
        for i in range(3):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000 * (i == 1))
                ys[i] = here(i)
            torch.cuda.current_stream().wait_stream(stream)
        found = here.backward(ys)
        assert all(map(bitwise_equal, found, expected))


@pytest.mark.gpu
def test_a_captured_backward_has_the_bits_of_eager():
    given = {"device": "cuda", "dtype": BF16}
    expected = Siblings(**given)
    expected = expected.backward({i: expected(i) for i in range(3)})
    here = Siblings(**given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        here.backward({i: here(i) for i in range(3)})
    torch.cuda.current_stream().wait_stream(side)
    for t in (here.leaf, *here.weights):
        t.grad = None
    here.x = None  # its graph holds where torch adds the leaf's gradient: on a stream outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here.x = here.leaf * 2
        ys = {i: here(i) for i in range(3)}
        torch.autograd.backward([*ys.values()], here.dys)
    graph.replay()
    found = [t.grad for t in (here.leaf, *here.weights)]
    assert all(map(bitwise_equal, found, expected))


# ---- the raw op


def raw_arguments(device="cpu", rows=ROWS, dtype=BF16, recipe="row"):
    here = Siblings(device=device, rows=rows, dtype=dtype)
    options = Fp8Recipe(recipe).options + 128
    weight = here.weights[0].detach()
    return [here.dys[0], None, weight, *[None] * 10, options, True, False, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["row", "tensor", "block"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("rows", [0, 1, 16, 33])
def test_a_sum_is_added_before_the_rounding(rows, dtype, recipe, device):
    device = torch_device(device.strip("-"))
    given = raw_arguments(device, rows, dtype, recipe)
    step = 0 if device == "cpu" and dtype != FP32 else 4 * torch.finfo(dtype).eps  # of addmm's order on a card
    wide = RAW(given[0].float(), None, given[2].float(), *given[3:])[0]
    whole = torch.randn(rows, 2 * WIDTH, device=device).to(dtype)
    for before in (whole[:, :WIDTH], whole[:, ::2], whole[:, :WIDTH].t().contiguous().t()):
        kept = before.clone()
        found = RAW(*given, before)[0]
        torch.testing.assert_close(found, (wide + before.float()).to(dtype), rtol=step, atol=step)
        assert torch.equal(before, kept) and found.is_contiguous()
    assert torch.equal(RAW(*given, None)[0], RAW(*given)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [17, 4096])
def test_a_card_adds_a_sum_in_its_product(rows, dtype, recipe):
    """So the product itself is not rounded."""
    given = raw_arguments("cuda", rows, dtype, recipe)
    given[13] -= 128  # not emulated
    wide = RAW(given[0].float(), None, given[2].float(), *given[3:])[0]
    before = torch.randn(rows, WIDTH, device="cuda").to(dtype)
    alone, found = RAW(*given)[0], RAW(*given, before)[0]
    once, twice = (wide + before.float()).to(dtype), alone + before
    assert (found != once).sum() < 0.01 * found.numel() < (found != twice).sum()
    assert torch.equal(found, RAW(*given, before)[0])
    wider = RAW(given[0].float(), None, given[2].float(), *given[3:], before.float())[0]
    torch.testing.assert_close(wider, wide + before.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_our_products_are_followed_by_an_addition(device):
    """On every device, so that it has the bits of a card."""
    device = torch_device(device.strip("-"))
    given = raw_arguments(device, 48)
    given[13] -= 128  # not emulated
    before = torch.randn(48, WIDTH, device=device).to(BF16)
    torch.ops.warpsmith._own_product("1")
    try:
        alone, found = RAW(*given)[0], RAW(*given, before)[0]
        assert torch.ops.warpsmith._own_product("1") >= 2
    finally:
        torch.ops.warpsmith._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto"))
    assert torch.equal(found, alone + before)


@pytest.mark.gpu
def test_products_of_blocks_are_followed_by_an_addition():
    given = raw_arguments("cuda", 48, recipe="block")
    given[13] -= 128
    before = torch.randn(48, WIDTH, device="cuda").to(BF16)
    assert torch.equal(RAW(*given, before)[0], RAW(*given)[0] + before)


def test_what_is_not_finite_stays_so_in_a_sum():
    given, before = raw_arguments(), torch.zeros(ROWS, WIDTH, dtype=BF16)
    before[3, 5], before[4, 6] = torch.nan, torch.inf
    found = RAW(*given, before)[0]
    assert found[3, 5].isnan() and found[4, 6].isinf() and found.isfinite().sum() == found.numel() - 2


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.float(), "sum: expected bfloat16, got float32"),
        (lambda t: t[1:], r"sum: expected shape \(40, 48\), got \(39, 48\)"),
        (lambda t: t[:, 1:], r"sum: expected shape \(40, 48\), got \(40, 47\)"),
        (lambda t: t[None], r"sum: expected shape \(40, 48\), got \(1, 40, 48\)"),
        (lambda t: t.to("meta"), "sum: expected a tensor on cpu, got .*meta"),
        (None, "sum: expected None where the gradient of x is not wanted, got a tensor"),
    ],
    ids=["dtype", "rows", "width", "dimensions", "device", "unwanted"],
)
def test_bad_sums(change, words, fake):
    given, before = raw_arguments(), torch.zeros(ROWS, WIDTH, dtype=BF16)
    if change is None:
        given[14] = False
    else:
        before = change(before)
    if fake and "meta" not in words:
        given, before = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in given], before.to("meta")
    with pytest.raises(ValueError, match=f"^scaled_linear_backward: {words}"):
        RAW(*given, before)


def test_the_fake_gives_what_the_kernel_gives():
    given, before = raw_arguments(), torch.zeros(ROWS, WIDTH, dtype=BF16)
    torch.library.opcheck(RAW.default, (*given, before), test_utils=("test_schema", "test_faketensor"))
