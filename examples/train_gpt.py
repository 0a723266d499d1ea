"""Train a GPT on any text, from one file, with Warpsmith's ops.

    python examples/train_gpt.py                                  nano: 2 CPU cores, about 3 minutes
    python examples/train_gpt.py --data ~/books --out runs/books
    python examples/train_gpt.py --resume                         go on after Ctrl-C, `kill` or a crash
    python examples/train_gpt.py --compare                        the same steps beside plain torch modules
    torchrun --nproc-per-node 8 examples/train_gpt.py --preset gpt2-124m

A run writes `log.jsonl`, `loss.png` and `checkpoints/` into its folder. All randomness is a function of (seed, step)
and a step's batch does not depend on the number of ranks, so a resumed run yields bit for bit the losses of the
uninterrupted one on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import checkpoint  # beside this file
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f"train_gpt: error: {missing.name} is not installed: pip install safetensors tqdm matplotlib")

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
    "dtype": ("float32", "bfloat16", "bfloat16 is autocast"),
    "stream": ("float32", "float32", "dtype of the residual stream; bfloat16 moves fewer bytes and rounds every sum"),
    "seed": (1, 1, "of weights and data order"),
    "tokens": ("bytes", "bytes", "the data's bytes, or random ones for a benchmark"),
    "modules": ("warpsmith", "warpsmith", "whose norms, positions, activation, loss and optimizer"),
}
PRESETS = {
    preset: {"preset": preset} | {name: row[i] for name, row in RECIPE.items()}
    for i, preset in enumerate(("nano", "gpt2-124m"))
}
CHOICES = {
    "positions": ("rope", "learned"),
    "norm": ("rms", "layer"),
    "dtype": ("float32", "bfloat16"),
    "stream": ("float32", "bfloat16"),
    "tokens": ("bytes", "random"),
    "modules": ("warpsmith", "torch"),
}
TIME_IS_UP = 1000  # a reason to stop, beside the signals' numbers
NATS = "nats per token"


class UserError(Exception):
    """Something the user can put right: printed as one line, exit code 2."""


PROBLEMS = (UserError, checkpoint.CheckpointError, OSError)


class FailedElsewhere(Exception):
    """Rank 0 failed and says why; this rank only has to leave."""


# ---------------------------------------------------------------------------------------------------------- model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021). x: [batch, time, heads, head_dim]; cos, sin: [time, head_dim / 2]."""
    (a, b), cos, sin = x.chunk(2, dim=-1), cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class AddLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return super().forward(residual), residual


class AddRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return super().forward(residual), residual


@functools.cache
def row_of_ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, count, dtype=dtype, device=device)


class BiasGradient(torch.autograd.Function):
    """y, to which `bias` has been added: its gradient is a product with ones, for which cuBLAS reads the rows at twice
    the rate of torch's sum (65,536 x 768 in bfloat16: 40 us and 74 us on an H200)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows = grad.flatten(0, -2)
        return grad, (row_of_ones(len(rows), rows.dtype, rows.device) @ rows)[0]


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or not x.is_cuda:
            return super().forward(x)
        return BiasGradient.apply(F.linear(x, self.weight, self.bias.detach()), self.bias)


def modules_of(kind: str) -> SimpleNamespace:
    """The building blocks that differ between `--modules warpsmith` and `--modules torch`, of equal meaning and equal
    parameter names."""
    if kind == "torch":
        return SimpleNamespace(
            Linear=nn.Linear,
            norms={"layer": (nn.LayerNorm, AddLayerNorm), "rms": (nn.RMSNorm, AddRMSNorm)},
            rope=lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin)),
            linear_gelu=lambda x, linear: F.gelu(linear(x), approximate="tanh"),
            linear_cross_entropy=lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
            AdamW=functools.partial(torch.optim.AdamW, fused=True),
        )
    import warpsmith
    from warpsmith import nn as ours

    def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
        if linear.bias is None:
            return F.gelu(linear(x), approximate="tanh")
        return warpsmith.bias_gelu(F.linear(x, linear.weight), linear.bias, approximate="tanh")

    def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # On a GPU a sixteenth of its memory for logits: fewer chunks than by default, and larger products.
        most = torch.cuda.get_device_properties(x.device).total_memory // 16 if x.is_cuda else None
        return warpsmith.linear_cross_entropy(x, weight, target, max_chunk_bytes=most)

    return SimpleNamespace(
        Linear=Linear,
        norms={"layer": (ours.LayerNorm, ours.AddLayerNorm), "rms": (ours.RMSNorm, ours.AddRMSNorm)},
        rope=warpsmith.rope,
        linear_gelu=linear_gelu,
        linear_cross_entropy=linear_cross_entropy,
        AdamW=warpsmith.optim.AdamW,
    )


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream. What a block is given and gives is normed already:
    adding to the stream and norming the sum are one step."""

    def __init__(self, s: SimpleNamespace, modules: SimpleNamespace) -> None:
        super().__init__()
        self.heads, self.modules_ = s.heads, modules
        self.qkv = modules.Linear(s.width, 3 * s.width, bias=s.bias)
        self.attention_out = modules.Linear(s.width, s.width, bias=s.bias)
        self.attention_norm = make_norm(s, modules.norms[s.norm][1])
        self.mlp_in = nn.Linear(s.width, 4 * s.width, bias=s.bias)
        self.mlp_out = modules.Linear(4 * s.width, s.width, bias=s.bias)
        self.mlp_norm = make_norm(s, modules.norms[s.norm][1])

    def forward(self, x: Tensor, stream: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [batch, time, heads, head_dim]
        if rope is not None:
            q, k = self.modules_.rope(q, k, *rope)
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x, stream = self.attention_norm(self.attention_out(attended.transpose(1, 2).flatten(2)), stream)
        return self.mlp_norm(self.mlp_out(self.modules_.linear_gelu(x, self.mlp_in)), stream)


def make_norm(s: SimpleNamespace, norm: type[nn.Module]) -> nn.Module:
    return norm(s.width) if s.norm == "rms" else norm(s.width, bias=s.bias)


class GPT(nn.Module):
    """A decoder-only transformer whose head shares the embedding's weight."""

    def __init__(self, s: SimpleNamespace, modules: SimpleNamespace) -> None:
        super().__init__()
        self.modules_, self.stream_dtype = modules, getattr(torch, s.stream)
        self.embedding = nn.Embedding(s.vocab, s.width)
        self.positions = nn.Embedding(s.context, s.width) if s.positions == "learned" else None
        self.norm = make_norm(s, modules.norms[s.norm][0])
        self.blocks = nn.ModuleList(Block(s, modules) for _ in range(s.layers))
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # GPT-2's initialisation: what feeds the residual stream is scaled by its 2 additions a layer.
                depth = 2 * s.layers if name.endswith("_out.weight") else 1
                nn.init.normal_(p, std=s.init_std / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.head.weight = self.embedding.weight
        half = s.width // s.heads // 2
        angles = torch.outer(torch.arange(s.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads. [batch, time] to [batch, time, width]."""
        time_ = tokens.shape[1]
        stream = self.embedding(tokens)
        rope = None
        if self.positions is None:
            rope = (self.cos[:time_], self.sin[:time_])
        else:
            stream = stream + self.positions.weight[:time_]
        stream = stream.to(self.stream_dtype)
        x = self.norm(stream)
        for block in self.blocks:
            x, stream = block(x, stream, rope)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats of predicting tokens[:, 1:] from what stands before each. tokens: [batch, context + 1]."""
        x, target = self.hidden(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        return self.modules_.linear_cross_entropy(x, self.head.weight, target)


# ----------------------------------------------------------------------------------------------------------- data


def read_data(path: Path | None, out: Path | None = None) -> tuple[bytes, bytes, str]:
    """(train, validation, description): bytes of the files under `path`, a tenth of the files held out for validation.

    Which files are held out depends on their relative names alone. A single file is cut at nine tenths. What lies in
    `out` is the run's own, and not data.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(f.parts)]
    else:
        root = path
        if not root.exists():
            raise UserError(f"--data: expected a file or a folder, got {root} (no such path)")
        files = [root] if root.is_file() else [f for f in root.rglob("*") if f.is_file()]
        files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)]
        if out is not None and root.is_dir():
            own = out.resolve()
            files = [f for f in files if not f.resolve().is_relative_to(own)]
    names = {f: os.fsencode(f.relative_to(root).as_posix()) for f in files}
    files = sorted((f for f in files if f.stat().st_size > 0), key=lambda f: hashlib.sha256(names[f]).digest())
    if not files:
        raise UserError(f"--data: expected text, got {root} with no file that holds any")
    texts = [f.read_bytes() for f in files]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts, held_out = [texts[0][cut:], texts[0][:cut]], 1
    else:
        held_out = math.ceil(len(texts) / 10)
    # A zero byte marks the end of a file.
    validation, train = (b"\0".join(part) for part in (texts[:held_out], texts[held_out:]))
    sizes = f"{len(train) / 1e6:.2f} MB to train, {len(validation) / 1e6:.2f} MB to validate"
    return train, validation, f"{len(files):,} file(s) of {root}: {sizes}"


class Data:
    """Batches as a function of (seed, step): a rank takes its rows of the global batch."""

    def __init__(self, s: SimpleNamespace, path: Path | None, ranks: Ranks, out: Path | None = None) -> None:
        self.s, self.ranks = s, ranks
        self.random = s.tokens == "random"
        if self.random:
            self.description, self.sha256 = f"random tokens below {s.vocab:,}", "random"
            return
        train, validation, self.description = read_data(path, out)
        for name, part in (("train", train), ("validate", validation)):
            if len(part) <= s.context:
                raise UserError(f"--data: expected more than --context {s.context} bytes to {name} on, got {len(part)}")
        if s.vocab < 256:
            raise UserError(f"--vocab: expected at least 256 for bytes, got {s.vocab}")
        self.sha256 = hashlib.sha256(train + validation).hexdigest()
        self.train, self.validation = (torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (train, validation))

    def batch(self, step: int) -> Tensor:
        """The rows [batch / ranks, context + 1] of this rank in training step `step`."""
        torch.manual_seed(self.s.seed * 1_000_003 + step)
        if self.random:
            rows = torch.randint(self.s.vocab, (self.s.batch, self.s.context + 1))
        else:
            starts = torch.randint(len(self.train) - self.s.context, (self.s.batch,))
            rows = self.rows(self.train, starts)
        return self.place(rows)

    def validation_batches(self, count: int) -> list[Tensor]:
        """`count` batches, spread evenly over the validation text, the same at every call."""
        if self.random:
            return [self.batch(-1 - i) for i in range(count)]
        last = len(self.validation) - self.s.context - 1
        starts = torch.linspace(0, last, count * self.s.batch, dtype=torch.float64).long()
        return [self.place(self.rows(self.validation, part)) for part in starts.split(self.s.batch)]

    def rows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self.s.context + 1)]

    def place(self, rows: Tensor) -> Tensor:
        rows = rows.chunk(self.ranks.world)[self.ranks.rank]
        if self.ranks.device.type == "cuda":  # from pageable memory the copy would make the host wait
            rows = rows.pin_memory()
        return rows.to(self.ranks.device, non_blocking=True).long()


# ---------------------------------------------------------------------------------------------------------- ranks


class Ranks:
    """This process's place among those started by torchrun (one, when started without)."""

    def __init__(self, device: str) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.first = self.rank == 0
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.world > 1:
            # With GPUs, gloo still carries the ranks' agreements: they must not wait for the device.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")

    def agree(self, value: int) -> int:
        """The largest `value` of all ranks."""
        if self.world == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def mean(self, values: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values)
            values /= self.world
        return values

    def on_first(self, action: Callable[..., Any], *args: Any) -> None:
        """Call `action` on rank 0; when it fails there, no rank goes on."""
        error = None
        if self.first:
            try:
                action(*args)
            except PROBLEMS as e:
                error = e
        if self.agree(int(error is not None)):
            raise error or FailedElsewhere

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def bar(self, total: int, done: int = 0) -> tqdm:
        few = 0.1 if sys.stderr.isatty() else 10.0  # a log file wants few lines
        return tqdm(total=total, initial=done, disable=not self.first, unit="step", mininterval=few, dynamic_ncols=True)


# ------------------------------------------------------------------------------------------------------- training


class Run:
    """A model and its optimizer. `done` counts the steps taken."""

    def __init__(self, s: SimpleNamespace, kind: str, ranks: Ranks) -> None:
        self.s, self.ranks, self.done = s, ranks, 0
        modules = modules_of(kind)
        torch.manual_seed(s.seed)
        self.model = GPT(s, modules).to(ranks.device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": s.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = modules.AdamW([g for g in groups if g["params"]], lr=s.lr, betas=(0.9, 0.95))
        self.loss: nn.Module = self.model
        if ranks.world > 1:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.loss = nn.parallel.DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.s.dtype == "bfloat16")

    def learning_rate(self) -> float:
        warmup = min(self.s.warmup, self.s.steps // 2)
        rising = (self.done + 1) / (warmup + 1)
        falling = (self.s.steps - self.done) / (self.s.steps - warmup)
        return self.s.lr * min(rising, falling)

    def step(self, tokens: Tensor) -> Tensor:
        """One update; the loss of this rank's rows before it, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        with self.autocast():
            loss = self.loss(tokens)
        loss.backward()
        # Clipping without a pass over the gradients: a fused optimizer divides them by grad_scale as it reads them.
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.grad_scale = (norm / self.s.clip).clamp(min=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self, batches: list[Tensor]) -> float:
        with self.autocast():
            losses = [self.model(tokens) for tokens in batches]
        return float(self.ranks.mean(torch.stack(losses).mean()))

    @torch.no_grad()
    def sample(self, prompt: str, length: int) -> str:
        generator = torch.Generator(self.ranks.device).manual_seed(self.s.seed)
        tokens = torch.tensor([list(prompt.encode())], device=self.ranks.device)
        for _ in range(length):
            with self.autocast():
                logits = self.model.logits(tokens[:, -self.s.context :])[:, -1, :256].float()
            following = torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=generator)
            tokens = torch.cat((tokens, following), dim=1)
        text = bytes(tokens[0].tolist()).decode(errors="replace")
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # a terminal obeys control bytes


class Training:
    """A run with all that surrounds it: log, progress bar, checkpoints, signals, resuming."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args, self.ranks, self.say = args, ranks, ranks.say
        self.signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: self.signals.append(received))
        self.log, self.checkpoints = args.out / "log.jsonl", args.out / "checkpoints"
        state: dict[str, Any] = {"seconds": 0.0}
        if args.resume:
            files = checkpoint.read(self.checkpoints, self.say)
            state = json.loads(files["state.json"])
        elif checkpoint.found(self.checkpoints):
            raise UserError(f"--out: {args.out} holds checkpoints: add --resume, or choose another folder")
        s = self.s = recipe_of(args, ranks, state.get("recipe"))
        self.data = Data(s, args.data, ranks, args.out)
        if state.get("data", self.data.sha256) != self.data.sha256:
            raise UserError(f"--data: expected the data that {args.out} was trained on, got other content")
        self.run = Run(s, s.modules, ranks)
        if args.resume:
            checkpoint.unpack(files, self.run.model, self.run.optimizer)
            self.run.done = state["step"]
        self.saved_at = self.run.done if args.resume else -1
        self.resumed_seconds = self.seconds = state["seconds"]  # of training, without validation and checkpoints
        self.pending: list[tuple[float, Tensor]] = []  # learning rate and loss of the steps that are not in the log
        self.lap_began = time.perf_counter()
        ranks.on_first(self.prepare_folder)
        parameters = sum(p.numel() for p in self.run.model.parameters())
        self.say(f"model: {s.preset}, {parameters:,} parameters, modules of {s.modules}")
        self.say(f"data: {self.data.description}")
        where = f"{ranks.world} x {ranks.device.type}"
        self.say(f"run: {s.steps} steps of {s.batch} x {s.context} tokens on {where}, into {args.out}")
        if args.resume:
            self.say(f"resumed at step {self.run.done}")
        self.bar = ranks.bar(s.steps, self.run.done)

    def prepare_folder(self) -> None:
        """Lines of the log after the checkpoint come from a process that was killed: they will come again."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        lines = [line for line in read_log(self.log) if line["step"] <= self.run.done] if self.args.resume else []
        temporary = self.log.with_suffix(".unfinished")
        checkpoint.write_synced(temporary, as_json_lines(lines))
        temporary.replace(self.log)

    def append(self, lines: list[dict[str, Any]]) -> None:
        def write() -> None:
            with open(self.log, "ab") as file:
                file.write(as_json_lines(lines))

        self.ranks.on_first(write)

    def flush(self) -> None:
        """Log the losses of the steps since the last call: the only place where the host waits for the device."""
        if not self.pending:
            return
        losses = self.ranks.mean(torch.stack([loss for _, loss in self.pending])).tolist()
        lap = time.perf_counter() - self.lap_began
        self.seconds += lap
        rate = len(losses) * self.s.batch * self.s.context / lap
        first = self.run.done - len(losses) + 1
        common = {"tokens_per_s": round(rate, 1), "seconds": round(self.seconds, 3)}
        steps = zip(self.pending, losses, strict=True)
        self.append([{"step": first + i, "loss": loss, "lr": lr} | common for i, ((lr, _), loss) in enumerate(steps)])
        self.pending = []
        self.bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False)
        if not math.isfinite(losses[-1]):
            last = f"last checkpoint: step {self.saved_at}" if self.saved_at >= 0 else "no checkpoint yet"
            raise UserError(f"the loss became {losses[-1]} by step {self.run.done}: lower --lr ({last})")
        self.lap_began = time.perf_counter()

    def validate(self, batches: list[Tensor]) -> float:
        self.flush()
        loss = self.run.validate(batches)
        self.append([{"step": self.run.done, "validation_loss": loss}])
        self.lap_began = time.perf_counter()
        return loss

    def save(self) -> None:
        self.flush()
        if self.saved_at != self.run.done:
            self.ranks.on_first(self.write_checkpoint)
            self.saved_at = self.run.done
        self.lap_began = time.perf_counter()

    def write_checkpoint(self) -> None:
        with open(self.log, "ab") as log:
            os.fsync(log.fileno())  # on disk before the checkpoint that will not repeat its steps
        done = self.run.done
        state = {"step": done, "seconds": self.seconds, "data": self.data.sha256, "recipe": vars(self.s)}
        checkpoint.write(self.checkpoints, done, checkpoint.pack(self.run.model, self.run.optimizer, state))

    def reason_to_stop(self) -> int:
        """0, a signal's number or TIME_IS_UP, the same on all ranks."""
        if self.signals:
            return self.ranks.agree(self.signals[0])
        seconds = self.seconds + time.perf_counter() - self.lap_began - self.resumed_seconds
        return self.ranks.agree(TIME_IS_UP if seconds > self.args.seconds else 0)

    def loop(self) -> int:
        """Train until the last step or a reason to stop; returns the process's exit code."""
        run, args, reason = self.run, self.args, 0
        quick = self.data.validation_batches(8)
        with self.bar:
            while run.done < self.s.steps:
                reason = self.reason_to_stop()
                if reason:
                    break
                self.pending.append((run.learning_rate(), run.step(self.data.batch(run.done))))
                self.bar.update()
                if run.done % args.log_every == 0:
                    self.flush()
                if run.done % args.eval_every == 0 and run.done < self.s.steps:
                    text = f"step {run.done}: validation loss {self.validate(quick):.4f}"
                    self.bar.write(text, file=sys.stderr) if self.ranks.first else None
                if run.done % args.save_every == 0:
                    self.save()
            self.save()
        return self.finish(reason)

    def finish(self, reason: int) -> int:
        """Say what came out; after a signal quickly."""
        run, killed = self.run, 0 < reason < TIME_IS_UP
        if not killed:
            loss = self.validate(self.data.validation_batches(40))
            if self.ranks.first and self.s.tokens == "bytes":
                self.say(f"sample:\n{run.sample('def ', 400)}\n")
            rate = run.done * self.s.batch * self.s.context / (self.seconds or 1)  # --seconds can end it before a step
            self.say(
                f"validation loss {loss:.4f} {NATS}: {run.done} steps in {self.seconds:.0f} s, {rate:,.0f} tokens/s"
            )
        image = self.args.out / "loss.png"
        title = f"{self.s.preset}: {run.done} steps in {self.seconds:.0f} s"
        self.ranks.on_first(lambda: plot_losses(read_log(self.log), title).savefig(image, dpi=120))
        self.say(f"written: {self.log}, {image}, {self.checkpoints}")
        if reason:
            cause = signal.Signals(reason).name if killed else "--seconds"
            self.say(f"stopped by {cause} at step {run.done}; to go on: --resume --out {self.args.out}")
        return 128 + reason if killed else 0


def as_json_lines(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def read_log(path: Path) -> list[dict[str, Any]]:
    """A line a step {"step", "loss", "lr", "tokens_per_s", "seconds"}, and lines {"step", "validation_loss"}."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a kill or a full disk can cut a line short
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def plot_losses(lines: list[dict[str, Any]], title: str) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (
        ("loss", "training batch", {"color": "tab:blue", "alpha": 0.6, "linewidth": 0.8}),
        ("validation_loss", "validation", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    ):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            label = f"{label} (last: {points[-1][1]:.3f})"
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel=f"loss [{NATS}]", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def compare(args: argparse.Namespace, ranks: Ranks) -> None:
    """The same steps with both kinds of modules, by turns in one process, so that both meet the same disturbances."""
    args.steps = args.steps or 100
    s = recipe_of(args, ranks)
    data = Data(s, args.data, ranks, args.out)
    kinds = CHOICES["modules"]
    runs = {kind: Run(s, kind, ranks) for kind in kinds}
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    seconds = dict.fromkeys(kinds, 0.0)
    turn = max(1, min(10, s.steps // 4))
    timed = s.steps - turn if s.steps > turn else s.steps  # the first turn warms up
    ranks.say(f"model: {s.preset}; data: {data.description}; {ranks.world} x {ranks.device.type}")
    bar = ranks.bar(s.steps)
    for first in range(0, s.steps, turn):
        batches = [data.batch(step) for step in range(first, min(first + turn, s.steps))]
        for kind in kinds if first // turn % 2 == 0 else reversed(kinds):
            began = time.perf_counter()
            turn_losses = torch.stack([runs[kind].step(tokens) for tokens in batches])
            losses[kind] += ranks.mean(turn_losses).tolist()  # waits for the device
            if first >= s.steps - timed:
                seconds[kind] += time.perf_counter() - began
        bar.update(len(batches))
    bar.close()
    result: dict[str, Any] = {"recipe": vars(s), "timed_steps": timed}
    validation = data.validation_batches(8)
    ranks.say(f"{'':10}{'tokens/s':>12}{'ms/step':>10}{'last loss':>11}{'validation':>12}")
    for kind in kinds:
        rate, loss = timed * s.batch * s.context / seconds[kind], runs[kind].validate(validation)
        result[kind] = {"tokens_per_s": rate, "validation_loss": loss, "losses": losses[kind]}
        milliseconds = 1e3 * seconds[kind] / timed
        ranks.say(f"{kind:10}{rate:12,.0f}{milliseconds:10.2f}{losses[kind][-1]:11.4f}{loss:12.4f}")
    speedup = result["speedup"] = seconds["torch"] / seconds["warpsmith"]
    gap = result["largest_loss_gap"] = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    ranks.say(f"warpsmith / torch: {speedup:.3f}x the tokens/s; the losses of a step differ by {gap:.1e} at most")
    ranks.on_first(lambda: args.out.mkdir(parents=True, exist_ok=True))
    ranks.on_first(checkpoint.write_synced, args.out / "compare.json", json.dumps(result).encode())
    ranks.say(f"written: {args.out / 'compare.json'}")


# --------------------------------------------------------------------------------------------------- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("train_gpt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="default: nano on CPU, gpt2-124m on a GPU")
    add("--data", type=Path, help="folder or file (default: Python's standard library, *.py)")
    add("--out", type=Path, help="the run's folder (default: runs/PRESET, or the first free runs/PRESET-N)")
    add("--resume", action="store_true", help="go on from --out's newest checkpoint (default: the last runs/PRESET-N)")
    add("--compare", action="store_true", help="warpsmith's and torch's modules side by side (--steps 100)")
    add("--seconds", type=float, default=math.inf, metavar="X", help="stop after so much training, with a checkpoint")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints (default: 200)")
    add("--eval-every", type=int, default=100, metavar="N", help="steps between validations (default: 100)")
    add("--log-every", type=int, metavar="N", help="steps between lines of the log (default: 1, on a GPU 10)")
    text = "on a GPU: deterministic algorithms (default); without them a resumed run may differ in the last bits"
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True, help=text)
    recipe = parser.add_argument_group("the recipe, with the values of nano and gpt2-124m")
    for name, (nano, gpt2, text) in RECIPE.items():
        options: dict[str, Any] = {"type": type(nano), "metavar": "N" if isinstance(nano, int) else "X"}
        if isinstance(nano, bool):
            options = {"action": argparse.BooleanOptionalAction}
        elif name in CHOICES:
            options = {"choices": CHOICES[name]}
        recipe.add_argument("--" + name.replace("_", "-"), help=f"{text} ({nano}, {gpt2})", default=None, **options)
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.log_every = args.log_every if args.log_every is not None else 10 if args.device == "cuda" else 1
    args.out = args.out or default_out(preset_of(args), args.resume)
    return args


def preset_of(args: argparse.Namespace) -> str:
    return args.preset or ("gpt2-124m" if args.device == "cuda" else "nano")


def default_out(preset: str, resume: bool) -> Path:
    """runs/PRESET, runs/PRESET-2, ...: the last that exists to resume, the first free one for a new run."""
    number, path = 1, Path("runs") / preset
    last = path
    while path.exists():
        number, last = number + 1, path
        path = Path("runs") / f"{preset}-{number}"
    return last if resume else path


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
    expect(s.positions != "rope" or s.width // s.heads % 2 == 0, "heads", f"an even --width {s.width} / heads for rope")
    expect(s.stream == "float32" or s.dtype == "bfloat16", "stream", "float32 where --dtype is float32")
    expect(s.batch % ranks.world == 0, "batch", f"a multiple of the {ranks.world} ranks")
    return s


def set_determinism(args: argparse.Namespace) -> None:
    if args.device == "cuda" and args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
        # By default that also fills every new tensor: 6 % of a step. Nothing here reads what it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device: expected cpu, got cuda, but torch finds no GPU")
        set_determinism(args)
        ranks = Ranks(args.device)
        if args.compare:
            compare(args, ranks)
            return 0
        return Training(args, ranks).loop()
    except PROBLEMS as e:
        text = f"{e.filename or args.out}: {e.strerror}" if isinstance(e, OSError) else str(e)
        if os.environ.get("RANK", "0") == "0":
            print(f"train_gpt: error: {text}", file=sys.stderr)
        return 2
    except FailedElsewhere:
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
