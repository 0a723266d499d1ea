from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith.ops import _check
from warpsmith.ops.adamw import adamw_pointers, adamw_step, adamw_table
from warpsmith.optim import _tensor_list as lists

_OP = "AdamW"
_STATE = ("exp_avg", "exp_avg_sq", "step")
# Of every group: step counters lie beside the parameters, so torch must take them for those of its fused step.
_AS_TORCHS_FUSED: dict[str, Any] = {"foreach": None, "fused": True, "decoupled_weight_decay": True}

_HOST_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever the default device


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
            [lists.local(s["step"]) for s in states],
            [owners[i] for i in indices],
        )
        self.pointers = torch.empty(len(indices), dtype=torch.int64, device=self.device)
        self.written = -1  # the version of the column that `pointers` holds

    def gradient_pointers(self, watch: _C.TensorWatch, number: int, capturing: bool) -> Tensor:
        """The column of gradient addresses on the device, as of the last look. `number`: of this bucket."""
        if capturing:
            # A column of the graph's own: an eager step in between must not change what a replay reads. A node of the
            # graph writes it, so later nodes may use its memory again.
            pointers = torch.empty_like(self.pointers)
            adamw_pointers(pointers, lists.words(watch.column(number)))
            return pointers
        version = watch.version(number)
        if self.written != version:
            adamw_pointers(self.pointers, lists.words(watch.column(number)))
            self.written = version
        return self.pointers


class _Plan:
    """The tables of an optimizer, and whether the addresses in them are still those of its tensors.

    The tables hold addresses, not references, so that memory which is taken from a parameter or state between two steps
    is free at once. Every step compares all addresses with those of the tensors that the optimizer has then; the memory
    that it touches is therefore that of living tensors.
    """

    def __init__(self, optimizer: AdamW, active: list[int]) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        params = lists.all_params(groups)
        owners = [g for g, group in enumerate(groups) for _ in group["params"]]
        self.amsgrad = [g["amsgrad"] for g in groups]
        self.active_params = [params[i] for i in active]
        by_kind: dict[Any, list[int]] = {}
        for i in active:
            by_kind.setdefault((params[i].device, params[i].dtype), []).append(i)
        numbers = [-1] * len(params)
        for number, indices in enumerate(by_kind.values()):
            for i in indices:
                numbers[i] = number
        self.state_names = _STATE + ("max_exp_avg_sq",) * any(self.amsgrad)
        group_params = [g["params"] for g in groups]
        api = Tensor.__dlpack_c_exchange_api__
        self.watch = _C.TensorWatch(
            api, lists.local, group_params, state, self.state_names, numbers, lists.ADDRESS_READER
        )
        self.buckets = [_Bucket(groups, state, indices, owners) for indices in by_kind.values()]
        self.copies: list[Tensor] = []  # of gradients with other strides than their parameters, until the next look
        self.held: list[Tensor] = []

    def hold(self, state: dict[Tensor, Any]) -> None:
        """Keeps the memory of parameters and states, for a CUDA graph that points to it."""
        tensors = [s[name] for s in (state[p] for p in self.active_params) for name in self.state_names if name in s]
        self.held = [lists.local(t).detach() for t in [*self.active_params, *tensors]]

    def look(self, optimizer: AdamW) -> bool:
        """Whether the tables hold. Then the columns of gradient addresses are those of now. Raises if a gradient does
        not fit."""
        groups = optimizer.param_groups
        if [g["amsgrad"] for g in groups] != self.amsgrad:
            return False
        if not self.watch.look([g["params"] for g in groups], optimizer.state):
            return False
        copies = []
        unusual = self.watch.unusual
        params = lists.all_params(groups) if unusual else []
        for i in unusual:
            grad = lists.checked_gradient(_OP, groups, i, params[i])
            like_param = lists.same_layout(grad, lists.local(params[i])) and lists.holds_its_elements(grad)
            if not like_param:
                grad = torch.empty_like(lists.local(params[i])).copy_(grad)
                copies.append(grad)
            self.watch.set_gradient(i, grad.data_ptr() or lists.NO_ELEMENTS, like_param)
        self.copies = copies
        return True


class AdamW(torch.optim.Optimizer):
    r"""Adam with decoupled weight decay: all parameters of all groups in one launch.

    .. math::
        p &\leftarrow p \, (1 - \gamma \lambda) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t} \, \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.AdamW``; each loads the other's state.
    Learning rate schedulers, closures, hooks, ``zero_grad`` and parameter groups work as in torch. The addresses of all
    tensors lie in a table on the device. Each step compares them with those of the tensors as they are then and makes
    the table anew when one differs: ``load_state_dict``, ``add_param_group``, ``.data = ...`` of a parameter or of any
    state, a replaced state tensor, states moved off the device and back, and a new gradient are all seen. (Only a state
    that is made another view of the very memory it has, by ``.data`` or ``t_()``, is not; a parameter of one dimension
    that is, is seen once its gradient has the new length.) The table keeps no memory alive, a captured CUDA graph does
    (parameters and states; the gradients are to be kept as for any graph).

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
    as it is. As by torch's fused step, version counters do not move: a backward through a graph of before the step is
    not refused.

    Raises:
        ValueError: a hyperparameter out of range; at ``step``, a parameter, gradient or state that does not fit (dtype,
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
            "capturable": capturable,
            "differentiable": differentiable,
            **_AS_TORCHS_FUSED,
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
        self.param_groups[-1].update(_AS_TORCHS_FUSED)
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
            group.update(_AS_TORCHS_FUSED)
            for p in group["params"]:
                s = self.state.get(p, {})
                if "step" in s:  # torch counts in Python numbers (before 1.12) or on the CPU where it is not fused
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
        if plan is None or not plan.look(self):
            plan = self._make_plan(capturing)
            if plan is None:
                return
            if not plan.look(self):
                raise RuntimeError(f"{_OP}: a parameter or state has another address at every look")
        if capturing and plan not in self._captured:
            plan.hold(self.state)
            self._captured.append(plan)
        constants = self._constants_of_groups()
        grad_scale, found_inf = (lists.whole(getattr(self, name, None)) for name in ("grad_scale", "found_inf"))
        for number, bucket in enumerate(plan.buckets):
            adamw_step(
                bucket.table,
                bucket.gradient_pointers(plan.watch, number, capturing),
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
        for i in active:  # a gradient is refused before any state is made
            if params[i].grad is not None:
                lists.checked_gradient(_OP, self.param_groups, i, params[i])
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
        state = self.state.get(param)
        missing = [name for name in _STATE if state and name not in state]
        if missing:  # another optimizer's
            _refuse(argument, f"a state with {', '.join(_STATE)}", f"one without {', '.join(missing)}")

    def _prepare_state(self, param: Tensor, amsgrad: bool) -> None:
        state = self.state[param]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif state[name].layout != torch.strided:
                _refuse(f"state {name}", "a dense tensor", str(state[name].layout).removeprefix("torch."))
            elif state[name].shape == param.shape and not lists.same_layout(
                lists.local(state[name]), lists.local(param)
            ):
                state[name] = torch.empty_like(param).copy_(state[name])

    def _constants_of_groups(self) -> Tensor:
        values = [(*g["betas"], g["eps"], g["weight_decay"], g["maximize"], g["amsgrad"]) for g in self.param_groups]
        if self._constants is None or self._constants[0] != values:
            self._constants = (values, torch.tensor([[float(x) for x in row] for row in values], **_HOST_DOUBLE))
        return self._constants[1]

    def _lr(self, lr: float | Tensor, device: torch.device) -> Tensor:
        if isinstance(lr, Tensor):
            return lr if lr.device.type == "cpu" else lr.to(device, non_blocking=True)
        known = self._host_lr.get(lr)
        if known is None:
            self._host_lr = {} if len(self._host_lr) >= len(self.param_groups) else self._host_lr
            known = self._host_lr[lr] = torch.tensor(lr, **_HOST_DOUBLE)
        return known
