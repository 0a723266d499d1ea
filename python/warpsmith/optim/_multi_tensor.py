"""The base of all optimizers: every parameter of a device and dtype in one launch.

A class names its row of ``csrc/kernels/optim/optim_ops.h`` and says which of the row's states a group has. Checks and
the step are here, loading is in ``_loading.py``, tables of addresses are in ``_plan.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core import tensor_list as lists
from warpsmith._core.raw_step import COUNTER, SCALES, optim_step, state_names, value_names
from warpsmith.optim import _eight_bit as eight_bit
from warpsmith.optim import _loading as loading
from warpsmith.optim._plan import Kind, Plan
from warpsmith.optim._precision import EXTRA_DTYPES, PRECISIONS, Storage, dtypes_of, storage_of
from warpsmith.optim._step_extras import NOTHING, WithStepExtras

Group = dict[str, Any]
Check = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that

_NOT_8BIT = "another one: 8bit is for Adam without amsgrad, Lion and SGD"
_HOST_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever the default device


def _is_part(value: Any) -> bool:
    return checks.is_number(value) and 0 <= value < 1


AT_LEAST_0: Check = ("a number >= 0", lambda x: x >= 0)
A_NUMBER: Check = ("a number", lambda x: x == x)
TWO_PARTS: Check = ("two numbers in [0, 1)", lambda x: len(x) == 2 and all(map(_is_part, x)))
THREE_NUMBERS: Check = (
    "three numbers",
    lambda x: len(x) == 3 and all(checks.is_number(v) and math.isfinite(v) for v in x),
)
_FLAGS = (
    *("maximize", "amsgrad", "nesterov", "centered", "capturable", "differentiable", "decoupled_weight_decay"),
    *("grad_averaging", "use_nvlamb", "foreach", "fused", "fp8_weights"),
)
_OR_NONE = ("foreach", "fused")


class CheckedOptimizer(torch.optim.Optimizer):
    """Checks of hyperparameters and of loaded states, and the call of a step."""

    _step_supports_amp_scaling = True  # GradScaler then leaves dividing and skipping to step()

    _op: ClassVar[str]  # in messages

    _check_loaded: Callable[[dict[str, Any]], None]  # before anything is loaded
    _restore: Callable[[dict[str, Any]], None]  # of loaded states: torch has given them dtypes of parameters
    _forget: Callable[[], None]
    _update: Callable[[], None]

    def _refuse(self, argument: str, expected: str, got: Any) -> NoReturn:
        checks.refuse(self._op, argument, expected, got if isinstance(got, str) else checks.value_text(got))
        raise AssertionError

    def _check_values(self, group: Group, values: Mapping[str, Check], prefix: str = "") -> None:
        """Refuses lr and these hyperparameters where they do not fit. ``prefix``: of their names in messages."""
        self._check_lr(f"{prefix}lr", group["lr"])
        for name, (expected, fits) in values.items():
            argument, value = prefix + name, group[name]
            if (expected, fits) not in (TWO_PARTS, THREE_NUMBERS):
                checks.number(self._op, argument, value, expected, fits)
                continue
            if not isinstance(value, (tuple, list)):
                checks.refuse_type(self._op, argument, expected, value)
            if not fits(value):
                self._refuse(argument, expected, value)

    def _check_lr(self, argument: str, lr: Any) -> None:
        if not isinstance(lr, Tensor):
            checks.number(self._op, argument, lr, *AT_LEAST_0)
            return
        if lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
            got = f"{checks.dtype_text(lr.dtype)} {tuple(lr.shape)}"
            self._refuse(argument, "a number, or one float32 or float64 element", got)
        if lr.device.type == "cpu" and not lr.item() >= 0:
            self._refuse(argument, "a number >= 0", lr.item())

    def _check_seed(self, seed: Any) -> None:
        if not checks.is_integer(seed) or not 0 <= seed < 2**53:
            self._refuse("seed", "a whole number in [0, 2^53)", seed)

    def _refuse_capture(self) -> NoReturn:
        raise RuntimeError(f"{self._op}: take one step before the capture: a replay would make the states anew")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of this class, here or in ``torch.optim``."""
        checked = []

        def check(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            self._check_loaded(given)
            checked.append(given)

        last = self.register_load_state_dict_pre_hook(check)  # after all others, which may change what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        self._restore(checked[0])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for p in group["params"]:
                s = self.state.get(p, {})
                if COUNTER in s:  # torch counts in Python numbers (before 1.12) or on the CPU where it is not fused
                    s[COUNTER] = torch.as_tensor(s[COUNTER], dtype=torch.float32, device=p.device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. ``closure`` recomputes the loss, which is then returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss


class MultiTensorOptimizer(WithStepExtras, CheckedOptimizer):
    """What all optimizers share that update every parameter in one launch; they are its subclasses."""

    _row: ClassVar[str]  # of the kernels, where all groups have the same
    _needed: ClassVar[tuple[str, ...]]  # names without which a state that is not empty is another optimizer's
    _checks: ClassVar[Mapping[str, Check]]  # of hyperparameters other than lr
    _of_every_group: ClassVar[Mapping[str, Any]] = {}  # values that no argument, group or loaded state changes
    _fp8_weights = False  # steps write the 8-bit casts of weights that layers of warpsmith.amp.fp8 keep

    def __init__(self, params: Any, given: dict[str, Any]) -> None:
        """``given``: ``locals()`` of a subclass's constructor, whose other arguments are the options of groups."""
        defaults = {name: value for name, value in given.items() if name not in ("self", "params", "__class__")}
        for name, usual in (("precision", None), ("seed", 0), ("keep_fp32", ()), ("keep_fp32", [])):
            if type(defaults.get(name)) is type(usual) and defaults.get(name) == usual:
                defaults.pop(name, None)  # torch's groups have no such entries
        self._check_flags(defaults)
        self._fp8_weights = bool(defaults.pop("fp8_weights", False))
        if defaults.get("foreach") and defaults.get("fused"):
            self._refuse("fused", "not both foreach and fused", "both True")
        if defaults.get("fused") is False:  # as torch's: those who divide and clip gradients themselves ask for this
            self._step_supports_amp_scaling = False
        defaults.update(self._of_every_group)
        self._check_hyperparameters(defaults)
        self._forget()
        super().__init__(params, defaults)

    # What a subclass may say of its groups.

    def _row_of(self, group: Group) -> str:
        return self._row

    def _states_of(self, group: Group) -> tuple[str, ...]:
        """The states of a group's parameters, with ``step`` if their steps are counted, in the order of torch's."""
        return self._needed

    def _values_of(self, group: Group) -> dict[str, float]:
        """Hyperparameters whose name in the row is not their name in the group."""
        return dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))

    def _takes_8bit(self, group: Group) -> bool:
        return False

    def _initial(self, group: Group, name: str) -> float:
        """What a state is filled with."""
        return 0.0

    def _adopt(self, state: dict[str, Any]) -> None:
        """Brings the loaded state of one parameter into the form of these optimizers."""

    # Hyperparameters and groups.

    def _check_hyperparameters(self, group: Group) -> None:
        self._check_values(group, self._checks)
        self._check_flags(group)
        checks.one_of(self._op, "precision", group.get("precision"), PRECISIONS)
        self._check_seed(group.get("seed", 0))
        if group.get("precision") == "8bit" and not self._takes_8bit(group):
            self._refuse("precision", _NOT_8BIT, "8bit")
        keep = group.get("keep_fp32", ())
        if not isinstance(keep, (tuple, list)) or not all(isinstance(pattern, str) for pattern in keep):
            self._refuse("keep_fp32", "a sequence of patterns for names of parameters", keep)
        if group.get("differentiable"):
            self._refuse("differentiable", "False: the fused step has no derivative", True)

    def _check_flags(self, group: Group) -> None:
        given = {name: group[name] for name in _FLAGS if name in group}
        checks.flags(self._op, **{n: value for n, value in given.items() if not (n in _OR_NONE and value is None)})

    def _kind(self, group: Group) -> Kind:
        keep_fp32 = tuple(group.get("keep_fp32", ()))
        return Kind(self._row_of(group), self._states_of(group), group.get("precision"), keep_fp32)

    def _forget(self) -> None:
        self._plan: Plan | None = None
        self._captured: list[Plan] = []  # what CUDA graphs point to
        self._constants: dict[str, tuple[list[tuple[float, ...]], Tensor]] = {}
        self._host_lr: dict[float, Tensor] = {}
        self.device_constants: dict[str, Tensor] = {}

    def host_constants(self) -> dict[str, Tensor]:
        """The hyperparameters of all groups by row, as a launch takes them; an entry of ``device_constants`` of the
        same form is read by the kernel in place of them, at each replay of a CUDA graph too. A row whose values are the
        same has the same tensor."""
        kinds = [self._kind(group) for group in self.param_groups]
        return {row: self._constants_of(row, kinds) for row in dict.fromkeys(kind.row for kind in kinds)}

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group of parameters, with its own values for any of the constructor's arguments."""
        if isinstance(param_group, dict):
            self._check_hyperparameters({**self.defaults, **param_group, **self._of_every_group})
        super().add_param_group(param_group)
        self.param_groups[-1].update(self._of_every_group)
        try:
            self._check_dtypes(len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise
        self._plan = None

    def _check_dtypes(self, number: int) -> None:
        """Refuses trainable parameters of a group whose dtype no precision takes. A frozen one may have any."""
        group = {**self.param_groups[number], "precision": None}
        first = sum(len(g["params"]) for g in self.param_groups[:number])
        for index, param in enumerate(group["params"], first):
            if param.requires_grad:
                self._checked_storage(lists.describe(self.param_groups, index), param, group)

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            self._check_hyperparameters({**self.defaults, **group, **self._of_every_group})
        rows = {self._row_of(group) for group in self.param_groups}
        loading.check_shapes(self, state_dict, {*EXTRA_DTYPES, *(name for row in rows for name in state_names(row))})

    def _restore(self, state_dict: dict[str, Any]) -> None:
        loading.restore_precision(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = "_step_supports_amp_scaling", "_fp8_weights"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        captured = getattr(self, "_captured", [])
        super().__setstate__(state)
        self._captured = captured
        for group in self.param_groups:
            group.update(self._of_every_group)
            for p in group["params"]:
                self._adopt(self.state.get(p, {}))

    # The step.

    @torch._disable_dynamo  # type: ignore[attr-defined]  # addresses cannot be traced
    @torch.no_grad()
    def _update(self) -> None:
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        plan = self._plan
        if plan is None or not plan.look(self):
            plan = self._make_plan(capturing)
            if plan is None:
                self._finish(None, False)
                return
            if not plan.look(self):
                raise RuntimeError(f"{self._op}: a parameter or state has another address at every look")
        if capturing and plan not in self._captured:
            plan.hold(self.state)
            self._captured.append(plan)
        grad_scale, found_inf = lists.whole(getattr(self, "grad_scale", None)), self._skip_flag()
        zeroes = self._zeroes_in_kernels(plan)
        plan.load_staged()
        for number, bucket in enumerate(plan.buckets):
            more, mixed = self._more(plan, bucket, zeroes, capturing), plan.watch.mixed(number)
            alone = not (capturing or mixed or (more and (more[0] is not None or more[2])))
            casts, weights = bucket.weight_casts(plan.params) if alone else (None, ())
            optim_step(
                bucket.table,
                bucket.facts,
                bucket.gradient_pointers(plan.watch, number, capturing),
                [self._lr(group["lr"], bucket.device) for group in self.param_groups],
                self._constants_of(bucket.row, plan.kinds),
                None if grad_scale is None else lists.moved(grad_scale, bucket.device).float(),
                None if found_inf is None else lists.moved(found_inf, bucket.device).float(),
                self.device_constants.get(bucket.row),
                mixed,
                *(more or NOTHING),
                casts,
            )
            for kept in weights:
                kept.follow_step()
        plan.store_staged()
        self._finish(plan, zeroes)

    def _make_plan(self, capturing: bool) -> Plan | None:
        params = lists.all_params(self.param_groups)
        active = [i for i, p in enumerate(params) if p.grad is not None or self.state.get(p)]
        if not active:
            return None
        owners = [group for group in self.param_groups for _ in group["params"]]
        for i in active:
            self._check_param(i, params[i], owners[i])
        for i in active:  # a gradient is refused before any state is made
            if params[i].grad is not None:
                lists.checked_gradient(self._op, self.param_groups, i, params[i])
        if capturing and any(self._arrays_of(params[i], owners[i]) and not self.state.get(params[i]) for i in active):
            self._refuse_capture()
        for i in active:
            self._prepare_state(params[i], owners[i])
        plan = Plan(self, active)
        if not capturing:  # a table made in a capture has its contents only once the graph has run
            self._plan = plan
        return plan

    def _check_param(self, index: int, param: Tensor, group: Group) -> None:
        p, argument = lists.local(param), lists.describe(self.param_groups, index)
        precision = group.get("precision")
        storage = self._checked_storage(argument, param, group)
        if p.device.type not in ("cpu", "cuda"):
            self._refuse(argument, "a tensor on the CPU or on CUDA", p.device)
        if lists.has_overlap(p):
            self._refuse(argument, "elements without overlap", f"strides {p.stride()} for shape {tuple(p.shape)}")
        if p._is_zerotensor():
            self._refuse(argument, "a tensor with memory", "zeros without memory")
        if precision == "8bit" and not self._takes_8bit(group):
            self._refuse("precision", _NOT_8BIT, "8bit")
        if precision == "8bit" and hasattr(param, "to_local"):
            self._refuse(argument, "a plain tensor for precision 8bit", "a DTensor")
        if precision == "8bit" and group.get("keep_fp32") and "param_names" not in group:
            self._refuse(argument, "a parameter that was given with its name, for keep_fp32", "one without")
        first = getattr(param, "first_element", 0)
        if type(first) is not int or first < 0:
            self._refuse(f"{argument}: first_element", "a whole number >= 0", first)
        state = self.state.get(param)
        loading.check_state(self, argument, state or {})
        for name in storage.arrays(self._states_of(group)):
            if not state or name not in state:
                continue
            value = state[name]
            if not isinstance(value, Tensor):
                checks.refuse_type(self._op, f"{argument}: {name}", "a tensor", value)
            if value.device != param.device:
                self._refuse(f"{argument}: {name}", f"a tensor on {param.device}", f"one on {value.device}")
            dtype = torch.float32 if name == COUNTER else storage.array_dtype(name)
            if value.dtype != dtype:
                self._refuse(f"{argument}: {name}", checks.dtype_text(dtype), checks.dtype_text(value.dtype))

    def _checked_storage(self, argument: str, param: Tensor, group: Group) -> Storage:
        storage, precision = self._storage(param, group), group.get("precision")
        if storage is None and precision is not None:
            known = " or ".join(str(d).removeprefix("torch.") for d in dtypes_of(precision))
            self._refuse(argument, f"{known} for precision {precision}", checks.dtype_text(param.dtype))
        if storage is None or (param.dtype == torch.float64 and param.device.type == "cuda"):
            self._refuse(argument, "float32, float16, bfloat16, or float64 on the CPU", checks.dtype_text(param.dtype))
        return storage

    def _storage(self, param: Tensor, group: Group) -> Storage | None:
        """How a parameter is stored; None where the precision does not take its dtype."""
        exact = False
        if group.get("precision") == "8bit":
            exact = param.numel() < eight_bit.LEAST_ELEMS or not self._states_of(group)
            if patterns := group.get("keep_fp32", ()):
                names = group.get("param_names", [""] * len(group["params"]))
                name = next(n for n, p in zip(names, group["params"], strict=True) if p is param)
                exact = exact or any(fnmatchcase(name, pattern) for pattern in patterns)
        return storage_of(group.get("precision"), param.dtype, exact)

    def _arrays_of(self, param: Tensor, group: Group) -> tuple[str, ...]:
        storage = self._storage(param, group)
        assert storage is not None
        return storage.arrays(self._states_of(group))

    def _prepare_state(self, param: Tensor, group: Group) -> None:
        storage = self._storage(param, group)
        names = self._arrays_of(param, group)
        if not names:
            return
        assert storage is not None
        state = self.state[param]
        for name in names:
            if name in state and not lists.holds_its_elements(lists.local(state[name])):
                state[name] = torch.empty_like(state[name]).copy_(state[name])
        place = lists.local(param)
        place = place if lists.in_place(place) else torch.empty_like(place)
        if COUNTER in names and COUNTER not in state:
            # A state whose steps were not counted so far has taken some.
            taken = float(bool(set(state) - {*EXTRA_DTYPES, SCALES}))
            state[COUNTER] = torch.full((), taken, dtype=torch.float32, device=param.device)
        for name in names:
            if name == COUNTER:
                continue
            if name == SCALES:
                if name not in state:
                    shape = (len(names) - (COUNTER in names) - 1, eight_bit.blocks_of(param.numel()))
                    state[name] = torch.zeros(shape, dtype=torch.float32, device=param.device)
            elif name == "master" and name not in state:
                state[name] = param.detach().to(torch.float32, memory_format=torch.preserve_format)
            elif name not in state:
                dtype, preserve = storage.array_dtype(name), torch.preserve_format
                value = 0.0 if name in EXTRA_DTYPES else self._initial(group, name)
                if storage.is_quantized:
                    value = eight_bit.ZERO_CODES[eight_bit.is_signed(self._row_of(group), name)]
                state[name] = torch.full_like(param, value, dtype=dtype, memory_format=preserve)
            elif state[name].layout != torch.strided:
                self._refuse(f"state {name}", "a dense tensor", str(state[name].layout).removeprefix("torch."))
            elif state[name].shape == param.shape and not lists.same_layout(lists.local(state[name]), place):
                if storage.is_quantized:
                    eight_bit.lay_as(state, name, self._row_of(group), param.detach())
                    continue
                state[name] = torch.empty_like(param, dtype=state[name].dtype).copy_(state[name])

    def _constants_of(self, row: str, kinds: list[Kind]) -> Tensor:
        """A line for each group: the values of the row, ``maximize``, the seed. Groups of other rows have zeros."""
        names = value_names(row)
        lines = []
        for group, kind in zip(self.param_groups, kinds, strict=True):
            if kind.row == row:
                own = self._values_of(group)
                values = (float(own[n] if n in own else group[n]) for n in names)
                lines.append((*values, float(group["maximize"]), float(group.get("seed", 0))))
            else:
                lines.append((0.0,) * (len(names) + 2))
        known = self._constants.get(row)
        if known is None or known[0] != lines:
            known = self._constants[row] = (lines, torch.tensor(lines, **_HOST_DOUBLE))
        return known[1]

    def _lr(self, lr: float | Tensor, device: torch.device) -> Tensor:
        if isinstance(lr, Tensor):
            return lr if lr.device.type == "cpu" else lists.moved(lr, device)
        known = self._host_lr.get(lr)
        if known is None:
            self._host_lr = {} if len(self._host_lr) >= len(self.param_groups) else self._host_lr
            known = self._host_lr[lr] = torch.tensor(lr, **_HOST_DOUBLE)
        return known
