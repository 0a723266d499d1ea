"""More groups and tensors than one launch takes, and one element that is not finite. All other elements must have the
bits that they have alone. Runs on the CPU, and with --sim by the kernels."""

import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal
from warpsmith.testing.sim import is_loaded

from tests.optim.optimizers import EACH_STORAGE, LAMB, OF_TORCH, Options, dtype_of

raw = torch.ops.warpsmith
GROUPS = 40 if is_loaded() else 70  # a launch takes 32
BF16 = torch.bfloat16
CLASSES = {name: getattr(warpsmith.optim, name) for name in warpsmith.optim.__all__}
EACH_CLASS = [
    Options(name, {"momentum": 0.9} if name == "SGD" else {}, "each option")
    for name, thing in CLASSES.items() if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer)
]  # fmt: skip
STATES = [o for o in EACH_STORAGE if o is not LAMB]  # whose elements depend on their own block at most


def parameters(count, dtype, size=5):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for _ in range(count)]


def steps(optimizer, params, seed=1, count=2, poison=None):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if poison is not None:
                p.grad[poison[0]] = poison[1]
        optimizer.step()


@pytest.mark.parametrize("options", EACH_STORAGE, ids=str)
def test_more_groups_than_a_launch_takes(options):
    """Each group keeps its learning rate, decay and seed: it has the bits of a run in which only it has gradients."""
    dtype, groups = dtype_of(options), []
    for i, p in enumerate(parameters(GROUPS, dtype)):
        groups.append({"params": [p], "lr": 0.01 * (1 + i % 7), "weight_decay": 0.01 * (i % 3)})
        if options.text == "bf16_sr":
            groups[-1]["seed"] = i
    params = [group["params"][0] for group in groups]
    before = [p.detach().clone() for p in params]
    steps(options.ours(groups), params)
    for i in (0, 1, 31, 32, 33, GROUPS - 1):
        alone = [torch.nn.Parameter(b.clone()) for b in before]
        some = [{**group, "params": [q]} for group, q in zip(groups, alone, strict=True)]
        if options.text != "bf16_sr":  # random bits depend on the element's index among all of the optimizer's
            some = some[i : i + 1]
        optimizer, generator = options.ours(some), torch.Generator().manual_seed(1)
        for _ in range(2):
            drawn = [torch.randn(q.shape, generator=generator).to(dtype) for q in alone]
            alone[i].grad = drawn[i]
            optimizer.step()
        assert bitwise_equal(alone[i], params[i]), f"group {i} of {GROUPS}"
        assert not bitwise_equal(before[i], params[i].detach())


def other(name, value):
    """Another value of an option; None: it has no effect on a step, or other states."""
    if name in ("capturable", "foreach", "fused", "differentiable", "amsgrad", "centered", "seed"):
        return None
    if isinstance(value, tuple):
        return tuple(v / 2 for v in value)
    words = {"adjust_lr_fn": "match_rms_adamw", "newton_schulz": "gram"}
    changed = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 or 0.25}
    return changed.get(type(value), lambda: words.get(name))()


@pytest.mark.parametrize("options", EACH_CLASS, ids=str)
def test_each_option_is_that_of_its_group(options):
    """Equal shapes in two groups have the bits of two optimizers."""
    asked = 0
    for name, value in options.ours(parameters(1, torch.float32, (4, 8))).defaults.items():
        if (changed := other(name, value)) is None:
            continue
        together, apart = (parameters(2, torch.float32, (4, 8)) for _ in range(2))
        for params, cuts in ((together, [slice(2)]), (apart, [slice(1), slice(1, 2)])):
            groups = [{"params": params[0]}, {"params": params[1], name: changed}]
            optimizers, generator = [options.ours(groups[cut]) for cut in cuts], torch.Generator().manual_seed(1)
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator)
                for optimizer in optimizers:
                    optimizer.step()
        assert all(bitwise_equal(p, q) for p, q in zip(together, apart, strict=True)), name
        asked += 1
    assert asked > 2


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_counts_of_more_than_512_tensors_and_two_launches(poison):
    """Whatever the memory of the counts held before."""
    bad = {0: 1, 31: 3, 511: 2, 512: 1, 513: 4, 1023: 5, 1024: 1, 1099: 2}
    tensors = [torch.ones(7 + i % 3) for i in range(1100)]
    for i, count in bad.items():
        tensors[i][:count] = poison
    expected = torch.zeros(len(tensors), dtype=torch.int64)
    expected[list(bad)] = torch.tensor(list(bad.values()))
    scale, table = torch.ones(()), raw.grad_table(tensors)
    for check in (
        lambda found, counts: raw.grad_check(tensors, 2.0, scale, 1.0, found, counts),
        lambda found, counts: raw.grad_check_table(table, len(tensors), False, 2.0, scale, 1.0, found, counts),
    ):
        found, counts = torch.full((), 7.0), torch.full((len(tensors),), 77)
        norm, _, _ = check(found, counts)
        assert torch.equal(counts, expected) and found == 1 and not norm.isfinite()
    found, counts = torch.zeros(()), torch.zeros(len(tensors), dtype=torch.int64)
    raw.unscale_grads(tensors, torch.full((), 0.5), found, counts)
    assert torch.equal(counts, expected) and found == 1
    good = [t.nan_to_num(1.0, 1.0, 1.0) for t in tensors]
    norm, _ = raw.grad_norm(good, 2.0)
    torch.testing.assert_close(norm, torch.cat(good).norm(), check_dtype=False)
    before = torch.cat(good)
    raw.clip_grads(good, norm, 1.0)
    torch.testing.assert_close(torch.cat(good), before * (1 / (norm + 1e-6)))
    averages, values = [torch.zeros(3) for _ in range(1100)], [torch.full((3,), float(i)) for i in range(1100)]
    raw.average_weights(averages, values, 0.5, None)
    assert all(torch.equal(a, v / 2) for a, v in zip(averages, values, strict=True))


@pytest.mark.parametrize("place", [0, 7, 255, 256, 299])
@pytest.mark.parametrize("options", STATES, ids=str)
def test_one_bad_element_leaves_the_others(options, place):
    """In the parameter and in every state, after steps with a NaN, an infinity and the largest number."""
    dtype, block = dtype_of(options), 256 if options.text == "8bit" else 1
    others = torch.arange(300) // block != place // block
    plain = parameters(1, dtype, 300)
    before = options.ours(plain)
    steps(before, plain, count=3)
    for value in (torch.nan, torch.inf, torch.finfo(dtype).max):
        params = parameters(1, dtype, 300)
        optimizer = options.ours(params)
        steps(optimizer, params, count=3, poison=(place, value))
        assert bitwise_equal(params[0][others], plain[0][others]), f"{value}"
        for name, state in optimizer.state[params[0]].items():
            if isinstance(state, torch.Tensor) and state.shape == others.shape:
                assert bitwise_equal(state[others], before.state[plain[0]][name][others]), f"{value}: {name}"
        if value != value:
            assert options.text == "8bit" or options.name == "Lion" or params[0][place].isnan()


@pytest.mark.parametrize("options", OF_TORCH, ids=str)
def test_one_bad_element_is_what_torch_makes_of_it(options):
    for value in (torch.nan, torch.inf, -torch.inf, 2e19, torch.finfo(torch.float32).max):
        results = []
        for make in (options.ours, options.theirs):
            params = parameters(1, torch.float32, 9)
            steps(make(params), params, count=2, poison=(4, value))
            results.append(params[0].detach())
        torch.testing.assert_close(*results, equal_nan=True, msg=lambda m, v=value: f"{v}: {m}")


def test_an_overflow_by_rounding_alone():
    """A float32 below the largest that rounds to infinity in 16 bits, and its neighbour that does not."""
    largest = torch.finfo(BF16).max
    values = torch.tensor([largest + 2.0**119, largest + 2.0**118, -largest - 2.0**119, 1.0])
    assert values.isfinite().all() and values.to(BF16).isinf().tolist() == [True, False, True, False]
    p, copy = torch.nn.Parameter(values.clone()), torch.zeros(4, dtype=BF16)
    optimizer = warpsmith.optim.SGD([p], lr=1.0)
    optimizer.fuse(copies={p: copy})
    p.grad = torch.zeros(4)
    optimizer.step()
    assert bitwise_equal(p.detach(), values) and bitwise_equal(copy, values.to(BF16))
    for dtype in (torch.float16, BF16):
        top = torch.finfo(dtype).max
        step = top * torch.finfo(dtype).eps / 4  # a quarter of the last place: a half is a tie
        x = torch.full((2, 8), top).to(dtype)
        residual = (
            (step * torch.tensor([0.0, 0.5, 0.99, 1.0, 1.01, 2.0, -1.0, -4.0])).to(dtype).expand(2, 8).contiguous()
        )
        expected = x + residual
        assert 0 < int(expected.isinf().sum()) < expected.numel()
        outputs = {
            "add_rms_norm": warpsmith.add_rms_norm(x, residual)[1],
            "add_layer_norm": warpsmith.add_layer_norm(x, residual)[1],
            "dropout_add": warpsmith.dropout_add(x, residual, 0.0),
        }
        for name, y in outputs.items():
            assert bitwise_equal(y, expected), f"{name} {dtype}"
