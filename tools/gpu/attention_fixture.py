"""Builds the attention fixture (tests/sim/attention_sm90_fixture.cuh), checks it against fp64 and measures it on a GPU.

    python tools/gpu/attention_fixture.py
    python tools/gpu/attention_fixture.py --beside path/to/attn_fwd.cu
    compute-sanitizer --kernel-name kns=attention python tools/gpu/attention_fixture.py --check

The figure is the share of the tensor cores' peak per cycle: the FLOPs of attention over 4096 FLOP x multiprocessors x
the cycles that the longest-lived block counted inside the kernel. It does not depend on the clock that the power limit
allows, so that kernels can be compared in one process. `--beside` names another kernel's source with the interface of
the project's first prototype (`attn_fwd(q, k, v, o, lse, batch, queries, keys, heads, key_heads, scale, causal,
variant, workspace, stream)`, which leaves its cycles in workspace[2]); both run in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
FLOP_A_CYCLE = 4096  # of one multiprocessor, dense bf16
TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
ROUNDS, IDLE_S = 9, 0.03


def compiled(sources: dict[str, list[str]], folder: Path) -> dict[str, ctypes.CDLL]:
    """Libraries by name, compiled at the same time."""
    path = os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin"
    running = {}
    for name, arguments in sources.items():
        command = ["nvcc", *FLAGS, *arguments, "-o", str(folder / f"{name}.so")]
        running[name] = subprocess.Popen(command, env={**os.environ, "PATH": path})
    for name, process in running.items():
        if process.wait():
            sys.exit(f"{name} does not compile")
    return {name: ctypes.CDLL(str(folder / f"{name}.so")) for name in sources}


@dataclass
class Kernel:
    """A library's function. workspace: two counters, then the cycles."""

    function: Callable[..., int]
    is_fixture: bool
    workspace: torch.Tensor = field(default_factory=lambda: torch.zeros(32, dtype=torch.int32, device="cuda"))

    def __call__(self, tensors: list[torch.Tensor], causal: bool) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        counters = ctypes.c_void_p(self.workspace.data_ptr())
        q, k = tensors[:2]
        sizes = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]]
        scale = ctypes.c_float(HEAD_DIM**-0.5)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.is_fixture:
            cycles = ctypes.c_void_p(self.workspace.data_ptr() + 8)
            failed = self.function(*pointers, counters, cycles, *sizes, scale, int(causal), stream)
        else:
            failed = self.function(*pointers, *sizes, scale, int(causal), 0, counters, stream)
        if failed:
            sys.exit(f"the launch failed: {failed}")


def inputs(batch: int, queries: int, keys: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    """q, k, v, o, lse; the outputs hold NaN."""

    def normal(length: int, count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    o = torch.full((batch, queries, heads, HEAD_DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
    lse = torch.full((batch, heads, queries), float("nan"), device="cuda")
    return [normal(queries, heads), normal(keys, key_heads), normal(keys, key_heads), o, lse]


def oracle(tensors: list[torch.Tensor], causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (t.double().transpose(1, 2) for t in tensors[:3])
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * HEAD_DIM**-0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril(scores.shape[-1] - scores.shape[-2])
        scores.masked_fill_(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.nan_to_num(torch.exp(scores - lse.unsqueeze(-1)))
    return (p @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


def check(kernel: Kernel, small: bool) -> int:
    """Wrong cases; also runs each twice and wants equal bits."""
    shapes = [(1, 200, 300, 4, 2), (1, 300, 171, 4, 4), (3, 1, 777, 8, 2), (40, 129, 129, 16, 4)]
    if not small:
        shapes += [(2, s, s, 4, 2) for s in (1, 64, 127, 128, 129, 352, 1000, 2048)]
    wrong = count = 0
    worst = 0.0
    for number, shape in enumerate([*shapes, (1, 640, 640, 4, 2), (1, 1000, 1000, 4, 2)]):
        for causal in (False, True):
            tensors = inputs(*shape)
            if number >= len(shapes):  # maxima that grow from block to block
                tensors[1] *= torch.linspace(40, 1 / 40, shape[2], device="cuda").view(1, -1, 1, 1)
            kernel(tensors, causal)
            first = [t.clone() for t in tensors[3:]]
            kernel(tensors, causal)
            same = all(torch.equal(a, b) for a, b in zip(first, tensors[3:], strict=True))
            o, lse = oracle(tensors, causal)
            relative = ((tensors[3].double() - o).norm() / o.norm().clamp_min(1e-30)).item()
            off = torch.where(torch.isinf(lse), (tensors[4] != lse).double(), (tensors[4] - lse).abs() / 20)
            off = torch.where(torch.isinf(lse), off, off / (lse.abs() / 20).clamp_min(1))
            count += 1
            worst = max(worst, relative)
            if not (relative < 6e-3 and off.max().item() < 1e-4 and same):
                wrong += 1
                print(f"WRONG {shape} causal={causal}: o {relative:.1e}, lse {off.max().item():.1e}, same bits {same}")
    print(f"{count - wrong} of {count} cases right, worst relative error of o {worst:.1e}")
    if not wrong:
        print(f"workload: {2 * count} op calls")  # as the sanitizers' stage expects
    return wrong


def measure(kernels: dict[str, Kernel]) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{'':20}" + "".join(f"{name:>24}" for name in kernels) + "   (share of peak per cycle, TFLOP/s)")
    for causal in (False, True):
        for length in (1024, 4096, 16384):
            batch = TOKENS // length
            tensors = inputs(batch, length, length, HEADS, HEADS)
            flops = 4 * batch * HEADS * length * length * HEAD_DIM / (2 if causal else 1)
            cycles: dict[str, list[int]] = {name: [] for name in kernels}
            times: dict[str, list[float]] = {name: [] for name in kernels}
            for turn in range(ROUNDS + 1):
                for name in list(kernels)[:: 1 if turn % 2 else -1]:
                    time.sleep(IDLE_S)
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    kernels[name].workspace.zero_()
                    kernels[name](tensors, causal)
                    start.record()
                    kernels[name](tensors, causal)
                    stop.record()
                    stop.synchronize()
                    if turn:
                        cycles[name].append(int(kernels[name].workspace[2].item()))
                        times[name].append(start.elapsed_time(stop))
            row = f"{'causal' if causal else 'full':7}{length:6}       "
            for name in kernels:
                share = flops / (multiprocessors * FLOP_A_CYCLE * statistics.median(cycles[name]))
                row += f"{share:14.1%}{flops / statistics.median(times[name]) / 1e9:10.0f}"
            print(row, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="source of another kernel to measure beside the fixture")
    parser.add_argument("--check", action="store_true", help="only check, small shapes: for the sanitizer")
    arguments = parser.parse_args()
    sources = {"fixture": [str(ROOT / "tools/gpu/attention_fixture.cu"), f"-I{ROOT / 'csrc'}"]}
    if arguments.beside:
        sources["other"] = [str(arguments.beside), "-DCYCLES"]
    with tempfile.TemporaryDirectory() as folder:
        libraries = compiled(sources, Path(folder))
        kernels = {"fixture": Kernel(libraries["fixture"].attention_fixture, is_fixture=True)}
        if arguments.beside:
            kernels["other"] = Kernel(libraries["other"].attn_fwd, is_fixture=False)
        wrong = check(kernels["fixture"], small=arguments.check)
        if not wrong and not arguments.check:
            measure(kernels)
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
