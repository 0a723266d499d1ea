"""A training step of a Llama of transformers (1.2B parameters, random weights, bf16, torch's fused AdamW): patched by
this package with its attention, as it is, under torch.compile, and patched by Liger-Kernel where that is installed. A
tiny one on the CPU.

"warpsmith, SDPA" keeps torch's attention, "warpsmith, AdamW" has this package's optimizer as well. Steps in a row from
an idle device, waited for; the time is one step's. Rows named "peak memory" have megabytes above weights and optimizer
states. Without transformers there are no rows.
"""

import copy
import functools
import sys

import torch
import warpsmith
from warpsmith.testing import time_cpu
from warpsmith.testing.rows import OURS, Row, make_rows

from benchmarks import rivals
from benchmarks.bench_gpt2 import one_step
from benchmarks.bench_linear_loss import peak_mb
from benchmarks.cells import compiled, forget_compiled

GPU_SHAPES = [(1, 8192), (4, 2048)]  # sequences, tokens
CPU_SHAPES = [(2, 128)]
TINY = (2, 16)
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 1024}
HEADS = {"cuda": {"num_attention_heads": 32, "num_key_value_heads": 8}, "cpu": {"num_attention_heads": 4}}
IN_A_ROW = {"cuda": 3, "cpu": 1}
BUDGET_S = {"cuda": 12.0, "cpu": 4.0}


class Run:
    """A model with its optimizer, and what computes its loss."""

    def __init__(self, model, loss=None, adamw=None):
        self.model = model
        self.loss = loss or (lambda tokens: model(tokens, labels=tokens, use_cache=False).loss)
        adamw = adamw or functools.partial(torch.optim.AdamW, fused=True)
        self.optimizer = adamw(model.parameters(), lr=1e-4)

    def step(self, tokens):
        loss = self.loss(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def patched_by_us(model, attention=True, **run):
    from warpsmith.integrations.transformers import patch

    done = patch(model, attention=attention)
    assert not done.kept, done
    return Run(model, **run)


OURS_BY_NAME = {
    OURS: patched_by_us,
    f"{OURS}, SDPA": functools.partial(patched_by_us, attention=False),
    f"{OURS}, AdamW": functools.partial(patched_by_us, adamw=warpsmith.optim.AdamW),
}


class LigerRun(Run):
    """Liger patches the model, and names in transformers' module, such as the function that rotates q and k: these
    would be in the other contenders' steps too, and stand there only during this one's."""

    def __init__(self, model):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        module = sys.modules[type(model).__module__]
        before = dict(vars(module))
        apply_liger_kernel_to_llama(fused_linear_cross_entropy=True, model=model)
        self.names = vars(module)
        self.theirs = {name: value for name, value in self.names.items() if before.get(name) is not value}
        self.before = {name: before[name] for name in self.theirs if name in before}
        self.names.update(self.before)
        super().__init__(model)

    def step(self, tokens):
        self.names.update(self.theirs)
        try:
            return super().step(tokens)
        finally:
            self.names.update(self.before)


def under_compile(model):
    forget_compiled()
    return Run(model, compiled(lambda tokens: model(tokens, labels=tokens, use_cache=False).loss, donate=True))


def runs_of(model, device, options):
    """{contender: Run}."""
    makers = {**OURS_BY_NAME, "torch": Run} if options.samples else {}
    if options.compile and not options.quick and device == "cuda":
        makers["torch.compile"] = under_compile
    if options.samples and device == "cuda":
        makers["liger"] = LigerRun
    runs = {}
    for name, make in makers.items():
        with rivals.optional():
            runs[name] = make(copy.deepcopy(model))
    return runs


def in_a_row(run, batches):
    """Some steps, waited for."""
    return float([run.step(tokens) for tokens in batches][-1])


def model_of(device, options):
    import transformers

    small = options.quick or device == "cpu"
    heads = HEADS["cpu" if small else device]
    config = transformers.LlamaConfig(
        **(SMALL if small else LLAMA_1B), **heads, rms_norm_eps=1e-5, max_position_embeddings=8192
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.train()


def run(device, options):
    try:
        model = model_of(device, options)
    except ModuleNotFoundError as error:
        print(f"llama is left out: {error}", file=sys.stderr, flush=True)
        return []
    rows = []
    for shape in options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY):
        steps = 1 if options.quick else IN_A_ROW[device]
        batches = [torch.randint(model.config.vocab_size, shape, device=device) for _ in range(steps)]
        runs = runs_of(model, device, options)
        calls = {name: functools.partial(in_a_row, one, batches) for name, one in runs.items()}
        timings = time_cpu(calls, rounds=options.samples, budget_s=BUDGET_S[device])
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        cell = ("llama", "x".join(map(str, shape)), dtype)
        rows += make_rows(*cell, "step", {name: one_step(t, steps) for name, t in timings.items()})
        if device == "cuda" and options.samples:
            for name, one in runs.items():
                if timings[name].ms is not None:
                    megabytes = peak_mb(functools.partial(one.step, batches[0]), one.model.parameters())
                    rows.append(Row(*cell, "peak memory", name, megabytes, "MB"))
        del runs, calls
    return rows
