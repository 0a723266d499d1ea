"""Builds the Hopper kernels of attention, checks them against fp64 and measures them beside PyTorch's on a GPU.

    python tools/gpu/attention.py                   # checks, then every cell
    python tools/gpu/attention.py --only D128       # cells whose name contains this
    compute-sanitizer python tools/gpu/attention.py --check --small

The library is compiled from csrc directly, so that neither bindings nor an installed package take part. Figures are
TFLOP/s of the whole pass (all kernels), with 4 B H Sq Sk D for a forward, the visible pairs only, and 2.5 times that
for a backward; competitors run in random order in one process, with an idle gap before each burst; medians. The table
goes to stdout, and as JSON to $OUT/attention.json where OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler",
    "-fPIC",
]
SOURCES = [
    "tools/gpu/attention_library.cu",
    "csrc/kernels/attention/forward_sm90a.cu",
    "csrc/kernels/attention/backward_sm90a.cu",
    "csrc/kernels/attention/backward_wide_sm90a.cu",
]
ROUNDS, IDLE_S, BURST_FLOPS = 9, 0.03, 6e12


def compiled(folder: Path) -> ctypes.CDLL:
    """The library; its sources are compiled at the same time."""
    environment = {**os.environ, "PATH": os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin"}
    objects = [folder / f"{Path(source).stem}.o" for source in SOURCES]
    running = [
        subprocess.Popen(["nvcc", *FLAGS, f"-I{ROOT / 'csrc'}", "-c", ROOT / source, "-o", to], env=environment)
        for source, to in zip(SOURCES, objects, strict=True)
    ]
    if max(process.wait() for process in running):
        sys.exit("the kernels do not compile")
    library = folder / "attention.so"
    subprocess.run(["nvcc", "-shared", *objects, "-o", library], env=environment, check=True)
    return ctypes.CDLL(str(library))


@dataclass
class Problem:
    batch: int = 1
    queries: int = 128
    keys: int = 0  # 0: as queries
    heads: int = 4
    key_heads: int = 0  # 0: as heads
    dim: int = 128
    dim_v: int = 0  # 0: as dim
    left: int = -1
    right: int = -1
    bottom_right: bool = True
    softcap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = ()  # packed sequences
    growth: float = 1.0  # of keys, from the last to the first

    def __post_init__(self) -> None:
        self.keys = self.keys or self.queries
        self.key_heads = self.key_heads or self.heads
        self.dim_v = self.dim_v or self.dim
        if self.lengths:
            self.batch, self.queries, self.keys = 1, sum(self.lengths), sum(self.lengths)

    def visible(self, queries: int, keys: int) -> torch.Tensor:
        """Pairs of one sequence that see each other."""
        shift = keys - queries if self.bottom_right else 0
        offset = torch.arange(keys, device="cuda")[None, :] - torch.arange(queries, device="cuda")[:, None] - shift
        seen = torch.ones_like(offset, dtype=torch.bool)
        if self.left >= 0:
            seen &= offset >= -self.left
        if self.right >= 0:
            seen &= offset <= self.right
        return seen

    def pairs(self) -> float:
        """Visible pairs of all sequences of one head; half of a square if causal, as is the custom."""
        if self.left >= 0:
            return sum(float(self.visible(n, n).sum()) for n in self.lengths or [self.queries])
        share = 0.5 if self.right >= 0 else 1.0
        return share * (sum(n * n for n in self.lengths) if self.lengths else self.batch * self.queries * self.keys)


@dataclass
class Data:
    """Tensors of a problem, and calls of the library on them."""

    library: ctypes.CDLL
    problem: Problem
    seed: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p, t = self.problem, self.tensors
        generator = torch.Generator("cuda").manual_seed(self.seed)

        def normal(length: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(p.batch, length, heads, dim, device="cuda", generator=generator).to(p.dtype)

        t["q"], t["dout"] = normal(p.queries, p.heads, p.dim), normal(p.queries, p.heads, p.dim_v)
        t["k"], t["v"] = normal(p.keys, p.key_heads, p.dim), normal(p.keys, p.key_heads, p.dim_v)
        if p.growth != 1.0:
            t["k"] *= p.growth ** torch.linspace(1, -1, p.keys, device="cuda").view(1, -1, 1, 1)
        t["out"] = torch.empty_like(t["dout"])
        t["dq"], t["dk"], t["dv"] = (torch.empty_like(t[name]) for name in "qkv")
        t["lse"] = torch.empty(p.batch, p.heads, p.queries, device="cuda")
        if p.lengths:
            t["cu"] = torch.tensor([sum(p.lengths[:i]) for i in range(len(p.lengths) + 1)], dtype=torch.int32).cuda()
        longest = max(p.lengths, default=0)
        numbers = [len(p.lengths) or p.batch, p.heads, p.key_heads, longest or p.queries, longest or p.keys, p.dim]
        numbers += [p.dim_v, p.batch * p.queries, p.batch * p.keys, p.left, p.right, int(p.bottom_right)]
        numbers += [int(p.dtype == torch.bfloat16)]
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
            numbers += t[name].stride()[:3]
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self.reals = (ctypes.c_double * 2)(p.dim**-0.5, p.softcap)
        self.workspaces = [self._workspace(backward) for backward in (0, 1)]

    def _pointers(self, workspace: torch.Tensor | None) -> ctypes.Array[ctypes.c_void_p]:
        names = ["q", "k", "v", "out", "lse", "dout", "", "dq", "dk", "dv"]
        at = [self.tensors[name].data_ptr() if name else None for name in names]
        cu = self.tensors["cu"].data_ptr() if "cu" in self.tensors else None
        return (ctypes.c_void_p * 15)(*at, None if workspace is None else workspace.data_ptr(), cu, cu, None, None)

    def _workspace(self, backward: int) -> torch.Tensor:
        size = ctypes.c_int64(0)
        if backward and self.problem.softcap:
            return torch.empty(0)
        if self.library.attention_workspace(
            backward, self.numbers, self.reals, self._pointers(None), ctypes.byref(size)
        ):
            sys.exit("no workspace")
        return torch.randint(0, 255, (size.value + 256,), dtype=torch.uint8, device="cuda")[-size.value or None :]

    def _call(self, function: Callable[..., int], backward: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if function(self.numbers, self.reals, self._pointers(self.workspaces[backward]), stream):
            sys.exit("the launch failed")

    def forward(self) -> None:
        self._call(self.library.attention_forward, 0)

    def backward(self) -> None:
        self._call(self.library.attention_backward, 1)

    def poison(self) -> None:
        for name in ("out", "lse", "dq", "dk", "dv"):
            self.tensors[name].fill_(float("nan"))

    def spans(self) -> list[tuple[int, int, int]]:
        """(batch, first token, tokens) of each sequence."""
        p = self.problem
        if p.lengths:
            return [(0, sum(p.lengths[:i]), n) for i, n in enumerate(p.lengths)]
        return [(b, 0, p.queries) for b in range(p.batch)]

    def oracle(self) -> dict[str, torch.Tensor]:
        """fp64, sequence by sequence."""
        p, t = self.problem, self.tensors
        want = {name: torch.zeros_like(t[name], dtype=torch.double) for name in ("out", "lse", "dq", "dk", "dv")}
        group = p.heads // p.key_heads
        for b, start, length in self.spans():
            rows = slice(start, start + length)
            keys = rows if p.lengths else slice(0, p.keys)
            wide = [
                t[n][b, rows if n in ("q", "dout") else keys].double().transpose(0, 1) for n in ("q", "k", "v", "dout")
            ]
            q, k, v, dout = (x.detach().requires_grad_() for x in wide)
            s = q @ k.repeat_interleave(group, 0).transpose(-1, -2) * p.dim**-0.5
            if p.softcap:
                s = p.softcap * torch.tanh(s / p.softcap)
            s = s.masked_fill(~p.visible(s.shape[-2], s.shape[-1]), float("-inf"))
            lse = torch.logsumexp(s, -1)
            seen = torch.isfinite(lse).unsqueeze(-1)
            probabilities = torch.exp(torch.where(seen, s - torch.where(seen, lse.unsqueeze(-1), 0.0), float("-inf")))
            out = probabilities @ v.repeat_interleave(group, 0)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            want["out"][b, rows] = out.detach().transpose(0, 1)
            want["lse"][b, :, rows] = lse.detach()
            want["dq"][b, rows] = grads[0].transpose(0, 1)
            want["dk"][b, keys] = grads[1].transpose(0, 1)
            want["dv"][b, keys] = grads[2].transpose(0, 1)
        return want


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    y = y.double()
    size = y.norm()
    if size == 0:
        return float(x.double().norm())
    return float((x.double() - y).norm() / size)


def check(library: ctypes.CDLL, small: bool) -> int:
    """Wrong cases of a grid of shapes; bits are compared with a second run."""
    cases = [Problem(queries=n, keys=k, key_heads=2) for n, k in [(1, 1), (63, 64), (200, 300), (300, 171), (1, 777)]]
    if not small:
        cases += [Problem(batch=2, queries=n, key_heads=h) for n in (64, 65, 127, 128, 129, 352, 1000) for h in (4, 1)]
        cases += [Problem(batch=40, queries=129, heads=16, key_heads=4), Problem(queries=4096, heads=2)]
        cases += [Problem(queries=2048, growth=20.0), Problem(queries=2048, growth=3.0)]
    problems = []
    for case in cases:
        for dim in (256, 128, 64):
            for right in (-1, 0):
                problems.append(Problem(**{**vars(case), "dim": dim, "dim_v": dim, "right": right}))
    problems += [
        Problem(queries=500, keys=700, dim=d, left=w, right=r) for d in (64, 128, 256) for w, r in [(100, 0), (64, 70)]
    ]
    problems += [Problem(queries=500, keys=300, right=0, bottom_right=False), Problem(queries=300, dim=96, dim_v=40)]
    problems += [Problem(queries=300, dim=136, dim_v=200)]
    problems += [Problem(queries=700, dim=d, right=0, dtype=torch.float16) for d in (64, 128, 256)]
    problems += [Problem(dim=d, right=0, lengths=(150, 1, 3, 700, 64), key_heads=2) for d in (64, 128, 256)]
    problems += [Problem(queries=700, dim=d, right=r, softcap=5.0) for d in (64, 128) for r in (-1, 0)]
    wrong = 0
    worst: dict[str, float] = {}
    for p in problems:
        data = Data(library, p)
        names = ["out", "lse"] if p.softcap else ["out", "lse", "dq", "dk", "dv"]
        runs = []
        for _ in range(2):
            data.poison()
            data.forward()
            if not p.softcap:
                data.backward()
            runs.append([data.tensors[name].clone() for name in names])
        same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        want = data.oracle()
        errors = {name: relative(data.tensors[name], want[name]) for name in names if name != "lse"}
        finite = torch.isfinite(want["lse"])
        off = (data.tensors["lse"].double() - want["lse"])[finite].abs() / want["lse"][finite].abs().clamp_min(20) * 20
        errors["lse"] = float(off.max()) if off.numel() else 0.0
        good = same and bool((torch.isfinite(data.tensors["lse"]) == finite).all())
        # A problem with one key has dq = dk = 0 exactly: what is left is rounding of dP - delta.
        limits = {"out": 6e-3, "lse": 1e-3 if p.growth != 1.0 else 2e-4, "dq": 1e-2, "dk": 1e-2, "dv": 6e-3}
        tiny = p.keys == 1
        good &= all(e <= (0.2 if tiny and n in ("dq", "dk") else limits[n]) for n, e in errors.items())
        if not good:
            wrong += 1
            print(f"WRONG {p}: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()) + f", same bits {same}")
        elif not tiny:
            worst = {n: max(worst.get(n, 0.0), e) for n, e in {**dict.fromkeys(names, 0.0), **errors}.items()} | {
                n: w for n, w in worst.items() if n not in errors
            }
    print(
        f"{len(problems) - wrong} of {len(problems)} cases right; worst "
        + ", ".join(f"{n} {e:.1e}" for n, e in worst.items())
    )
    return wrong


def check_bits(library: ctypes.CDLL, runs: int) -> int:
    """Large problems, on which all multiprocessors compete, many times: cases whose bits differ."""
    wrong = 0
    for p in (
        Problem(batch=2, queries=1000, key_heads=2),
        Problem(queries=8192, heads=8),
        Problem(batch=4, queries=2048, heads=16, key_heads=4),
        Problem(batch=2, queries=4096, heads=16, dim=64),
        Problem(batch=2, queries=2048, heads=8, key_heads=4, dim=256),
        Problem(queries=8192, heads=16, key_heads=2, dim=64, left=700),
        Problem(lengths=tuple(random.Random(1).randint(1, 2000) for _ in range(16)), heads=16),
    ):
        for right in (-1, 0):
            data = Data(library, Problem(**{**vars(p), "right": right}))
            data.forward()
            first: dict[str, torch.Tensor] = {}
            same = True
            for _ in range(runs):
                for name in ("dq", "dk", "dv"):
                    data.tensors[name].fill_(float("nan"))
                data.backward()
                now = {name: data.tensors[name].clone() for name in ("dq", "dk", "dv")}
                first = first or now
                same &= all(torch.equal(first[name], now[name]) for name in now)
            wrong += not same
            print(f"bits over {runs} runs {'the same' if same else 'DIFFER'}: {data.problem}", flush=True)
    return wrong


def cells() -> Iterator[tuple[str, Problem]]:
    for dim in (256, 128, 64):
        for length in (16384, 4096, 1024):
            for right in (-1, 0):
                p = Problem(batch=16384 // length, queries=length, heads=2048 // dim, dim=dim, right=right)
                yield f"D{dim} {length} {'causal' if right == 0 else 'full'}", p
    yield "D64 GPT-2 64x1024x12 causal", Problem(batch=64, queries=1024, heads=12, dim=64, right=0)
    yield "D128 GQA 64:8 8192 causal", Problem(queries=8192, heads=64, key_heads=8, right=0)
    yield "D64 GQA 32:8 8192 causal", Problem(queries=8192, heads=32, key_heads=8, dim=64, right=0)
    yield "D64 window 1024 64:8 32768", Problem(queries=32768, heads=64, key_heads=8, dim=64, left=1023, right=0)
    rng, lengths = random.Random(0), [0][:0]
    while sum(lengths) < 32768:
        lengths.append(min(rng.randint(64, 1984), 32768 - sum(lengths)))
    yield "D128 documents 32768 causal", Problem(lengths=tuple(lengths), heads=16, right=0)
    yield "D128 4096 full float16", Problem(batch=4, queries=4096, heads=16, dtype=torch.float16)
    yield "D128 16384 full, growing maxima", Problem(queries=16384, heads=16, growth=18.0)


@dataclass
class Rival:
    """A forward, its backward, and what they give: out, dq, dk, dv."""

    forward: Callable[[], object]
    backward: Callable[[], object]
    results: list[torch.Tensor]


def sdpa(data: Data, backend: SDPBackend) -> Rival | None:
    """PyTorch's forward and backward of the problem, and its results; None where it has none."""
    p, t = data.problem, data.tensors
    if p.lengths:
        return packed_flash(data) if backend == SDPBackend.FLASH_ATTENTION else None
    if p.left >= 0:
        return None
    q, k, v = (t[name].transpose(1, 2).detach().requires_grad_() for name in "qkv")

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=p.right == 0, enable_gqa=p.heads != p.key_heads
            )

    try:
        out = run()
    except RuntimeError as error:
        print(f"{backend}: {error}"[:200])
        return None
    dout = t["dout"].transpose(1, 2)

    def forward() -> None:
        with torch.no_grad():
            run()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return Rival(forward, backward, [x.detach().transpose(1, 2) for x in (out, *backward())])


def packed_flash(data: Data) -> Rival | None:
    p, t = data.problem, data.tensors
    q, k, v, dout = (t[name][0] for name in ("q", "k", "v", "dout"))
    cu, longest = t["cu"], max(p.lengths)
    operators = torch.ops.aten

    def run() -> tuple[torch.Tensor, ...]:
        return operators._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, p.right == 0, False)

    try:
        out, lse, seed, offset, _ = run()

        def backward() -> tuple[torch.Tensor, ...]:
            return operators._flash_attention_backward(
                dout, q, k, v, out, lse, cu, cu, longest, longest, 0.0, p.right == 0, seed, offset
            )

        grads = backward()
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"packed flash: {error}"[:300])
        return None
    return Rival(run, backward, [x.unsqueeze(0) for x in (out, *grads)])


def timed(competitors: dict[str, Callable[[], object]], flops: float, rounds: int) -> dict[str, list[float]]:
    """TFLOP/s of each round."""
    repeats = max(3, int(BURST_FLOPS / flops))
    speeds: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(rounds + 1):
        for name in random.sample(list(competitors), len(competitors)):
            time.sleep(IDLE_S)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            competitors[name]()
            start.record()
            for _ in range(repeats):
                competitors[name]()
            stop.record()
            stop.synchronize()
            if turn:
                speeds[name].append(flops * repeats / start.elapsed_time(stop) / 1e9)
    return speeds


def measure(library: ctypes.CDLL, only: str, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(
        f"{'cell':34} {'pass':8} {'ours':>6} {'cuDNN':>6} {'flash':>6}   ours/cuDNN  spread   "
        "differs from cuDNN, else flash"
    )
    for name, p in cells():
        if only not in name:
            continue
        data = Data(library, p)
        data.poison()
        data.forward()
        data.backward()
        rivals = {"cuDNN": sdpa(data, SDPBackend.CUDNN_ATTENTION), "flash": sdpa(data, SDPBackend.FLASH_ATTENTION)}
        have = {who: rival for who, rival in rivals.items() if rival is not None}
        reference = next((rival.results for rival in have.values()), None)
        errors = []
        if reference is not None:
            results = [data.tensors[x] for x in ("out", "dq", "dk", "dv")]
            errors = [relative(a, b) for a, b in zip(results, reference, strict=True)]
        flops = 4 * p.heads * p.pairs() * p.dim
        for index, which in enumerate(("forward", "backward")):
            competitors = {who: getattr(x, which) for who, x in {"ours": data, **have}.items()}
            speeds = timed(competitors, flops * (2.5 if index else 1.0), rounds)
            medians = {who: statistics.median(s) for who, s in speeds.items()}
            spread = max((max(s) - min(s)) / statistics.median(s) for s in speeds.values())
            cudnn = medians.get("cuDNN")
            line = f"{name:34} {which:8} {medians['ours']:6.0f} " + (f"{cudnn:6.0f} " if cudnn else "     - ")
            line += (f"{medians['flash']:6.0f}" if "flash" in medians else "     -") + "   "
            line += (f"{medians['ours'] / cudnn:9.2f}x" if cudnn else "         -") + f"  {spread:6.1%}   "
            shown = errors[:1] if index == 0 else errors[1:]
            print(line + " ".join(f"{e:.1e}" for e in shown), flush=True)
            rows.append({"cell": name, "pass": which, "tflops": medians, "spread": spread, "errors": shown})
        del data, rivals, have, reference
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--small", action="store_true", help="few small cases, for the sanitizer")
    parser.add_argument("--only", default="", help="measure cells whose name contains this")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--runs", type=int, default=20, help="repeats of the check of bits")
    arguments = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        library = compiled(Path(folder))
        seconds = time.perf_counter() - started
        print(f"compiled in {seconds:.0f} s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
        wrong = check(library, arguments.small)
        if not arguments.small:
            wrong += check_bits(library, arguments.runs)
        rows: list[dict[str, object]] = []
        if not arguments.check and not arguments.small:
            rows = measure(library, arguments.only, arguments.rounds)
    with contextlib.suppress(KeyError):
        (Path(os.environ["OUT"]) / "attention.json").write_text(json.dumps({"wrong": wrong, "rows": rows}, indent=1))
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
