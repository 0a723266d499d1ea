"""What 8-bit products leave of a signal, which casts are kept, and which cards a recipe is refused on."""

import gc
import itertools
import math
import weakref

import pytest
import torch
import warpsmith
from warpsmith import reference
from warpsmith._core import pending
from warpsmith.amp import Fp8Recipe
from warpsmith.ops import _scaled_linear, _shared_casts
from warpsmith.testing import bitwise_equal

from tests.dispatched import Dispatched

E4M3 = torch.float8_e4m3fn
raw = torch.ops.warpsmith


def decibels(signal, value):
    noise = value.double() - signal.double()
    return 10 * math.log10(float(signal.double().square().sum() / noise.square().sum()))


def of_all(function, x, weight, bias, dy):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def tensors(rows, width, out, dtype=torch.float32):
    torch.manual_seed(0)
    x, dy = torch.randn(rows, width) * torch.randn(rows, 1).mul(0.5).exp(), torch.randn(rows, out)
    return [t.to(dtype) for t in (x, torch.randn(out, width) / width**0.5, torch.randn(out), dy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"scaling": s, "grad_dtype": g} for s in ("row", "tensor", "block")
                                     for g in ("e4m3", "e5m2")], ids=str)  # fmt: skip
def test_signal_over_noise(options, dtype):
    """Each product keeps what its casts leave, within 1 dB, and no less than torchao asks of its own."""
    given = tensors(96, 512, 256, dtype)
    exact = of_all(torch.nn.functional.linear, *(t.double() for t in given))
    found = of_all(lambda *t: warpsmith.scaled_linear(*t, recipe=Fp8Recipe(**options)), *given)
    casts = of_all(lambda *t: reference.scaled_linear(*t, **options), *(t.double() for t in given))
    least = {"e4m3": 25, "e5m2": 21}[options["grad_dtype"]]
    for name, e, f, c, bound in zip(("y", "dx", "dweight"), exact, found, casts, (25, least, least), strict=False):
        assert decibels(e, f) >= max(decibels(e, c) - 1, bound), name
    assert decibels(exact[3], found[3]) > 45  # of the bias: nothing is cast


def test_what_is_not_cast_is_exact():
    x, weight, bias, dy = tensors(40, 64, 32)
    found = of_all(lambda *t: warpsmith.scaled_linear(*t, recipe=Fp8Recipe(wgrad="high")), x, weight, bias, dy)
    torch.testing.assert_close(found[2], dy.t() @ x)
    torch.testing.assert_close(found[3], dy.sum(0))


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_what_is_not_finite_stays_so_and_is_counted(scaling):
    x, weight, bias, dy = tensors(40, 64, 32)
    x[3, 5], x[7, 0], dy[9, 9] = math.inf, math.nan, -math.inf
    state = _scaled_linear.Fp8State(x.device)
    found = of_all(lambda *t: warpsmith.scaled_linear(*t, recipe=scaling, state=state), x, weight, bias, dy)
    assert state.x_counts.tolist() == [0, 2] and state.dy_counts.tolist() == [0, 1]
    y, dx, dweight, dbias = found
    assert not y[[3, 7]].isfinite().any() and y[:3].isfinite().all()
    assert not dx[9].isfinite().any() and not dbias[9].isfinite()
    assert not dweight[:, [0, 5]].isfinite().any() and not dweight[9].isfinite().any()


def test_zeros_largest_values_and_subnormal_rows():
    x = torch.zeros(4, 16)
    x[1, 0], x[2, 0], x[3, 0] = 448.0, 2.0**-140, 9.0
    y = warpsmith.scaled_linear(x, torch.eye(16))
    assert y[:, 0].tolist() == [0.0, 448.0, 2.0**-140 if y[2, 0] else 0.0, 9.0]
    assert warpsmith.scaled_linear(x[:0], torch.eye(16)).shape == (0, 16)


class Calls(Dispatched):
    def casts(self):
        """Of weights, since the last question."""
        count = self.names.count("scaled_linear_cast")
        self.calls.clear()
        return count

    def shared(self, place, *forms):
        """Of each product of these forms, whether it was given the bytes of x, which have this place."""
        return [args[place] is not None for op, args in self.calls if op._schema.name.rsplit("_")[-1] in forms]


def layer(**options):
    torch.manual_seed(0)
    made = torch.nn.Linear(32, 48)
    recipe = Fp8Recipe(**options)
    return made, lambda x: warpsmith.scaled_linear(x, made.weight, made.bias, recipe=recipe)


def test_one_op_a_direction():
    _, call = layer()
    x = torch.randn(4, 32, requires_grad=True)
    with Calls() as calls:
        call(x).sum().backward()
    assert calls.names == ["scaled_linear_cast", "scaled_linear_forward", "scaled_linear_backward"]
    with Calls() as calls:
        warpsmith.scaled_linear(x, torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert calls.names == ["scaled_linear_forward", "scaled_linear_backward"]


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_what_nobody_reads_is_not_returned(scaling):
    """Without a gradient, and where x was cast before, the op gives y alone."""
    made, call = layer(scaling=scaling)
    x = torch.randn(4, 32, requires_grad=True)
    with Calls() as calls:
        expected = call(x)
        assert torch.equal(call(x), expected)
        made.requires_grad_(False)
        with torch.no_grad():
            assert torch.equal(call(x), expected)
        assert torch.equal(call(x.detach()), expected)
    forms = [name for name in calls.names if name != "scaled_linear_cast"]
    assert forms == ["scaled_linear_forward", *["scaled_linear_inference"] * 3]
    # a frozen layer of a model in training counts all the same
    state = _scaled_linear.Fp8State(torch.device("cpu"))
    warpsmith.scaled_linear(x.detach().fill_(torch.inf), made.weight, recipe=scaling, state=state)
    assert state.x_counts.tolist() == [0, x.numel()]


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_micro_batches_cast_a_weight_once(scaling):
    made, call = layer(scaling=scaling)
    optimizer = warpsmith.optim.AdamW(made.parameters(), lr=1e-2)
    x = torch.randn(4, 32, requires_grad=True)
    with Calls() as calls:
        for step in range(2):
            for micro_batch in range(4):
                call(x).sum().backward()
                # the transpose is kept from the second backward on
                assert calls.casts() == {0: 1, 1: 1}.get(micro_batch, 0), (step, micro_batch)
            optimizer.step()
        assert call(x).shape == (4, 48) and "scaled_linear_cast" in calls.names


def take_averages(made):
    averages = warpsmith.optim.EMA(made.parameters(), 0.5)
    averages.averages[0].mul_(3)
    averages.copy_to_params()


CHANGES = {
    "in place": lambda m: m.weight.detach().mul_(2),
    "load_state_dict": lambda m: m.load_state_dict({k: 2 * v for k, v in m.state_dict().items()}),
    "data": lambda m: setattr(m.weight, "data", 2 * m.weight.data),
    "torch's step": lambda m: torch.optim.SGD([m.weight], lr=1.0).step(),
    "a fused step": lambda m: torch.optim.AdamW([m.weight], lr=1.0, fused=True).step(),
    "our step": lambda m: warpsmith.optim.SGD([m.weight], lr=1.0).step(),
    "our op": lambda m: warpsmith.adamw(
        [m.weight], [m.weight.grad], *([torch.zeros(48, 32)] for _ in range(2)), [], [torch.zeros(())], lr=1.0
    ),
    "averages": take_averages,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_cast_anew(change):
    made, call = layer()
    x = torch.randn(4, 32, requires_grad=True)
    before = call(x)
    before.sum().backward()
    CHANGES[change](made)
    gc.collect()
    expected = warpsmith.scaled_linear(x, made.weight.detach().clone(), made.bias)
    assert torch.equal(call(x), expected) and not torch.equal(before, expected)


def test_averages_that_are_swapped_in_by_data_are_seen():
    made, call = layer()
    x, kept = torch.randn(4, 32), made.weight.detach().clone()
    before = call(x)
    with torch.no_grad():
        assert torch.equal(call(x), before)
        made.weight.data.mul_(3)  # no version moves
        assert torch.equal(call(x), warpsmith.scaled_linear(x, 3 * kept, made.bias))
    made.weight.data.copy_(kept)
    assert torch.equal(call(x), before)


def test_a_loop_that_edits_data_is_seen_by_its_gradients():
    made, call = layer()
    x = torch.randn(4, 32)
    for _ in range(3):
        y = call(x)
        assert torch.equal(y, warpsmith.scaled_linear(x, made.weight.detach().clone(), made.bias))
        y.sum().backward()
        for p in made.parameters():
            p.data.sub_(p.grad)
        made.zero_grad()


@pytest.mark.parametrize("change", [torch.t, lambda t: t[:16], lambda t: t[16:]], ids=["transposed", "first", "last"])
def test_other_views_of_the_same_memory_are_cast_anew(change):
    weight, x = torch.nn.Parameter(torch.randn(32, 32)), torch.randn(4, 32)
    for _ in range(2):
        assert torch.equal(warpsmith.scaled_linear(x, weight), warpsmith.scaled_linear(x, weight.detach().clone()))
        weight.data = change(weight.data)


def test_weights_of_inference_mode_have_no_version():
    with torch.inference_mode():
        made, call = layer()
        x = torch.randn(4, 32)
        for _ in range(2):
            assert torch.equal(call(x), warpsmith.scaled_linear(x, made.weight.clone(), made.bias))
            made.weight.mul_(2)


@pytest.mark.parametrize("named", [True, False], ids=["parameters", "fragments"])
def test_weights_of_a_captured_step_are_not_kept(named, monkeypatch):
    """Its replays change them and count no step. A sharded step does not name them."""
    monkeypatch.setattr(_scaled_linear.Steps, "captured", False)
    (made, call), (other, call_other), x = layer(), layer(), torch.randn(4, 32)
    given = made.weight if named else made.weight.detach()
    with monkeypatch.context() as capturing:
        for name in ("is_initialized", "is_current_stream_capturing"):
            capturing.setattr(torch.cuda, name, lambda: True)
        states = [[torch.zeros(48, 32)] for _ in range(3)]
        warpsmith.adamw([given], *states, [], [torch.zeros(())], lr=0.1)
    call(x), call_other(x)
    kept = [_scaled_linear.kept_of(one.weight) is not None for one in (made, other)]
    assert kept == [False, named]


@pytest.mark.gpu
def test_each_stream_has_its_own_cast():
    weight, x = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda")), torch.randn(16, 4096, device="cuda")
    expected, streams = warpsmith.scaled_linear(x, weight.detach()), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(50_000_000)
        found = [warpsmith.scaled_linear(x, weight)]
    with torch.cuda.stream(streams[1]):
        found.append(warpsmith.scaled_linear(x, weight))
    torch.cuda.synchronize()
    assert all(torch.equal(f, expected) for f in found)


def test_a_frozen_base_is_cast_once_and_has_no_gradient():
    made, call = layer()
    made.requires_grad_(False)
    adapter = torch.nn.Parameter(torch.randn(4, 32))
    optimizer = warpsmith.optim.SGD([adapter], lr=0.1)
    with Calls() as calls:
        for step in range(3):
            call(adapter).sum().backward()
            optimizer.step()
            assert calls.casts() == (2 if step == 0 else 0)
    assert made.weight.grad is None


def test_a_frozen_teacher_follows_its_student():
    """It is averaged by weight.data behind each step; what follows no step is told to torch."""
    (teacher, call), student, x = layer(), torch.nn.Linear(32, 48), torch.randn(4, 32)
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(3):
        expected = warpsmith.scaled_linear(x, teacher.weight.clone(), teacher.bias)
        assert torch.equal(call(x), expected)
        if step == 1:
            torch.autograd.graph.increment_version(teacher.weight)
        else:
            (student(x) - expected).square().sum().backward()
            optimizer.step()
        teacher.weight.data.mul_(0.5).add_(student.weight.data, alpha=0.5)


def test_one_byte_a_weight_is_kept():
    """Two, where a second backward of the same weight has shown that its transpose is needed again."""
    made, call = layer()
    x = torch.randn(4, 32, requires_grad=True)
    weight = made.weight
    call(x).sum().backward()
    kept = _scaled_linear.kept_of(weight)
    assert kept.data.numel() == weight.numel() and kept.data.itemsize == 1 and kept.turned is None
    call(x).sum().backward()
    assert kept.turned[0].shape == (32, 48)
    _scaled_linear.forget(weight)
    assert _scaled_linear.kept_of(weight) is None


def test_recomputation_and_two_graphs_at_once():
    made, call = layer(scaling="tensor")
    x = torch.randn(4, 32, requires_grad=True)
    plain = torch.autograd.grad(call(x).cos().sum(), [x, made.weight])
    again = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
    assert all(map(torch.equal, plain, torch.autograd.grad(again.cos().sum(), [x, made.weight])))
    first, second = call(x), call(2 * x)
    first.sum().backward()
    second.sum().backward()


CARDS = {
    (8, 0): (),
    (8, 9): ("tensor",),
    (9, 0): ("row", "tensor", "block"),
    (10, 0): ("tensor",),
    (12, 0): ("tensor",),
}


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_cards(card, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_scaled_linear, "capability", lambda device: card)
    for scaling in ("row", "tensor", "block"):
        recipe = Fp8Recipe(scaling)
        assert _scaled_linear.is_emulated("scaled_linear", recipe, device, True)
        if scaling in CARDS[card]:
            assert not _scaled_linear.is_emulated("scaled_linear", recipe, device, False)
            continue
        with pytest.raises(
            ValueError, match=r"^scaled_linear: recipe: expected (scaling 'tensor' on|a card of) sm_.*, got"
        ):
            _scaled_linear.is_emulated("scaled_linear", recipe, device, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaling": "column"}, "scaling: expected one of 'row', 'tensor', 'block', got 'column'"),
        ({"amax": "delayed"}, "amax: expected 'current' with scaling 'row', got 'delayed'"),
        ({"history": 0}, "history: expected a number >= 1, got 0"),
        ({"margin": -1}, "margin: expected an int from 0 to 64, got -1"),
        ({"grad_dtype": "e3m4"}, "grad_dtype: expected one of 'e4m3', 'e5m2', got 'e3m4'"),
        ({"wgrad": "bf16"}, "wgrad: expected one of 'fp8', 'high', got 'bf16'"),
        ({"accumulate": "slow"}, "accumulate: expected one of 'auto', 'fast', 'float32', got 'slow'"),
    ],
)
def test_recipes(options, words):
    with pytest.raises(ValueError, match=f"^Fp8Recipe: {words}$"):
        Fp8Recipe(**options)
    with pytest.raises(ValueError, match="^scaled_linear: recipe: expected an Fp8Recipe or one of .*, got 'rows'"):
        warpsmith.scaled_linear(torch.ones(1, 16), torch.ones(16, 16), recipe="rows")


def test_plan():
    sizes = {"rows": 20_000, "in_features": 4096, "out_features": 128_256}
    found = warpsmith.plan("scaled_linear", **sizes)
    assert [found[k] for k in ("path", "tile", "forward", "dgrad", "wgrad")] == ["own", "128x256", "fast"] + [
        "float32"
    ] * 2
    found = warpsmith.plan("scaled_linear", **sizes, scaling="block")
    assert [found[k] for k in ("path", "tile", "forward")] == ["own", "256x128", "float32"]
    assert warpsmith.plan("scaled_linear", **sizes, accumulate="fast")["wgrad"] == "fast"
    assert warpsmith.plan("scaled_linear", **sizes, code_capability=100)["path"] == "none"
    assert warpsmith.plan("scaled_linear", **sizes, scaling="tensor", code_capability=89)["path"] == "_scaled_mm"
    for scaling, accumulate in itertools.product(("row", "tensor", "block"), ("fast", "float32")):
        how = {"scaling": scaling, "accumulate": accumulate, "own_product": "auto"}
        pays = (scaling, accumulate) != ("tensor", "float32")  # where it was measured
        assert (warpsmith.plan("scaled_linear", **sizes, **how)["path"] == "own") == pays
        few = sizes | {"rows": 50}
        assert (warpsmith.plan("scaled_linear", **few, **how)["path"] == "own") == (scaling == "block")
    own = warpsmith.plan("scaled_linear", **sizes, own_product="always", accumulate="float32")
    assert (own["path"], own["tile"], own["forward"]) == ("own", "256x128", "float32")
    long = {**sizes, "in_features": 8192}
    assert warpsmith.plan("scaled_linear", **long, own_product="always", accumulate="float32")["tile"] == "128x192"
    for other in ({"emulate": True}, {"dtype": "float32"}, {"code_capability": 89}):
        assert warpsmith.plan("scaled_linear", **sizes, own_product="always", **other)["path"] != "own"


# ---- on a card: the products, beside what they mean

SIZES = [(128, 256, 512), (100, 128, 48), (17, 2064, 144), (1, 16, 16), (4096, 1024, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{"scaling": s, "grad_dtype": g} for s in ("row", "tensor", "block")
                                     for g in ("e4m3", "e5m2")], ids=str)  # fmt: skip
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_a_card_are_the_emulated(size, options, dtype):
    rows, width, out = size
    card = torch.cuda.get_device_capability()
    if options["scaling"] not in CARDS.get(card, ("tensor",)):
        pytest.skip(f"sm_{card[0]}{card[1]} has no products of scaling {options['scaling']}")
    given = [t.cuda() for t in tensors(rows, width, out, dtype)]
    recipe = Fp8Recipe(**options, accumulate="float32")
    found = of_all(lambda *t: warpsmith.scaled_linear(*t, recipe=recipe), *given)
    expected = of_all(lambda *t: warpsmith.scaled_linear(*t, recipe=recipe, emulate=True), *given)
    for name, f, e in zip(("y", "dx", "dweight", "dbias"), found, expected, strict=True):
        assert f.dtype == e.dtype and decibels(e, f) > 50, (name, decibels(e, f))
    again = of_all(lambda *t: warpsmith.scaled_linear(*t, recipe=recipe), *given)
    assert all(map(torch.equal, found, again))


def siblings(scaling, count=3):
    g = torch.Generator().manual_seed(3)
    weights = [torch.randn(32, 48, generator=g).requires_grad_() for _ in range(count)]
    states = [_scaled_linear.Fp8State(torch.device("cpu")) for _ in weights]

    def call(i, x):
        return warpsmith.scaled_linear(x, weights[i], recipe=scaling, state=states[i])

    return weights, states, call


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_layers_of_one_x_share_its_cast(scaling):
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(4)).requires_grad_()
    x.data[3, 5] = math.inf
    weights, states, call = siblings(scaling)
    with Calls() as calls:
        torch.cat([call(i, x) for i in range(3)], 1).square().sum().backward()
    assert calls.shared(6, "forward", "inference") == calls.shared(11, "backward") == [False, True, True]
    assert [s.x_counts.tolist() for s in states] == [[0, 1]] * 3
    shared = [t.grad.clone() for t in (x, *weights)]
    for t in (x, *weights):
        t.grad = None
    _scaled_linear.of_rows.clear()
    ys = []
    for i in range(3):
        ys.append(call(i, x))
        _scaled_linear.of_rows.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_scaled_linear.of_columns, "keep", lambda *_: None)
        torch.cat(ys, 1).square().sum().backward()
    assert all(bitwise_equal(t.grad, s) for t, s in zip((x, *weights), shared, strict=True))


def test_a_cast_of_x_is_shared_with_that_very_x_alone():
    weights, _, call = siblings("row", 2)

    def alone(i, x):
        return warpsmith.scaled_linear(x.clone(), weights[i].detach().clone())

    for change in (
        lambda x: x.mul_(2),  # in place
        lambda x: x[:20],  # a part of it
        lambda x: x.t().reshape(40, 48),  # other values at another place
        lambda x: x.as_strided((40, 48), (48, 1)),  # the same again: may be shared
    ):
        x = torch.randn(40, 48)
        call(0, x)
        x = change(x)
        assert bitwise_equal(call(1, x), alone(1, x))
    for _ in range(20):  # another tensor where the one before lay
        call(0, torch.randn(40, 48))
        other = torch.randn(40, 48)
        assert bitwise_equal(call(1, other), alone(1, other))
    call(0, other)
    warpsmith.optim.SGD(weights, lr=0.1).step()
    assert _scaled_linear.of_rows.of() is None


def test_other_recipes_and_given_scales_share_nothing():
    weights, states, _ = siblings("tensor", 2)
    x = torch.randn(40, 48, requires_grad=True)
    states[1].x_scale = torch.tensor(0.5)
    with Calls() as calls:
        for recipe, state in (("tensor", states[0]), ("row", states[0]), ("row", None), ("tensor", states[1])):
            warpsmith.scaled_linear(x, weights[0], recipe=recipe, state=state)
    assert calls.shared(6, "forward", "inference") == [False, False, True, False]


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_several_gradients_in_one_leave_no_trace(scaling):
    weights, states, call = siblings(scaling, 1)
    x = torch.randn(40, 48, requires_grad=True)
    y = call(0, x)
    inputs, dys = [x, weights[0]], torch.randn(3, 40, 32)
    torch.autograd.grad(y, inputs, dys, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(y, inputs, dys[0])
    assert all(not torch._C._functorch.is_legacy_batchedtensor(t) and t.isfinite().all() for t in alone)
    assert states[0].dy_counts.tolist() == states[0].x_counts.tolist() == [0, 0]


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_a_loop_that_edits_x_by_data_is_seen(scaling):
    weights, _, call = siblings(scaling, 1)
    x = torch.randn(40, 48, requires_grad=True)
    for _ in range(3):
        y = call(0, x)
        expected = warpsmith.scaled_linear(x.detach().clone(), weights[0].detach().clone(), recipe=scaling)
        assert bitwise_equal(y, expected)
        y.square().sum().backward()
        x.data.add_(x.grad.sign())


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_totals_are_settled_together(most, monkeypatch):
    """Of several layers, in rounds; forwards that have kept a total for their backward do not find it changed."""
    monkeypatch.setattr(pending, "_MOST", most)
    sums = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    maxima = [torch.zeros(()) for _ in range(3)]
    for i in range(20):
        for stream in (0, 1):
            pending.note_later(sums[i % 3], torch.tensor([1, i]), stream)
            pending.note_later(maxima[i % 3], torch.tensor(float(i)), stream)
    assert [t.tolist() for t in map(pending.settled, sums)] == [[14, 126], [14, 140], [12, 114]]
    assert [t.item() for t in maxima] == [18, 19, 17] and not any(pending._pending.values())
    assert all(t._version == 0 for t in (*sums, *maxima))


def test_casts_go_with_their_weight():
    made, call = layer()
    call(torch.randn(4, 32))
    count, kept = len(_scaled_linear._kept), weakref.ref(_scaled_linear.kept_of(made.weight))
    del made, call
    gc.collect()
    assert kept() is None and len(_scaled_linear._kept) == count - 1


def test_what_bytes_are_made_of_again_must_not_change():
    """torch refuses a backward behind a write to the sum that a norm has read, and the layer behind it reads again."""
    weight, norm = (torch.nn.Parameter(torch.randn(*s)) for s in ((32, 64), (64,)))
    state = _scaled_linear.Fp8State(torch.device("cpu"), recomputes=True)
    for again, written in ((True, True), (True, False), (False, True)):
        state.recomputes = again
        x = torch.randn(4, 64, requires_grad=True) * 1
        y = _shared_casts.with_cast("rms_norm")(x, norm, 1e-5, 0.0)
        loss = warpsmith.scaled_linear(y, weight, state=state).sum()
        kept = loss.grad_fn.next_functions[0][0].saved_tensors
        assert any(t is not None and t.data_ptr() == x.data_ptr() for t in kept) is again
        if written:
            with torch.no_grad():
                x.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


def test_bytes_are_kept_where_what_they_are_made_of_is_gone():
    weight, norm = (torch.nn.Parameter(torch.randn(*s)) for s in ((32, 64), (64,)))
    state = _scaled_linear.Fp8State(torch.device("cpu"), recomputes=True)
    x = torch.randn(4, 64)
    y = _shared_casts.with_cast("rms_norm")(x.clone(), norm.detach().requires_grad_(), 1e-5, 0.0)
    warpsmith.scaled_linear(y, weight, state=state).sum().backward()
    found, weight.grad = weight.grad, None
    warpsmith.scaled_linear(warpsmith.rms_norm(x, norm, 1e-5), weight).sum().backward()
    assert torch.equal(found, weight.grad)


def test_bytes_are_kept_where_fully_shard_may_free_the_norm(monkeypatch):
    weight, norm = (torch.nn.Parameter(torch.randn(*s)) for s in ((32, 64), (64,)))
    state, x = _scaled_linear.Fp8State(torch.device("cpu"), recomputes=True), torch.randn(4, 64, requires_grad=True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for gathered in (True, False):
        for module in ("_norm", "_scaled_linear"):
            monkeypatch.setattr(f"warpsmith.ops.{module}.is_gathered", lambda parameter, found=gathered: found)
        y = warpsmith.scaled_linear(_shared_casts.with_cast("rms_norm")(x, norm, 1e-5, 0.0), weight, state=state)
        assert any(t is norm for t in y.grad_fn.saved_tensors) is not gathered
