"""CapturedStep on CUDA: the bits of eager steps, what prevents a capture, and the waits that sync_audit finds."""

import inspect
import warnings

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import bitwise_equal
from warpsmith.train import CapturedStep, CaptureError, sync_audit

pytestmark = pytest.mark.gpu

CALLS = 12  # of which the first three and the audited one are eager


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.mlp_norm = warpsmith.nn.RMSNorm(width), warpsmith.nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.heads, self.dropout = warpsmith.nn.GatedMLP(width, 2 * width), heads, nn.Dropout(0.1)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.dropout(self.out(warpsmith.attention(qkv, causal=True).flatten(2)))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    def __init__(self, vocab=96, width=64, heads=2, layers=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))

    def forward(self, tokens):
        x = self.blocks(self.embedding(tokens[:, :-1]))
        return warpsmith.linear_cross_entropy(x, self.head.weight, tokens[:, 1:])


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 8))

    def forward(self, x):
        return super().forward(x).float().square().mean()


def batches(kind, dtype, count=CALLS):
    generator = torch.Generator().manual_seed(7)
    if kind == "gpt":
        return [torch.randint(0, 96, (4, 33), generator=generator).cuda() for _ in range(count)]
    return [torch.randn(16, 32, generator=generator).to("cuda", dtype) for _ in range(count)]


class Training:
    """A model and its step. `gather`: what the step appends to, so that it is no global of its function."""

    def __init__(
        self, kind="mlp", optimizer="AdamW", dtype=torch.float32, half=None, clip=None, schedule=False, **more
    ):
        torch.manual_seed(0)
        self.model = {"mlp": Mlp, "gpt": Gpt}[kind]().to("cuda", dtype)
        make = getattr(warpsmith.optim, optimizer)
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-2, **more})
        kinds = {None: None, "guard": warpsmith.amp.StepGuard, "scaler": warpsmith.amp.GradScaler}
        self.scaler = kinds[half]() if half else None
        if half == "scaler":
            self.scaler = warpsmith.amp.GradScaler(init_scale=2.0**10, growth_interval=3)
        self.schedule = None
        if schedule:
            self.schedule = warpsmith.amp.DeviceLR(
                self.optimizer, warpsmith.amp.schedules.cosine(20, warmup_steps=3), 20, self.scaler
            )
        self.half, self.clip = half, clip
        self.state = [o for o in (self.model, self.optimizer, self.scaler, self.schedule) if o is not None]

    def step(self, batch):
        with torch.autocast("cuda", torch.float16, enabled=self.half == "scaler"):
            loss = self.model(batch)
        if self.scaler is None:
            loss.backward()
            if self.clip:
                warpsmith.optim.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            if self.clip:
                self.scaler.clip_(self.optimizer, self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        return loss

    def tensors(self):
        states = [t for p in self.model.parameters() for t in self.optimizer.state.get(p, {}).values()]
        return [*self.model.parameters(), *self.model.buffers(), *states]


def run(training, inputs, step=None, between=None):
    torch.manual_seed(5)
    losses = []
    for i, batch in enumerate(inputs):
        if between is not None:
            between(training, i)
        losses.append((step or training.step)(batch))
    return [loss.detach().clone() for loss in losses]


def same(a, b):
    return len(a) == len(b) and all(bitwise_equal(x.detach(), y.detach()) for x, y in zip(a, b, strict=True))


def check(options, inputs, between=None, state=lambda t: t.state, captured=True, **more):
    """Both ways end with the same bits; returns the captured step and its training."""
    eager, graphed = Training(**options), Training(**options)
    expected, random_state = run(eager, inputs, between=between), torch.cuda.get_rng_state()
    step = CapturedStep(graphed.step, state=state(graphed), **more)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if captured else "ignore")
        losses = run(graphed, inputs, step, between)
    assert (step.fallback_reason is None) == captured, step.fallback_reason
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())
    if eager.scaler is not None:
        assert eager.scaler.state_dict() == graphed.scaler.state_dict()
        assert eager.scaler.skipped_steps == graphed.scaler.skipped_steps
    assert torch.equal(random_state, torch.cuda.get_rng_state())
    return step, graphed


CASES = {
    "mlp-adamw": {"kind": "mlp"},
    "mlp-sgd": {"optimizer": "SGD", "momentum": 0.9, "clip": 0.5},
    "mlp-lion": {"optimizer": "Lion", "lr": 1e-3},
    "mlp-bf16": {"dtype": torch.bfloat16, "half": "guard", "clip": 0.5, "schedule": True},
    "mlp-bf16-sr": {"dtype": torch.bfloat16, "precision": "bf16_sr"},
    "mlp-8bit": {"precision": "8bit"},
    "mlp-scaler": {"half": "scaler", "clip": 0.5, "schedule": True},
    "gpt-adamw": {"kind": "gpt", "clip": 1.0},
    "gpt-scaler": {"kind": "gpt", "half": "scaler", "clip": 1.0, "schedule": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_has_the_bits_of_eager_steps(name):
    """With dropout, so that random numbers are drawn in the graph; with one overflow where the loss is scaled."""
    options = CASES[name]
    inputs = batches(options.get("kind", "mlp"), options.get("dtype", torch.float32))
    if options.get("half") and inputs[0].is_floating_point():
        inputs[5][0, 0] = torch.inf
        inputs[9][0, 0] = torch.nan
    step, graphed = check(options, inputs)
    assert step.self_test_result == "3 steps: the bits of eager steps"
    if options.get("half") and inputs[0].is_floating_point():
        assert graphed.scaler.skipped_steps == 2


def test_a_scheduler_of_torch_around_the_step():
    schedulers = {}

    def between(training, i):
        if id(training) not in schedulers:
            schedulers[id(training)] = torch.optim.lr_scheduler.StepLR(training.optimizer, 2, 0.7)
        elif i:
            schedulers[id(training)].step()

    check({}, batches("mlp", torch.float32), between)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Lion", "RMSprop", "Adagrad"])
def test_hyperparameters_between_steps(optimizer, monkeypatch):
    """Hyperparameters are on the device, so one capture serves all values. OneCycleLR also changes the momentum."""
    more = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
    cycles = {}

    def between(training, i):
        if id(training) not in cycles:
            cycles[id(training)] = torch.optim.lr_scheduler.OneCycleLR(
                training.optimizer, 0.01, CALLS, cycle_momentum=optimizer not in ("Adagrad",)
            )
        elif i:
            cycles[id(training)].step()
        training.optimizer.param_groups[0]["weight_decay"] = 0.01 * i

    captures, capture = [], torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *a, **k: captures.append(1) or capture(*a, **k))
    check({"optimizer": optimizer, **more}, batches("mlp", torch.float32), between)
    assert len(captures) == 1


def test_other_numbers_are_noticed():
    def between(training, i):
        if i == 7:
            training.optimizer.param_groups[0]["maximize"] = True

    check({}, batches("mlp", torch.float32), between)


def test_loaded_states_and_modes_are_noticed():
    def between(training, i):
        if i == 6:
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        if i == 9:
            training.model.eval()

    check({}, batches("mlp", torch.float32), between)


def test_two_shapes_and_inputs_on_the_host():
    inputs = [b.cpu()[: 16 if i % 3 else 5] for i, b in enumerate(batches("mlp", torch.float32, 18))]
    eager, graphed = Training(), Training()
    expected = run(eager, [b.cuda() for b in inputs])
    step = CapturedStep(graphed.step, state=graphed.state, max_buckets=2)
    losses = run(graphed, inputs, step)
    assert step.fallback_reason is None and same(expected, losses) and same(eager.tensors(), graphed.tensors())
    before = [t.clone() for t in graphed.tensors()]
    with pytest.raises(ValueError, match=r"CapturedStep: inputs: expected one of max_buckets = 2 kinds .* \(7, 32\)"):
        step(inputs[1][:7])
    assert same(before, graphed.tensors())


def test_accumulation_in_the_step():
    def accumulate(training):
        def step(batch):
            total = 0
            for part in batch.chunk(4):
                loss = training.model(part) / 4
                loss.backward()
                total = total + loss.detach()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
            return {"loss": total}

        return step

    eager, graphed = Training(), Training()
    inputs = batches("mlp", torch.float32)
    torch.manual_seed(5)
    expected = [accumulate(eager)(b)["loss"] for b in inputs]
    step = CapturedStep(accumulate(graphed), state=graphed.state)
    torch.manual_seed(5)
    losses = [step(b)["loss"] for b in inputs]
    assert step.fallback_reason is None, step.fallback_reason
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())


def test_inputs_that_are_freed_after_each_step():
    """The memory of the captured inputs is overwritten after each step: replays must not read it."""
    eager, graphed = Training(), Training()
    inputs = batches("mlp", torch.float32)
    expected = run(eager, inputs)
    step = CapturedStep(graphed.step, state=graphed.state)
    torch.manual_seed(5)
    losses = []
    for batch in inputs:
        mine = batch.clone()
        losses.append(step(mine))
        mine.untyped_storage().resize_(0)
        torch.full((1 << 20,), torch.nan, device="cuda")
    assert step.fallback_reason is None and same(expected, losses) and same(eager.tensors(), graphed.tensors())


@pytest.mark.parametrize("how", ["item", "synchronize"])
def test_what_prevents_a_capture_is_named(how):
    """A wait that torch tells of is found before the capture; another one fails it. Eager steps go on, bit for bit."""
    eager, graphed = Training(), Training()
    inputs = batches("mlp", torch.float32)
    expected = run(eager, inputs)

    def step(batch):
        loss = graphed.step(batch)
        if how == "item":
            loss.item()
        else:
            torch.cuda.synchronize()
        return loss

    lines, first = inspect.getsourcelines(step)
    line = first + next(i for i, text in enumerate(lines) if how + "()" in text)
    captured = CapturedStep(step, state=graphed.state)
    with pytest.warns(RuntimeWarning, match=f"{__name__.split('.')[-1]}.py:{line}: .*{how}"):
        losses = run(graphed, inputs, captured)
    assert same(expected, losses) and same(eager.tensors(), graphed.tensors())
    torch.randn(3, device="cuda").cpu()  # the generator is out of its capture
    refusing = CapturedStep(step, state=graphed.state, fallback=False)
    with pytest.raises(CaptureError, match=how):
        run(graphed, inputs, refusing)


def test_a_gradient_that_waits_is_named():
    """torch reports the wait only after the backward pass; the next eager step finds the formula that waited."""
    training = Training()

    def step(batch):
        loss = (training.model[0](batch).prod(-1).float() ** 2).mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss

    captured = CapturedStep(step, state=training.state)
    text = r"loss.backward\(\): the host waits for the device in ProdBackward1, the gradient of .*loss = .*prod\(-1\)"
    with pytest.warns(RuntimeWarning, match=text):
        run(training, batches("mlp", torch.float32), captured)
    with sync_audit() as audit:
        step(batches("mlp", torch.float32)[0])
    own = "torch.Tensor.backward in ProdBackward1, the gradient of "  # torch 2.11 has waits beside it
    assert any(found.operation.startswith(own) for found in audit.syncs), str(audit)


def test_an_average_and_large_layers():
    """LAMB and EMA in the step, in bfloat16 with masters."""
    results = []
    for captured in (False, True):
        training = Training(optimizer="LAMB", dtype=torch.bfloat16, precision="master", half="guard", clip=0.5)
        ema = warpsmith.optim.EMA(training.model.parameters(), 0.9, optimizer=training.optimizer)

        def step(batch, training=training, ema=ema):
            loss = training.step(batch)
            ema.update(training.scaler.found_inf(training.optimizer))
            return loss

        inputs = batches("mlp", torch.bfloat16)
        inputs[7][0, 0] = torch.nan
        step = CapturedStep(step, state=[*training.state, ema]) if captured else step
        results.append([*run(training, inputs, step), *training.tensors(), *ema.averages])
    assert step.fallback_reason is None, step.fallback_reason
    assert same(*results)


def test_an_optimizer_of_torch():
    torch.manual_seed(0)
    model = Mlp().cuda()
    other = Mlp().cuda()
    other.load_state_dict(model.state_dict())
    inputs = batches("mlp", torch.float32)

    def steps(m, **options):
        optimizer = torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2, device="cuda"), **options)

        def step(batch):
            optimizer.zero_grad()
            loss = m(batch)
            loss.backward()
            optimizer.step()
            return loss

        return step, optimizer

    eager, _ = steps(model, fused=True, capturable=True)
    graphed, optimizer = steps(other, fused=True, capturable=True)
    captured = CapturedStep(graphed, state=[other, optimizer])
    torch.manual_seed(5)
    expected = [eager(b).detach() for b in inputs]
    torch.manual_seed(5)
    losses = [captured(b) for b in inputs]
    assert captured.fallback_reason is None, captured.fallback_reason
    assert same(expected, losses) and same(list(model.parameters()), list(other.parameters()))
    assert same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    plain, optimizer = steps(other)
    captured = CapturedStep(plain, state=[other, optimizer])
    with pytest.warns(RuntimeWarning, match="steps run eagerly"):
        [captured(b) for b in inputs]


def test_the_audit_finds_each_wait():
    training = Training(half="scaler", clip=1.0, schedule=True)
    inputs = batches("mlp", torch.float32)
    for batch in inputs[:3]:
        training.step(batch)
    with sync_audit() as audit:
        for batch in inputs[3:6]:
            training.step(batch)
    assert audit.total == 0 and audit.steps == 3, str(audit)
    pageable, event = torch.ones(1000), torch.cuda.Event()
    with sync_audit() as audit:
        for _ in range(2):
            x = pageable.to("cuda", non_blocking=True)
            x.sum().item()
            x.cpu()
            x[x > 0]
            torch.cuda.synchronize()
            event.record()
            event.synchronize()
            float(x[0])
            pageable.pin_memory().to("cuda", non_blocking=True)
    found = {s.operation for s in audit.syncs}
    expected = {"torch.Tensor.item", "torch.Tensor.cpu", "torch.Tensor.__getitem__", "torch.Tensor.__float__"}
    expected |= {"to with pageable memory", "torch.cuda.synchronize", "Event.synchronize"}
    assert expected <= found, str(audit)
    assert all(s.count == 2 for s in audit.syncs if s.operation in expected), str(audit)
    assert not [s for s in audit.syncs if "pin_memory" in s.source and "pageable" in s.operation]
