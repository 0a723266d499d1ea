from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core import tensor_list as lists
from warpsmith._core.captures import capturing
from warpsmith._core.raw_step import COUNTER
from warpsmith.optim import _newton_schulz as iteration
from warpsmith.optim._loading import check_shapes
from warpsmith.optim._multi_tensor import (
    AT_LEAST_0,
    THREE_NUMBERS,
    TWO_PARTS,
    CheckedOptimizer,
    Group,
    MultiTensorOptimizer,
)
from warpsmith.optim._precision import EXTRA_DTYPES, PRECISIONS, dtypes_of, storage_of
from warpsmith.optim.adamw import AdamW
from warpsmith.optim.sgd import SGD

_LEARNING_RATES = ("original", "match_rms_adamw")
_PRECISIONS = tuple(p for p in PRECISIONS if p != "8bit")
_WIDE = ("master", "remainder")  # precisions whose states are float32
_BATCH_ELEMS = 1 << 28  # of the matrices that are multiplied together: 512 MiB in 16 bits
_OF_ADAMW = ("lr", "betas", "eps", "weight_decay", "precision", "seed")
BUFFER = "momentum_buffer"


class _Matrix(NamedTuple):
    """A parameter of a group of matrices that has a gradient."""

    param: Tensor
    grad: Tensor
    group: int


class Muon(CheckedOptimizer):
    r"""Muon: the momentum of each matrix, orthogonalised; equal shapes together.

    .. math::
        B &\leftarrow \mu B + (1 - \mu) G, \qquad U = (1 - \mu) G + \mu B \text{ (Nesterov), or } B \\
        X &\leftarrow U / \max(\lVert U \rVert, \epsilon), \text{ then } k \text{ times }
        X \leftarrow (a + b A + c A^2) X \text{ with } A = X X^T \\
        p &\leftarrow p \, (1 - \gamma \lambda) - \gamma' X

    Constructor, ``param_groups``, ``state_dict`` and the default iteration are those of ``torch.optim.Muon``; each
    loads the other's state. A and its square are :func:`warpsmith.matmul_symmetric`'s products, half of the work.

    Args:
        params: tensors, (name, tensor) pairs or dicts of groups; matrices, unless ``others`` says otherwise.
        lr: :math:`\gamma`: a number, or a tensor of one element; one on the device is read there.
        weight_decay, momentum, eps: :math:`\lambda`, :math:`\mu`, :math:`\epsilon`: numbers >= 0.
        nesterov: use U with the gradient once more.
        ns_coefficients: (a, b, c). ns_steps: k, at most 99.
        adjust_lr_fn: :math:`\gamma'` of an (A, B) matrix: None or "original": :math:`\gamma \sqrt{\max(1, A / B)}`;
            "match_rms_adamw": :math:`0.2 \gamma \sqrt{\max(A, B)}`.
        newton_schulz: "standard": in bfloat16, as torch. "gram": the polynomials multiply A, in float16 (on the CPU
            float32), and the matrix is multiplied after the second and the last step; less work for matrices that are
            not square, other roundings. Also an option of a group.
        others: None: other parameters than matrices are refused. "adamw": they are stepped as by
            :class:`warpsmith.optim.AdamW`, in groups of their own, with ``others=True``. So are those of a group that
            is given with ``others=True``, and parameters given with names that match ``others_names``.
        others_names: patterns (``fnmatch``). By default embeddings and ``lm_head``.
        others_lr, others_betas, others_eps, others_weight_decay: of those groups; None: ``lr``, ``weight_decay``.
        precision, seed: what is stored in which dtype, as for :class:`warpsmith.optim.AdamW`, but not "8bit"; also
            options of a group. Without one, momentum buffers have the dtype of the gradients, as in torch.

    Gradient scaling and skipped steps, tensors as learning rates and CUDA graphs: as for
    :class:`warpsmith.optim.AdamW`. Matrices must be whole: DTensors and
    :class:`warpsmith.distributed.ShardedOptimizer` are refused. Deterministic. The host never waits for the device.

    Raises:
        ValueError: a hyperparameter out of range; a parameter that is no matrix; a loaded state of another shape; at
            ``step``, a parameter, gradient or state that does not fit. Nothing has changed then.

    Source: Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/; the Gram form with a restart as in
    Dao-AILab's gram-newton-schulz, 2026.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.Muon(model.named_parameters(), lr=0.02, others="adamw", others_lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op = "Muon"
    _of_matrices = {**dict.fromkeys(("weight_decay", "momentum", "eps"), AT_LEAST_0), "ns_coefficients": THREE_NUMBERS}
    _of_others_groups = {"betas": TWO_PARTS, "weight_decay": AT_LEAST_0, "eps": AT_LEAST_0}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        newton_schulz: str = "standard",
        others: str | None = None,
        others_names: Sequence[str] = ("*embed*", "*wte*", "*wpe*", "*lm_head*"),
        others_lr: float | Tensor | None = None,
        others_betas: tuple[float, float] = (0.9, 0.999),
        others_eps: float = 1e-8,
        others_weight_decay: float | None = None,
        precision: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "newton_schulz": newton_schulz,
            "precision": precision,
            "seed": seed,
        }
        checks.one_of(self._op, "others", others, (None, "adamw"))
        if isinstance(others_names, str) or not all(isinstance(pattern, str) for pattern in others_names):
            self._refuse("others_names", "a sequence of patterns for names of parameters", others_names)
        self._has_others, self._others_names = others is not None, tuple(others_names)
        self._of_others = {
            "lr": lr if others_lr is None else others_lr,
            "betas": others_betas,
            "eps": others_eps,
            "weight_decay": weight_decay if others_weight_decay is None else others_weight_decay,
        }
        self._check(defaults)
        self._check_values({**defaults, **self._of_others}, self._of_others_groups, "others_")
        self._forget()
        super().__init__(params, defaults)

    # Hyperparameters and groups.

    def _check(self, group: Group) -> None:
        self._check_values(group, self._of_matrices)
        checks.flags(self._op, nesterov=group["nesterov"])
        steps = group["ns_steps"]
        if not checks.is_integer(steps) or not 0 <= steps < 100:
            self._refuse("ns_steps", "a whole number in [0, 100)", steps)
        checks.one_of(self._op, "adjust_lr_fn", group["adjust_lr_fn"], (None, *_LEARNING_RATES))
        checks.one_of(self._op, "newton_schulz", group["newton_schulz"], iteration.FORMS)
        checks.one_of(self._op, "precision", group["precision"], _PRECISIONS)
        self._check_seed(group["seed"])

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group of parameters, with its own values for any of the constructor's arguments; those that AdamW
        steps become a group of their own."""
        if not isinstance(param_group, dict):
            checks.refuse_type(self._op, "param_group", "a dict", param_group)
        given = dict(param_group)
        of_adamw = given.pop("others", False)
        checks.flags(self._op, others=of_adamw)
        if of_adamw and not self._has_others:
            self._refuse("others", 'False beside others=None of the constructor, which takes "adamw"', True)
        params = given.pop("params")
        entries = [params] if isinstance(params, Tensor) else list(params)
        apart = [of_adamw or (self._has_others and self._is_other(entry)) for entry in entries]
        matrices = [entry for entry, other in zip(entries, apart, strict=True) if not other]
        others = [entry for entry, other in zip(entries, apart, strict=True) if other]
        first = len(self.param_groups)
        try:
            if matrices or not others:
                self._check({**self.defaults, **given})
                super().add_param_group({**given, "params": matrices})
                self._check_matrices(first)
            if others:
                # A group without matrices has its own values; of a mixed one, those that both kinds have alike.
                alike = ("weight_decay", "betas", "precision")
                own = given if of_adamw or not matrices else {n: given[n] for n in alike if n in given}
                values = {**self._of_others, **own}
                self._check_values({**self.defaults, **values}, self._of_others_groups)
                kept = {name: value for name, value in given.items() if name not in values}
                super().add_param_group({**kept, **values, "others": True, "params": others})
        except (ValueError, TypeError):
            del self.param_groups[first:]
            raise
        self._forget()

    def _is_other(self, entry: Any) -> bool:
        name, param = entry if isinstance(entry, tuple) else ("", entry)
        if not isinstance(param, Tensor):
            return False  # torch says what is wrong
        return param.dim() != 2 or any(fnmatchcase(name, pattern) for pattern in self._others_names)

    def _check_matrices(self, number: int) -> None:
        start = sum(len(group["params"]) for group in self.param_groups[:number])
        for index, param in enumerate(self.param_groups[number]["params"], start):
            argument = lists.describe(self.param_groups, index)
            if param.dim() != 2:
                self._refuse(
                    argument, 'a matrix (others="adamw" steps other parameters)', f"shape {tuple(param.shape)}"
                )
            if hasattr(param, "to_local"):
                self._refuse(argument, "a whole matrix", "a DTensor")
            precision = self.param_groups[number]["precision"]
            if param.requires_grad and storage_of(precision, param.dtype) is None:
                known = (torch.float32, torch.float16, torch.bfloat16) if precision is None else dtypes_of(precision)
                self._refuse(argument, " or ".join(map(checks.dtype_text, known)), checks.dtype_text(param.dtype))

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        for group, mine in zip(state_dict["param_groups"], self.param_groups, strict=False):
            if bool(group.get("others")) != bool(mine.get("others")):
                kinds = ["one that AdamW steps" if g.get("others") else "one of matrices" for g in (mine, group)]
                self._refuse("state_dict: a group", *kinds)
            whole = {**self.defaults, **group}
            self._check_values(whole, self._of_others_groups) if group.get("others") else self._check(whole)
        check_shapes(self, state_dict, {name for s in state_dict["state"].values() for name in s} - {COUNTER})

    def _restore(self, state_dict: dict[str, Any]) -> None:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        owners = [group for group in self.param_groups for _ in group["params"]]
        for key, p, group in zip(keys, lists.all_params(self.param_groups), owners, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                dtype = EXTRA_DTYPES.get(name, torch.float32 if group["precision"] in _WIDE else None)
                if isinstance(value, Tensor) and name != COUNTER and dtype is not None:
                    self.state[p][name] = value.to(device=p.device, dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_has_others", "_others_names", "_of_others")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    # The step: momentum and weights are steps of SGD, in one launch each.

    def _forget(self) -> None:
        self._parts: list[MultiTensorOptimizer] = []
        self._aliases: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of buffer and parameter, whose gradients are ours
        self._known: tuple[Any, ...] = ()

    @torch._disable_dynamo  # type: ignore[attr-defined]  # addresses cannot be traced
    @torch.no_grad()
    def _update(self) -> None:
        active = [
            _Matrix(p, p.grad, number)
            for number, group in enumerate(self.param_groups)
            if not group.get("others")
            for p in group["params"]
            if p.grad is not None
        ]
        self._prepare(active)
        momentum, weights, adamw = self._parts
        scale, found_inf = (lists.whole(getattr(self, name, None)) for name in ("grad_scale", "found_inf"))
        for matrix in active:
            buffer, _ = self._aliases[matrix.param]
            buffer.grad = matrix.grad
        self._run(momentum, scale, found_inf)
        for matrices in _batches(active, self.param_groups):
            self._orthogonalise(matrices, scale)
        self._run(weights, None, found_inf)
        for matrix in active:
            for alias in self._aliases[matrix.param]:
                alias.grad = None
        self._run(adamw, scale, found_inf)

    @staticmethod
    def _run(part: MultiTensorOptimizer, scale: Tensor | None, found_inf: Tensor | None) -> None:
        if part.param_groups:
            part.grad_scale, part.found_inf = scale, found_inf  # type: ignore[attr-defined]
            part._update()

    def _orthogonalise(self, matrices: list[_Matrix], scale: Tensor | None) -> None:
        """Gives the aliases of parameters their steps as gradients."""
        group, first = self.param_groups[matrices[0].group], matrices[0].param
        u = torch.empty((len(matrices), *first.shape), dtype=torch.bfloat16, device=first.device)
        factor = None if scale is None else lists.moved(scale, first.device).float().reciprocal()
        eps, momentum = float(group["eps"]), float(group["momentum"])
        for out, matrix in zip(u.unbind(0), matrices, strict=True):
            buffer = self.state[matrix.param][BUFFER]
            if group["nesterov"] and momentum > 0:  # U over the momentum, in one pass
                g = matrix.grad if factor is None else matrix.grad.float() * factor
                torch.add(buffer, g, alpha=(1 - momentum) / momentum, out=out)
            else:
                out.copy_(buffer)
        if group["nesterov"] and momentum > 0:
            eps /= momentum
        a, b, c = map(float, group["ns_coefficients"])
        u = iteration.newton_schulz(u, group["newton_schulz"], (a, b, c), eps, group["ns_steps"])
        for step, matrix in zip(u.unbind(0), matrices, strict=True):
            wide = matrix.param.dtype == torch.float64  # no step takes another dtype beside it
            self._aliases[matrix.param][1].grad = step.double() if wide else step

    def _prepare(self, active: list[_Matrix]) -> None:
        """Makes states and the optimizers of the parts, or brings them up to date."""
        for matrix in active:
            if matrix.param not in self.state or BUFFER not in self.state[matrix.param]:
                self._check_gradients(active)
                break
        for matrix in active:
            state = self.state[matrix.param]
            if BUFFER not in state:
                if capturing():
                    self._refuse_capture()
                precision, grad = self.param_groups[matrix.group]["precision"], matrix.grad
                dtype = torch.float32 if precision in _WIDE else grad.dtype
                dtype = torch.bfloat16 if precision == "bf16_states" else dtype
                state[BUFFER] = torch.zeros_like(grad, dtype=dtype, memory_format=torch.preserve_format)
        known = tuple(
            (id(p), number, self._ratio(m), id(self.state[p][BUFFER])) for m in active for p, _, number in (m,)
        )
        if not self._parts or known != self._known:
            self._build(active)
            self._known = known
        for group in self._parts[0].param_groups:
            group["lr"] = 1 - self.param_groups[group["of"]]["momentum"]
        for group in self._parts[1].param_groups:
            of, ratio = self.param_groups[group["of"]], group["ratio"]
            group["lr"], group["weight_decay"] = of["lr"] * ratio, of["weight_decay"] / ratio
        for group in self._parts[2].param_groups:
            group.update({name: self.param_groups[group["of"]][name] for name in _OF_ADAMW})
        for p, aliases in self._aliases.items():
            for alias, tensor in zip(aliases, (self.state[p][BUFFER], p), strict=True):
                if alias.data_ptr() != tensor.data_ptr() or alias.stride() != tensor.stride():
                    alias.data = tensor.detach()

    def _check_gradients(self, active: list[_Matrix]) -> None:
        for matrix in active:
            index = next(i for i, p in enumerate(lists.all_params(self.param_groups)) if p is matrix.param)
            lists.checked_gradient(self._op, self.param_groups, index, matrix.param)

    def _ratio(self, matrix: _Matrix) -> float:
        """Of the learning rate of a matrix and its group's."""
        rows, columns = matrix.param.shape
        if self.param_groups[matrix.group]["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns)) if columns else 1.0

    def _build(self, active: list[_Matrix]) -> None:
        """B + (1 - momentum) (G - B) is a step of SGD up G with a decay of 1; p (1 - lr decay) - lr ratio X is one with
        the learning rate lr ratio."""
        self._aliases = {m.param: (self.state[m.param][BUFFER].detach(), m.param.detach()) for m in active}
        buffers: dict[int, list[Tensor]] = {}
        weights: dict[tuple[int, float], list[Tensor]] = {}
        others = []
        for number, group in enumerate(self.param_groups):
            if group.get("others"):
                of_adamw = {name: group[name] for name in _OF_ADAMW}
                others.append({**of_adamw, "params": list(group["params"]), "of": number})
        for matrix in active:
            for alias in self._aliases[matrix.param]:
                alias.grad_dtype = None  # any
            buffer, alias = self._aliases[matrix.param]
            buffers.setdefault(matrix.group, []).append(buffer)
            weights.setdefault((matrix.group, self._ratio(matrix)), []).append(alias)
        of_buffers = [{"params": tensors, "of": number} for number, tensors in buffers.items()]
        momentum = _made(SGD, of_buffers, lr=0.0, weight_decay=1.0, maximize=True)
        of_weights = [
            {
                "params": aliases,
                "of": number,
                "ratio": ratio,
                "precision": self.param_groups[number]["precision"],
                "seed": self.param_groups[number]["seed"],
            }
            for (number, ratio), aliases in weights.items()
        ]
        stepped, adamw = _made(SGD, of_weights), _made(AdamW, others)
        for matrix in active:  # what a precision keeps of a parameter lies beside its momentum
            stepped.state[self._aliases[matrix.param][1]] = self.state[matrix.param]
        adamw.state = self.state
        self._parts = [momentum, stepped, adamw]


def _made(kind: type[MultiTensorOptimizer], groups: list[Group], **defaults: Any) -> Any:
    """An optimizer of groups, which may be none."""
    made = kind(groups or [torch.empty(0)], **defaults)
    if not groups:
        made.param_groups.clear()
    return made


def _batches(active: list[_Matrix], groups: list[Group]) -> Iterator[list[_Matrix]]:
    """Matrices of one group, shape and device, as many as are multiplied together."""
    alike: dict[Any, list[_Matrix]] = {}
    for matrix in active:
        if matrix.param.numel() > 0:
            alike.setdefault((matrix.group, matrix.param.shape, matrix.param.device), []).append(matrix)
    for matrices in alike.values():
        count = max(1, _BATCH_ELEMS // matrices[0].param.numel())
        for first in range(0, len(matrices), count):
            yield matrices[first : first + count]
