"""A model of many dtypes and uneven sizes, and its training by DDP with ``accurate_hook`` beside a ShardedOptimizer."""

import copy

import torch
import warpsmith
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import ShardedOptimizer, accurate_hook

# dtype, shape, precision of its group. Some are longer than what is cut at (16,384 on the CPU).
PARAMS = [
    (torch.float32, (50_001,), None),
    (torch.float32, (33, 7), "bf16_states"),
    (torch.bfloat16, (20_011,), "bf16"),
    (torch.bfloat16, (129,), "master"),
    (torch.float16, (17_000,), "master"),
    (torch.float32, (), "fp32"),
    (torch.float64, (33,), "fp32"),
    (torch.float32, (4, 3, 5, 5), None),  # channels_last
    (torch.float16, (16_385,), "bf16"),
    (torch.float32, (16_384,), "master"),
    (torch.bfloat16, (40,), "bf16_states"),
    (torch.bfloat16, (16_400,), "bf16_sr"),
    (torch.bfloat16, (17_003,), "remainder"),
    (torch.bfloat16, (300,), "bf16_kahan"),
]

LONGEST = 200_003


class Uneven(torch.nn.Module):
    def __init__(self, params=PARAMS):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=draw).to(dtype) for dtype, shape, _ in params]
        weights = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, x, unused=()):
        used = [w for i, w in enumerate(self.weights) if i not in unused]
        return sum((w * x[: w.numel()].view(w.shape).to(w.dtype)).float().square().sum() for w in used) * 0.05

    def groups(self, params=PARAMS):
        precisions = list(dict.fromkeys(precision for _, _, precision in params))
        owners = [precision for _, _, precision in params]
        return [
            {
                "params": [w for w, o in zip(self.weights, owners, strict=True) if o == p],
                **({} if p is None else {"precision": p}),
                **({"lr": 0.02} if p == "bf16" else {}),
            }
            for p in precisions
        ]


def input_of(rank, step, micro=0):
    draw = torch.Generator().manual_seed(10_000 * rank + 10 * step + micro)
    return torch.randn(LONGEST, generator=draw)


class Pair:
    """The same model trained twice: ``ours`` by a ShardedOptimizer, ``theirs`` by DDP and the plain optimizer."""

    def __init__(
        self, rank, group, optimizer_class=warpsmith.optim.AdamW, *, stage=1, params=PARAMS, device="cpu", **options
    ):
        self.rank, self.group, self.device = rank, group, device
        sharding = {k: options.pop(k) for k in ("bucket_cap_mb", "wire", "find_unused_parameters") if k in options}
        self.ours, model = Uneven(params).to(device), Uneven(params).to(device)
        self.sharded = ShardedOptimizer(
            self.ours.groups(params), optimizer_class, stage=stage, process_group=group, **sharding, **options
        )
        unused = sharding.get("find_unused_parameters", False)
        self.theirs = DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
        self.theirs.register_comm_hook(group, accurate_hook(wire=sharding.get("wire", torch.bfloat16)))
        self.plain = optimizer_class(model.groups(params), **copy.deepcopy(options))

    def backward(self, step, micros=1, unused=(), scale=1.0):
        for micro in range(micros):
            last = micro == micros - 1
            x = input_of(self.rank, step, micro).to(self.device)
            for model, owner in ((self.ours, self.sharded), (self.theirs, self.theirs)):
                if last:
                    (model(x, unused) * scale).backward()
                else:
                    with owner.no_sync():
                        (model(x, unused) * scale).backward()

    def clip(self, max_norm):
        norm = self.sharded.clip_grad_norm_(max_norm)
        in_order = [p for group in self.plain.param_groups for p in group["params"]]
        expected = warpsmith.optim.clip_grad_norm_(in_order, max_norm)
        assert norm.dtype == expected.dtype
        assert torch.equal(norm, expected), (norm, expected)

    def step(self, **scaling):
        """scaling: ``grad_scale`` and ``found_inf``; one rank alone finds something in the sharded gradients."""
        for optimizer in (self.sharded, self.plain):
            for name, value in scaling.items():
                alone = name == "found_inf" and optimizer is self.sharded and self.rank != 0
                setattr(optimizer, name, torch.tensor(0.0 if alone else value, device=self.device))
            optimizer.step()
            for name in scaling:
                delattr(optimizer, name)
            optimizer.zero_grad()

    def check(self, step):
        for i, (a, b) in enumerate(zip(self.ours.weights, self.theirs.module.weights, strict=True)):
            assert a.isfinite().all()
            assert torch.equal(a, b), f"step {step}: parameter {i}: {(a != b).sum()} of {a.numel()} differ"

    def check_state(self):
        """All states too, on rank 0; and what holds states holds those of fragments alone."""
        self.sharded.consolidate_state_dict()
        if self.rank != 0:
            return None
        ours, theirs = self.sharded.state_dict(), self.plain.state_dict()
        assert same(ours, theirs)
        return ours


def same(a, b):
    """Whether two state dictionaries have the same entries, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b
