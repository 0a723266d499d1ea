"""A state loaded into a used object gives what it gives in a fresh one, for every class that loads a state, and every
function."""

import contextlib
import copy
import importlib
import inspect

import pytest
import torch
import warpsmith
from nested_states import differences
from warpsmith.distributed import ShardedOptimizer, ShardedState

from tests.nn.test_no_copies import WIDTH, first_case

ROOMS = ("optim", "amp", "train", "nn", "distributed")


def loads(name, of):
    return hasattr(of, "load_state_dict") if inspect.isclass(of) else name.startswith("load_")


def public():
    """Classes, and functions for what has no class of its own."""
    rooms = [importlib.import_module(f"warpsmith.{room}") for room in ROOMS]
    named = {name: getattr(room, name) for room in rooms for name in room.__all__}
    return {name: of for name, of in named.items() if loads(name, of)}


class Training:
    """A model in which one parameter may be left out, and an optimizer. ``go_on`` says what came of some steps."""

    def __init__(self, make=None, **options):
        torch.manual_seed(0)
        precision = options.get("precision")
        shapes = (4, 3), (64, 65) if precision == "8bit" else (5,)
        dtype = torch.float32 if precision in (None, "8bit") else torch.bfloat16
        self.params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        self.optimizer = (make or warpsmith.optim.AdamW)(self.params, lr=0.1, **options)
        self.object = self.optimizer

    def step(self, generator, left_out=()):
        self.optimizer.zero_grad()
        for i, p in enumerate(self.params):
            if i not in left_out:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        self.optimizer.step()

    def use(self, seed):
        """An odd seed leaves a parameter without a state; an even one changes hyperparameters."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(seed):
            self.step(generator, (1,) if seed % 2 else ())
        if not seed % 2:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * 3
                group["weight_decay"] = 0.5

    def go_on(self):
        generator = torch.Generator().manual_seed(99)
        for _ in range(3):
            self.step(generator)
        return [*(p.detach().clone() for p in self.params), self.state()]

    def state(self):
        """The states of the optimizer and of the object under test."""
        return copy.deepcopy([part.state_dict() for part in (self.optimizer, self.object)])

    def load_parameters(self, saved):
        with torch.no_grad():
            for p, value in zip(self.params, saved.params, strict=True):
                p.copy_(value)

    def load(self, saved):
        self.load_parameters(saved)
        for part, state in zip((self.optimizer, self.object), saved.state(), strict=True):
            part.load_state_dict(state)


class Sharded(Training):
    def __init__(self, **options):
        super().__init__(lambda params, **more: ShardedOptimizer(params, warpsmith.optim.AdamW, **more), **options)

    def step(self, generator, left_out=()):
        self.optimizer.zero_grad()
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.params).backward()
        self.optimizer.step()

    def state(self):
        self.optimizer.consolidate_state_dict()
        return super().state()


class StateOfSharded(Sharded):
    def load(self, saved):
        self.load_parameters(saved)
        ShardedState(self.optimizer).load_state_dict(ShardedState(saved.optimizer).state_dict())


class Averaged(Training):
    def __init__(self):
        super().__init__()
        self.object = warpsmith.optim.EMA(self.params, decay=0.75)

    def use(self, seed):
        super().use(seed)
        self.object.decay = 1 / (1 + seed)
        self.object.update()

    def go_on(self):
        super().go_on()
        self.object.update()
        return [*self.object.averages, self.object.decay]


class Scaled(Training):
    """Under a scaler. An even seed ends in the middle of a step that overflows, clipped and not yet taken; an odd one
    behind such a step."""

    def __init__(self, make, torchs=False, **options):
        super().__init__(torch.optim.AdamW if torchs else None)
        self.object = make("cpu", **options)

    def backward(self, generator, factor=1.0):
        self.optimizer.zero_grad()
        loss = sum((p * torch.randn(p.shape, generator=generator) * factor).sum() for p in self.params)
        self.object.scale(loss).backward()

    def step(self, generator, left_out=(), factor=1.0):
        self.backward(generator, factor)
        self.object.clip_(self.optimizer, 0.1)
        self.object.step(self.optimizer)
        self.object.update()

    def use(self, seed):
        super().use(seed)
        generator = torch.Generator().manual_seed(seed)
        self.step(generator, factor=float("inf"))
        self.step(generator)
        if seed % 2:
            self.step(generator, factor=float("inf"))
        else:
            self.backward(generator, float("inf"))
            self.object.clip_(self.optimizer, 0.1)

    def go_on(self):
        """First an overflow: whether the scale shrinks depends on those before."""
        loaded = self.state()
        self.step(torch.Generator().manual_seed(98), factor=float("inf"))
        return [loaded, self.object.get_scale(), super().go_on(), self.object.get_scale(), self.object.last_skipped]


class Scheduled(Training):
    def __init__(self):
        super().__init__()
        self.object = warpsmith.amp.DeviceLR(self.optimizer, lambda step: 0.5**step, 20)

    def step(self, generator, left_out=()):
        super().step(generator, left_out)
        self.object.step()

    def use(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(seed):
            self.step(generator)

    def go_on(self):
        return [self.object.get_last_lr(), super().go_on(), self.object.get_last_lr()]


class Alone:
    """An object without an optimizer beside it."""

    def load(self, saved):
        self.object.load_state_dict(copy.deepcopy(saved.object.state_dict()))


class Sampled(Alone):
    def __init__(self):
        self.object = warpsmith.distributed.ResumableSampler(10, seed=1, rank=1, world_size=3)

    def use(self, seed):
        drawn = [len(list(self.object)) for _ in range(seed)]
        if drawn and not seed % 2:
            self.object.advance(sum(drawn) - 1)

    def go_on(self):
        first = self.object.state_dict()
        drawn = [list(self.object) for _ in range(4)]
        self.object.advance(2)
        return [first, drawn, self.object.state_dict(), self.object.epoch, len(self.object)]


WEIGHT = torch.rand(WIDTH)  # of classes


class Module(Alone):
    def __init__(self, name):
        torch.manual_seed(0)
        given, call = first_case(name)
        given |= {"weight": WEIGHT} if name == "CrossEntropyLoss" else {}
        self.object, self.inputs = getattr(warpsmith.nn, name)(**given), call()

    def call(self):
        torch.manual_seed(5)
        given, more = self.inputs
        results = self.object(*given, **more)
        return [r.detach() for r in (results if isinstance(results, tuple) else (results,))]

    def use(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.object.parameters():
                p.copy_(torch.rand(p.shape, generator=generator))
        self.call()

    def go_on(self):
        return [self.call(), dict(self.object.state_dict())]


class Converted(Alone):
    """A model of 8-bit layers with delayed scales. Each use ends in the middle of a step, of values larger than all; an
    odd seed leaves out a layer."""

    def __init__(self, **recipe):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 32))
        recipe = warpsmith.amp.Fp8Recipe("tensor", amax="delayed", history=2, **recipe)
        self.layers, self.object = warpsmith.amp.fp8(self.model, recipe), self

    def backward(self, generator, seed=0, factor=1.0):
        for layer in self.model[seed % 2 :]:
            x = torch.randn(4, layer.in_features, generator=generator) * factor
            layer(x).backward(torch.randn(4, layer.out_features, generator=generator) * factor)

    def use(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(seed):
            self.backward(generator, seed)
            self.layers.update()
        self.backward(generator, seed, 10.0)

    def go_on(self):
        generator, states = torch.Generator().manual_seed(99), []
        for _ in range(3):
            self.backward(generator)
            self.layers.update()
            states.append(copy.deepcopy(self.state_dict()))
        return states

    def state_dict(self):
        return warpsmith.amp.fp8_state(self.model)

    def load_state_dict(self, state):
        warpsmith.amp.load_fp8_state(self.model, state)


RUNS = {
    "EMA": [Averaged],
    "load_fp8_state": [Converted, lambda: Converted(grad_dtype="e5m2", power_of_two=False)],
    "DeviceLR": [Scheduled],
    "ResumableSampler": [Sampled],
    "ShardedOptimizer": [Sharded, lambda: Sharded(amsgrad=True)],
    "ShardedState": [StateOfSharded],
    "StepGuard": [lambda: Scaled(warpsmith.amp.StepGuard), lambda: Scaled(warpsmith.amp.StepGuard, torchs=True)],
    "Muon": [
        lambda: Training(warpsmith.optim.Muon, others="adamw"),
        lambda: Training(warpsmith.optim.Muon, others="adamw", newton_schulz="gram", nesterov=False),
    ],
    "GradScaler": [
        lambda: Scaled(warpsmith.amp.GradScaler, growth_interval=2),
        lambda: Scaled(warpsmith.amp.GradScaler, torchs=True, growth_interval=2),
        lambda: Scaled(warpsmith.amp.GradScaler, growth_interval=3, hysteresis=2, min_scale=2.0, max_scale=2.0**17),
    ],
}
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}, "Adam": {"amsgrad": True}}


def runs_of(name, kind):
    if name in RUNS:
        return RUNS[name]
    if issubclass(kind, torch.nn.Module):
        return [lambda: Module(name)]
    assert issubclass(kind, torch.optim.Optimizer), f"{name} loads a state: say in RUNS how it is used"
    more = {**OPTIONS.get(name, {}), "weight_decay": 0.1}
    runs = [lambda: Training(kind), lambda: Training(kind, **more)]
    for precision in ("8bit", "master", "bf16_kahan", "bf16_sr", "remainder"):
        stored = {k: v for k, v in more.items() if k != "amsgrad"} | {"precision": precision}
        with contextlib.suppress(ValueError):  # of a class without it
            Training(kind, **stored)
            runs.append(lambda stored=stored: Training(kind, **stored))
    return runs


def answer(loaded):
    """What an object says of its state without more ado; None: it asks for a preparation."""
    with contextlib.suppress(RuntimeError):
        return copy.deepcopy(loaded.state_dict())


@pytest.fixture(scope="module")
def one_rank():
    with warpsmith.distributed.init(device="cpu"):
        yield


@pytest.mark.parametrize("name", public())
@pytest.mark.parametrize("seeds", [(1, 2), (2, 1), (3, 4), (0, 2)], ids=str)
def test_load_into_used_is_load_into_fresh(name, seeds, one_rank):
    """The seeds say how the saved object was used, and how the one that loads it was."""
    for make in runs_of(name, public()[name]):
        saved, fresh, used = make(), make(), make()
        saved.use(seeds[0])
        used.use(seeds[1])
        getattr(used, "state", list)()
        results = []
        for run in (fresh, used):
            run.load(saved)
            results.append([answer(run.object), run.go_on()])
        assert differences(*results) == []
