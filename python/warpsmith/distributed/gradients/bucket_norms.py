"""Sums of squares of the buckets that DDP reduces, so that the norm of the gradients needs no read of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from warpsmith._core.gradient_sums import Sums, remember, sums_of
from warpsmith._core.tensor_list import is_dense, same_layout


class _Taken(NamedTuple):
    """A gradient in a bucket."""

    param: Tensor
    in_bucket: Tensor
    sums: Sums
    before: tuple[Tensor | None, int]  # param.grad when the bucket was reduced, and its version
    bucket: tuple[Tensor, int]  # after the reduction, and its version


class BucketNorms:
    """Takes the sums of one model's buckets, one backward after another.

    DDP copies a bucket to the gradients at the end of the backward, unless the gradients are views of it. So what was
    summed is known to be the gradients only after that.
    """

    def __init__(self) -> None:
        self._taken: list[_Taken] = []
        self._elems = self._elems_before = 0  # of the buckets of this and of the last backward

    @torch.no_grad()
    def take(self, bucket: GradBucket) -> None:
        """Sums a bucket that was just reduced, on the current stream."""
        if bucket.index() == 0:  # a backward begins; the one before may have failed
            self._taken, self._elems_before, self._elems = [], self._elems, 0
            torch.autograd.Variable._execution_engine.queue_callback(self._after_callbacks)
        buffer, tensors, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
        self._elems += sum(t.numel() for t in tensors)
        if (buffer.is_cuda and buffer.dtype == torch.float64) or not all(map(is_dense, tensors)):
            return
        sums = sums_of(tensors, self._elems_before or self._elems)
        state = buffer, buffer._version
        for param, tensor, its in zip(params, tensors, sums, strict=True):
            before = param.grad, -1 if param.grad is None else param.grad._version
            self._taken.append(_Taken(param, tensor, its, before, state))

    def _after_callbacks(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # behind DDP's, which copies the buckets

    def _finish(self) -> None:
        for param, in_bucket, sums, (before, version), (buffer, buffer_version) in self._taken:
            grad = param.grad
            if grad is None or type(grad) is not Tensor or grad.dtype != in_bucket.dtype:
                continue
            is_view = grad.data_ptr() == in_bucket.data_ptr()
            was_copied = grad is not before or grad._version != version  # not where no rank used the parameter
            whole = buffer._version == buffer_version
            if whole and (is_view or was_copied) and same_layout(grad, in_bucket):
                remember(param, sums)
        self._taken = []
