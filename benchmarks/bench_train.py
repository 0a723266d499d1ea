"""Whole training steps. Several are taken in a row, from an idle device, and waited for; the time is one step's. Rows
"peak memory" have megabytes above the weights and optimizer states.

gpt2: examples/train_gpt.py on random tokens with this package's modules, with these and torch's attention ("warpsmith,
SDPA") or torch's linear layers ("warpsmith, F.linear"), with torch's modules, and (on a GPU) with torch's compiled.
GPT-2 124M in bf16 autocast on a GPU, the small preset on the CPU.

llama, qwen3, gemma3: a model of transformers (shapes of Llama 3.2 1B, Qwen3 0.6B, Gemma 3 1B; random weights, bf16,
torch's fused AdamW), patched by this package with its attention and linear=False, as it is, under torch.compile, and
patched by Liger-Kernel where that is installed. A tiny one on the CPU. "warpsmith, SDPA" keeps torch's attention
(attention=False), "warpsmith, linear" has linear=True, "warpsmith, AdamW" this package's optimizer, "warpsmith, linear,
AdamW" both. Without transformers there are no rows.

step: steps as one CUDA graph (CapturedStep) beside the same run eagerly: three scripts that wait for their host
(step_scripts.py), and GPT-2. On the CPU both are eager. Rows "host" have the time until the host has launched a step.
"""

import copy
import functools
import importlib
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import warpsmith
from warpsmith.testing.gpu_timer import Timing, first_line
from warpsmith.testing.rows import OURS, Row, make_rows
from warpsmith.train import CapturedStep

from benchmarks import rivals
from benchmarks.cells import cell_of, compiled, forget_compiled, peak_rows, time_steps
from benchmarks.step_scripts import SCRIPTS, Script

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WITH_SDPA, WITH_TORCHS_LINEAR = f"{OURS}, SDPA", f"{OURS}, F.linear"


def rows_of_runs(cell, runs, batches, device, options, budget_s):
    """``runs``: {contender: an object with ``step(batch)`` and a model}."""
    steps = {name: lambda i, one=one: one.step(batches[i]) for name, one in runs.items()}
    rows = time_steps(cell, steps, len(batches), options, budget_s)
    if device == "cuda":
        asking = {name: one for name, one in runs.items() if not isinstance(one.step, CapturedStep)}  # graphs ask none
        first = {name: functools.partial(one.step, batches[0]) for name, one in asking.items()}
        rows += peak_rows(rows, first, lambda name: runs[name].model.parameters())
    return rows


# ------------------------------------------------------------------------------------- GPT-2 of examples/train_gpt.py

GPT2_IN_A_ROW = {"cuda": 10, "cpu": 2}
GPT2_PRESETS = {"cuda": "gpt2-124m", "cpu": "nano"}
GPT2_TINY = {"layers": 1, "heads": 2, "width": 32, "context": 16, "batch": 4}
GPT2_BUDGET_S = {"cuda": 15.0, "cpu": 5.0}


def example(name):
    """A script of examples/ as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def gpt2_example(preset, tiny=False):
    """The example as a module, and its recipe of a preset on random tokens."""
    train_gpt = example("train_gpt")
    values = train_gpt.PRESETS[preset] | {"tokens": "random"} | (GPT2_TINY if tiny else {})
    return train_gpt, SimpleNamespace(**values)


def gpt2_runs(gpt, recipe, device, options):
    """{name: Run}, each with a model and an optimizer of its own."""
    ranks = gpt.Ranks(device)
    ours = dict.fromkeys((OURS, WITH_SDPA, WITH_TORCHS_LINEAR), "warpsmith")
    kinds = {**ours, "torch": "torch"} if options.samples else {}
    runs = {name: gpt.Run(recipe, kind, ranks) for name, kind in kinds.items()}
    if options.samples:  # all blocks of a model share one set of modules
        runs[WITH_SDPA].model.modules_.attention = runs["torch"].model.modules_.attention
        runs[WITH_TORCHS_LINEAR].model.modules_.mlp = runs["torch"].model.modules_.mlp
        for module in runs[WITH_TORCHS_LINEAR].model.modules():
            if isinstance(module, warpsmith.nn.Linear):
                module.__class__ = torch.nn.Linear
    if options.compile and not options.quick and device == "cuda":
        forget_compiled()
        runs["torch.compile"] = gpt.Run(recipe, "torch", ranks)
        runs["torch.compile"].loss = compiled(runs["torch.compile"].model, donate=True)
    return runs


def run_gpt2(device, options):
    rows = []
    for preset in options.shapes(device, (GPT2_PRESETS["cuda"],), (GPT2_PRESETS["cpu"],), GPT2_PRESETS[device]):
        gpt, recipe = gpt2_example(preset, options.quick)
        data = gpt.Data(recipe, None, gpt.Ranks(device))
        batches = [data.batch(i) for i in range(1 if options.quick else GPT2_IN_A_ROW[device])]
        runs = gpt2_runs(gpt, recipe, device, options)
        cell = ("train_gpt", f"{preset} {recipe.batch}x{recipe.context}", recipe.dtype)
        rows += rows_of_runs(cell, runs, batches, device, options, GPT2_BUDGET_S[device])
    return rows


# --------------------------------------------------------------------------------------------- models of transformers

MODEL_SHAPES = {"llama": [(1, 8192), (4, 2048)], "qwen3": [(1, 8192)], "gemma3_text": [(1, 8192)]}  # sequences, tokens
SIZES = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
              "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936,
              "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "vocab_size": 262144,
                    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 1024, "head_dim": 32,
         "num_attention_heads": 4, "num_key_value_heads": 1}  # fmt: skip
MODEL_IN_A_ROW = {"cuda": 3, "cpu": 1}
MODEL_BUDGET_S = {"cuda": 12.0, "cpu": 4.0}


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


def patched_by_us(model, attention=True, linear=False, **run):
    from warpsmith.integrations.transformers import patch

    done = patch(model, attention=attention, linear=linear)
    assert not done.kept, done
    return Run(model, **run)


OURS_BY_NAME = {
    OURS: patched_by_us,
    WITH_SDPA: functools.partial(patched_by_us, attention=False),
    f"{OURS}, linear": functools.partial(patched_by_us, linear=True),
    f"{OURS}, AdamW": functools.partial(patched_by_us, adamw=warpsmith.optim.AdamW),
    f"{OURS}, linear, AdamW": functools.partial(patched_by_us, linear=True, adamw=warpsmith.optim.AdamW),
}


class LigerRun(Run):
    """Liger patches the model, and names in transformers' module, such as the function that rotates q and k: these
    would be in the other contenders' steps too, and stand there only during this one's."""

    def __init__(self, model):
        import liger_kernel.transformers as liger

        apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
        module = sys.modules[type(model).__module__]
        before = dict(vars(module))
        apply(fused_linear_cross_entropy=True, model=model)
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


def model_runs(model, device, options):
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


def model_of(kind, device, options):
    import transformers

    sizes = SIZES[kind] | (SMALL if options.quick or device == "cpu" else {})
    config = transformers.AutoConfig.for_model(kind, **sizes, max_position_embeddings=8192)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.train()


def run_model(kind, device, options):
    try:
        model = model_of(kind, device, options)
    except ModuleNotFoundError as error:
        print(f"{kind} is left out: {error}", file=sys.stderr, flush=True)
        return []
    rows = []
    for shape in options.shapes(device, MODEL_SHAPES[kind], [(2, 128)], (2, 16)):
        steps = 1 if options.quick else MODEL_IN_A_ROW[device]
        batches = [torch.randint(model.config.vocab_size, shape, device=device) for _ in range(steps)]
        cell = cell_of(kind.removesuffix("_text"), shape, next(model.parameters()))
        runs = model_runs(model, device, options)
        rows += rows_of_runs(cell, runs, batches, device, options, MODEL_BUDGET_S[device])
        del runs
    return rows


# ---------------------------------------------------------------------------------------------------- captured steps

STEP_IN_A_ROW = {"cuda": 10, "cpu": 1}
STEP_BUDGET_S = {"cuda": 4.0, "cpu": 3.0}
FIRST_STEPS = 5  # until a captured step is replayed


def gpt2_script(device, tiny=False):
    """The step of examples/train_gpt.py."""
    gpt, recipe = gpt2_example(GPT2_PRESETS["cuda" if device == "cuda" and not tiny else "cpu"], tiny)
    ranks = gpt.Ranks(device)
    run = gpt.Run(recipe, "warpsmith", ranks)
    return Script(run.update_once, [run.model, run.optimizer, run.scaler], (gpt.Data(recipe, None, ranks).batch(0),))


def host_ms(step, batch, device, steps):
    """Milliseconds in which the host launches a step, the median of several."""
    taken = []
    for _ in range(steps):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step(*batch)
        taken.append(1e3 * (time.perf_counter() - began))
    return Timing(sorted(taken)[steps // 2], min(taken), max(taken), steps)


def eager_and_captured(make, device, tiny):
    """{name: (step, batch)}: equal models, one captured; and why that one is not, where it is not."""
    torch.manual_seed(0)
    eager, graphed = make(device, tiny), make(device, tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason goes into a note
        captured = CapturedStep(graphed.step, state=graphed.state)
        for _ in range(FIRST_STEPS):
            captured(*graphed.batch)
            eager.step(*eager.batch)
    return {OURS: (captured, graphed.batch), "eager": (eager.step, eager.batch)}, captured


def captured_rows(name, make, device, options):
    """The rows of one script. Where its step cannot be captured, ours have the reason in place of a time."""
    tiny = options.quick or device == "cpu"
    steps = 1 if options.quick else STEP_IN_A_ROW[device]
    contenders, captured = eager_and_captured(make, device, tiny)
    why = captured.fallback_reason if device == "cuda" else None
    if why is not None:
        del contenders[OURS]
    refused = {} if why is None else {OURS: Timing(None, error=why)}
    cell = ("captured_step", name, "mixed")
    calls = {who: lambda i, step=step, batch=batch: step(*batch) for who, (step, batch) in contenders.items()}
    rows = make_rows(*cell, "step", refused) + time_steps(cell, calls, steps, options, STEP_BUDGET_S[device])
    if options.samples:
        host = {who: host_ms(*what, device, 2 * steps + 1) for who, what in contenders.items()}
        rows += make_rows(*cell, "host", refused | host)
    return rows


def run_step(device, options):
    rows = []
    makers = {**SCRIPTS, "gpt2": gpt2_script}
    for name in options.shapes(device, tuple(makers), ("policy gradient",), "policy gradient"):
        try:
            rows += captured_rows(name, makers[name], device, options)
        except Exception as error:  # the other scripts keep their rows
            traceback.print_exc()
            rows.append(Row("captured_step", name, "mixed", "step", OURS, None, note=first_line(error)))
    return rows


MODELS = {kind.removesuffix("_text"): functools.partial(run_model, kind) for kind in SIZES}
OPS = {"gpt2": run_gpt2, **MODELS, "step": run_step}
