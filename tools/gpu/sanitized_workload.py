"""Every op forward and backward at small shapes, for compute-sanitizer: the small cases of the ops' own case tables.

A spec is that of any class made by `op_tests` in a module tests/ops/test_<op>.py. Inputs are made on the CPU and
copied, so that the tools see few kernels but ours. The optimizers, which have no spec, come first.

    python tools/gpu/sanitized_workload.py [--device cpu] [--cases 1] [--op rms_norm]
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import warpsmith
from warpsmith.testing import LAYOUTS, OpSpec
from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.run import run

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = {"adamw"}
MOST_ELEMENTS = 40_000
MOST_CASES = 16  # of one op: spread evenly over its table


def specs() -> list[OpSpec]:
    """The specs of the ops' test modules: all ops but the optimizers must be among them."""
    found: dict[str, OpSpec] = {}
    sys.path.insert(0, str(ROOT))
    for path in sorted((ROOT / "tests/ops").glob("test_*.py")):
        for value in vars(importlib.import_module(f"tests.ops.{path.stem}")).values():
            if isinstance(spec := getattr(value, "spec", None), OpSpec):
                found[spec.name] = spec
    ops = {name for name in warpsmith.ops.__all__ if name.islower()} - OPTIMIZERS
    if missing := ops - found.keys():
        raise SystemExit(f"no spec found of {', '.join(sorted(missing))}")
    return list(found.values())


def run_spec(spec: OpSpec, device: str, most_cases: int) -> int:
    """Small cases of the table, and the first of them in every layout."""
    small = [c for c in spec.cases_on(device) if torch.Size(c.shape).numel() <= MOST_ELEMENTS]
    step = max(1, -(-len(small) // most_cases))
    cases = small[::step] + [spec.base_case().but(layout=layout) for layout in spec.layouts or LAYOUTS]
    for case in cases:
        run(spec.op, spec, case, make_inputs(spec, case, device))
    return 2 * len(cases)


def run_optimizers(device: str) -> int:
    """Two steps of each over tensors of odd sizes, one of them misaligned; and steps by way of a scaler."""
    sizes = (1, 3, 127, 1024, 4097, 20_000)
    params = [torch.ones(n).to(device).requires_grad_() for n in sizes]
    params.append(torch.ones(514).to(device)[1:].detach().requires_grad_())
    for p in params:
        p.grad = torch.full(p.shape, 0.5).to(device)
    calls = 0
    found = (getattr(warpsmith.optim, name) for name in warpsmith.optim.__all__)
    for optim in (f for f in found if isinstance(f, type) and issubclass(f, torch.optim.Optimizer)):
        warpsmith.optim.clip_grad_norm_(params, 1.0)
        more = {"others": "adamw"} if optim is warpsmith.optim.Muon else {}
        optimizer = optim(params, lr=1e-3, **more)
        for _ in range(2):
            optimizer.step()
            calls += 1
    average = warpsmith.optim.EMA(params)
    for _ in range(2):
        average.update()
        calls += 1
    scaler = warpsmith.amp.GradScaler(device)
    scaler.scale(torch.ones(()).to(device))
    for bad in (1.0, torch.inf):
        params[-1].grad[3] = bad
        scaler.clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        calls += 2
    return calls


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """In place of initcheck where the Hopper kernels run: it does not see what their bulk copies write to memory, so
    that it reports every element that a later kernel reads. What is read before it is written gives NaN instead."""
    torch.use_deterministic_algorithms(True)
    try:
        if not torch.empty(8, device="cuda" if torch.cuda.is_available() else "cpu").isnan().all():
            raise SystemExit("new memory is not filled with NaN")
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_attention(device: str, op: str) -> int:
    """A few small problems, forward and backward, single and packed; the later ones have portable kernels alone."""
    calls = 0
    bias = torch.zeros(4, 1, 1).to(device).requires_grad_()
    hopper = (
        (64, 130, {"causal": True}),
        (128, 200, {}),
        (72, 65, {"window_size": (20, 0)}),
        (256, 130, {"causal": True}),
    )
    portable = (
        (64, 100, {"softcap": 5.0, "dropout_p": 0.1}),
        (128, 70, {"causal": True, "bias": bias}),
        (256, 70, {"alibi_slopes": torch.full((4,), 0.1).to(device)}),
    )
    for dim, tokens, options in hopper + portable:
        shapes = ((2, tokens, heads, dim) if op == "attention" else (2 * tokens, heads, dim) for heads in (4, 2, 2))
        q, k, v = (torch.full(s, 0.25, dtype=torch.bfloat16).to(device).requires_grad_() for s in shapes)
        cu = torch.tensor([0, 50, 50, tokens, 2 * tokens], dtype=torch.int32).to(device)
        with nan_in_new_memory() if (dim, tokens, options) in hopper else contextlib.nullcontext():
            if op == "attention":
                result = warpsmith.attention(q, k, v, **options)
            else:
                result = warpsmith.attention_varlen(q, k, v, cu, cu, tokens, tokens, **options)
            out = cast(torch.Tensor, result)
            upstream = torch.full(out.shape, 0.5, dtype=torch.bfloat16).to(device)
            gradients = torch.autograd.grad(out, (q, k, v), upstream)
            if not all(t.isfinite().all() for t in (out, *gradients)):
                raise SystemExit(f"{op}: {options}: not finite: memory was read before it was written")
        calls += 2
    return calls


def main() -> None:
    """Prints the number of calls last, as the stage expects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", type=int, default=MOST_CASES, help="of each op; default: %(default)s")
    parser.add_argument("--op", help="this one alone; default: all")
    options = parser.parse_args()
    found = [spec for spec in specs() if options.op in (None, spec.name)]
    optimizers = OPTIMIZERS if options.op is None else OPTIMIZERS & {options.op}
    calls = run_optimizers(options.device) if optimizers else 0
    for spec in found:
        if options.device in spec.devices:
            calls += run_spec(spec, options.device, options.cases)
        elif spec.name.startswith("attention") and torch.cuda.get_device_capability() >= (8, 0):
            calls += run_attention(options.device, spec.name)
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(f"workload: {calls} op calls of {len(found) + len(optimizers)} ops", flush=True)


if __name__ == "__main__":
    main()
