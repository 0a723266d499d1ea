from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith.ops import _check
from warpsmith.ops.adamw import adamw_pointers, adamw_step, adamw_table
from warpsmith.optim import _tensor_list as lists

_OP = "AdamW"
_STATE = ("exp_avg", "exp_avg_sq", "step")


def _refuse(argument: str, expected: str, got: Any) -> NoReturn:
    _check.refuse(_OP, argument, expected, str(got))
    raise AssertionError


def _check_hyperparameters(group: dict[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
            _refuse(
                "lr", "a number, or one float32 or float64 element", f"{_check.dtype_text(lr.dtype)} {tuple(lr.shape)}"
            )
        if lr.device.type == "cpu" and not lr.item() >= 0:
            _refuse("lr", "a number >= 0", lr.item())
    elif not lr >= 0:
        _refuse("lr", "a number >= 0", lr)
    if len(betas) != 2 or any(isinstance(b, Tensor) or not 0 <= b < 1 for b in betas):
        _refuse("betas", "two numbers in [0, 1)", betas)
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            _refuse(name, "a number >= 0", group[name])
    if group["differentiable"]:
        _refuse("differentiable", "False: the fused step has no derivative", True)


class _Bucket:
    """The parameters of one device and dtype: one table, one launch."""

    def __init__(
        self, groups: list[dict[str, Any]], state: dict[Tensor, Any], indices: list[int], owners: list[int]
    ) -> None:
        params = lists.all_params(groups)
        states = [state[params[i]] for i in indices]
        parts = [lists.local(params[i]) for i in indices]
        none = parts[0].new_empty(0)
        self.device, self.wide = parts[0].device, parts[0].dtype == torch.float64
        self.table = adamw_table(
            parts,
            [lists.local(s["exp_avg"]) for s in states],
            [lists.local(s["exp_avg_sq"]) for s in states],
            [
                lists.local(s["max_exp_avg_sq"]) if groups[owners[i]]["amsgrad"] else none
                for i, s in zip(indices, states, strict=True)
            ],
            [s["step"] for s in states],
            [owners[i] for i in indices],
        )
        self.gradients = lists.Gradients(_OP, groups, indices)
        self.pointers = torch.empty(len(indices), dtype=torch.int64, device=self.device)
        self.written: list[int] | None = None  # the addresses that `pointers` holds

    def gradient_pointers(self, capturing: bool) -> Tensor:
        """The column of gradient addresses on the device, as of the last look."""
        addresses = self.gradients.addresses
        if capturing:
            # A column of the graph's own: an eager step in between must not change what a replay reads. A node of the
            # graph writes it, so later nodes may use its memory again.
            pointers = torch.empty_like(self.pointers)
            adamw_pointers(pointers, lists.words(addresses))
            return pointers
        if self.written is not addresses:
            adamw_pointers(self.pointers, lists.words(addresses))
            self.written = addresses
        return self.pointers


class _Plan:
    """The tables of an optimizer, and whether the tensors and addresses in them are still those of the optimizer."""

    def __init__(self, optimizer: AdamW, active: list[int]) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self.params = lists.all_params(groups)
        owners = [g for g, group in enumerate(groups) for _ in group["params"]]
        active_set = set(active)
        self.idle = [p for i, p in enumerate(self.params) if i not in active_set]
        self.distributed = any(hasattr(p, "to_local") for p in self.params)
        self.addresses = array("q", [lists.local(p).data_ptr() for p in self.params])
        self.amsgrad = [g["amsgrad"] for g in groups]
        self.states = list(state.values())
        self.active_states = [state[self.params[i]] for i in active]
        self.state_names = _STATE + ("max_exp_avg_sq",) * any(self.amsgrad)
        tensors = [s.get(name) for s in self.active_states for name in self.state_names]
        # Weak: whoever takes states off the device between two steps wants their memory back.
        self.state_tensors = [None if t is None else ref(t) for t in tensors]
        moments = [] if self.distributed else [s["exp_avg"].data_ptr() for s in self.active_states]
        self.moment_addresses = array("q", moments)
        self.held: list[Any] = []
        by_kind: dict[Any, list[int]] = {}
        for i in active:
            by_kind.setdefault((self.params[i].device, self.params[i].dtype), []).append(i)
        self.buckets = [_Bucket(groups, state, indices, owners) for indices in by_kind.values()]

    def hold(self) -> None:
        """Keeps the states alive, for a CUDA graph that points to them."""
        self.held = [s.get(name) for s in self.active_states for name in self.state_names]

    def is_current(self, optimizer: AdamW) -> bool:
        groups = optimizer.param_groups
        params = lists.all_params(groups)
        parts = [lists.local(p) for p in params] if self.distributed else params
        return (
            (not self.distributed or lists.same_objects(params, self.params))
            and _C.same_tensors(parts, parts if self.distributed else self.params, self.addresses, Tensor.data_ptr)
            and [g["amsgrad"] for g in groups] == self.amsgrad
            and lists.same_objects(list(optimizer.state.values()), self.states)
            and _C.same_values(
                self.active_states, self.state_names, self.state_tensors, self.moment_addresses, Tensor.data_ptr
            )
            and lists.without_gradients(self.idle)
        )


class AdamW(torch.optim.Optimizer):
    r"""Adam with decoupled weight decay: all parameters of all groups in one launch.

    .. math::
        p &\leftarrow p \, (1 - \gamma \lambda) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t} \, \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.AdamW``; each loads the other's state.
    Learning rate schedulers, closures, hooks, ``zero_grad`` and parameter groups work as in torch. The addresses of all
    tensors lie in a table on the device that is made anew when one changes: ``load_state_dict``, ``add_param_group``,
    ``p.data = ...``, a replaced state tensor, states moved off the device and back, and a new gradient are all seen.
    (Not seen is a ``.data = ...`` of ``exp_avg_sq`` or ``step`` alone: replace the tensor instead.)

    Args:
        params: tensors, (name, tensor) pairs or dicts of groups. float32, or float64 on the CPU; gradients alike. Any
            number of devices, one launch each. DTensor parameters (FSDP2) are updated shard by shard. Elements must
            fill their memory without gaps or overlap, in any order of dimensions.
        lr: a number, or a tensor of one float32 or float64 element. A number goes along in the launch, so a scheduler
            costs no copy; captured in a CUDA graph it is fixed. A tensor on the parameters' device is read by the
            kernel, at each replay too.
        betas: two numbers in [0, 1). eps, weight_decay: numbers >= 0.
        amsgrad: divide by the root of the largest ``v`` so far.
        maximize: go up the gradient.
        foreach, fused: choose among torch's implementations; accepted, without effect. Not both may be True.
        capturable: accepted, without effect: every step can be captured. Take one step before the capture, so that
            states exist.
        differentiable: only False.

    ``grad_scale`` and ``found_inf``, which ``torch.amp.GradScaler`` sets, are read on the device: gradients are divided
    by the scale, and where ``found_inf`` is not zero nothing changes, step counters neither. Other than torch's, the
    step does not write the divided gradients back (4 bytes a parameter): after it ``p.grad`` still holds the scaled
    ones.

    Deterministic. The host never waits for the device. Moves 28 bytes of memory a float32 parameter, 36 with amsgrad.
    More than 32 parameter groups take one launch for each 32. Under ``torch.compile`` a step is a graph break and runs
    as it is.

    Raises:
        ValueError: a hyperparameter out of range; at ``step``, a parameter or gradient that does not fit (dtype,
            device, sparse, strides), named with its group and index. Nothing has changed then.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; order of operations as torch's fused
    step.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves dividing and skipping to step()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if foreach and fused:
            _refuse("fused", "not both foreach and fused", "both True")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": True,  # step counters lie beside the parameters: torch must take them for those of its fused step
            "decoupled_weight_decay": True,
        }
        _check_hyperparameters(defaults)
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        self._plan: _Plan | None = None
        self._captured: list[_Plan] = []  # what CUDA graphs point to
        self._constants: tuple[list[tuple[Any, ...]], Tensor] | None = None
        self._host_lr: dict[float, Tensor] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, with its own values for any of the constructor's arguments."""
        if isinstance(param_group, dict):
            _check_hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._plan = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a ``warpsmith.optim.AdamW`` or a ``torch.optim.AdamW``."""
        for group in state_dict["param_groups"]:
            _check_hyperparameters({**self.defaults, **group})
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        captured = getattr(self, "_captured", [])
        super().__setstate__(state)
        self._forget()
        self._captured = captured
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update(foreach=None, fused=True, decoupled_weight_decay=True)
            for p in group["params"]:
                s = self.state.get(p)
                if s:  # torch counts steps in Python numbers (before 1.12) or on the CPU where it is not fused
                    s["step"] = torch.as_tensor(s["step"], dtype=torch.float32).to(p.device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. ``closure`` recomputes the loss, which is then returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]  # addresses cannot be traced
    @torch.no_grad()
    def _update(self) -> None:
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        plan = self._plan
        if plan is None or not plan.is_current(self):
            plan = self._make_plan(capturing)
        if plan is None:
            return
        for bucket in plan.buckets:
            bucket.gradients.look()
        if capturing and plan not in self._captured:
            plan.hold()
            self._captured.append(plan)
        constants = self._constants_of_groups()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for bucket in plan.buckets:
            adamw_step(
                bucket.table,
                bucket.gradient_pointers(capturing),
                [self._lr(group["lr"], bucket.device) for group in self.param_groups],
                constants,
                bucket.wide,
                None if grad_scale is None else grad_scale.to(bucket.device, torch.float32, non_blocking=True),
                None if found_inf is None else found_inf.to(bucket.device, torch.float32, non_blocking=True),
            )

    def _make_plan(self, capturing: bool) -> _Plan | None:
        params = lists.all_params(self.param_groups)
        active = [i for i, p in enumerate(params) if p.grad is not None or self.state.get(p)]
        if not active:
            return None
        for i in active:
            self._check_param(i, params[i])
        lists.Gradients(_OP, self.param_groups, active).look()  # may refuse a gradient, before any state is made
        new = [i for i in active if not self.state.get(params[i])]
        if new and capturing:
            raise RuntimeError(f"{_OP}: take one step before the capture: a replay would make the states anew")
        owners = [group for group in self.param_groups for _ in group["params"]]
        for i in active:
            self._prepare_state(params[i], owners[i]["amsgrad"])
        plan = _Plan(self, active)
        if not capturing:  # a table made in a capture has its contents only once the graph has run
            self._plan = plan
        return plan

    def _check_param(self, index: int, param: Tensor) -> None:
        p, argument = lists.local(param), lists.describe(self.param_groups, index)
        wide = p.dtype == torch.float64 and p.device.type == "cpu"
        if p.dtype != torch.float32 and not wide:
            _refuse(argument, "float32, or float64 on the CPU", _check.dtype_text(p.dtype))
        if p.device.type not in ("cpu", "cuda"):
            _refuse(argument, "a tensor on the CPU or on CUDA", p.device)
        if not lists.is_dense(p):
            _refuse(argument, "elements without gaps or overlap", f"strides {p.stride()} for shape {tuple(p.shape)}")

    def _prepare_state(self, param: Tensor, amsgrad: bool) -> None:
        state = self.state[param]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif state[name].shape == param.shape and not lists.same_layout(
                lists.local(state[name]), lists.local(param)
            ):
                state[name] = torch.empty_like(param).copy_(state[name])

    def _constants_of_groups(self) -> Tensor:
        values = [(*g["betas"], g["eps"], g["weight_decay"], g["maximize"], g["amsgrad"]) for g in self.param_groups]
        if self._constants is None or self._constants[0] != values:
            self._constants = (values, torch.tensor([[float(x) for x in row] for row in values], dtype=torch.float64))
        return self._constants[1]

    def _lr(self, lr: float | Tensor, device: torch.device) -> Tensor:
        if isinstance(lr, Tensor):
            return lr if lr.device.type == "cpu" else lr.to(device, non_blocking=True)
        known = self._host_lr.get(lr)
        if known is None:
            self._host_lr = {} if len(self._host_lr) >= len(self.param_groups) else self._host_lr
            known = self._host_lr[lr] = torch.tensor(lr, dtype=torch.float64)
        return known
