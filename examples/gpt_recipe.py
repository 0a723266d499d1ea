"""The recipe of train_gpt.py: its numbers, the two presets, and what is checked before a run."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpt_ranks import Ranks, UserError  # beside this file

# The recipe is what fixes a run's losses. A flag of the same name overrides the preset; a checkpoint stores all of it.
# gpt2-124m is GPT-2 small (Radford et al., 2019) with its 50257 tokens padded to a multiple of 128.
RECIPE: dict[str, tuple[Any, Any, str]] = {  # name: (nano, gpt2-124m, help)
    "layers": (4, 12, "transformer blocks"),
    "heads": (4, 12, "attention heads"),
    "width": (128, 768, "model width"),
    "context": (128, 1024, "tokens a sequence"),
    "vocab": (256, 50304, "rows of the embedding; bytes need 256"),
    "positions": ("rope", "learned", "position encoding"),
    "norm": ("rms", "layer", "RMSNorm or LayerNorm"),
    "bias": (False, True, "biases in linear layers and in LayerNorm"),
    "batch": (32, 64, "sequences a step, over all ranks"),
    "steps": (700, 500, "length of the run and of its learning rate schedule"),
    "lr": (4e-3, 6e-4, "peak learning rate"),
    "warmup": (40, 50, "steps until the peak; then it falls linearly to 0"),
    "weight_decay": (0.1, 0.1, "AdamW's decay of matrices"),
    "init_std": (0.08, 0.02, "of the initial weights, but for those that feed the residual stream"),
    "clip": (1.0, 1.0, "largest norm of the gradient"),
    "dtype": ("float32", "bfloat16", "16-bit ones are autocast; float16 scales the loss"),
    "fp8": ("none", "none", "products of linear layers in 8 bits, by scales of (docs/fp8.md)"),
    "stream": ("float32", "float32", "dtype of the residual stream; bfloat16 moves fewer bytes and rounds every sum"),
    "seed": (1, 1, "of weights and data order"),
    "tokens": ("bytes", "bytes", "the data's bytes, or random ones for a benchmark"),
    "reduce": ("float32", "float32", "how gradients travel: float32 by all-reduce, or bfloat16 by accurate_hook"),
    "shard": ("none", "none", "what each rank keeps a part of: AdamW's states (ZeRO-1), gradients too (ZeRO-2)"),
    "modules": ("warpsmith", "warpsmith", "whose norms, positions, attention, activation, loss and optimizer"),
}
PRESETS = {
    preset: {"preset": preset} | {name: row[i] for name, row in RECIPE.items()}
    for i, preset in enumerate(("nano", "gpt2-124m"))
}
CHOICES = {
    "positions": ("rope", "learned"),
    "norm": ("rms", "layer"),
    "dtype": ("float32", "bfloat16", "float16"),
    "fp8": ("none", "row", "tensor", "delayed", "block"),
    "stream": ("float32", "bfloat16"),
    "tokens": ("bytes", "random"),
    "reduce": ("float32", "bfloat16"),
    "shard": ("none", "states", "gradients"),
    "modules": ("warpsmith", "torch"),
}


def default_out(preset: str, resume: bool) -> Path:
    """runs/PRESET, runs/PRESET-2, ...: the last that exists to resume, the first free one for a new run."""
    number, path = 1, Path("runs") / preset
    last = path
    while path.exists():
        number, last = number + 1, path
        path = Path("runs") / f"{preset}-{number}"
    return last if resume else path


def preset_of(args: argparse.Namespace) -> str:
    return args.preset or ("gpt2-124m" if args.device == "cuda" else "nano")


def recipe_of(args: argparse.Namespace, ranks: Ranks, stored: dict[str, Any] | None = None) -> SimpleNamespace:
    """The preset with the flags given, checked; on a resume the checkpoint's recipe, which no flag may change."""
    base = PRESETS[preset_of(args)] | (stored or {})  # a checkpoint may be older than one of the flags
    given = {name: getattr(args, name) for name in base if getattr(args, name) is not None}
    s = SimpleNamespace(**base | given)

    def expect(good: bool, name: str, expected: str, values: Any = s) -> None:
        if not good:
            raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(values, name)}")

    for name, value in given.items():
        expect(stored is None or base[name] == value, name, f"{base[name]} (the checkpoint's)")
    for name in ("layers", "heads", "width", "context", "vocab", "batch", "steps", "lr", "clip", "init_std"):
        expect(getattr(s, name) > 0, name, "more than 0")
    for name in ("save_every", "eval_every", "log_every", "seconds"):
        expect(getattr(args, name) > 0, name, "more than 0", args)
    for name in ("warmup", "weight_decay"):
        expect(getattr(s, name) >= 0, name, "0 or more")
    expect(abs(s.seed) < 2**43, "seed", "fewer than 44 bits")  # with the step it makes a generator's 64
    expect(s.width % s.heads == 0, "heads", f"a divisor of --width {s.width}")
    head_dim = s.width // s.heads
    expect(head_dim % 8 == 0 and head_dim <= 256, "heads", f"--width {s.width} / heads in steps of 8 up to 256")
    expect(s.stream == "float32" or s.dtype == "bfloat16", "stream", f"float32 where --dtype is {s.dtype}")
    expect(not args.captured or ranks.world == 1, "captured", f"one process where there are {ranks.world}", args)
    expect(not args.captured or s.modules == "warpsmith", "captured", "--modules warpsmith", args)
    expect(s.fp8 == "none" or s.modules == "warpsmith", "fp8", f"none where --modules is {s.modules}")
    expect(s.shard == "none" or s.reduce == "bfloat16", "shard", f"none where --reduce is {s.reduce}")
    expect(s.shard == "none" or s.modules == "warpsmith", "shard", f"none where --modules is {s.modules}")
    expect(s.batch % ranks.world == 0, "batch", f"a multiple of the {ranks.world} ranks")
    return s
