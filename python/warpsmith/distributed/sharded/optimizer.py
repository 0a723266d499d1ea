"""``ShardedOptimizer``: ZeRO-1 and ZeRO-2 around the optimizers of ``warpsmith.optim``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpsmith._core import checks
from warpsmith._core.grad_norm import CUT_ELEMS, clip_in_place, largest_norm, norm_order
from warpsmith._core.gradient_sums import remember, sums_of
from warpsmith._core.tensor_list import all_params, describe, moved, numbered
from warpsmith.distributed.agreement import require_agreement
from warpsmith.distributed.exchange import rank_and_size
from warpsmith.distributed.sharded import checks as sharded_checks
from warpsmith.distributed.sharded.gradient_shards import GradientShards, flat
from warpsmith.distributed.sharded.norm import ShardNorm
from warpsmith.distributed.sharded.param_gather import ParamGather
from warpsmith.distributed.sharded.shards import plan_buckets
from warpsmith.distributed.sharded.states import States, cut_states, gather_states
from warpsmith.optim._loading import check_names

_OP = sharded_checks.OP
_REMEDY = (
    "give all ranks the same model and arguments: build it after the same torch.manual_seed, or broadcast the "
    "parameters of rank 0"
)


class ShardedOptimizer(torch.optim.Optimizer):
    r"""An optimizer of ``warpsmith.optim`` whose state is shared out over the ranks (ZeRO-1, ZeRO-2).

    Takes the place of ``DistributedDataParallel`` and an optimizer: the model stays as it is. While the backward runs,
    gradients are averaged as by :func:`accurate_hook`, and rank r receives the means of the elements that it owns,
    about 1 / N of all. ``step`` updates these on each rank, then all ranks gather the parameters.

    .. math::
        g_r = \mathrm{wire}\Big(\frac{1}{N} \sum_{s=0}^{N-1} \mathrm{wire}(g^{(s)})\Big)\Big|_{\text{elements of } r},
        \qquad p_r \leftarrow \mathrm{step}(p_r, g_r), \qquad p = (p_0, \ldots, p_{N-1})

    **Parameters and states have the bits of the unsharded optimizer** that is fed with the gradients of
    ``accurate_hook`` under ``DistributedDataParallel``, for any number of ranks, with clipping and skipped steps.

    Args:
        params: as for the optimizer: tensors, (name, tensor) pairs or dicts of groups, equal in shapes, dtypes and
            values on all ranks. Of one device, dense; no DTensors. Frozen ones stay as they are.
        optimizer_class: ``SGD``, ``Adagrad``, ``Adam``, ``AdamW``, ``Lion`` or ``RMSprop`` of ``warpsmith.optim``.
        stage: 1: each rank keeps its own whole gradients in ``p.grad`` until ``zero_grad``; they are not averaged.
            2: ``p.grad`` becomes None as soon as its bucket is sent, so gradients take the memory of some buckets.
        process_group: the ranks that train together; default: all.
        wire: in which float32 gradients are sent: ``torch.bfloat16`` or ``torch.float16``. Others are sent as they are.
        bucket_cap_mb: MiB of gradients that are reduced together. Give large worlds larger buckets: a parameter is cut
            at multiples of 65,536 elements (16,384 on the CPU), where the chunks of its norm begin.
        find_unused_parameters: allow parameters without a gradient. One that no rank uses is left out of the step; to
            know of it, the host waits for all ranks once a step. By default a missing gradient is an error.
        **defaults: of the optimizer: ``lr``, ``betas``, ``precision`` and so on; also options of groups.

    ``param_groups`` and ``state`` are those of this rank's fragments, flat views of the parameters' memory, whose
    ``.grad`` are the averaged gradients. Learning rate schedulers work as ever. Each rank's last group also has one
    element of which the gradient is infinite where any rank's gradients are not finite: so ``torch.amp.GradScaler``,
    ``unscale_`` too, finds the same on all ranks. Divided and skipped steps are those of the optimizer's kernel.

    Where a parameter has a ``main_grad``, to which :func:`warpsmith.linear` and others add its gradient, the sum of
    it and of what other ops gave is reduced, rounded once to what is sent.

    Clip with :meth:`clip_grad_norm_` or ``warpsmith.amp.GradScaler.clip_``: other functions know only the fragments of
    this rank, or none.

    Memory of N ranks: states 1 / N of the unsharded optimizer's, masters too. Moves on the wire what ``accurate_hook``
    moves, but gathers parameters in their own dtype. Deterministic. On CUDA the host waits for the device only where
    ranks set up the memory that they share: in the first step, and for a larger bucket than any before (but see
    ``find_unused_parameters``, and for ``error_if_nonfinite``). Activation checkpointing: with ``use_reentrant=False``.

    Raises:
        ValueError: an argument out of range; an optimizer or precision that needs whole tensors; parameters that differ
            between ranks, on every rank, with the rank that differs.
        RuntimeError: gradients that would be reduced twice, or were written to after they were reduced; a step without
            a backward; a parameter that was replaced or frozen since, or that another living ShardedOptimizer reduces
            too. The message names the rank and the remedy. On the
            CPU every rank raises what one rank reports at the end of a backward; on CUDA that rank alone.
        TypeError: a copy or pickle of the optimizer.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020; arguments as
    ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Example:
        >>> import torch, warpsmith
        >>> with warpsmith.distributed.init(device="cpu"):
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = warpsmith.distributed.ShardedOptimizer(
        ...         model.parameters(), warpsmith.optim.AdamW, stage=2, lr=1e-3
        ...     )
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     norm = optimizer.clip_grad_norm_(1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> norm
        tensor(4.)
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves dividing and skipping to step()

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        stage: int = 1,
        process_group: ProcessGroup | None = None,
        wire: torch.dtype = torch.bfloat16,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        sharded_checks.require_group(process_group)
        self.process_group, self.stage, self.optimizer_class = process_group, stage, optimizer_class
        rank, world_size = rank_and_size(process_group)
        given = {"stage": stage, "wire": wire, "bucket_cap_mb": bucket_cap_mb, "unused": find_unused_parameters}

        def describe_own() -> list[tuple[str, str]]:
            sharded_checks.check_arguments(optimizer_class, stage, wire, bucket_cap_mb, find_unused_parameters)
            self._whole = optimizer_class(params, **defaults)
            sharded_checks.check_groups(self._whole.param_groups)
            return sharded_checks.description(optimizer_class, self._whole.param_groups, given)

        require_agreement(_OP, describe_own, _REMEDY, process_group)
        groups = self._whole.param_groups
        whole = all_params(groups)
        self._trainable = [i for i, p in enumerate(whole) if p.requires_grad]
        self._params = [whole[i] for i in self._trainable]
        buckets = plan_buckets(
            [p.numel() for p in self._params],
            [p.element_size() for p in self._params],
            [p.dtype for p in self._params],
            world_size=world_size,
            bucket_bytes=int(bucket_cap_mb * 2**20),
            cut_elems=CUT_ELEMS[self._params[0].device.type],
        )
        self._shards = GradientShards(
            self._params,
            [describe(groups, i) for i in self._trainable],
            buckets,
            group=process_group,
            wire=wire,
            keep_whole=stage == 1,
            find_unused=find_unused_parameters,
            reduced=self._take_gradients,
        )
        self._norm = ShardNorm(self._shards)
        self._gather = ParamGather(self._shards, self._params)
        self._tensors = [
            flat(self._params[f.param].detach())[f.start : f.start + f.count] for f in self._shards.fragments
        ]
        before = numbered([p.numel() for p in whole])
        for f, tensor in zip(self._shards.fragments, self._tensors, strict=True):  # for bits drawn by element
            tensor.first_element = before[self._trainable[f.param]] + f.start  # type: ignore[attr-defined]
        self._flag = torch.zeros((), dtype=torch.float32, device=self._params[0].device)
        self._inner: Any = optimizer_class(self._fragment_groups(), **defaults)
        self._consolidated: States | None = None
        self._built = False
        super().__init__([self._flag], self._whole.defaults)
        self._built = True
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _fragment_groups(self) -> list[dict[str, Any]]:
        """The groups with this rank's fragments in place of the parameters, and the flag in the last one."""
        groups = self._whole.param_groups
        owner = [g for g, group in enumerate(groups) for _ in group["params"]]
        found: list[dict[str, Any]] = [{**sharded_checks.values_of(group), "params": []} for group in groups]
        names = [name for group in groups for name in group.get("param_names", ())]
        for f, tensor in zip(self._shards.fragments, self._tensors, strict=True):
            at = self._trainable[f.param]
            entry = (f"{names[at]}[{f.start}:{f.start + f.count}]", tensor) if names else tensor
            found[owner[at]]["params"].append(entry)
        found[-1]["params"].append(("nonfinite", self._flag) if names else self._flag)
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the parameters are shared out once.

        Raises:
            RuntimeError: always, but in the constructor.
        """
        if self._built:
            raise RuntimeError(f"{_OP}.add_param_group: expected all groups at construction: make a new {_OP} of them")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: a copy would lack the hooks and the ranks.

        Raises:
            TypeError: always, from ``copy`` and ``pickle``.
        """
        raise TypeError(
            f"{_OP}: expected no copy and no pickle of it, whose hooks and ranks cannot be copied: make a new {_OP} of "
            "the copied model's parameters, call consolidate_state_dict() on all ranks and load its state_dict() there"
        )

    # Gradients.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backwards only add to ``p.grad``, as ``DistributedDataParallel.no_sync``. For all backwards
        of a step but the last, which reduces the sums, once."""
        before = self._shards.synchronizing
        self._shards.synchronizing = False
        try:
            yield
        finally:
            self._shards.synchronizing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the parameters (or fills them with zeros) and the averaged ones of the fragments.
        Fills every ``main_grad`` with zeros."""
        params = list(all_params(self._whole.param_groups))
        main_grads = [to for p in params if isinstance(to := getattr(p, "main_grad", None), Tensor)]
        if main_grads:
            torch._foreach_zero_(main_grads)
        for p in params:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad = p.grad.detach().zero_()
        self._shards.forget()
        for tensor in (*self._tensors, self._flag):
            tensor.grad = None

    def _take_gradients(self) -> None:
        for tensor, gradient in zip(self._tensors, self._shards.gradients, strict=True):
            tensor.grad = gradient
        nonfinite = self._shards.nonfinite
        assert nonfinite is not None
        self._flag.grad = torch.zeros_like(self._flag).masked_fill_(nonfinite != 0, math.inf)
        of_flag = sums_of([self._flag.grad], sum(p.numel() for p in self._params))
        for tensor, sums in zip(
            (*self._tensors, self._flag),
            (*(self._shards.sums[f] for f in self._shards.fragments), *of_flag),
            strict=True,
        ):
            if tensor.grad is not None:
                remember(tensor, sums)

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the averaged gradients of all parameters, as :func:`warpsmith.optim.grad_norm`; the same bits on
        all ranks. A collective: every rank must call.

        Raises:
            ValueError: ``norm_type`` is not 1, 2 or ``inf``.
            RuntimeError: no backward has reduced gradients since the last step.
        """
        p = norm_order(f"{_OP}.grad_norm", norm_type)
        self._shards.require_reduced("grad_norm()")
        return self._norm.norm(p)

    @torch.no_grad()
    def _norm_of_scaled(self, p: float, scale: Tensor) -> Tensor:
        """:meth:`grad_norm` of gradients that were multiplied by ``scale``, for a scaler."""
        self._shards.require_reduced("grad_norm()")
        return self._norm.norm(p, moved(scale, self._flag.device))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the averaged gradients so that the norm of all of them is at most ``max_norm``, as
        :func:`warpsmith.optim.clip_grad_norm_`, bit for bit, and returns the norm before. A collective.

        Each rank reads and writes its fragments alone. Under a ``GradScaler`` call ``unscale_`` before, or
        :meth:`warpsmith.amp.GradScaler.clip_` in place of both.

        Raises:
            ValueError: a negative or NaN ``max_norm``, or another ``norm_type``.
            RuntimeError: no backward has reduced gradients since the last step; ``error_if_nonfinite`` and such a norm,
                for which the host waits.
        """
        op = f"{_OP}.clip_grad_norm_"
        max_norm = largest_norm(op, max_norm)
        p = norm_order(op, norm_type)
        self._shards.require_reduced("clip_grad_norm_()")
        norm = self._norm.norm(p)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"{op}: expected a finite norm of the gradients, got {norm.item()}")
        if own := [g for g in self._shards.gradients if g is not None]:
            clip_in_place(own, norm, max_norm)
        return norm

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's fragments and gathers the parameters of all ranks. A collective.

        closure: recomputes the loss, which is then returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._shards.require_reduced("step()")
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            found_inf = found_inf.detach().to(self._flag.device, torch.float32, copy=True)
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.process_group)
        self._inner.grad_scale, self._inner.found_inf = getattr(self, "grad_scale", None), found_inf
        self._gather.take()  # what no forward has waited for
        self._inner.param_groups = self.param_groups
        of_flag, self._flag.grad = self._flag.grad, None  # the flag is no parameter: the step leaves it alone
        self._inner.step()
        self._flag.grad = of_flag
        self._gather.start() if self._gather.in_forward else self._gather.gather()
        self._shards.forget()
        self._consolidated = None
        return loss

    def gather_in_forward(self, model: torch.nn.Module) -> None:
        """From now on ``step`` only starts to gather the parameters, and the next forward of ``model`` waits for them
        block by block, so that they travel behind its computation. The bits stay the same.

        Blocks are the elements of the model's outermost ``ModuleList``, ``Sequential`` or ``ModuleDict``: the forward
        of a block waits for the block's parameters, that of the model for those that are in no block. A model must not
        use the parameters of a block before it calls the block. ``model.state_dict()`` and ``load_state_dict`` wait
        for all; code that reads parameters by itself between ``step`` and the forward calls
        :meth:`wait_for_parameters` first.

        Takes the memory of the parameters once more, until the forward has taken them. Not for compiled models.

        Raises:
            ValueError: the model lacks a parameter of this optimizer.
        """
        inside = {id(p) for p in model.parameters()}
        for name, p in zip(self._shards.names, self._params, strict=True):
            if id(p) not in inside:
                checks.refuse(f"{_OP}.gather_in_forward", "model", f"one that holds {name}", type(model).__name__)
        self._gather.wait_in_forward(model)

    def wait_for_parameters(self) -> None:
        """Waits for the parameters that :meth:`gather_in_forward` has left under way; on CUDA the stream does. Nothing
        to do elsewhere."""
        self._gather.take()

    # Checkpoints.

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all ranks on rank ``to`` of the group, in host memory, for ``state_dict`` there. A
        collective. ``warpsmith.train.Checkpointer`` calls it.

        Raises:
            ValueError: ``to`` is no rank of the group.
        """
        checks.refuse_non_int(f"{_OP}.consolidate_state_dict", "to", to)
        if not 0 <= to < self._shards.world_size:
            checks.refuse(f"{_OP}.consolidate_state_dict", "to", f"a rank below {self._shards.world_size}", str(to))
        own = [dict(self._inner.state.get(tensor, {})) for tensor in self._tensors]
        self._consolidated = gather_states(self._shards, own, to)

    def state_dict(self) -> dict[str, Any]:
        """The state of the unsharded optimizer: whole tensors on the CPU, which any world size and the optimizer
        itself can load. On the rank of the last ``consolidate_state_dict``.

        Raises:
            RuntimeError: the state was not consolidated on this rank since the last step.
        """
        if self._consolidated is None:
            rank = self._shards.rank
            raise RuntimeError(
                f"{_OP}.state_dict: rank {rank} of {self._shards.world_size}: expected a consolidated state: call "
                f"consolidate_state_dict(to={rank}) on all ranks after the last step"
            )
        groups, first = [], 0
        for own, whole in zip(self.param_groups, self._whole.param_groups, strict=True):
            names = {"param_names": whole["param_names"]} if "param_names" in whole else {}
            count = len(whole["params"])
            groups.append({**sharded_checks.values_of(own), **names, "params": list(range(first, first + count))})
            first += count
        return {
            "state": {self._trainable[i]: state for i, state in sorted(self._consolidated.items())},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this or the unsharded optimizer, here or in ``torch.optim``, saved by any world size. On
        every rank; each keeps its fragments. Not a collective.

        Raises:
            TypeError, ValueError: no state; other groups, a precision that cannot be shared out, a state of another
                optimizer or of another shape than its parameter. Nothing has changed then.
        """
        self.check_state_dict(state_dict)
        groups = state_dict["param_groups"]
        numbers = {key: n for n, key in enumerate(key for group in groups for key in group["params"])}
        trainable = {at: i for i, at in enumerate(self._trainable)}
        saved = {numbers[key]: state for key, state in state_dict["state"].items() if state}
        whole = {trainable[at]: state for at, state in saved.items() if at in trainable}
        self._load_own(cut_states(self._shards, whole), groups)

    def _load_own(self, states: States, groups: Sequence[Mapping[str, Any]]) -> None:
        """Loads the states of this rank's fragments, and hyperparameters of groups."""
        local, first = [], 0
        for group, inner in zip(groups, self._inner.param_groups, strict=True):
            count = len(inner["params"])
            local.append({**sharded_checks.values_of(group), "params": list(range(first, first + count))})
            first += count
        self._inner.load_state_dict({"state": states, "param_groups": local})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._consolidated = None

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises TypeError or ValueError where ``load_state_dict`` would, and changes nothing."""
        sharded_checks.check_state(self._whole.param_groups, state_dict)
        check_names(self._whole, state_dict)  # on each rank, also on one that has no fragment of these states
