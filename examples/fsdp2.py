"""Train under FSDP2 (``fully_shard``): parameters, gradients and states shared out by torch, our modules and optimizer.

    python examples/fsdp2.py                                       one process
    torchrun --nproc-per-node 2 examples/fsdp2.py                  two: GPUs where there are any, else CPU processes

Each block is gathered in bfloat16 before it runs and dropped afterwards; gradients are summed in float32. The optimizer
updates each rank's shards of the float32 parameters in one launch, and the norm for clipping is that of all shards.
"""

import argparse

import torch
import warpsmith
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SAMPLES, WIDTH, BLOCKS, SEED = 512, 64, 3, 1


class Block(torch.nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = warpsmith.nn.RMSNorm(WIDTH), warpsmith.nn.GatedMLP(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane and a function of them, the same on every rank."""
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(SEED)) * 4 - 2
    return x, torch.sin(x[:, :1]) + x[:, 1:] ** 2 / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="samples a step, of all ranks")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the forward")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()

    with warpsmith.distributed.init(device=args.device, seed=SEED) as ctx:
        log = ctx.logger("fsdp2")
        x, y = (t.to(ctx.device) for t in dataset())
        torch.manual_seed(SEED)  # the same values on all ranks: each keeps its shards of its own
        blocks = [Block() for _ in range(BLOCKS)]
        model = torch.nn.Sequential(torch.nn.Linear(2, WIDTH), *blocks, torch.nn.Linear(WIDTH, 1)).to(ctx.device)
        sharding = {
            "mesh": ctx.mesh(data=ctx.world_size),
            "mp_policy": MixedPrecisionPolicy(getattr(torch, args.compute), torch.float32),
        }
        for block in blocks:
            fully_shard(block, **sharding)
        fully_shard(model, **sharding)
        optimizer = warpsmith.optim.AdamW(model.parameters(), lr=3e-3)
        sampler = warpsmith.distributed.ResumableSampler(SAMPLES, seed=SEED, rank=ctx.rank, world_size=ctx.world_size)

        log.info("%d ranks on %s", ctx.world_size, ctx.device.type)
        stream = (index for _ in iter(int, 1) for index in sampler)  # epoch after epoch
        for step in range(1, args.steps + 1):
            batch = [next(stream) for _ in range(args.batch // ctx.world_size)]
            loss = (model(x[batch]).float() - y[batch]).square().mean()
            loss.backward()
            norm = warpsmith.optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == args.steps:
                total = loss.detach() / ctx.world_size
                torch.distributed.all_reduce(total)
                log.info("step %d loss %.6f norm %.6f", step, total.item(), norm.item())


if __name__ == "__main__":
    main()
