"""Training on many ranks, over torch.distributed: launch, data order, gradient reduction, sharded optimizers."""

from warpsmith.distributed.context import Context, init
from warpsmith.distributed.hook import accurate_hook
from warpsmith.distributed.output import RankFilter
from warpsmith.distributed.sampler import ResumableSampler
from warpsmith.distributed.sharded_optimizer import ShardedOptimizer

__all__ = ["Context", "RankFilter", "ResumableSampler", "ShardedOptimizer", "accurate_hook", "init"]
