"""Train on many ranks with a sharded optimizer (ZeRO): each rank keeps a part of the states. One file.

    python examples/zero.py                                       one process
    torchrun --nproc-per-node 2 examples/zero.py                  two: GPUs where there are any, else CPU processes
    torchrun --nproc-per-node 2 examples/zero.py --steps 80       again: goes on from the newest checkpoint

The model is bfloat16, with float32 masters and states in the optimizer. It fits a small network to a function, with two
micro-batches a step and clipping. The checkpoint holds whole states: any number of ranks goes on from it.
"""

import argparse
from collections.abc import Iterator

import torch
import warpsmith

SAMPLES, WIDTH, SEED = 512, 192, 1
MICRO_BATCHES = 2


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane and a function of them, the same on every rank."""
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(SEED)) * 4 - 2
    return x, torch.sin(x[:, :1]) + x[:, 1:] ** 2 / 2


def build() -> torch.nn.Module:
    """The model, with the same values on every rank: nothing broadcasts them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [torch.nn.Linear(2, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU()]
        return torch.nn.Sequential(*layers, warpsmith.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, 1)).bfloat16()


def batches(sampler: warpsmith.distributed.ResumableSampler, size: int) -> Iterator[list[int]]:
    """Endless batches of indices."""
    batch = []
    while True:
        for index in sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/zero", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--batch", type=int, default=16, help="samples a micro-batch, of each rank")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()

    with (
        warpsmith.distributed.init(device=args.device, seed=SEED) as ctx,
        warpsmith.train.Checkpointer(args.out) as saved,
    ):
        log = ctx.logger("zero")
        x, y = (t.to(ctx.device, torch.bfloat16) for t in dataset())
        model = build().to(ctx.device)
        optimizer = warpsmith.distributed.ShardedOptimizer(
            model.parameters(), warpsmith.optim.AdamW, stage=args.stage, lr=1e-2, precision="master"
        )
        sampler = warpsmith.distributed.ResumableSampler(SAMPLES, seed=SEED, rank=ctx.rank, world_size=ctx.world_size)
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}

        def loss_of(batch: list[int]) -> torch.Tensor:
            return (model(x[batch]).float() - y[batch].float()).square().mean() / MICRO_BATCHES

        step = saved.load(**parts) or 0
        log.info("%d ranks on %s, from step %d", ctx.world_size, ctx.device.type, step)
        stream = batches(sampler, args.batch)
        while step < args.steps:
            with optimizer.no_sync():
                for _ in range(MICRO_BATCHES - 1):
                    loss_of(next(stream)).backward()
            loss = loss_of(next(stream))
            loss.backward()  # reduces the gradients of all micro-batches
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                saved.save(step, **parts)
                log.info("step %d loss %.9f", step, loss.item() * MICRO_BATCHES)
        held = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
        log.info("rank %d holds %d bytes of states", ctx.rank, held, extra={"all_ranks": True})


if __name__ == "__main__":
    main()
