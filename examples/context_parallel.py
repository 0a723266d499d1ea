"""Train on sequences that lie on several ranks: context parallel attention. One file.

    python examples/context_parallel.py                                            one process
    torchrun --nproc-per-node 2 examples/context_parallel.py                       each holds half of every sequence
    torchrun --nproc-per-node 2 examples/context_parallel.py --mode ring           or ulysses

A small language model learns to repeat: the second half of a sequence is the first half again, so that its tokens can
only be told by attention over half the sequence, across ranks. The losses do not depend on the number of ranks, but for
rounding.
"""

import argparse

import torch
import warpsmith
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import context_parallel_attention, shard_sequence

VOCABULARY, WIDTH, HEADS, HEAD_DIM, LAYERS, SEED = 32, 64, 4, 16, 2, 1


class Block(torch.nn.Module):
    """Attention and an MLP, each behind a norm. Attention alone knows that there are other ranks."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.norms = torch.nn.ModuleList([warpsmith.nn.RMSNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = warpsmith.nn.GatedMLP(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = warpsmith.rope(q, k, cos, sin)
        heads = context_parallel_attention(q, k, v, causal=True, mode=self.mode)
        x = x + self.out(heads.flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(mode) for _ in range(LAYERS)])
        self.norm, self.head = warpsmith.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotations(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of this rank's positions in the whole sequence. No buffers of the model: DDP makes those equal."""
    angles = torch.outer(torch.arange(tokens), 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    return shard_sequence(angles.cos(), 0), shard_sequence(angles.sin(), 0)


def batch(step: int, size: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences and their labels, the same on every rank. Labels are shifted here, before anything is cut."""
    draw = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    half = torch.randint(VOCABULARY, (size, tokens // 2 + 1), generator=draw)
    ids = torch.cat([half[:, :-1], half[:, :-1], half[:, :1]], 1)
    return ids[:, :-1], ids[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("all_gather", "ring", "ulysses"), default="all_gather")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence, on all ranks together")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()

    with warpsmith.distributed.init(device=args.device) as ctx:
        log = ctx.logger("context_parallel")
        torch.manual_seed(SEED)
        model = Model(args.mode).to(ctx.device)
        cos, sin = (t.to(ctx.device) for t in rotations(args.tokens))
        # Every rank has its tokens' part of the gradients. DDP averages them, as for parts of a batch.
        ddp = DistributedDataParallel(model, device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None)
        optimizer = warpsmith.optim.AdamW(ddp.parameters(), lr=3e-3)
        log.info("%d ranks, %s, %d tokens each", ctx.world_size, args.mode, args.tokens // ctx.world_size)
        for step in range(1, args.steps + 1):
            ids, labels = (shard_sequence(t).to(ctx.device) for t in batch(step, args.batch, args.tokens))
            loss = torch.nn.functional.cross_entropy(ddp(ids, cos, sin).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0 or step == args.steps:
                mean = loss.detach() / ctx.world_size
                if ctx.world_size > 1:
                    torch.distributed.all_reduce(mean)
                log.info("step %d loss %.6f", step, mean.item())


if __name__ == "__main__":
    main()
