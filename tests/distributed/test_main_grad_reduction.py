"""What a hook and a sharded optimizer send of main_grads: no zeros beside them, and all that other ops gave."""

import pytest
import torch
import torch.distributed as dist
import warpsmith
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from warpsmith.distributed import ShardedOptimizer, accurate_hook
from warpsmith.distributed.gradients.hook import mean_in_rank_order
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("main_grad")
WIDTH, ROWS = 16, 5
LAYERS, BUCKET_MB = 3, 0.0006  # of bfloat16: about a layer a bucket


class Model(nn.Module):
    """Layers with a main_grad. `plain`: the weight of the last one is multiplied by other ops, too; `skip`: one is left
    out."""

    def __init__(self, fused=True):
        super().__init__()
        torch.manual_seed(1)
        layers = (warpsmith.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, fuse_main_grad=fused) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        for layer in self.layers if fused else ():
            layer.weight.main_grad = torch.zeros(WIDTH, WIDTH)
        if fused:
            self.layers[0].weight.main_grad = torch.zeros(WIDTH, WIDTH).t()

    def forward(self, x, plain=False, skip=None, checkpointed=False):
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        x = self.norm(x)
        return x @ self.layers[-1].weight if plain else x

    def weights(self):
        return [layer.weight for layer in self.layers]


def loss(model, rank, micro, **how):
    draw = torch.Generator().manual_seed(10 * rank + micro)
    x, upstream = (torch.randn(ROWS, WIDTH, generator=draw).bfloat16() for _ in range(2))
    return (model(x, **how) * upstream).sum()


def own(rank, steps):
    """The gradients of a rank alone: of each weight both parts added, and of the other parameters."""
    model = Model()
    for micro, how in enumerate(steps):
        loss(model, rank, micro, **how).backward()
    fused = [w.main_grad + (0 if w.grad is None else w.grad) for w in model.weights()]
    return fused, [None if p.grad is None else p.grad.clone() for p in others(model)]


def others(model):
    fused = {id(w) for w in model.weights()}
    return [p for p in model.parameters() if id(p) not in fused]


def mean(parts):
    stacked = torch.stack([part.bfloat16().flatten() for part in parts])
    return mean_in_rank_order(stacked).view_as(parts[0]).to(parts[0].dtype)


def under_ddp(keep_norm=False, **options):
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=BUCKET_MB, **options)
    ddp.register_comm_hook(None, accurate_hook(keep_norm=True) if keep_norm else accurate_hook)
    return ddp


def run_step(ddp, rank, steps):
    """All but the last under no_sync()."""
    *first, last = enumerate(steps)
    with ddp.no_sync():
        for micro, how in first:
            loss(ddp, rank, micro, **how).backward()
    loss(ddp, rank, last[0], **last[1]).backward()


def check(model, world_size, steps_of):
    fused, plain = zip(*(own(r, steps_of(r)) for r in range(world_size)), strict=True)
    for w, parts in zip(model.weights(), zip(*fused, strict=True), strict=True):
        assert torch.equal(w.main_grad, mean(parts))
        assert w.grad is None or not w.grad.any()
    for p, parts in zip(others(model), zip(*plain, strict=True), strict=True):
        if any(part is not None for part in parts):
            assert torch.equal(p.grad, mean([torch.zeros_like(p) if part is None else part for part in parts]))


def clear(model, set_to_none=True):
    model.zero_grad(set_to_none=set_to_none)
    for w in model.weights():
        w.main_grad.zero_()


MIXES = {
    "fused alone": lambda rank: [{}],
    "accumulated": lambda rank: [{}, {}, {}],
    "plain beside": lambda rank: [{"plain": True}],
    "plain on a rank": lambda rank: [{"plain": rank == 0}],
    "plain in the first": lambda rank: [{"plain": True}, {}],
    "plain in the last, on a rank": lambda rank: [{}, {"plain": rank == 1}],
    "checkpointed": lambda rank: [{"checkpointed": True}] * 2,
}
OPTIONS = {
    "": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "kept norm": {"keep_norm": True},
}


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("options", OPTIONS)
def test_what_mixes_is_the_mean_of_both(rank, world_size, options):
    ddp = under_ddp(**OPTIONS[options])
    for n, steps_of in enumerate(MIXES.values()):
        run_step(ddp, rank, steps_of(rank))
        check(ddp.module, world_size, steps_of)
        clear(ddp.module, set_to_none=n % 2 == 0)


@multirank(3, timeout_s=120)
def test_sums_are_in_rank_order(rank, world_size):
    ddp, steps_of = under_ddp(), MIXES["plain on a rank"]
    run_step(ddp, rank, steps_of(rank))
    check(ddp.module, world_size, steps_of)


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("mix", ["fused alone", "accumulated", "plain beside"])
def test_a_static_graph(rank, world_size, mix):
    steps_of, ddp = MIXES[mix], under_ddp(static_graph=True)
    if mix == "accumulated":
        run_step(ddp, rank, [{}])  # torch takes no first step under no_sync()
        clear(ddp.module)
    for _ in range(3):
        run_step(ddp, rank, steps_of(rank))
        check(ddp.module, world_size, steps_of)
        clear(ddp.module)


@multirank(2, timeout_s=120)
def test_layers_that_some_ranks_leave_out(rank, world_size):
    ddp = under_ddp(find_unused_parameters=True)
    for mine, others in ((1, 1), (0, 2), (None, 1)):
        skip = (mine, others)
        for steps_of in (lambda r, skip=skip: [{}, {"skip": skip[r]}], lambda r, skip=skip: [{"skip": skip[r]}]):
            run_step(ddp, rank, steps_of(rank))
            check(ddp.module, world_size, steps_of)
            clear(ddp.module)


class Exchanges:
    """Elements and dtypes that this rank gives to all-to-alls."""

    def __init__(self, monkeypatch):
        self.sent, original = [], dist.all_to_all_single

        def counted(received, sent, *more, **options):
            self.sent.append((sent.dtype, sent.numel()))
            return original(received, sent, *more, **options)

        monkeypatch.setattr(dist, "all_to_all_single", counted)

    def of(self, call):
        self.sent.clear()
        call()
        return list(self.sent)


def reducers(kind, fused):
    """A model, a backward that reduces, no_sync, and what ends a step."""
    if kind == "hook":
        ddp = DistributedDataParallel(Model(fused), bucket_cap_mb=BUCKET_MB)
        ddp.register_comm_hook(None, accurate_hook)
        return ddp, ddp.module, ddp.no_sync, ddp.zero_grad
    model = Model(fused)
    stage = {"stage 1": 1, "stage 2": 2}[kind]
    optimizer = ShardedOptimizer(
        model.parameters(), warpsmith.optim.SGD, stage=stage, lr=0.125, bucket_cap_mb=BUCKET_MB
    )

    def end():
        optimizer.step()
        optimizer.zero_grad()

    return model, model, optimizer.no_sync, end


KINDS = ("hook", "stage 1", "stage 2")


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_elements_are_sent_as_without_main_grad(rank, world_size, kind):
    with pytest.MonkeyPatch.context() as monkeypatch:
        exchanges, sent = Exchanges(monkeypatch), {}
        for fused in (False, True):
            wrapped, _, _, end = reducers(kind, fused)
            for _ in range(2):  # DDP makes its buckets anew after the first step
                sent[fused] = exchanges.of(loss(wrapped, rank, 0).backward)
                end()
    elements = sum(p.numel() for p in Model().parameters())
    for exchanged in sent.values():
        assert all(dtype == torch.bfloat16 for dtype, _ in exchanged)
        assert len(exchanged) > 1  # buckets, of which each is padded
        assert elements <= sum(count for _, count in exchanged) <= elements + 16 * len(exchanged)


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("kind", KINDS)
def test_no_zeros_are_made(rank, world_size, kind):
    wrapped, model, no_sync, end = reducers(kind, True)
    given = []
    nodes = [torch.autograd.graph.get_gradient_edge(w).node for w in model.weights()]
    for node in nodes:
        node.register_hook(lambda _, gradients: given.extend(gradients))
    for _ in range(2):
        with no_sync():
            loss(wrapped, rank, 0).backward()
        assert [w.grad for w in model.weights()] == [None] * LAYERS
        loss(wrapped, rank, 1).backward()
        assert given == [None] * (2 * LAYERS)
        given.clear()
        end()
        clear(model)


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reduction_overlaps_with_the_backward(rank, world_size, kind):
    wrapped, model, _, end = reducers(kind, True)
    events, original = [], dist.all_to_all_single

    def noted(*inputs, **options):
        events.append("sent")
        return original(*inputs, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_to_all_single", noted)
        for _ in range(2):
            events.clear()
            x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            x.register_hook(lambda _: events.append("all layers have run"))
            wrapped(x).sum().backward()
            end()
    assert events[0] == "sent" and len(events) > 2  # DDP's first step has one bucket


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_optimizer_takes_what_mixes(rank, world_size, stage):
    mixes = {name: steps for name, steps in MIXES.items() if name != "plain on a rank"}
    mixes["left out in the last"] = lambda r: [{}, {"skip": 1}]
    mixes["left out on a rank"] = lambda r: [{"skip": r}]
    for steps_of in mixes.values():
        model = Model()
        before = [w.detach().clone() for w in model.weights()]
        optimizer = ShardedOptimizer(
            model.parameters(), warpsmith.optim.SGD, stage=stage, lr=1.0, find_unused_parameters=True
        )
        *first, last = enumerate(steps_of(rank))
        with optimizer.no_sync():
            for micro, how in first:
                loss(model, rank, micro, **how).backward()
        loss(model, rank, last[0], **last[1]).backward()
        optimizer.step()
        fused = [own(r, steps_of(r))[0] for r in range(world_size)]
        for w, old, *parts in zip(model.weights(), before, *fused, strict=True):
            assert torch.equal(w, (old.float() - mean(parts).float()).bfloat16())
        optimizer.zero_grad()
        assert not any(w.main_grad.any() for w in model.weights())


@multirank(2, timeout_s=120)
def test_what_a_sharded_optimizer_would_miss_is_refused(rank, world_size):
    for stage in (1, 2):
        model = Model()
        optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, stage=stage, lr=1.0)
        loss(model, rank, 0).backward()
        with optimizer.no_sync():
            x, weight = torch.ones(1, WIDTH, dtype=torch.bfloat16), model.layers[0].weight
            warpsmith.linear(x, weight, main_grad=weight.main_grad).sum().backward()
        with pytest.raises(RuntimeError, match="was written to after it was reduced"):
            optimizer.step()
        optimizer.zero_grad()
        loss(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match="a second gradient of .* after the first was reduced"):
            loss(model, rank, 0).backward()


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_several_backwards_under_ddp(rank, world_size, checkpointed):
    ddp = under_ddp()
    steps_of = MIXES["fused alone"]
    for _ in range(2):
        first, second = (loss(ddp, rank, micro, checkpointed=checkpointed) for micro in (0, 1))
        first.backward()
        check(ddp.module, world_size, steps_of)
        reduced = [w.main_grad.clone() for w in ddp.module.weights()]
        with pytest.raises(RuntimeError, match=rf"linear: main_grad: rank {rank}: a backward after .*no_sync\(\)"):
            second.backward()
        assert all(map(torch.equal, reduced, (w.main_grad for w in ddp.module.weights())))
        clear(ddp.module)
        with pytest.raises(RuntimeError, match="call the DDP module"):
            loss(ddp.module, rank, 0).backward()
        clear(ddp.module)
        with ddp.no_sync():
            loss(ddp.module, rank, 0).backward()
        loss(ddp, rank, 1).backward()
        check(ddp.module, world_size, lambda r: [{}, {}])
        clear(ddp.module)
        loss(ddp, rank, 0).backward()
        check(ddp.module, world_size, steps_of)
        clear(ddp.module)
        (loss(ddp, rank, 0) + loss(ddp, rank, 1)).backward()
        check(ddp.module, world_size, lambda r: [{}, {}])
        clear(ddp.module)


class EveryOp(nn.Module):
    """All uses of a main_grad, each of a weight of its own; one weight is given transposed, one is the embedding
    too, and lies by columns."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        self.plain, self.transposed, self.gate, self.up, self.head, self.rows = nn.ParameterList(
            [(torch.randn(WIDTH, WIDTH) / 4).to(dtype) for _ in range(6)]
        )
        self.head.data = self.head.data.t().contiguous().t()
        for p in self.parameters():
            p.main_grad = torch.zeros(WIDTH, WIDTH)

    def forward(self, tokens):
        x = nn.functional.embedding(tokens, self.head)
        x = warpsmith.linear(x, self.plain, main_grad=self.plain.main_grad)
        x = warpsmith.linear(x, self.transposed.t(), activation="silu", main_grad=self.transposed.main_grad.t())
        x = warpsmith.gated_linear(x, self.gate, self.up, main_grads=(self.gate.main_grad, self.up.main_grad))
        losses = (
            warpsmith.linear_cross_entropy(x, w, tokens, reduction=reduction, main_grad=w.main_grad)
            for w, reduction in ((self.head, "mean"), (self.rows, "none"))
        )
        return sum(loss.mean() for loss in losses)


@multirank(2, timeout_s=120)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_op_hands_its_gradient_over(rank, world_size, dtype, autocast):
    def tokens(r):
        return torch.randint(WIDTH, (8,), generator=torch.Generator().manual_seed(r))

    def backward(model, r):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens(r))
        loss.backward()

    parts = []
    for r in range(world_size):
        alone = EveryOp(dtype)
        backward(alone, r)
        assert not any(p.grad.any() for p in alone.parameters() if p is not alone.head)
        parts.append([p.main_grad + p.grad for p in alone.parameters()])
    expected = [mean(each) for each in zip(*parts, strict=True)]
    ddp = DistributedDataParallel(EveryOp(dtype), bucket_cap_mb=BUCKET_MB)
    ddp.register_comm_hook(None, accurate_hook)
    for _ in range(2):
        backward(ddp, rank)
        for p, want in zip(ddp.module.parameters(), expected, strict=True):
            assert torch.equal(p.main_grad, want) and not p.grad.any()
            p.main_grad.zero_()
    sharded = EveryOp(dtype)
    before = [p.detach().clone().float() for p in sharded.parameters()]
    optimizer = ShardedOptimizer(sharded.parameters(), warpsmith.optim.SGD, stage=2, lr=1.0)
    backward(sharded, rank)
    assert all(p.grad is None for p in sharded.parameters())
    optimizer.step()
    if dtype != torch.float16:  # which is sent as it is
        for p, old, want in zip(sharded.parameters(), before, expected, strict=True):
            assert torch.equal(p, (old - want).to(dtype))
