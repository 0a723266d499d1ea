"""Draws docs/img/plan.png: published step times beside predicted ones, and efficiency by ranks.

python docs/plan_plot.py
"""

from __future__ import annotations

from pathlib import Path

from warpsmith.distributed import plan

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {"GPT-2": "#f9ab00", "GPT ": "#1a73e8", "vTrain": "#12b5cb", "Megatron": "#188038", "torchtitan": "#d93025"}
SCALED = (("Megatron 177B, H100 x 96", "#188038"), ("torchtitan 8B, compiled, H100 x 8", "#d93025"))


def main() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown: set[str] = set()
    for case in plan.cases():
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
    cases = {case.name: case for case in plan.cases()}
    for name, color in SCALED:
        first = cases[name]
        replica = first.layout.tensor * first.layout.pipeline
        strong = first.name.startswith("Megatron")
        factors = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if strong else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
        ranks = [factor * first.layout.data * replica for factor in factors]
        found = plan.scaling(first.model, first.cluster, first.layout, ranks, strong=strong)
        label = "177 G, 1,152 sequences" if strong else "Llama 8B, FSDP, 2 sequences a GPU"
        right.plot(ranks, plan.efficiency(found), color=color, label=label)
        for case in (c for c in plan.cases() if c.scales_from == name):
            ratio = plan.errors()["scaling"].ratios[case.name]
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
    main()
