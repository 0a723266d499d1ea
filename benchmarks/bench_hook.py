"""What many ranks cost: gradient reduction, the sharded optimizer's step, linear layers with a main_grad, scales of
FP8, batch norm's statistics, GPT-2 and ResNet-50 on more GPUs, context parallelism, and being watched.

    torchrun --nproc-per-node 2 -m benchmarks.bench_hook                     on GPUs: all parts
    torchrun --nproc-per-node 2 -m benchmarks.bench_hook --parts reduce,step
    torchrun --nproc-per-node 2 -m benchmarks.bench_hook --device cpu --quick    does the script itself work?

Contenders of a part take turns. A time is the median over the rounds of the slowest rank's.
"""

import argparse
import functools
import gc
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import warpsmith
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import ShardedOptimizer, accurate_hook, context_parallel_attention, reduction_plan

from benchmarks.bench_train import GPT2_PRESETS, example, gpt2_example

OPS = {}  # none for `python -m benchmarks`, which is one process
MIB = 1 << 20
FIRST_STEPS = 14  # until a step under DDP is replayed


class Bench:
    """The ranks, and the rows that rank 0 prints."""

    def __init__(self, ctx, quick):
        self.ctx, self.quick, self.device, self.rows = ctx, quick, ctx.device, []

    def say(self, part, what, name, value, unit, **more):
        row = {"part": part, "what": what, "name": name, "value": value, "unit": unit} | more
        self.rows.append(row)
        if self.ctx.rank == 0:
            extra = " ".join(f"{k} {v}" for k, v in more.items())
            print(f"{part:8} {what:24} {name:28} {value:12.4f} {unit} {extra}\n", end="", flush=True)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, call, repeats):
        """Milliseconds of a call, the slowest rank's."""
        self.synchronize()
        dist.barrier()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self.synchronize()
        ms = torch.tensor((time.perf_counter() - began) * 1e3 / repeats, device=self.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return float(ms)

    def times(self, calls, rounds, repeats):
        """{name: median milliseconds}; the contenders take turns."""
        rounds, repeats = (1, 1) if self.quick else (rounds, repeats)
        for call in calls.values():
            for _ in range(1 if self.quick else 3):
                call()
        found = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                found[name].append(self.once(call, repeats))
        return {name: statistics.median(values) for name, values in found.items()}


def reduce_part(bench):
    """Reduction of a bucket of float32 gradients; casts are counted."""
    if bench.ctx.rank == 0:
        print(f"reduce   {reduction_plan(device=bench.device)}\n", end="", flush=True)
    else:
        reduction_plan(device=bench.device)
    for mib in (1,) if bench.quick else (1, 16, 64, 1024):
        gradients = torch.randn(mib * MIB // 4, device=bench.device)
        bucket = SimpleNamespace(buffer=lambda gradients=gradients: gradients, parameters=list)
        calls = {
            "all-reduce float32": functools.partial(all_reduce_mean, gradients),
            "all-reduce bfloat16": functools.partial(all_reduce_bfloat16, gradients),
            "all-reduce bfloat16, no cast": functools.partial(dist.all_reduce, gradients.bfloat16()),
            "accurate_hook": lambda bucket=bucket: accurate_hook(None, bucket).wait(),
        }
        times = bench.times(calls, 7, max(2, 512 // mib) if mib < 1024 else 5)
        base, lowest = times["all-reduce float32"], times["all-reduce bfloat16, no cast"]
        for name, ms in times.items():
            bench.say(
                "reduce", f"{mib} MiB", name, ms, "ms", of_fp32=round(ms / base, 3), of_bf16=round(ms / lowest, 3)
            )


def all_reduce_mean(gradients):
    dist.all_reduce(gradients)
    gradients.div_(dist.get_world_size())


def all_reduce_bfloat16(gradients):
    """As torch's bf16_compress_hook."""
    sent = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    dist.all_reduce(sent)
    gradients.copy_(sent)


class Sums(torch.nn.Module):
    """Parameters whose backward is little but to write their gradients."""

    def __init__(self, count, numel, device):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.full((numel,), 0.5, device=device) for _ in range(count)])

    def forward(self, _):
        return sum(Fill.apply(w) for w in self.weights)


class Fill(torch.autograd.Function):
    """0, with a gradient of ones."""

    @staticmethod
    def forward(ctx, w):
        ctx.like = w
        return w.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        return torch.ones_like(ctx.like)


def adamw_of(bench):
    """AdamW over 1e9 parameters: their number, and what makes a model with its optimizer, under DDP and sharded."""
    count, numel = (3, 1000) if bench.quick else (40, 25_000_000)
    ids = [bench.device.index] if bench.device.type == "cuda" else None

    def ddp(hook=None):
        model = Sums(count, numel, bench.device)
        loss = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        if hook:
            loss.register_comm_hook(None, hook)
        return loss, warpsmith.optim.AdamW(model.parameters(), lr=1e-6)

    def sharded(stage):
        model = Sums(count, numel, bench.device)
        return model, ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW, stage=stage, lr=1e-6)

    return f"{count * numel:.0e} parameters", ddp, sharded


def step_part(bench):
    """Backward and step of AdamW over 1e9 parameters: all that is not the model's."""
    what, ddp, sharded = adamw_of(bench)
    makers = {
        "DDP, AdamW": ddp,
        "DDP, accurate_hook, AdamW": lambda: ddp(accurate_hook),
        "ShardedOptimizer, stage 1": lambda: sharded(1),
        "ShardedOptimizer, stage 2": lambda: sharded(2),
    }
    calls, peaks = {}, {}
    for name, make in makers.items():
        before = memory(bench)
        calls[name] = functools.partial(train_step, *make())
        calls[name]()
        calls[name]()
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        calls[name]()
        peaks[name] = ((torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0) - before) / 1e9
    times = bench.times(calls, 5, 3)
    for name, ms in times.items():
        bench.say("step", what, name, ms, "ms", of_ddp=round(ms / times["DDP, AdamW"], 3),
                  peak_gb=round(peaks[name], 2))  # fmt: skip


def clip_part(bench):
    """Backward, clipping and step of AdamW over 1e9 parameters: with norms that read the gradients, and kept ones."""
    what, ddp, sharded = adamw_of(bench)
    calls = {}
    for name, hook in {"accurate_hook": accurate_hook, "with keep_norm": accurate_hook(keep_norm=True)}.items():
        loss, optimizer = ddp(hook)
        clip = functools.partial(warpsmith.optim.clip_grad_norm_, list(loss.parameters()))
        calls[name] = functools.partial(train_step, loss, optimizer, clip)
    model, optimizer = sharded(2)
    calls["ShardedOptimizer, stage 2"] = functools.partial(train_step, model, optimizer, optimizer.clip_grad_norm_)
    times = bench.times(calls, 5, 3)
    for name, ms in times.items():
        bench.say("clip", what, name, ms, "ms", of_read=round(ms / times["accurate_hook"], 3))


def main_grad_part(bench):
    """Four micro-batches through linear layers and a step: gradients of each micro-batch added apart, and inside their
    product. Large layers fill a bucket each; of small ones several share one, with biases, which have no main_grad.
    `hidden`: how much of NCCL's time other kernels ran in; set WARPSMITH_PEER_MEMORY=0 for it. On the CPU the layers
    are tiny: what the host does for them is all there is."""
    gpu, cpu = ((12, 4096, 8192, False), (48, 1024, 16384, True)), ((48, 8, 8, True),)
    quick = ((2, 64, 32, False), (3, 32, 32, True))
    for sizes in quick if bench.quick else gpu if bench.device.type == "cuda" else cpu:
        main_grad_of(bench, *sizes)


def main_grad_of(bench, layers, width, rows, bias):
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    x = torch.randn(rows, width, device=bench.device, dtype=dtype)
    ids = [bench.device.index] if bench.device.type == "cuda" else None

    def make(sharded, fused):
        torch.manual_seed(0)
        linear = functools.partial(warpsmith.nn.Linear, width, width, bias=bias, fuse_main_grad=fused)
        model = torch.nn.Sequential(*(linear(device=bench.device, dtype=dtype) for _ in range(layers)))
        for layer in model if fused else ():
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        main_grads = [layer.weight.main_grad for layer in model] if fused and not sharded else []
        if sharded:
            optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, stage=2, lr=1e-6)
            loss, no_sync = model, optimizer.no_sync
        else:
            loss = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
            loss.register_comm_hook(None, accurate_hook)
            optimizer, no_sync = warpsmith.optim.SGD(model.parameters(), lr=1e-6), loss.no_sync

        def step():
            with no_sync():
                for _ in range(3):
                    loss(x).sum().backward()
            loss(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if main_grads:
                torch._foreach_zero_(main_grads)

        return step

    for name, sharded in {"accurate_hook": False, "ShardedOptimizer, stage 2": True}.items():
        calls = {"gradients": make(sharded, False), "main_grad": make(sharded, True)}
        times = bench.times(calls, *((7, 3) if bench.device.type == "cuda" else (25, 20)))
        for kind, ms in times.items():
            more = {"of_gradients": round(ms / times["gradients"], 4), "hidden": hidden_part(bench, calls[kind])}
            bench.say("main_grad", f"{layers} x {width}, {name}", kind, ms, "ms", **more)


def hidden_part(bench, call):
    """The part of the collectives' time on this rank in which other kernels ran, of five steps."""
    if bench.device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        bench.once(call, 5)
    spans = {True: [], False: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    total = sum(end - begin for begin, end in spans[True])
    shared = sum(max(0, min(e, f) - max(b, s)) for b, e in spans[True] for s, f in spans[False])
    return round(shared / total, 3) if total else None


def fp8_part(bench):
    """A step of GPT-2 under DDP in FP8 with delayed scales: of each rank alone, and the largest of all."""
    preset, recipe, steps = gpt2_of(bench)
    calls = {"scales of a rank": steps(together_of(bench), fp8="delayed")}
    calls["scales of all ranks"] = steps(together_of(bench), fp8="delayed")
    calls["scales of a rank"].run.fp8.group = None
    times = bench.times(calls, 9, 4)
    for name, ms in times.items():
        bench.say("fp8", f"{preset} {recipe.batch} a rank, two steps", name, ms, "ms",
                  of_alone=round(ms / times["scales of a rank"], 4))  # fmt: skip


def batch_norm_part(bench):
    """Batch norm over the ranks, forward and backward, of shapes of ResNet-50. torch's takes tensors of a GPU alone."""
    shapes = ((2, 16, 4, 4),) if bench.quick else ((128, 64, 112, 112), (128, 256, 56, 56), (128, 512, 7, 7))
    for shape in shapes:
        x, dy = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x.requires_grad_(), dy))
        kinds = {"warpsmith": warpsmith.nn.SyncBatchNorm}
        kinds |= {"torch": torch.nn.SyncBatchNorm} if bench.device.type == "cuda" else {}
        calls = {}
        for name, kind in kinds.items():
            norm = kind(shape[1], device=bench.device)
            leaves = [x, *norm.parameters()]
            calls[name] = functools.partial(gradients_of, norm, leaves, dy)
        times = bench.times(calls, 7, 20)
        for name, ms in times.items():
            bench.say("batch_norm", "x".join(map(str, shape)), name, ms, "ms",
                      of_torch=round(ms / times["torch"], 3) if "torch" in times else None)  # fmt: skip


def gradients_of(norm, leaves, dy):
    return torch.autograd.grad(norm(leaves[0]), leaves, dy)


def memory(bench):
    return torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0


def train_step(loss, optimizer, clip=None):
    loss(0).backward()
    if clip:
        clip(1e9)  # larger than the norm: nothing is scaled
    optimizer.step()
    optimizer.zero_grad()


def gpt2_of(bench):
    """The recipe of a preset, and what makes two steps of GPT-2 for some ranks and flags."""
    preset = GPT2_PRESETS[bench.device.type]
    gpt, recipe = gpt2_example(preset, bench.quick)

    def steps(ranks, **flags):
        mine = SimpleNamespace(**vars(recipe) | {"batch": recipe.batch * ranks.world} | flags)
        run = gpt.Run(mine, "warpsmith", ranks)
        data = gpt.Data(mine, None, ranks)
        batches = [data.batch(i) for i in range(2)]
        call = functools.partial(lambda run, batches: [run.step(tokens) for tokens in batches], run, batches)
        call.run = run
        return call

    return preset, recipe, steps


def together_of(bench):
    return SimpleNamespace(rank=bench.ctx.rank, world=bench.ctx.world_size, first=False, device=bench.device)


def gpt2_part(bench):
    """GPT-2 124M of examples/train_gpt.py: a rank alone, and all together."""
    preset, recipe, steps = gpt2_of(bench)
    together = together_of(bench)
    calls = {"alone": steps(SimpleNamespace(rank=0, world=1, first=True, device=bench.device))}
    if bench.ctx.world_size > 1:
        calls |= {
            "DDP": steps(together),
            "DDP, accurate_hook": steps(together, reduce="bfloat16"),
            "ShardedOptimizer": steps(together, reduce="bfloat16", shard="states"),
        }
    times = bench.times(calls, 5, 4)
    for name, ms in times.items():
        rate = 2 * recipe.batch * recipe.context / ms
        bench.say("gpt2", f"{preset} {recipe.batch} a rank", name, rate, "k tokens/s a rank",
                  of_alone=round(times["alone"] / ms, 4))  # fmt: skip


def resnet_part(bench):
    """ResNet-50 of examples/train_resnet.py: a rank alone, and all together, eager and captured."""
    train_resnet = example("train_resnet")
    args = train_resnet.parse(["--preset", "digits" if bench.quick else "resnet50"])
    size, classes = (8, 10) if bench.quick else (224, 1000)
    images = torch.randn(args.batch, 3, size, size, device=bench.device).to(memory_format=torch.channels_last)
    batch = {"images": images, "labels": torch.randint(classes, (args.batch,), device=bench.device)}
    calls = {}
    for captured in (False, True)[: 1 if bench.device.type == "cpu" else 2]:
        for name, world in {"alone": 1, "DDP": bench.ctx.world_size}.items():
            mine = SimpleNamespace(**vars(args) | {"captured": captured})
            run = train_resnet.Run(mine, SimpleNamespace(device=bench.device, world_size=world), classes, bench.quick)
            calls[name + ", captured" * captured] = functools.partial(run.step, 0, batch)
            for _ in range(FIRST_STEPS * captured):
                run.step(0, batch)
            if captured and run.update.fallback_reason:
                print(f"resnet   {name}: not captured: {run.update.fallback_reason}\n", end="", flush=True)
    times = bench.times(calls, 5, 10)
    for name, ms in times.items():
        alone = times["alone" + name.removeprefix("alone").removeprefix("DDP")]
        bench.say("resnet", f"{args.preset} {args.batch} a rank", name, args.batch / ms, "k images/s a rank",
                  of_alone=round(alone / ms, 4))  # fmt: skip


def context_part(bench):
    """Causal attention over one long sequence, forward and backward."""
    tokens, heads, dim = (64, 2, 16) if bench.quick else (65_536, 16, 128)
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    ranks = bench.ctx.world_size

    def both(count, attend):
        q, k, v, out = (torch.randn(1, count, heads, dim, device=bench.device, dtype=dtype) for _ in range(4))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        return lambda: torch.autograd.grad(attend(*inputs), inputs, out)

    calls = {"one rank": both(tokens, functools.partial(warpsmith.attention, causal=True))}
    for mode in ("all_gather", "ring", "ulysses"):
        attend = functools.partial(context_parallel_attention, mode=mode, causal=True)
        calls[mode] = both(tokens // ranks, attend)
    times = bench.times(calls, 3, 1)
    for name, ms in times.items():
        share = times["one rank"] / ms / (1 if name == "one rank" else ranks)
        bench.say("context", f"{tokens} tokens", name, ms, "ms", efficiency=round(share, 3))


def watch_part(bench):
    """A step of GPT-2 under DDP with and without ``watch``, and a small collective. Goal: below 1 % of a step.

    Time of the CPU is that of all threads of this rank: other programs of the machine are not in it."""
    preset, _, steps = gpt2_of(bench)
    small, loss = torch.zeros(1, device=bench.device), torch.ones((), device=bench.device)
    run = steps(together_of(bench))
    calls = {
        f"{preset}, two steps": (run, 4),
        "all_reduce of 4 bytes": (functools.partial(dist.all_reduce, small), 500),
    }
    for what, (call, repeats) in calls.items():
        found = {"alone": [], "watched": []}
        rounds, repeats = (1, 1) if bench.quick else (9, repeats)
        for _ in range(1 if bench.quick else 3):
            call()
        for _ in range(rounds):
            found["alone"].append(wall_and_cpu(bench, call, repeats))
            with warpsmith.distributed.watch(timeout_s=600) as watching:
                watched = functools.partial(watched_step, watching, call, loss) if "step" in what else call
                found["watched"].append(wall_and_cpu(bench, watched, repeats))
        times = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        for name, (ms, cpu) in times.items():
            alone = times["alone"]
            bench.say("watch", what, name, ms, "ms", of_alone=round(ms / alone[0], 4), cpu_ms=round(cpu, 4),
                      cpu_of_alone=round(cpu / alone[1], 4))  # fmt: skip


def wall_and_cpu(bench, call, repeats):
    """Milliseconds of a call by the clock, the slowest rank's; and of this rank's threads."""
    began = time.process_time()
    ms = bench.once(call, repeats)
    return ms, (time.process_time() - began) * 1e3 / repeats


def watched_step(watching, call, loss):
    call()
    watching.step(loss=loss)


PARTS = {
    "reduce": reduce_part,
    "step": step_part,
    "clip": clip_part,
    "main_grad": main_grad_part,
    "fp8": fp8_part,
    "batch_norm": batch_norm_part,
    "gpt2": gpt2_part,
    "resnet": resnet_part,
    "context": context_part,
    "watch": watch_part,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="next to nothing to do")
    parser.add_argument("--json", type=Path, help="rank 0 writes its rows there")
    args = parser.parse_args()
    with warpsmith.distributed.init(device=args.device) as ctx:
        bench = Bench(ctx, args.quick)
        for name in args.parts.split(","):
            began = time.perf_counter()
            PARTS[name](bench)
            gc.collect()
            if ctx.device.type == "cuda":
                torch.cuda.empty_cache()
            if ctx.rank == 0:
                print(f"{name:8} took {time.perf_counter() - began:.1f} s\n", end="", flush=True)
        if args.json and ctx.rank == 0:
            place = {"ranks": ctx.world_size, "device": str(ctx.device), "torch": torch.__version__}
            if ctx.device.type == "cuda":
                place["gpu"] = torch.cuda.get_device_name()
            args.json.write_text(json.dumps(place | {"rows": bench.rows}, indent=1))


if __name__ == "__main__":
    main()
