"""Training on many ranks, over torch.distributed: launch, data order, gradient reduction, sharded optimizers, context
parallel, reports of hangs, and what a step on many ranks will take."""

from warpsmith.distributed import plan
from warpsmith.distributed.context.attention import context_parallel_attention
from warpsmith.distributed.context.sequence import shard_sequence, unshard_sequence
from warpsmith.distributed.gradients.hook import accurate_hook, reduction_plan
from warpsmith.distributed.launch.context import Context, init
from warpsmith.distributed.launch.output import RankFilter
from warpsmith.distributed.sampler import ResumableSampler
from warpsmith.distributed.sharded.optimizer import ShardedOptimizer
from warpsmith.distributed.sharded.state_dict import ShardedState
from warpsmith.distributed.vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from warpsmith.distributed.watching.watch import Watch, watch

__all__ = [
    "Context",
    "RankFilter",
    "ResumableSampler",
    "ShardedOptimizer",
    "ShardedState",
    "Watch",
    "accurate_hook",
    "context_parallel_attention",
    "init",
    "plan",
    "reduction_plan",
    "shard_sequence",
    "unshard_sequence",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "watch",
]
