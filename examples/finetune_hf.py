"""Fine-tunes a Llama-class model with LoRA on the bytes of your files: transformers' Trainer, PEFT, and our ops.

    python examples/finetune_hf.py                             a small random model on Python's standard library
    python examples/finetune_hf.py --model path --data notes   weights and tokenizer that you have, any text
    python examples/finetune_hf.py --steps 400                 goes on from the last checkpoint in --out

`patch` replaces norms, rotary embedding, feed-forward layers and the loss; layers with an adapter stay PEFT's. AdamW is
ours: the Trainer clips, schedules and saves as ever.
"""

import argparse
from pathlib import Path

import peft
import torch
import transformers
import warpsmith
from gpt_data import read_data  # beside this file
from transformers.trainer_utils import get_last_checkpoint
from warpsmith.integrations.transformers import patch

BYTES = 256


class Windows(torch.utils.data.Dataset):
    """Rows of `length` tokens that follow each other in a text."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = self.rows[i].long()
        return {"input_ids": row, "labels": row}


def load(given: argparse.Namespace) -> tuple[transformers.PreTrainedModel, torch.Tensor, torch.Tensor]:
    """A model, and tokens to train and to validate on: of its tokenizer, or bytes."""
    train, validation, description = read_data(given.data, given.out)
    print(description)
    if given.model is None:
        config = transformers.LlamaConfig(
            vocab_size=BYTES,
            hidden_size=given.hidden,
            intermediate_size=4 * given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=given.hidden // 16,
            num_key_value_heads=given.hidden // 32,
        )
        model = transformers.LlamaForCausalLM(config)
        return model, *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, validation))
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model)
    texts = (text[: given.most_bytes].decode("utf-8", errors="replace") for text in (train, validation))
    return model, *(tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with weights and tokenizer; default: a random model")
    parser.add_argument("--data", type=Path, help="a file or folder of text; default: Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    for name, value in (("steps", 100), ("batch", 8), ("length", 128), ("hidden", 64), ("layers", 2), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--most-bytes", type=int, default=10_000_000, help="of the text that a tokenizer reads")
    parser.add_argument("--full", action="store_true", help="train all weights, without adapters")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    model, train, validation = load(given)
    if not given.full:
        lora = peft.LoraConfig(r=given.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    print(patch(model.get_base_model() if not given.full else model))
    options = transformers.TrainingArguments(
        output_dir=str(given.out),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        per_device_eval_batch_size=given.batch,
        learning_rate=given.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(10, given.steps),
        max_grad_norm=1.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=10,
        save_steps=50,
        save_total_limit=2,
        prediction_loss_only=True,
        report_to="none",
    )
    held_out = Windows(validation, given.length)
    trainer = transformers.Trainer(
        model,
        options,
        train_dataset=Windows(train, given.length),
        eval_dataset=torch.utils.data.Subset(held_out, range(min(8 * given.batch, len(held_out)))),
        optimizer_cls_and_kwargs=(warpsmith.optim.AdamW, {"lr": given.lr}),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.out) if given.out.is_dir() else None)
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    validated = trainer.evaluate()["eval_loss"]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, held out {validated:.3f}; saved in {given.out}")
    return {"first": losses[0], "last": losses[-1], "held out": validated}


if __name__ == "__main__":
    main()
