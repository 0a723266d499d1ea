"""Trains a small Llama on the bytes of your files with Lightning: our loss scaling, clipping, optimizer and ops.

python examples/train_lightning.py                          bfloat16 autocast, clipped, on Python's standard library
python examples/train_lightning.py --precision 16-mixed     scaled losses; overflows skip a step without a wait
python examples/train_lightning.py --captured               the whole step is one CUDA graph, on a GPU
python examples/train_lightning.py --audit                  lists the lines on which the host waits
"""

import argparse
from pathlib import Path

import lightning
import torch
import transformers
import warpsmith
from gpt_data import read_data  # beside this file
from lightning.pytorch.callbacks import ModelCheckpoint
from warpsmith.integrations.lightning import MixedPrecision, SyncAuditCallback, captured_step
from warpsmith.integrations.transformers import patch


class Text(torch.utils.data.Dataset):
    """Rows of `length` bytes that follow each other in a text."""

    def __init__(self, text: bytes, length: int) -> None:
        self.rows = torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8)
        self.rows = self.rows.view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i].long()


class Model(lightning.LightningModule):
    """A Llama of transformers with our ops in it; Lightning optimizes."""

    def __init__(self, hidden: int, layers: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 16,
            num_key_value_heads=hidden // 32,
        )
        self.model = transformers.LlamaForCausalLM(config)
        self.patched = patch(self.model)
        self.losses: list[torch.Tensor] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model(rows, labels=rows, use_cache=False).loss

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.loss(rows)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        self.log("held out", self.loss(rows))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return warpsmith.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Captured(Model):
    """The same, stepped by hand: one CUDA graph takes forward, backward, clipping and step."""

    automatic_optimization = False

    def on_fit_start(self) -> None:
        optimizer, guard = self.optimizers(use_pl_optimizer=False), warpsmith.amp.StepGuard()

        def step(rows: torch.Tensor) -> torch.Tensor:
            with torch.autocast(rows.device.type, torch.bfloat16):
                loss = self.loss(rows)
            loss.backward()
            guard.clip_(optimizer, max_norm=1.0)
            guard.step(optimizer)
            guard.update()
            optimizer.zero_grad()
            return loss

        self.step = captured_step(self, step, state=[self, optimizer, guard])

    def training_step(self, rows: torch.Tensor, index: int) -> None:
        self.losses.append(self.step(rows))


def main(arguments: list[str] | None = None) -> Model:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file or folder of text; default: Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    for name, value in (("steps", 100), ("batch", 8), ("length", 128), ("hidden", 64), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", choices=("bf16-mixed", "16-mixed"), default="bf16-mixed")
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--audit", action="store_true")
    given = parser.parse_args(arguments)
    lightning.seed_everything(0, verbose=False)
    train, validation, description = read_data(given.data, given.out)
    print(description)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (Captured if given.captured else Model)(given.hidden, given.layers, given.lr)
    by_lightning = {
        "plugins": [MixedPrecision(given.precision, device)],
        "gradient_clip_val": 1.0,
    }
    trainer = lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=given.steps,
        default_root_dir=given.out,
        callbacks=[ModelCheckpoint(given.out, save_last=True), *([SyncAuditCallback()] if given.audit else [])],
        limit_val_batches=8,
        logger=False,
        enable_model_summary=False,
        **({} if given.captured else by_lightning),
    )
    loaders = [
        torch.utils.data.DataLoader(Text(text, given.length), given.batch, shuffle=text is train, drop_last=True)
        for text in (train, validation)
    ]
    last = given.out / "last.ckpt"
    trainer.fit(model, *loaders, ckpt_path=last if last.exists() else None)
    losses = torch.stack(model.losses).tolist() if model.losses else []
    if losses:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {trainer.global_step} steps; saved in {given.out}")
    return model


if __name__ == "__main__":
    main()
