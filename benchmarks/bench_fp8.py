"""Products of 8-bit floats beside those of bfloat16 and torchao's, casts counted. A row's direction is the recipe.

    scaled_linear       a layer, forward and both gradients; its weight counts as changed before each call
    scaled_linear_own   the forward product alone, of bytes that are there, by our Hopper kernels beside cuBLASLt's: one
                        call from a cold cache, and 16 behind one another
    scaled_linear_host  the host's time of a call of a small layer, beside F.linear's
    llama_fp8           a step of the Llama of bench_train.py, patched, and with amp.fp8 behind that: by the clock, and
                        the GPU's time where the host is ahead; and both as one CUDA graph, "llama_fp8 captured"

Contenders: "warpsmith" multiplies by the recipe of the row; "warpsmith, fp8_weights" by rows, and the optimizer casts
the weights; "bfloat16" is this package's linear; "torchao" and "torchao, compiled" are its layers of the same scaling,
where it is installed.
"""

import copy
import functools
import sys

import torch
import warpsmith
from torch import nn
from warpsmith.amp import Fp8Recipe
from warpsmith.testing.rows import OURS
from warpsmith.train import CapturedStep

from benchmarks import bench_linear, rivals
from benchmarks.bench_train import (
    FIRST_STEPS,
    MODEL_BUDGET_S,
    MODEL_IN_A_ROW,
    MODEL_SHAPES,
    Run,
    model_of,
    patched_by_us,
    rows_of_runs,
)
from benchmarks.cells import cell_of, compiled, forget_compiled, leaves, timed

# M x K x N: Llama 8B's, and where FP8 in eager has lost.
GPU_SHAPES = (
    (16384, 4096, 4096), (16384, 4096, 14336), (16384, 14336, 4096), (8192, 1024, 4096), (8192, 2048, 2048),
    (8192, 2048, 8192), (8192, 8192, 2048),
)  # fmt: skip
CPU_SHAPES = ((512, 256, 1024),)
TINY = (16, 32, 32)
RECIPES = {
    "row": Fp8Recipe(),
    "current": Fp8Recipe("tensor"),
    "delayed": Fp8Recipe("tensor", amax="delayed"),
    "block": Fp8Recipe("block"),
    "row, wgrad high": Fp8Recipe(wgrad="high"),
}
TORCHAO = {"row": "rowwise", "current": "tensorwise", "row, wgrad high": "rowwise_with_gw_hp"}
BF16 = "bfloat16"
AHEAD_CYCLES = 400_000_000  # 0.2 s, in which the host launches a step


def layer_of(shape, device):
    _, k, n = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return nn.Linear(k, n, device=device, dtype=dtype)


def converted(layer, recipe, x, dy):
    """A copy that multiplies by a recipe, behind a step of the same values: delayed scales are theirs."""
    layer = nn.Sequential(copy.deepcopy(layer))
    done = warpsmith.amp.fp8(layer, recipe)
    layer(x).backward(dy)
    done.update()
    return layer


def of_torchao(layer, recipe, options):
    """{contender: layer}."""
    with rivals.optional():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        made = {"torchao": convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)}
        if options.compile and not options.quick:
            forget_compiled()
            made["torchao, compiled"] = compiled(copy.deepcopy(made["torchao"]), donate=True)
        return made
    return {}


def step_of(layer, x, dy):
    """Forward and all gradients, of a weight that a step has changed and of an x that no layer has cast."""
    weight = next(layer.parameters())

    def step():
        torch.autograd.graph.increment_version([weight, x])
        x.grad = None
        for p in layer.parameters():
            p.grad = None
        layer(x).backward(dy)

    return step


def layers(device, options):
    rows = []
    for shape in options.shapes(device, GPU_SHAPES, CPU_SHAPES, TINY):
        m, k, n = shape
        x, dy = leaves(device, (m, k), (m, n))
        dy, layer = dy.detach(), layer_of(shape, device)
        for name, recipe in RECIPES.items():
            made = {OURS: converted(layer, recipe, x, dy)} if options.samples else {}
            plain = copy.deepcopy(layer)
            made[BF16] = lambda x, plain=plain: warpsmith.linear(x, plain.weight, plain.bias)
            if name in TORCHAO and device == "cuda":
                made |= of_torchao(layer, TORCHAO[name], options)
            calls = {}
            for who, one in made.items():
                one = one if isinstance(one, nn.Module) else _Call(plain, one)
                calls[who] = step_of(one, x, dy)
            rows += timed(cell_of("scaled_linear", shape, x, name), calls, device, options)
    return rows


def products_of(device, m, k, n):
    """{direction: a product of bytes that are there, and the bare product}."""
    x, weight = (t.detach() for t in leaves(device, (m, k), (n, k)))
    forward, found = torch.ops.warpsmith.scaled_linear_inference, {}
    for scaling, of_weight in (("row", "row"), ("tensor", "tensor"), ("block", "block2d")):
        x8, w8 = warpsmith.quantize_fp8(x, scaling), warpsmith.quantize_fp8(weight, of_weight)
        for accumulate in ("fast", "float32")[scaling == "block" :]:
            given = x, weight, None, w8.data, w8.scale, None, x8.data, x8.scale
            call = functools.partial(forward, *given, Fp8Recipe(scaling, accumulate=accumulate).options)
            found[f"{scaling}, {accumulate}"] = call, functools.partial(torch.mm, x, weight.t())
    return found


class _Call(nn.Module):
    """A function of x with the parameters of a layer."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(x)


class Fp8Run(Run):
    """The step of a patched model whose layers multiply 8-bit floats."""

    def __init__(self, model, recipe, fp8_weights=False, **options):
        patched_by_us(model, linear=True)
        self.layers = warpsmith.amp.fp8(model, recipe, **options)
        super().__init__(model, adamw=functools.partial(warpsmith.optim.AdamW, fp8_weights=fp8_weights))
        self.state = [self.model, self.optimizer, self.layers]

    def step(self, tokens):
        loss = super().step(tokens)
        self.layers.update()
        return loss


class CapturedRun:
    """A run whose step is one CUDA graph."""

    def __init__(self, run):
        self.model = run.model
        state = getattr(run, "state", [run.model, run.optimizer])
        self.step = CapturedStep(run.step, state=state)


def llama(device, options):
    rows = []
    with rivals.optional():
        model = model_of("llama", device, options)
        for shape in options.shapes(device, MODEL_SHAPES["llama"], [(2, 128)], (2, 16)):
            steps = 1 if options.quick else MODEL_IN_A_ROW[device]
            batches = [torch.randint(model.config.vocab_size, shape, device=device) for _ in range(steps)]
            makers = {BF16: functools.partial(patched_by_us, linear=True, adamw=warpsmith.optim.AdamW)}
            names = {OURS: "row", f"{OURS}, current": "current", f"{OURS}, delayed": "delayed"}
            makers |= {who: functools.partial(Fp8Run, recipe=RECIPES[name]) for who, name in names.items()}
            by_rows = functools.partial(Fp8Run, recipe=RECIPES["row"])
            makers[f"{OURS}, no recompute"] = functools.partial(by_rows, recompute=False)
            makers[f"{OURS}, recompute all"] = functools.partial(by_rows, recompute="all")
            makers[f"{OURS}, fp8_weights"] = functools.partial(by_rows, fp8_weights=True)
            runs = {who: make(copy.deepcopy(model)) for who, make in makers.items()} if options.samples else {}
            cell = cell_of("llama_fp8", shape, next(model.parameters()))
            rows += rows_of_runs(cell, runs, batches, device, options, MODEL_BUDGET_S[device])
            if device != "cuda" or options.quick or not options.samples:
                continue
            steps = {who: functools.partial(run.step, batches[0]) for who, run in runs.items()}
            rows += timed((*cell, "step, host ahead"), steps, device, options, spin_cycles=AHEAD_CYCLES, budget_s=8.0)
            del runs, steps
            runs = {who: CapturedRun(makers[who](copy.deepcopy(model))) for who in (BF16, OURS)}
            for run in runs.values():
                for i in range(FIRST_STEPS):
                    run.step(batches[i % len(batches)])
            for who, why in [(who, run.step.fallback_reason) for who, run in runs.items()]:
                if why:
                    print(f"llama_fp8 captured: {who} is left out: {why}", file=sys.stderr, flush=True)
                    del runs[who]
            cell = "llama_fp8 captured", *cell[1:]
            rows += rows_of_runs(cell, runs, batches, device, options, MODEL_BUDGET_S[device])
            del runs
    return rows


OPS = {
    "scaled_linear": layers,
    "scaled_linear_own": functools.partial(bench_linear.own, "scaled_linear_own", products_of, counts=(1, 16)),
    "scaled_linear_host": functools.partial(
        bench_linear.host, "scaled_linear", functools.partial(warpsmith.scaled_linear, recipe="tensor")
    ),
    "llama_fp8": llama,
}
