"""Runs that others published, and this project's own, beside what ``predict`` says of them.

python docs/plan_published.py    # prints the last table of docs/plan.md, draws docs/img/plan.png

Every case has the settings that its source states. What a source leaves open is the same for all of its cases, and
stated at the family below. No rate in ``warpsmith/distributed/plan/gpus.py`` was fitted to these runs.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warpsmith.distributed import plan
from warpsmith.distributed.plan import GPUS, Cluster, Layout, Model, Prediction, predict
from warpsmith.distributed.plan.gpus import COPY_SHARE

GIB = 2**30
ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {"GPT-2": "#f9ab00", "GPT ": "#1a73e8", "vTrain": "#12b5cb", "Megatron": "#188038", "torchtitan": "#d93025"}
SCALED = (("Megatron 177B, H100 x 96", "#188038"), ("torchtitan 8B, compiled, H100 x 8", "#d93025"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: its settings, and the seconds of a step or the bytes of a rank that were published (None: were not).

    ``scales_from`` names the case with fewer ranks against which the source states how it scales.
    """

    name: str
    source: str
    model: Model
    cluster: Cluster
    layout: Layout
    step_s: float | None = None
    memory_bytes: float | None = None
    scales_from: str | None = None

    def predict(self) -> Prediction:
        """What the formulas say of this case."""
        return _predicted(self)


@functools.cache
def _predicted(case: Case) -> Prediction:
    return predict(case.model, case.cluster, case.layout)


@dataclasses.dataclass(frozen=True)
class Error:
    """How published figures differ from predicted ones.

    Args:
        ratios: published / predicted, by the case's name.
    """

    ratios: dict[str, float]

    @property
    def low(self) -> float:
        """The lowest ratio."""
        return min(self.ratios.values())

    @property
    def high(self) -> float:
        """The highest ratio."""
        return max(self.ratios.values())

    @property
    def mean(self) -> float:
        """Of ``|predicted / published - 1|``."""
        return sum(abs(1 / r - 1) for r in self.ratios.values()) / len(self.ratios)

    @property
    def worst(self) -> float:
        """The largest ``|predicted / published - 1|``."""
        return max(abs(1 / r - 1) for r in self.ratios.values())


def _selene() -> Iterator[Case]:
    """Korthikanti et al., arXiv 2205.05198, tables 3 and 5 and figure 1 (figures as collected by Calculon,
    calculon-ai/calculon, calculon/llm/validation.py): GPT with eager attention and dropout on DGX A100 (200 Gbit/s a
    GPU), 2,048 tokens, 51,200 classes. "full": everything again, no sequence parallelism; "selective": attention again,
    sequence parallelism. Memory: figure 1, weights, gradients, states and activations of the first rank."""
    cluster = Cluster.of("A100", network_gbit=200)
    sizes = {  # layers, hidden, heads, pipeline, interleave, micro-batch, micro-batches
        "22B": (48, 6144, 64, 1, 1, 4, 1),
        "175B": (96, 12288, 96, 8, 3, 1, 64),
        "530B": (105, 20480, 128, 35, 3, 1, 280),
        "1T": (128, 25600, 160, 64, 1, 1, 512),
    }
    seconds = {"22B": (1.42, 1.10), "175B": (18.13, 13.75), "530B": (49.05, 37.83), "1T": (94.42, 71.49)}
    gib = {
        "22B": (45.5625, 59.25, 9.5625),
        "175B": (45.5625, 66.84375, 12.3515625),
        "530B": (31.640625, 114.0234375, 23.076171875),
        "1T": (32.958984375, 131.25, 26.5625),
    }
    for name, (layers, hidden, heads, pipeline, interleave, micro_batch, micro_batches) in sizes.items():
        model = Model(layers, hidden, heads, 51200, 2048, tied=True, dropout=True, dtype="float16")
        layout = Layout(
            tensor=8,
            pipeline=pipeline,
            interleave=interleave,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            attention="eager",
            precision="master",
            wire="float16",
        )
        full = dataclasses.replace(layout, checkpoint="full")
        selective = dataclasses.replace(layout, checkpoint="attention", sequence_parallel=True)
        state, none, some = gib[name]
        source = "arXiv 2205.05198"
        yield Case(f"GPT {name}, full, A100 x {layout.ranks}", source, model, cluster, full, seconds[name][0])
        yield Case(
            f"GPT {name}, selective, A100 x {layout.ranks}",
            source,
            model,
            cluster,
            selective,
            seconds[name][1],
            (state + some) * GIB,
        )
        yield Case(
            f"GPT {name}, nothing again, A100 x {layout.ranks}",
            source,
            model,
            cluster,
            layout,
            memory_bytes=(state + none) * GIB,
        )


def _vtrain() -> Iterator[Case]:
    """VIA-Research/vTrain, data/ground_truth_multi.csv: the fastest measured run of each model. A100, 800 Gbit/s a host
    of 8, 1F1B, everything computed again, gradients after the backward. Taken as eager attention, no dropout, gradients
    of 16 bits, 51,200 classes."""
    cluster = Cluster.of("A100", network_gbit=100)
    for name, layers, hidden, heads, tensor, data, pipeline, batch, micro_batch, seconds in (
        ("3.6B", 30, 3072, 32, 1, 64, 1, 512, 8, 3.5665),
        ("18.4B", 40, 6144, 48, 8, 32, 1, 1024, 8, 9.6036),
        ("39.1B", 48, 8192, 64, 4, 32, 4, 1536, 2, 13.8755),
        ("175B", 96, 12288, 96, 4, 4, 32, 1536, 2, 53.9096),
    ):
        layout = Layout(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            micro_batch=micro_batch,
            micro_batches=batch // data // micro_batch,
            checkpoint="full",
            attention="eager",
            precision="master",
            wire="float16",
            overlap_data=False,
        )
        model = Model(layers, hidden, heads, 51200, 2048, tied=True, dtype="float16")
        yield Case(f"vTrain {name}, A100 x {layout.ranks}", "VIA-Research/vTrain", model, cluster, layout, seconds)


def _megatron() -> Iterator[Case]:
    """NVIDIA/Megatron-LM, README.md and images/model_table.png (2024): GPT, 4,096 tokens, 131,072 classes, H100,
    everything overlapped, and the model of 177 G parameters on 96 and 4,608 GPUs at the same 1,152 sequences (MFU 47 %
    and 42 %). TFLOP/s there count all scores. Taken as micro-batches of one sequence, one layer a pipeline chunk, a
    sharded optimizer, cuDNN's attention, nothing computed again, no dropout, 400 Gbit/s a GPU."""
    cluster = Cluster.of("H100", network_gbit=400)

    def case(name: str, sizes: tuple[int, int, int], tensor: int, pipeline: int, data: int, batch: int, tflops: float,
             scales_from: str | None = None) -> Case:  # fmt: skip
        layers, hidden, heads = sizes
        model = Model(layers, hidden, heads, 131072, 4096, tied=True)
        layout = Layout(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            interleave=layers // pipeline if pipeline > 1 else 1,
            micro_batches=batch // data,
            sharding=1,
            sequence_parallel=tensor > 1,
            attention="cudnn",
            precision="master",
            overlap_gather=True,
            overlap_tensor=True,
        )
        seconds = model.flops_per_token * batch * 4096 / (tflops * 1e12 * layout.ranks)
        title = f"Megatron {name}, H100 x {layout.ranks}"
        return Case(title, "NVIDIA/Megatron-LM", model, cluster, layout, seconds, scales_from=scales_from)

    large = (96, 12288, 96)
    few = case("177B", large, 8, 6, 2, 1152, 0.47 * 989)
    yield few
    yield case("1.7B", (24, 2048, 16), 1, 1, 48, 192, 408.8)
    yield case("7.1B", (30, 4096, 32), 2, 1, 48, 192, 465.9)
    yield case("16B", (32, 6144, 48), 4, 1, 48, 192, 489.1)
    yield case("32B", (48, 7168, 56), 8, 1, 48, 192, 459.6)
    yield case("70B", (84, 8192, 64), 8, 2, 48, 384, 419.7)
    yield case("119B", (92, 10240, 80), 8, 4, 48, 768, 420.5)
    yield case("177B", large, 8, 6, 48, 1152, 432.8, few.name)
    yield case("314B", (96, 16384, 128), 8, 8, 48, 1536, 474.4)
    yield case("462B", (112, 18432, 144), 8, 16, 48, 3072, 459.9)
    yield case("177B", large, 8, 6, 96, 1152, 0.42 * 989, few.name)


LLAMA_8B = Model(32, 4096, 32, 128256, 8192, intermediate=14336, kv_heads=8, gated=True, rotary=True)
LLAMA_70B = Model(80, 8192, 64, 128256, 8192, intermediate=28672, kv_heads=8, gated=True, rotary=True)


def _torchtitan() -> Iterator[Case]:
    """pytorch/torchtitan, its pages llama3_h100_202412_torchtitan.md (H100 with HBM2e, 96 GB, 2.4 TB/s, at 500 W; its
    rate at 500 W is not published, and the 700 W rate is taken) and llama3_8b_h200_2025-06_torchtitan*.md: Llama 3.1,
    FSDP2, 8,192 tokens, 400 Gbit/s a GPU, "op" checkpoints for 8B, SDPA's flash attention, gradients reduced in
    float32, the loss compiled in 2025 only (its train.py of 2024 says that it is not).
    Its tables with context parallelism have no form here, and that of 405B does not say how many micro-batches."""
    gpu = dataclasses.replace(GPUS["H100"], memory_bytes=96e9, copy_bytes_per_s=2.4e12 * COPY_SHARE)
    teton, h200 = Cluster.of(gpu), Cluster.of("H200")
    fsdp = Layout(sharding=3, micro_batch=2, checkpoint="half", loss="eager")
    kinds: dict[str, tuple[str, str]] = {
        "eager": ("eager", "bfloat16"),
        "compiled": ("compiled", "bfloat16"),
        "float8": ("compiled", "float8"),
    }
    published = {
        "eager": ((5762, 82.4), (5605, 67.0)),
        "compiled": ((6667, 77.0), (6514, 62.0)),
        "float8": ((8532, 76.8), (8380, 61.8)),
    }
    source = "pytorch/torchtitan"
    for kind, (kernels, dtype) in kinds.items():
        model = dataclasses.replace(LLAMA_8B, dtype=dtype)
        first = None
        for ranks, (rate, gib) in zip((8, 128), published[kind], strict=True):
            layout = dataclasses.replace(fsdp, data=ranks, kernels=kernels)
            name = f"torchtitan 8B, {kind}, H100 x {ranks}"
            yield Case(name, source, model, teton, layout, 2 * 8192 / rate, gib * GIB, first)
            first = name
    first = None
    for ranks, rate, gib in ((32, 10938, 47.96), (64, 10753, 46.97)):
        layout = dataclasses.replace(fsdp, data=ranks, gather="float8", loss="compiled")
        name = f"torchtitan 8B, float8, H200 x {ranks}"
        model = dataclasses.replace(LLAMA_8B, dtype="float8")
        yield Case(name, source, model, h200, layout, 2 * 8192 / rate, gib * GIB, first)
        first = name
    two = dataclasses.replace(fsdp, data=32, tensor=8, micro_batch=16, checkpoint="full", sequence_parallel=True)
    for kind, overlap, rate, gib in (("float8", False, 829, 71.9), ("float8, async TP", True, 876, 67.6)):
        layout = dataclasses.replace(two, overlap_tensor=overlap)
        model = dataclasses.replace(LLAMA_70B, dtype="float8")
        name = f"torchtitan 70B, {kind}, H100 x 256"
        yield Case(name, source, model, teton, layout, 16 * 8192 * 32 / 256 / rate, gib * GIB)


def _ours() -> Iterator[Case]:
    """This project's recordings on H200s (benchmarks/recordings.csv): of ``--op gpt2`` (medians of six), ``--op llama``
    (2026-11-23-0951) and of two GPUs (2026-11-23-0955). Memory: the peak above weights and states, and these."""
    cluster, source = Cluster.of("H200"), "benchmarks/recordings.csv"
    gpt2 = Model(12, 768, 12, 50304, 1024, tied=True)
    for kernels, attention, seconds, gigabytes in (
        ("eager", "flash", 0.15809, 55.316),
        ("compiled", "flash", 0.12377, 29.013),
        ("warpsmith", "cudnn", 0.11603, 29.120),
    ):
        layout = Layout(micro_batch=64, kernels=kernels, attention=attention)
        total = gigabytes * 1e9 + 12 * gpt2.parameters
        yield Case(f"GPT-2 124M, {kernels}, H200", source, gpt2, cluster, layout, seconds, total)
    alone = "GPT-2 124M, one of two H200"
    layout = Layout(micro_batch=64, kernels="warpsmith", attention="cudnn")
    for name, rate, changes in (
        (alone, 580.60, {}),
        ("GPT-2 124M, DDP, H200 x 2", 551.18, {"data": 2}),
        ("GPT-2 124M, accurate_hook, H200 x 2", 560.85, {"data": 2, "wire": "bfloat16"}),
        ("GPT-2 124M, ShardedOptimizer, H200 x 2", 563.75, {"data": 2, "wire": "bfloat16", "sharding": 1}),
    ):
        changed: dict[str, Any] = changes
        scales_from = None if name == alone else alone
        run = dataclasses.replace(layout, **changed)
        yield Case(name, source, gpt2, cluster, run, 64 * 1.024 / rate, scales_from=scales_from)
    llama = Model(16, 2048, 32, 128256, 8192, intermediate=8192, kv_heads=8, gated=True, rotary=True)
    rates = {"eager": (0.19117, 0.16631), "compiled": (0.23169, 0.14160), "warpsmith": (0.14357, 0.12029)}
    for kernels, pair in rates.items():
        for (sequences, tokens), seconds in zip(((1, 8192), (4, 2048)), pair, strict=True):
            attention = "cudnn" if kernels == "warpsmith" else "flash"
            layout = Layout(micro_batch=sequences, kernels=kernels, attention=attention, precision="bf16")
            model = dataclasses.replace(llama, sequence=tokens)
            yield Case(
                f"Llama of 16 layers, {kernels}, {sequences} x {tokens}, H200", source, model, cluster, layout, seconds
            )


@functools.cache
def cases() -> tuple[Case, ...]:
    """All published runs."""
    return (*_selene(), *_vtrain(), *_megatron(), *_torchtitan(), *_ours())


@functools.cache
def errors() -> dict[str, Error]:
    """Published over predicted, for ``"step"`` (seconds), ``"memory"`` (bytes) and ``"scaling"`` (tokens/s a GPU beside
    the same run on fewer GPUs).
    """
    by_name = {case.name: case for case in cases()}
    step, space, scale = {}, {}, {}
    for case in cases():
        found = case.predict()
        if case.step_s is not None:
            step[case.name] = case.step_s / found.step_s
        if case.memory_bytes is not None:
            space[case.name] = case.memory_bytes / found.memory_bytes
        if case.scales_from is not None:
            first = by_name[case.scales_from]
            scale[case.name] = _per_rank(case, case.step_s) / _per_rank(first, first.step_s)
            predicted = _per_rank(case, found.step_s) / _per_rank(first, first.predict().step_s)
            scale[case.name] /= predicted
    return {"step": Error(step), "memory": Error(space), "scaling": Error(scale)}


def _per_rank(case: Case, seconds: float | None) -> float:
    assert seconds is not None, case.name
    return case.layout.sequences / case.layout.ranks / seconds


def report() -> str:
    """A table of all published runs beside what is predicted for them."""
    lines = ["| run | published | predicted | predicted / published |", "|---|---|---|---|"]
    for case in cases():
        found = case.predict()
        if case.step_s is not None:
            lines.append(
                f"| {case.name} | {case.step_s:.4g} s | {found.step_s:.4g} s | {found.step_s / case.step_s:.2f} |"
            )
    for name, ratio in errors()["scaling"].ratios.items():
        case = next(c for c in cases() if c.name == name)
        first = next(c for c in cases() if c.name == case.scales_from)
        published = _per_rank(case, case.step_s) / _per_rank(first, first.step_s)
        lines.append(
            f"| {name}, of {first.layout.ranks} | {published:.3f} | {published / ratio:.3f} | {1 / ratio:.3f} |"
        )
    for case in cases():
        if case.memory_bytes is not None:
            gigabytes = case.predict().memory_bytes / 1e9
            lines.append(
                f"| {case.name}, memory | {case.memory_bytes / 1e9:.1f} GB | {gigabytes:.1f} GB | "
                f"{gigabytes * 1e9 / case.memory_bytes:.2f} |"
            )
    return "\n".join(lines)


def draw() -> None:
    """Published step times beside predicted ones, and efficiency by ranks: docs/img/plan.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown: set[str] = set()
    for case in cases():
        if case.step_s is None:
            continue
        family = next((f for f in FAMILIES if case.name.startswith(f)), "Llama")
        label = None if family in shown else {"GPT ": "GPT, A100"}.get(family, family)
        shown.add(family)
        color = FAMILIES.get(family, "#9334e6")
        left.scatter(case.step_s, case.predict().step_s, s=14, color=color, label=label)
    ends = (0.06, 200)
    left.plot(ends, ends, color="#5f6368", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="published seconds of a step", ylabel="predicted")
    left.legend(frameon=False, fontsize=8)
    by_name = {case.name: case for case in cases()}
    for name, color in SCALED:
        first = by_name[name]
        replica = first.layout.tensor * first.layout.pipeline
        strong = first.name.startswith("Megatron")
        factors = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if strong else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
        ranks = [factor * first.layout.data * replica for factor in factors]
        found = plan.scaling(first.model, first.cluster, first.layout, ranks, strong=strong)
        label = "177 G, 1,152 sequences" if strong else "Llama 8B, FSDP, 2 sequences a GPU"
        right.plot(ranks, plan.efficiency(found), color=color, label=label)
        for case in (c for c in cases() if c.scales_from == name):
            ratio = errors()["scaling"].ratios[case.name]
            share = plan.efficiency([first.predict(), case.predict()])[1] * ratio
            right.scatter(case.layout.ranks, share, color=color, s=24, zorder=3)
    right.set(
        xscale="log", ylim=(0, 1.1), xlabel="H100 GPUs (points: published)", ylabel="tokens/s a GPU, of the fewest"
    )
    right.legend(frameon=False, fontsize=8, loc="lower left")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/img/plan.png", dpi=120)


if __name__ == "__main__":
    print(report())
    draw()
