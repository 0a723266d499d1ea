"""Train a GPT on any text with Warpsmith's ops.

    python examples/train_gpt.py                                  nano: 2 CPU cores, about 3 minutes
    python examples/train_gpt.py --data ~/books --out runs/books
    python examples/train_gpt.py --resume                         go on after Ctrl-C, `kill` or a crash
    python examples/train_gpt.py --compare                        the same steps beside plain torch modules
    torchrun --nproc-per-node 8 examples/train_gpt.py --preset gpt2-124m
    torchrun --nproc-per-node 8 examples/train_gpt.py --preset gpt2-124m --reduce bfloat16 --shard states

Beside this file: the model (gpt_model.py), the data, the recipe, the ranks and the log.

A run writes `log.jsonl`, `loss.png` and `checkpoints/` into its folder. All randomness is a function of (seed, step)
and a step's batch does not depend on the number of ranks, so a resumed run yields bit for bit the losses of the
uninterrupted one on the same machine.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import warpsmith
from torch import Tensor, nn
from warpsmith.distributed import ShardedOptimizer, accurate_hook

try:  # the files beside this one
    from gpt_data import Data
    from gpt_log import NATS, as_json_lines, plot_losses, read_log, write_synced
    from gpt_model import GPT, modules_of
    from gpt_ranks import PROBLEMS, FailedElsewhere, Ranks, UserError
    from gpt_recipe import CHOICES, PRESETS, RECIPE, default_out, preset_of, recipe_of
except ImportError as missing:
    sys.exit(f"train_gpt: error: {missing.name} is not installed: pip install safetensors tqdm matplotlib")

TIME_IS_UP = 1000  # a reason to stop, beside the signals' numbers


# ------------------------------------------------------------------------------------------------------- training


class Run:
    """A model and its optimizer. `done` counts the steps taken."""

    def __init__(self, s: SimpleNamespace, kind: str, ranks: Ranks, captured: bool = False) -> None:
        self.s, self.ranks, self.done = s, ranks, 0
        modules = modules_of(kind)
        torch.manual_seed(s.seed)
        if s.fp8 != "none":  # which takes layers that are called
            modules.mlp = modules_of("torch").mlp
        self.model = GPT(s, modules).to(ranks.device)
        scales = warpsmith.amp.Fp8Recipe("tensor", amax="delayed") if s.fp8 == "delayed" else s.fp8
        ranks_of_scales = torch.distributed.group.WORLD if ranks.world > 1 else None  # which a checkpoint holds once
        self.fp8 = warpsmith.amp.fp8(self.model, scales, group=ranks_of_scales) if s.fp8 != "none" else None
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": s.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [g for g in groups if g["params"]]
        options: dict[str, Any] = {"lr": s.lr, "betas": (0.9, 0.95)}
        self.optimizer: Any
        self.scaler = warpsmith.amp.GradScaler(ranks.device.type, enabled=s.dtype == "float16")
        self.loss: nn.Module = self.model
        self.update: Callable[[Tensor], Tensor] = self.update_once
        self.sharded = ranks.world > 1 and s.shard != "none" and kind == "warpsmith"
        if self.sharded:
            stage = {"states": 1, "gradients": 2}[s.shard]
            self.optimizer = ShardedOptimizer(groups, modules.AdamW, stage=stage, **options)
            self.optimizer.gather_in_forward(self.model)
            return
        self.optimizer = modules.AdamW(groups, **options)
        if ranks.world > 1:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            # One bucket: behind the backward its reduction over NVLink takes 2 % of a step of GPT-2 124M on two H200.
            # Buckets of 25 MB beside the backward cost 3.4 %: they take multiprocessors from the products.
            self.loss = ddp = nn.parallel.DistributedDataParallel(
                self.model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=1024
            )
            if s.reduce == "bfloat16":
                ddp.register_comm_hook(None, accurate_hook)
        if captured:
            state = [self.model, self.optimizer, self.scaler, self.fp8]
            self.update = warpsmith.train.CapturedStep(self.update_once, state=state)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        scaler = self.scaler if self.scaler.is_enabled() else None
        return {"model": self.model, "optimizer": self.optimizer, "scaler": scaler}

    def autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.s.dtype == "float16" else torch.bfloat16
        return torch.autocast(self.ranks.device.type, dtype, enabled=self.s.dtype != "float32")

    def learning_rate(self) -> float:
        warmup = min(self.s.warmup, self.s.steps // 2)
        rising = (self.done + 1) / (warmup + 1)
        falling = (self.s.steps - self.done) / (self.s.steps - warmup)
        return self.s.lr * min(rising, falling)

    def step(self, tokens: Tensor) -> Tensor:
        """One update; the loss of this rank's rows before it, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.update(tokens)
        self.done += 1
        return loss

    def update_once(self, tokens: Tensor) -> Tensor:
        """What a step does on the device; with --captured it is one CUDA graph."""
        with self.autocast():
            loss = self.loss(tokens)
        self.scaler.scale(loss).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        if self.fp8 is not None:
            self.fp8.update(self.scaler.found_inf(self.optimizer) if self.scaler.is_enabled() else None)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def clip(self) -> None:
        """Clipping without a pass over the gradients: a fused optimizer divides them by grad_scale as it reads them."""
        if self.scaler.is_enabled():
            self.scaler.clip_(self.optimizer, self.s.clip)
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = self.optimizer.grad_norm() if self.sharded else nn.utils.get_total_norm(grads)
        self.optimizer.grad_scale = (norm / self.s.clip).clamp(min=1.0)

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
        self.saved = warpsmith.train.Checkpointer(self.checkpoints, keep=2)
        state: dict[str, Any] = {"seconds": 0.0}
        if args.resume:
            if self.saved.load(rng=False) is None:
                raise UserError(f"--resume: no checkpoint in {self.checkpoints}")
            state = self.saved.extra
        elif any(self.checkpoints.glob("step-*")):
            raise UserError(f"--out: {args.out} holds checkpoints: add --resume, or choose another folder")
        s = self.s = recipe_of(args, ranks, state.get("recipe"))
        self.data = Data(s, args.data, ranks, args.out)
        if state.get("data", self.data.sha256) != self.data.sha256:
            raise UserError(f"--data: expected the data that {args.out} was trained on, got other content")
        self.run = Run(s, s.modules, ranks, args.captured)
        if args.resume:
            self.run.done = self.saved.load(**self.run.parts()) or 0
            if self.run.fp8 is not None:
                warpsmith.amp.load_fp8_state(self.run.model, self.saved.extra["fp8"])
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
        write_synced(temporary, as_json_lines(lines))
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
            self.ranks.on_first(self.sync_log)
            extra = {"seconds": self.seconds, "data": self.data.sha256, "recipe": vars(self.s)}
            extra |= {"fp8": warpsmith.amp.fp8_state(self.run.model)} if self.run.fp8 is not None else {}
            self.saved.save(self.run.done, **self.run.parts(), extra=extra)  # writes while the training goes on
            self.saved_at = self.run.done
        self.lap_began = time.perf_counter()

    def sync_log(self) -> None:
        with open(self.log, "ab") as log:
            os.fsync(log.fileno())  # on disk before the checkpoint that will not repeat its steps

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
            self.ranks.on_first(self.saved.wait)
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
    ranks.on_first(write_synced, args.out / "compare.json", json.dumps(result).encode())
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
    add("--captured", action="store_true", help="the step as one CUDA graph, on one GPU (docs/step.md)")
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
        with Ranks(args.device) as ranks:
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


if __name__ == "__main__":
    sys.exit(main())
