"""``python -m warpsmith plan``: predicts time, memory and scaling of a training step, with the error on published runs.

python -m warpsmith plan --gpu H100 --config config.json --data 64 --sharding 3 --micro-batch 2 --scale
torchrun --nproc-per-node 8 -m warpsmith plan --calibrate --config config.json --data 8
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

PARTS = ("model", "layout")


def _options(parser: argparse.ArgumentParser, part: str, kind: Any) -> None:
    """An option for each field, with the type of its default."""
    group = parser.add_argument_group(f"of {kind.__name__}")
    for field in dataclasses.fields(kind):
        flag, name = "--" + field.name.replace("_", "-"), f"{part}.{field.name}"
        if field.type == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, dest=name)
        else:
            takes = str if field.type == "str" else int
            group.add_argument(flag, type=takes, default=None, dest=name, metavar=takes.__name__.upper())


def add_to(tools: Any, named: bool) -> None:
    """Adds ``plan`` to the parser's tools, with its options if it is ``named``: they are the fields of Model and
    Layout, and reading those loads torch.distributed, which other tools do without."""
    parser: argparse.ArgumentParser = tools.add_parser(
        "plan",
        help="predicts step time, memory and scaling of a model on a cluster",
        description="Predicts step time, memory and scaling of a model on a cluster, with the error that the same "
        "formulas have on published runs. Runs nothing, but for --calibrate.",
    )
    parser.set_defaults(run=_run)
    if not named:
        return
    from warpsmith.distributed import plan

    parser.add_argument("--gpu", choices=sorted(plan.GPUS), default="H100", help="default: H100")
    parser.add_argument("--network-gbit", type=float, default=400.0, help="Gbit/s of the network a GPU (400)")
    parser.add_argument("--ranks-per-host", type=int, default=8, help="GPUs of a host (8)")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine in place of --gpu; torchrun")
    parser.add_argument("--config", type=Path, help="config.json of a model of transformers")
    parser.add_argument("--scale", action="store_true", help="also the efficiency up to 10,000 ranks")
    parser.add_argument("--plot", type=Path, help="write a figure to this file")
    for part, kind in zip(PARTS, (plan.Model, plan.Layout), strict=True):
        _options(parser, part, kind)


def _run(given: argparse.Namespace) -> int:
    from warpsmith.distributed import plan

    fields: dict[str, dict[str, Any]] = {
        part: {k.split(".")[1]: v for k, v in vars(given).items() if k.startswith(part + ".") and v is not None}
        for part in PARTS
    }
    try:
        if given.config:
            model = plan.Model.from_config(_read(given.config), **fields["model"])
        else:
            lacks = [n for n in ("layers", "hidden", "heads", "vocabulary", "sequence") if n not in fields["model"]]
            if lacks:
                raise ValueError(f"expected --config, or --{lacks[0]} and the other sizes of a model")
            model = plan.Model(**fields["model"])
        layout = plan.Layout(**fields["layout"])
        if given.calibrate:
            return _calibrated(given, model, layout)
        cluster = plan.Cluster.of(given.gpu, given.network_gbit, ranks_per_host=given.ranks_per_host)
        _show(given, model, cluster, layout)
    except (TypeError, ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--config: expected JSON in {path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config: expected a JSON object in {path}, got a {type(found).__name__}")
    return found


def _calibrated(given: argparse.Namespace, model: Any, layout: Any) -> int:
    from warpsmith.distributed import init, plan

    with init(timeout_s=600) as ctx:
        cluster = plan.calibrate(ctx.device, network_gbit=given.network_gbit)
        if ctx.is_main:
            _show(given, model, cluster, layout)
    return 0


def _show(given: argparse.Namespace, model: Any, cluster: Any, layout: Any) -> None:
    from warpsmith.distributed import plan
    from warpsmith.distributed.plan.prediction import PUBLISHED

    found = plan.predict(model, cluster, layout)
    lines = [str(found)]
    if given.scale:
        several = plan.scaling(model, cluster, layout)
        low, high = PUBLISHED["scaling"]
        lines.append(f"ranks, tokens/s, of the first (published runs: {low:.2f} to {high:.2f} times that)")
        for one, share in zip(several, plan.efficiency(several), strict=True):
            lines.append(
                f"  {one.layout.ranks:>6} {one.tokens_per_s:>16,.0f} {share:7.1%}, with failures "
                f"{one.goodput * share:.1%}"
            )
    sys.stdout.write("\n".join(lines) + "\n")
    if given.plot:
        found.plot(given.plot)
