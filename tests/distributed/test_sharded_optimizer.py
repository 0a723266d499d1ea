"""ShardedOptimizer: the bits of the unsharded optimizer under DDP with accurate_hook; parameters that travel later."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
import warpsmith
from sharding import PARAMS, Pair, Uneven, input_of
from warpsmith.distributed import ShardedOptimizer
from warpsmith.testing import run_ranks
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("sharded")
SMALL = [(torch.float32, (40_000,), None), (torch.float32, (7, 3), None), (torch.float32, (5,), None)]
WIDE = [entry for entry in PARAMS if entry[0] == torch.float32]


@multirank(4, timeout_s=300)
@pytest.mark.parametrize("clip_and_skip", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_50_steps_of_all_precisions(rank, world_size, ranks, clip_and_skip):
    group = dist.new_group(list(range(ranks)))
    if rank >= ranks:
        return
    stage = 1 + (ranks + clip_and_skip) % 2
    wire = torch.float16 if clip_and_skip and ranks == 3 else torch.bfloat16
    pair = Pair(rank, group, stage=stage, wire=wire, bucket_cap_mb=0.05, lr=0.01, weight_decay=0.1)
    assert len(pair.sharded._shards.buckets) > 4
    scale = 4.0 if clip_and_skip else 1.0
    for step in range(50):
        pair.backward(step, scale=scale)
        if clip_and_skip:
            pair.clip(2.0 * scale if step % 2 else 1e9)
        pair.step(**({"grad_scale": scale, "found_inf": float(step in (0, 7, 8, 31))} if clip_and_skip else {}))
        pair.check(step)
    state = pair.check_state()
    if rank == 0:
        assert state["state"][0]["step"] == (46 if clip_and_skip else 50)


OTHERS = [
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {}),
    ("Lion", {}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
]


@multirank(4, timeout_s=200)
@pytest.mark.parametrize(("name", "options"), OTHERS, ids=str)
def test_every_optimizer(rank, world_size, name, options):
    params = WIDE if name == "RMSprop" else PARAMS  # centred, in 16 bits it takes roots of negative numbers
    optimizer_class = getattr(warpsmith.optim, name)
    pair = Pair(rank, None, optimizer_class, stage=2, params=params, bucket_cap_mb=0.05, lr=0.01, **options)
    for step in range(6):
        pair.backward(step)
        pair.clip(3.0)
        pair.step()
        pair.check(step)
    pair.check_state()


@multirank(2, timeout_s=200)
def test_a_step_reads_its_groups_where_they_are(rank, world_size):
    """No step walks through the options of the groups, and a changed option is in the next step, loaded or not."""
    walks = []

    class Group(dict):
        def items(self):
            walks.append(self)
            return super().items()

    pair = Pair(rank, None, bucket_cap_mb=0.05, lr=0.01)
    for step in range(4):
        pair.backward(step)
        pair.sharded.param_groups[:] = map(Group, pair.sharded.param_groups)
        walks.clear()
        pair.step()
        assert not walks
        pair.check(step)
        if step == 1:
            for to in range(world_size):
                pair.sharded.consolidate_state_dict(to)
                if rank == to:
                    state = pair.sharded.state_dict()
            pair.sharded.load_state_dict(state)
        for optimizer in (pair.sharded, pair.plain):
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[-1]["lr"] = 0.3
    pair.check_state()


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_accumulated_gradients_are_reduced_once(rank, world_size, stage):
    pair = Pair(rank, None, stage=stage, bucket_cap_mb=0.05)
    for step in range(3):
        pair.backward(step, micros=3)
        kept = [w.grad is not None for w in pair.ours.weights]
        assert all(kept) if stage == 1 else not any(kept)
        pair.clip(1.0)
        pair.step()
        pair.check(step)
    pair.backward(3)
    with pytest.raises(RuntimeError, match=rf"rank {rank} of 4: a second gradient of .* no_sync\(\)"):
        pair.ours(input_of(rank, 4)).backward()


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_no_sync_within_no_sync(rank, world_size, stage):
    """The outer block goes on behind an inner one, also behind one that ends by an exception."""
    pair = Pair(rank, None, stage=stage, params=SMALL, bucket_cap_mb=0.05)
    for step in range(2):
        for model, owner in ((pair.ours, pair.sharded), (pair.theirs, pair.theirs)):
            with owner.no_sync():
                with contextlib.suppress(KeyError), owner.no_sync():
                    model(input_of(rank, step, 0)).backward()
                    if step == 1:
                        raise KeyError
                model(input_of(rank, step, 1)).backward()
            model(input_of(rank, step, 2)).backward()
        pair.step()
        pair.check(step)


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters(rank, world_size, stage):
    """3 and 9 are used by some ranks, 2 and 5 by none in some steps: weights decay only where the plain ones do."""
    pair = Pair(rank, None, stage=stage, bucket_cap_mb=0.05, find_unused_parameters=True, weight_decay=0.5)
    for step in range(6):
        nobody = (2, 5) if step in (0, 3) else ()
        pair.backward(step, unused=(*nobody, *((3, 9) if rank % 2 else ())))
        pair.clip(1.0)
        pair.step()
        pair.check(step)
    pair.check_state()


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, warpsmith.amp.GradScaler], ids=["torch", "warpsmith"])
def test_under_a_grad_scaler(rank, world_size, kind, unscale):
    """They look for infinite gradients in param_groups: one rank's overflow must be seen by all."""
    pair = Pair(rank, None, stage=2, params=WIDE, bucket_cap_mb=0.05)
    scalers = [kind("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]
    models, optimizers = (pair.ours, pair.theirs), (pair.sharded, pair.plain)
    scales = []
    for step in range(12):
        x = input_of(rank, step)
        if step in (0, 6) and rank == 2:
            x[0] = float("inf")
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(model(x)).backward()
            if unscale and kind is torch.amp.GradScaler:
                scaler.unscale_(optimizer)
        if unscale and step not in (0, 6):
            if kind is torch.amp.GradScaler:
                pair.clip(0.5)
            else:  # a clip_ that knew only the fragments of this rank would find another norm
                norms = [scaler.clip_(optimizer, 0.5) for scaler, optimizer in zip(scalers, optimizers, strict=True)]
                assert torch.equal(*norms)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.check(step)
        scales.append([scaler.get_scale() for scaler in scalers])
    assert all(ours == theirs for ours, theirs in scales)
    assert scales[0][0] == 2.0**7
    assert scales[6][0] < scales[5][0]
    pair.check_state()


@multirank(4, timeout_s=200)
def test_a_schedule_and_a_closure(rank, world_size):
    pair = Pair(rank, None, params=SMALL, lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (pair.sharded, pair.plain)]
    for step in range(3):
        x = input_of(rank, step)

        def closure(model=pair.ours, optimizer=pair.sharded, x=x):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        loss = pair.sharded.step(closure)
        assert loss == pair.theirs(x)
        pair.theirs(x).backward()
        pair.plain.step()
        pair.plain.zero_grad()
        for schedule in schedules:
            schedule.step()
        pair.check(step)
    assert pair.sharded.param_groups[0]["lr"] == 0.1 / 8


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("norm_type", [1, 2, float("inf")])
def test_norms(rank, world_size, norm_type):
    pair = Pair(rank, None, bucket_cap_mb=0.05)
    pair.backward(0)
    in_order = [p for group in pair.plain.param_groups for p in group["params"]]
    assert torch.equal(pair.sharded.grad_norm(norm_type), warpsmith.optim.grad_norm(in_order, norm_type))
    if norm_type == 2:
        norm = pair.sharded.clip_grad_norm_(0.0)
        assert norm > 0
        assert pair.sharded.grad_norm() == 0
        with pytest.raises(ValueError, match="norm_type: expected 1, 2 or inf, got 3"):
            pair.sharded.grad_norm(3)
        with pytest.raises(ValueError, match="max_norm: expected a number >= 0, got -1"):
            pair.sharded.clip_grad_norm_(-1)


@multirank(4, timeout_s=200)
def test_parameters_without_elements(rank, world_size):
    """They take part: in the order of chunks, which is part of a norm on CUDA, each has an empty one."""
    empty = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((0,), (3, 0))]
    full = torch.nn.Parameter(torch.ones(20_000))
    sharded = warpsmith.distributed.ShardedOptimizer([empty[0], full, empty[1]], warpsmith.optim.AdamW)
    (full.sum() + sum(p.sum() for p in empty)).backward()
    assert sharded.clip_grad_norm_(1.0) == warpsmith.optim.grad_norm([full])
    assert len(sharded._norm._chunk_order()[2]) == 4
    sharded.step()
    sharded.consolidate_state_dict()
    if rank == 0:
        assert list(sharded.state_dict()["state"]) == [1]


@multirank(4, timeout_s=200)
def test_the_reduction_begins_during_the_backward(rank, world_size):
    layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    with torch.no_grad():
        for p in layers.parameters():
            p.fill_(0.01)
    sharded = warpsmith.distributed.ShardedOptimizer(layers.parameters(), warpsmith.optim.SGD, bucket_cap_mb=0.02)
    sent = []
    layers[1].weight.register_hook(lambda _: sent.append(sharded._shards._next))  # before the gradient is stored
    layers(torch.ones(2, 64)).sum().backward()
    assert len(sharded._shards.buckets) == 6
    assert sent == [4]  # of layers 5 to 2; those of 1 and 0 are to come


@multirank(4, timeout_s=200)
def test_each_rank_holds_a_part_of_the_states(rank, world_size):
    pair = Pair(rank, None, params=[(torch.float32, (50_001,), None)] * 8, stage=2)
    pair.backward(0)
    assert all(w.grad is None for w in pair.ours.weights)
    pair.step()
    held = sum(s["exp_avg"].numel() for s in pair.sharded.state.values())
    assert held <= 400_008 // 4 + 16_384
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total == 400_008


@multirank(4, timeout_s=200)
def test_an_optimizer_that_is_gone_reduces_no_more(rank, world_size):
    model = Uneven(SMALL)
    first = warpsmith.distributed.ShardedOptimizer(model.parameters(), warpsmith.optim.SGD)
    del first
    gc.collect()
    model(input_of(rank, 0)).backward()  # ranks would wait for each other
    second = warpsmith.distributed.ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, stage=2)
    second.zero_grad()
    model(input_of(rank, 0)).backward()
    second.step()


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_with_the_negative_bit(rank, world_size, name, in_forward):
    """One of each length: with several fragments, with one, of a single element at a stride of 2."""
    ours, plain = Uneven(SMALL), Uneven(SMALL)
    for net in (ours, plain):
        net.weights.append(torch.nn.Parameter(torch.ones(1)))
    for p in ours.weights:
        p.data = torch._neg_view(-p.data) if p.numel() > 1 else torch.complex(p.data, -p.data).conj().imag
        assert p.is_neg()
    optimizers = [
        warpsmith.distributed.ShardedOptimizer(
            net.parameters(), getattr(warpsmith.optim, name), lr=0.1, stage=2, bucket_cap_mb=0.05
        )
        for net in (ours, plain)
    ]
    if in_forward:
        optimizers[0].gather_in_forward(ours)
    for step in range(3):
        for net, optimizer in zip((ours, plain), optimizers, strict=True):
            net(input_of(rank, step)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    optimizers[0].wait_for_parameters()
    for p, q in zip(ours.weights, plain.weights, strict=True):
        assert p.is_neg() and torch.equal(p, q)


class Blocks(torch.nn.Module):
    """An embedding that is the head too, blocks of which some steps leave one out, and a list in a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(50, 24)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 24)) for _ in range(4)
        ]
        self.trunk = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)})
        self.norm = warpsmith.nn.RMSNorm(24)
        self.inner = Inner()

    def forward(self, ids, leave_out=None):
        x = self.embedding(ids)
        for i, block in enumerate(self.trunk["blocks"]):
            if i != leave_out:
                x = x + block(x)
        return (self.norm(self.inner(x)) @ self.embedding.weight.T).logsumexp(-1).mean()


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(24))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.scale)
        return x


def trained(rank, in_forward, look):
    """Losses and parameters over some steps. look: called between a step and the next forward."""
    model = Blocks()
    optimizer = ShardedOptimizer(
        model.parameters(), warpsmith.optim.AdamW, lr=0.05, bucket_cap_mb=0.005, find_unused_parameters=True
    )
    assert len(optimizer._shards.buckets) > 4
    if in_forward:
        optimizer.gather_in_forward(model)
    found = []
    for step in range(7):
        draw = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randint(50, (3, 5), generator=draw), leave_out=2 if step in (2, 3) else None)
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *look(model, optimizer)]
    optimizer.wait_for_parameters()
    return found + [p.detach().clone() for p in model.parameters()]


def on_ranks(rank, world_size):
    def nothing(model, optimizer):
        return []

    def state(model, optimizer):
        return [value.clone() for value in model.state_dict().values()]

    def loaded(model, optimizer):
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        return []

    def evaluated(model, optimizer):
        with torch.no_grad():
            return [model(torch.arange(5)[None])]

    for look in (nothing, state, loaded, evaluated):
        ours, plain = trained(rank, True, look), trained(rank, False, look)
        assert len(ours) == len(plain) > 7
        for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert torch.equal(a, b), (look.__name__, i)

    model = Blocks()
    optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW, lr=0.05, bucket_cap_mb=0.005)
    optimizer.gather_in_forward(model)
    model(torch.arange(5)[None]).backward()
    optimizer.step()
    early = [p.detach().clone() for p in model.parameters()]
    optimizer.wait_for_parameters()
    changed = [not torch.equal(a, p) for a, p in zip(early, model.parameters(), strict=True)]
    with pytest.raises(ValueError, match=r"gather_in_forward: model: expected one that holds .*, got Linear"):
        optimizer.gather_in_forward(torch.nn.Linear(2, 2))
    return sum(changed)


@pytest.mark.parametrize("world_size", [2])
def test_the_bits_are_those_of_gathering_in_the_step(world_size):
    changed = run_ranks(on_ranks, world_size, timeout_s=200)
    assert min(changed) > 0  # on each rank parameters were still under way after the step
