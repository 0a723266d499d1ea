"""What a step does beside its own: moves an average of the weights, writes 16-bit copies, makes gradients zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core import checks
from warpsmith._core import tensor_list as lists
from warpsmith.optim.ema import EMA

if TYPE_CHECKING:
    from warpsmith.optim._plan import Bucket, Plan

_COPY_DTYPES = {torch.float16: 1, torch.bfloat16: 2}  # numbers of Dtype in csrc/common/dtype.h
_AVERAGES_PARAM = 1 << 8
NOTHING = (None, 0.0, False)
More = tuple[Tensor | None, float, bool]  # the last arguments of a step: table, weight of the averages, zero_grads


class StepExtras:
    """One of an optimizer. What the kernels do not take is done by the separate operations, after the step."""

    def __init__(self, optimizer: Any, op: str, ema: EMA | None, copies: Mapping[Tensor, Tensor], zero: bool) -> None:
        self.op, self.ema, self.zero_grads = op, ema, zero
        self.copies = dict(copies)
        self.averages: dict[Tensor, int] = {}
        own = set(lists.all_params(optimizer.param_groups))
        if ema is not None:
            if ema._optimizer not in (None, optimizer):
                checks.refuse(op, "ema", "one of this optimizer, or of none", "that of another")
            self.averages = {p: n for n, p in enumerate(ema._params)}
        for number, (p, copy) in enumerate(self.copies.items()):
            argument = f"copies[{number}]"
            if p not in own:
                checks.refuse(op, argument, "a copy of a parameter of this optimizer", "that of another tensor")
            if p.dtype != torch.float32:
                checks.refuse(op, argument, "a copy of a float32 parameter", f"that of {checks.dtype_text(p.dtype)}")
            if copy.dtype not in _COPY_DTYPES:
                checks.refuse(op, argument, "float16 or bfloat16", checks.dtype_text(copy.dtype))
            if copy.requires_grad:
                checks.refuse(op, argument, "a tensor that requires no gradient", "one that does")
            self._check_like(argument, copy, p)
        with torch.no_grad():
            for p, copy in self.copies.items():
                copy.copy_(p)

    def _check_like(self, argument: str, beside: Tensor, param: Tensor) -> None:
        checks.same_shape(self.op, argument, beside, param.shape)
        checks.same_device(self.op, argument, beside, param)
        checks.overwritable(self.op, argument, beside)
        if not lists.same_layout(lists.local(beside), lists.local(param)):
            checks.refuse(self.op, argument, "the strides of its parameter", "others")

    def _entry(self, param: Tensor) -> tuple[int, int, int]:
        """A StepExtras of csrc/kernels/optim/step_extras.h."""
        average = copy = kind = 0
        if self.ema is not None and param in self.averages:
            tensor = self.ema.averages[self.averages[param]]
            self._check_like(f"ema.averages[{self.averages[param]}]", tensor, param)
            average = lists.local(tensor).data_ptr()
            kind = _AVERAGES_PARAM * (self.ema._optimizer is None)
        if param in self.copies:
            self._check_like("copies", self.copies[param], param)
            copy = lists.local(self.copies[param]).data_ptr()
            kind |= _COPY_DTYPES[self.copies[param].dtype]
        return average, copy, kind

    def of_bucket(self, plan: Plan, bucket: Bucket, zeroes: bool, capturing: bool) -> More:
        if not bucket.fuses:
            return NOTHING
        zeroes = zeroes and self.zero_grads
        words = [
            word for i in bucket.indices for word in ((0, 0, 0) if i in plan.staged else self._entry(plan.params[i]))
        ]
        if not any(words):
            return None, 0.0, zeroes
        if capturing:
            averages = [] if self.ema is None else self.ema.averages
            plan.held += [lists.local(t) for t in (*self.copies.values(), *averages)]
        return bucket.column("extras", words, capturing), self._weight(), zeroes

    def _weight(self) -> float:
        return 0.0 if self.ema is None else 1 - self.ema.decay

    def zeroes_in_kernels(self, plan: Plan) -> bool:
        """Whether no two parameters have the same gradient: one's zeros must not be what the other reads."""
        if not self.zero_grads:
            return False
        entries = [e for n in range(len(plan.buckets)) for e in lists.words(plan.watch.column(n)).tolist()]
        entries = [e for e in entries if e not in (0, _C.NO_ELEMENTS)]
        return len(set(entries)) == len(entries)

    def finish(self, plan: Plan | None, params: list[Tensor], zeroed: bool, found_inf: Tensor | None) -> None:
        """The separate operations, for what the kernels have not done."""
        fused = set() if plan is None else plan.fused()
        if self.ema is not None:
            rest = [n for p, n in self.averages.items() if p not in fused]
            self.ema._move(rest, 1 - self.ema.decay, found_inf)
        for p, copy in self.copies.items():
            if p not in fused:
                copy.copy_(p)
        if self.zero_grads:
            copied = set() if plan is None else plan.copied
            for p in params:
                if p.grad is not None and not (zeroed and p in fused and p not in copied):
                    p.grad.zero_()


class WithStepExtras:
    """The part of an optimizer that fuses."""

    _op: ClassVar[str]
    param_groups: list[dict[str, Any]]
    _extras: StepExtras | None = None

    def fuse(
        self, *, ema: EMA | None = None, copies: Mapping[Tensor, Tensor] | None = None, zero_grads: bool = False
    ) -> None:
        """Lets each step from now on do more, in the launch that updates the parameters.

        The results are those of the separate operations after the step, bit by bit, in a skipped step too. With 8-bit
        states and LAMB, and for parameters of the average that this optimizer lacks, they are those operations. A call
        replaces what an earlier one said. It is no part of ``state_dict``, nor of copies of the optimizer.

        Args:
            ema: moves as by ``ema.update(found_inf)``; do not call that too. 8 bytes of memory a parameter, not 12.
            copies: {float32 parameter: float16 or bfloat16 tensor of its shape, strides and device}, written at once
                and by each step: ``copy.copy_(parameter)`` in 2 bytes a parameter, not 6.
            zero_grads: gradients become 0 where they are, as by ``zero_grad(set_to_none=False)``.

        Raises:
            ValueError: an average of another optimizer; a copy of another dtype, shape, strides or device, or of a
                tensor that is no float32 parameter of this optimizer. Nothing has changed then.

        Example:
            >>> import torch, warpsmith
            >>> p = torch.nn.Parameter(torch.ones(4))
            >>> optimizer = warpsmith.optim.SGD([p], lr=0.5)
            >>> optimizer.fuse(copies={p: (copy := torch.empty(4, dtype=torch.bfloat16))}, zero_grads=True)
            >>> p.grad = torch.ones(4)
            >>> optimizer.step()
            >>> copy[0].item(), p.grad[0].item()
            (0.5, 0.0)
        """
        does_more = ema is not None or copies or zero_grads
        self._extras = StepExtras(self, f"{self._op}.fuse", ema, copies or {}, bool(zero_grads)) if does_more else None

    def _skip_flag(self) -> Tensor | None:
        return lists.whole(getattr(self, "found_inf", None))

    def _zeroes_in_kernels(self, plan: Plan) -> bool:
        return self._extras is not None and self._extras.zeroes_in_kernels(plan)

    def _more(self, plan: Plan, bucket: Bucket, zeroes: bool, capturing: bool) -> More | tuple[()]:
        return self._extras.of_bucket(plan, bucket, zeroes, capturing) if self._extras else ()

    def _finish(self, plan: Plan | None, zeroed: bool) -> None:
        if self._extras:
            self._extras.finish(plan, lists.all_params(self.param_groups), zeroed, self._skip_flag())
