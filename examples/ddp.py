"""Train on many ranks: launch, accurate gradient reduction, checkpoints, exact resume. One file.

    python examples/ddp.py                                       one process
    torchrun --nproc-per-node 2 examples/ddp.py                  two: GPUs where there are any, else CPU processes
    torchrun --nproc-per-node 2 examples/ddp.py --steps 80       again: goes on from the newest checkpoint

It fits a small network to a function. A run that is killed and started again ends with the losses of one that was not;
with another number of ranks it goes on with the samples that have not been seen.
"""

import argparse

import torch
import warpsmith
from torch.nn.parallel import DistributedDataParallel

SAMPLES, WIDTH, SEED = 512, 64, 1


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane and a function of them, the same on every rank."""
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(SEED)) * 4 - 2
    return x, torch.sin(x[:, :1]) + x[:, 1:] ** 2 / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/ddp", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="samples a step, of each rank")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()

    with (
        warpsmith.distributed.init(device=args.device, seed=SEED) as ctx,
        warpsmith.train.Checkpointer(args.out) as saved,
    ):
        log = ctx.logger("ddp")
        x, y = (t.to(ctx.device) for t in dataset())
        model = torch.nn.Sequential(
            torch.nn.Linear(2, WIDTH), torch.nn.SiLU(), warpsmith.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, 1)
        ).to(ctx.device)
        ddp = DistributedDataParallel(model, device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None)
        ddp.register_comm_hook(None, warpsmith.distributed.accurate_hook)
        optimizer = warpsmith.optim.AdamW(ddp.parameters(), lr=1e-2)
        sampler = warpsmith.distributed.ResumableSampler(SAMPLES, seed=SEED, rank=ctx.rank, world_size=ctx.world_size)
        parts = {"model": ddp, "optimizer": optimizer, "sampler": sampler}

        step = saved.load(**parts) or 0
        log.info("%d ranks on %s, from step %d", ctx.world_size, ctx.device.type, step)
        indices = iter(sampler)
        while step < args.steps:
            batch = []
            while len(batch) < args.batch:
                index = next(indices, None)
                if index is None:  # the epoch's end
                    indices = iter(sampler)
                else:
                    batch.append(index)
            optimizer.zero_grad()
            loss = (ddp(x[batch]) - y[batch]).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                saved.save(step, **parts)
                log.info("step %d loss %.9f", step, loss.item())


if __name__ == "__main__":
    main()
