"""Training on many ranks, over torch.distributed: launch, data order, gradient reduction."""

from warpsmith.distributed.context import Context, init
from warpsmith.distributed.hook import accurate_hook
from warpsmith.distributed.output import RankFilter
from warpsmith.distributed.sampler import ResumableSampler

__all__ = ["Context", "RankFilter", "ResumableSampler", "accurate_hook", "init"]
