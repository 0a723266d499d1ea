"""Our ops, optimizers and scaler in the loops of Lightning, transformers, Accelerate, PEFT and DeepSpeed."""

import importlib.util
import os

import pytest
import torch
import warpsmith
from torch.utils.data import DataLoader
from warpsmith.testing import run_ranks

lightning = pytest.importorskip("lightning", reason="needs lightning")
transformers = pytest.importorskip("transformers", reason="needs transformers")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
peft = pytest.importorskip("peft", reason="needs peft")

from warpsmith.integrations import lightning as ours  # noqa: E402
from warpsmith.integrations.transformers import patch  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("trainers"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = X.square().sum(1, keepdim=True) * 40
STEPS = 8
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))


class Module(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.net, self.make = net(), make

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        return self.make(self.parameters())


def adamw(params, **options):
    return warpsmith.optim.AdamW(params, lr=0.01, **options)


def loader():
    return DataLoader(list(zip(X, Y, strict=True)), batch_size=4)


def fit(module, steps=STEPS, ckpt_path=None, **options):
    options = {"max_steps": steps, "enable_checkpointing": False, **QUIET, **options}
    trainer = lightning.Trainer(**options)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def by_hand(clip, algorithm, scaler, make, dtype):
    """The same training as a plain loop."""
    model = net()
    optimizer = make(model.parameters())
    for x, y in list(loader())[:STEPS]:
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None and (algorithm == "value" or make is not adamw):
            scaler.unscale_(optimizer)  # what torch's unfused optimizers need
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), clip)
        elif scaler is not None and make is adamw:
            scaler.clip_(optimizer, clip)
        else:
            warpsmith.optim.clip_grad_norm_(list(model.parameters()), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("make", [adamw, torch.optim.AdamW], ids=["ours", "torch's"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_clips_and_steps_as_a_plain_loop(precision, make, algorithm):
    scaled = precision == "16-mixed"
    scaler = warpsmith.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    module = Module(make)
    plugin = ours.MixedPrecision(precision, "cpu", scaler)
    fit(module, plugins=[plugin], gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
    own = warpsmith.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    expected = by_hand(0.5, algorithm, own, make, torch.float16 if scaled else torch.bfloat16)
    for a, b in zip(module.net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(torch.equal(a, b) for a, b in zip(module.net.parameters(), net().parameters(), strict=True))


def test_lightning_clips_by_what_it_is_told():
    """Half the bound, another model: the bound is not lost on the way."""
    models = []
    for clip in (0.5, 0.25, None):
        module = Module(lambda params: warpsmith.optim.SGD(params, lr=0.01))
        fit(module, plugins=[ours.MixedPrecision("bf16-mixed", "cpu")], gradient_clip_val=clip)
        models.append(module.net[0].weight.detach())
    assert not torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])


def test_lightning_skips_a_step_that_overflows():
    scaler = warpsmith.amp.GradScaler("cpu", init_scale=2.0**60)
    module = Module(adamw)
    fit(module, plugins=[ours.MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=1.0)
    assert scaler.skipped_steps == STEPS and scaler.get_scale() == 2.0 ** (60 - STEPS)
    for a, b in zip(module.net.parameters(), net().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_resumes_bit_for_bit(tmp_path, precision):
    """From the end of an epoch, which has STEPS batches: weights, states of the optimizer, scale. A run that max_steps
    ended resumes with other batches, with torch's optimizer too."""

    def train(epochs, ckpt_path=None):
        module, plugin = Module(adamw), ours.MixedPrecision(precision, "cpu")
        return module, fit(module, -1, ckpt_path, max_epochs=epochs, plugins=[plugin], gradient_clip_val=0.5)

    whole, at_end = train(2)
    _, half = train(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, also_at_end = train(2, tmp_path / "half.ckpt")
    assert also_at_end.global_step == 2 * STEPS
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    if precision == "16-mixed":
        scales = [trainer.precision_plugin.scaler.state_dict() for trainer in (at_end, also_at_end)]
        assert scales[0] == scales[1] and scales[0]["scale"] < 2.0**16  # it backed off on the way


def test_lightning_lists_waits_of_its_batches(capsys):
    class Waits(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * 1 if loss.item() > -1 else None

    callback = ours.SyncAuditCallback(first=2, batches=3)
    fit(Waits(adamw), callbacks=[callback])
    found = [s for s in callback.audit.syncs if "loss.item()" in s.source]
    assert [s.count for s in found] == [3] and callback.audit.steps == 3
    assert "loss.item()" in capsys.readouterr().out
    short = ours.SyncAuditCallback(first=6, batches=20)
    fit(Waits(adamw), callbacks=[short])
    assert short.audit.steps == 2
    with pytest.warns(UserWarning, match="had 8 batches, none was audited"):
        fit(Waits(adamw), callbacks=[ours.SyncAuditCallback(first=50)])


class ByHand(Module):
    automatic_optimization = False

    def on_fit_start(self):
        optimizer, guard = self.optimizers(use_pl_optimizer=False), warpsmith.amp.StepGuard()

        def step(x, y):
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            loss.backward()
            guard.clip_(optimizer, 0.5)
            guard.step(optimizer)
            guard.update()
            optimizer.zero_grad()
            return loss

        self.step = ours.captured_step(self, step, state=[self, optimizer, guard])

    def training_step(self, batch, index):
        self.step(*batch)


@pytest.mark.filterwarnings("ignore:CapturedStep")
def test_a_captured_step_counts_for_lightning():
    module = ByHand(adamw)
    trainer = fit(module)
    assert trainer.global_step == STEPS  # max_steps ended it
    automatic = Module(adamw)
    fit(automatic, plugins=[], gradient_clip_val=None, steps=1)
    with pytest.raises(ValueError, match="captured_step: module.automatic_optimization: expected False, got True"):
        ours.captured_step(automatic, lambda: None, state=[])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ours.MixedPrecision("16-mixed", "cpu", 3), "MixedPrecision: scaler: expected a warpsmith.amp"),
        (lambda: ours.MixedPrecision("32-true", "cpu"), "precision"),
        (lambda: ours.SyncAuditCallback(batches=0), "SyncAuditCallback: batches: expected"),
        (lambda: ours.SyncAuditCallback(first=-1), "SyncAuditCallback: first: expected"),
    ],
)
def test_lightnings_parts_refuse(make, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make()


# ---- transformers, Accelerate, PEFT


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    )


ROWS = [{"input_ids": r, "labels": r} for r in torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(2))]
BATCH = torch.stack([row["input_ids"] for row in ROWS[:4]])


@pytest.mark.parametrize("precision", [None, "master", "8bit"])
def test_trainer_resumes_bit_for_bit(tmp_path, precision):
    def train(folder, steps, resume=None):
        model = llama().to(torch.bfloat16 if precision == "master" else torch.float32)
        patch(model)
        options = transformers.TrainingArguments(
            str(folder), max_steps=6, save_steps=3, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=50
        )
        trainer = transformers.Trainer(
            model,
            options,
            train_dataset=ROWS,
            optimizer_cls_and_kwargs=(warpsmith.optim.AdamW, {"lr": 1e-2, "precision": precision}),
        )
        if steps < 6:
            trainer.add_callback(_StopAfter(steps))
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 3)
    resumed = train(tmp_path / "parts", 6, resume=True)
    assert os.path.isdir(tmp_path / "parts/checkpoint-6")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


class _StopAfter(transformers.TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.steps


def test_accelerate_saves_and_loads_bit_for_bit(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = llama()
    patch(model)
    model, optimizer = accelerator.prepare(model, warpsmith.optim.AdamW(model.parameters(), lr=1e-2))

    def step():
        loss = model(input_ids=BATCH, labels=BATCH).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    accelerator.save_state(str(tmp_path / "state"))
    expected = [step() for _ in range(3)]
    accelerator.load_state(str(tmp_path / "state"))
    assert [step() for _ in range(3)] == expected
    assert expected[-1] < expected[0]


@pytest.mark.gpu
def test_accelerate_in_float16_with_our_scaler():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="fp16")
    accelerator.scaler = warpsmith.amp.GradScaler(init_scale=2.0**40)
    model = llama()
    patch(model)
    model, optimizer = accelerator.prepare(model, warpsmith.optim.AdamW(model.parameters(), lr=1e-2))
    batch = BATCH.cuda()
    losses = []
    for _ in range(40):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.scaler.get_scale() < 2.0**40 and losses[-1] < losses[0]


def sharded_by_accelerate(rank, world_size, folder):
    """Losses of four steps under FSDP2: by torch's AdamW, patched by ours, and by ours again from the first's state."""
    device = torch.cuda.current_device()  # ranks may share one
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(device), "WORLD_SIZE": str(world_size)}
    batch, found = BATCH.cuda(), []
    for is_ours in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        accelerator = accelerate.Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
        model = llama()
        if is_ours:
            patch(model)
        make = warpsmith.optim.AdamW if is_ours else torch.optim.AdamW
        model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=1e-2))

        def step(accelerator=accelerator, model=model, optimizer=optimizer):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        first = [step()]
        accelerator.save_state(folder)
        found.append(first + [step() for _ in range(3)])
    accelerator.load_state(folder)
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())
    return [*found, first + [step() for _ in range(3)]]


@pytest.mark.gpu
def test_accelerate_shards_a_patched_model_by_fsdp2(tmp_path):
    ranks = run_ranks(sharded_by_accelerate, 2, str(tmp_path / "state"), backend="nccl", timeout_s=200)
    for by_torch, by_ours, resumed in ranks:
        assert by_ours == pytest.approx(by_torch, rel=0.01)
        assert resumed == by_ours and by_ours[-1] < by_ours[0]


@pytest.mark.parametrize("first", ["peft", "patch"])
def test_adapters_train_beside_our_ops(first):
    """The gradients of all adapters are those of PEFT without our ops; frozen weights have none. So are merged ones."""

    def adapted(patched):
        model = llama()
        if patched and first == "patch":
            patch(model)
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        found = peft.get_peft_model(model, lora)
        if patched and first == "peft":
            patch(found.get_base_model())
        return found.train()

    theirs, mine = adapted(False), adapted(True)
    losses = []
    for model in (theirs, mine):
        loss = model(input_ids=BATCH, labels=BATCH).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])
    found = {n: p.grad for n, p in mine.named_parameters()}
    assert {n for n, g in found.items() if g is not None} == {n for n in found if "lora_" in n}
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)
    merged = [m.merge_and_unload().eval()(BATCH).logits for m in (theirs, mine)]
    torch.testing.assert_close(merged[1], merged[0], rtol=1e-4, atol=1e-4)


def deepspeed_losses(rank, world_size):
    """Of steps with ZeRO: by torch's AdamW, and patched by ours, at stages 2 and 3."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # collectives by gloo: 40 s less to compile
    found = []
    for is_ours, stage in ((False, 2), (True, 2), (True, 3)):
        model = llama()
        if is_ours:
            warpsmith.patch(model)
        make = warpsmith.optim.AdamW if is_ours else torch.optim.AdamW
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(4):
            tokens = torch.randint(32, (2, 16), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
    return found


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeed_trains_a_patched_model_by_our_adamw():
    for by_torch, *by_ours in run_ranks(deepspeed_losses, 2, timeout_s=300):
        for losses in by_ours:
            assert losses == pytest.approx(by_torch, rel=1e-4)
