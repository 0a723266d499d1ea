"""Linear layers of a model in 8-bit floats, in place."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith._core.library import raw
from warpsmith._core.modules import stock
from warpsmith._core.pending import settle
from warpsmith.amp.fp8_ranks import group_of_forward, require_same_layers
from warpsmith.ops import _scaled_linear
from warpsmith.ops._linear import LINEAR, capability, under_autocast
from warpsmith.ops._scaled_linear import (
    Fp8Recipe,
    Fp8State,
    as_recipe,
    forget,
    in_fp8,
    is_emulated,
)
from warpsmith.ops._shared_casts import BY_ROWS

_OP, _LOAD = "fp8", "load_fp8_state"
_HEADS = ("lm_head", "head", "output", "unembed")  # names of layers that make logits
Filter = Callable[[str, nn.Module], bool]


class _Layer:
    """What a converted module carries, outside of its state_dict."""

    def __init__(self, owner: Fp8Layers, name: str, state: Fp8State) -> None:
        self.owner, self.name, self.state = owner, name, state

    def __reduce__(self) -> Any:
        return type(None), ()  # what is loaded is the layer as it was

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        settle()
        return _Layer(self.owner, self.name, copy.deepcopy(self.state, memo))


def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
    """Of a converted layer. It has the name of what it replaces: a pickle of a bound method holds its name alone."""
    layer: _Layer | None = self._fp8
    if layer is None:  # undone below somebody else's forward
        return type(self).forward(self, input, *(() if residual is None else (residual,)))
    owner, parameters = layer.owner, self._parameters
    if not owner._is_compared and (group := group_of_forward()) is not None:
        owner._compare(group)
    # nn.Module finds a parameter by a look-up that fails first (0.5 us); what is computed has no place among them.
    weight = parameters["weight"] if "weight" in parameters else self.weight
    bias = parameters["bias"] if "bias" in parameters else self.bias
    if layer.state.device != weight.device:
        owner.renew(layer, weight.device)
    if residual is not None:  # as linear takes it
        cast, residual = under_autocast(LINEAR, x=input, residual=residual)
        checks.same_dtype(LINEAR, "residual", residual, cast)
        checks.same_shape(LINEAR, "residual", residual, (*input.shape[:-1], self.out_features))
    y = _scaled_linear.layer(input, weight, bias, owner.recipe, layer.state, owner.emulate)
    return y if residual is None else y + residual


class Fp8Layers:
    """What :func:`warpsmith.amp.fp8` did; printed it is a table.

    Attributes:
        recipe: of all layers.
        replaced: by name, the scaling and the features of a layer that multiplies 8-bit floats now.
        kept: by name, why a layer multiplies as it did.
        group: the ranks over which delayed scales take the largest value; None: this one alone.
    """

    def __init__(
        self, recipe: Fp8Recipe, emulate: bool, group: dist.ProcessGroup | None, recompute: bool | str = False
    ) -> None:
        self.recipe, self.emulate, self.group, self._recompute = recipe, emulate, group, recompute
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._tensors_of_layers: list[Tensor] = []  # where CapturedStep finds what a step changes
        self._is_compared = False  # with other ranks
        self._history: Tensor | None = None  # (steps, layers, 2), newest first: of x and of the gradient
        self._scales: Tensor | None = None  # (layers, 2)

    def _add(self, name: str, module: nn.Linear) -> None:
        self._modules[name] = module
        self.replaced[name] = f"{self.recipe.scaling}, {module.in_features} -> {module.out_features}"
        module._fp8 = layer = _Layer(self, name, Fp8State(module.weight.device, self._recompute))  # type: ignore[assignment]
        self._tensors_of_layers += layer.state.totals()
        in_fp8[module.weight] = f"layer {name} in FP8, {self.recipe}"
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]

    def _compare(self, group: dist.ProcessGroup) -> None:
        require_same_layers(dict.fromkeys(self._modules, str(self.recipe)), group)
        self._is_compared = True

    def renew(self, layer: _Layer, device: torch.device) -> None:
        """For a layer that was moved: what it keeps begins anew on the other device."""
        layer.state = Fp8State(device, self._recompute)
        self._tensors_of_layers = [t for state in self._states() for t in state.totals()]

    def _states(self) -> list[Fp8State]:
        return [module._fp8.state for module in self._modules.values()]  # type: ignore[union-attr,misc]

    def undo(self) -> None:
        """Gives the layers their own forward back; one that somebody has put around ours stays. May be called again."""
        while self._modules:
            _, module = self._modules.popitem()
            module._fp8 = None  # type: ignore[assignment]
            if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
                del module.__dict__["forward"], module.__dict__["_fp8"]
            forget(module.weight)  # type: ignore[arg-type]
            in_fp8.pop(module.weight, None)

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Ends a step: delayed scales follow the largest values of the last steps. Call it once behind each step of the
        optimizer; other recipes need no call. The host does not wait; over a group it is one reduction.

        Args:
            found_inf: one float32 element: where it is not 0, the step was skipped and the history stays.
                ``scaler.found_inf(optimizer)``.
        """
        if self.recipe.amax != "delayed" or not self._modules:
            return
        states = self._states()
        totals = [t for s in states for t in s.totals()[:2]]
        settle()
        recipe, amax = self.recipe, torch.stack(totals).view(-1, 2)
        if self.group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, self.group)
        history, scales = self._tensors(amax.device)
        moved = torch.cat([amax[None], history[:-1]])
        if found_inf is not None:
            moved = torch.where(found_inf.to(amax.device) > 0, history, moved)
        history.copy_(moved)
        largest = history.amax(0)
        largest = torch.where(largest > 0, largest, amax) * 2.0**recipe.margin  # amax: of a first step that was skipped
        for i, dtype in enumerate((torch.float8_e4m3fn, recipe.grad_float8)):
            found = raw.fp8_scale(largest[:, i].contiguous(), dtype, bool(recipe.power_of_two))
            scales[:, i] = torch.where(largest[:, i] > 0, found, scales[:, i])  # what has not run keeps its scale
        for i, state in enumerate(states):
            if state.has_run:
                state.x_scale, state.dy_scale, state.has_run = scales[i, 0], scales[i, 1], False
        torch._foreach_zero_(totals)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._history is None or self._scales is None or self._history.device != device:
            self._history = torch.zeros(self.recipe.history, len(self._modules), 2, dtype=torch.float32, device=device)
            # cuBLASLt refuses a scale that does not lie on 16 bytes.
            self._scales = torch.ones(len(self._modules), 2, 4, dtype=torch.float32, device=device)[..., 0]
        return self._history, self._scales

    def counts(self) -> dict[str, tuple[int, int, int, int]]:
        """By name, since the conversion: elements of x that were saturated, elements that were not finite, and the same
        of the gradient. The host waits."""
        found = (
            torch.stack([torch.cat([s.x_counts, s.dy_counts]) for s in self._states()]).tolist()
            if self._modules
            else []
        )
        return dict(zip(self._modules, map(tuple, found), strict=True))

    def __repr__(self) -> str:
        lines = [f"{name}: {what}" for name, what in self.replaced.items()]
        return "\n".join([*lines, *(f"{name}: as it was: {why}" for name, why in self.kept.items())])


def layer_of(module: nn.Module) -> _Layer | None:
    """What a layer carries that multiplies 8-bit floats."""
    found = module.__dict__.get("_fp8")
    return found if isinstance(found, _Layer) else None


def reads_rows(module: nn.Module) -> bool:
    """Whether a layer multiplies the rows of x by powers of two, whose cast the producer of x may leave."""
    layer = layer_of(module)
    return layer is not None and layer.owner.recipe.how == BY_ROWS


def _owned(module: nn.Module) -> _Layer | None:
    """The same, but None of a copy, which nobody updates."""
    layer = layer_of(module)
    return None if layer is None or layer.owner._modules.get(layer.name) is not module else layer


def _heads(model: nn.Module) -> tuple[set[nn.Module], dict[nn.Linear, str]]:
    """Layers that make logits, and of those whose weight is an embedding's the embedding's name."""
    modules = dict(model.named_modules())
    embeddings = {id(m.weight): name for name, m in modules.items() if isinstance(m, nn.Embedding)}
    heads: set[nn.Module] = {m for name, m in modules.items() if name.rsplit(".", 1)[-1] in _HEADS}
    heads |= {m.get_output_embeddings() for m in modules.values() if hasattr(m, "get_output_embeddings")}
    linears = [m for m in modules.values() if isinstance(m, nn.Linear)]
    tied = {m: embeddings[id(m.weight)] for m in linears if id(m.weight) in embeddings}
    return heads | tied.keys(), tied


def _why_not(name: str, module: nn.Linear, filter: Filter | None, is_head: bool) -> str | None:
    cls = type(module)
    if _owned(module) is not None:
        return "it is in FP8 already"
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) not in (cls.forward, forward):
        return "somebody else has replaced its forward"
    ours = f"{cls.forward.__module__}.{cls.forward.__qualname__}" == "warpsmith.nn._linear.Linear.forward"
    if ours and (module.activation is not None or module.fuse_main_grad):
        return "its product has an activation or a main_grad"
    known = ours or cls.forward is nn.Linear.forward or getattr(cls.forward, "of_warpsmith", False)
    if not known or any(stock(c) is nn.modules.linear.NonDynamicallyQuantizableLinear for c in cls.__mro__):
        return f"it is a {cls.__name__} whose weight is used otherwise"
    if isinstance(module.weight, nn.UninitializedParameter):
        return "it has no sizes yet"
    if module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is {checks.dtype_text(module.weight.dtype)}"
    for what in ("in_features", "out_features"):
        if (size := getattr(module, what)) % 16:
            return f"its {what}, {size}, are no multiple of 16"
    if is_head:
        return "it makes logits: head=True of a recipe takes it too"
    return None if filter is None or filter(name, module) else "the filter leaves it out"


def fp8(
    model: nn.Module,
    recipe: str | Fp8Recipe = "auto",
    filter: Filter | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    emulate: bool = False,
    recompute: bool | str = True,
) -> Fp8Layers:
    """Lets the linear layers of a model multiply 8-bit floats, by :func:`warpsmith.scaled_linear`, in place.

    Parameters, ``state_dict``, hooks and classes stay. A copy of the model keeps its delayed scales until it is
    converted itself. Call it behind :func:`warpsmith.patch`; before or behind DDP, ``fully_shard`` and
    ``torch.compile``.

    Args:
        model: with ``torch.nn.Linear`` or :class:`warpsmith.nn.Linear` in it.
        recipe: a :class:`Fp8Recipe`; "row", "tensor" or "block"; or "auto": row scales on sm_90 and where products are
            emulated, else tensor scales.
        filter: ``filter(name, module)`` says whether to take a layer. Layers that make logits, by
            ``get_output_embeddings`` or the name ``lm_head``, ``head``, ``output`` or ``unembed``, or whose weight is
            an embedding's, stay unless the recipe has ``head=True``.
        group: the ranks that share tensors, over which delayed scales take the largest value. All of them must call,
            and are compared here; without it those of DDP in their first forward, those of a ShardedOptimizer in its
            first reduction.
        emulate: multiply what the casts leave in float32. So on the CPU in any case.
        recompute: behind ``patch`` and with row scales that are powers of two, the backward makes the bytes of x again
            where what they are made of is kept anyway, by an RMS norm or by attention: a byte an element of x less,
            for another pass over it. "all": of SwiGLU's result too, whose pass is the longest. No bit of the training
            changes.

    Returns:
        :class:`Fp8Layers`: what was replaced, what was kept and why, ``undo()``, and for delayed scales ``update()``.

    Raises:
        ValueError: no model; a card without such products; another recipe than the model has; ``head=True`` where the
            head's weight is an embedding's; ranks of ``group`` with other layers or another recipe, or one that has not
            called for 300 s. Nothing has changed.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
        >>> warpsmith.amp.fp8(model)
        0: row, 16 -> 64
        2: as it was: its out_features, 10, are no multiple of 16
    """
    if not isinstance(model, nn.Module):
        checks.refuse(_OP, "model", "a torch.nn.Module", checks.value_text(model))
    if filter is not None and not callable(filter):
        checks.refuse_type(_OP, "filter", "a function of name and module, or None", filter)
    checks.flags(_OP, emulate=emulate)
    checks.one_of(_OP, "recompute", recompute, (True, False, "all"))
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    device = next((m.weight.device for _, m in layers), torch.device("cpu"))
    if isinstance(recipe, str) and recipe == "auto":
        of_rows = emulate or device.type != "cuda" or capability(device) == (9, 0)
        recipe = "row" if of_rows else "tensor"
    chosen = as_recipe(_OP, recipe)
    is_emulated(_OP, chosen, device, bool(emulate))
    for _, module in layers:
        before = _owned(module)
        if before is not None and before.owner.recipe != chosen:
            checks.refuse(_OP, "recipe", f"{before.owner.recipe}, which the model has, or undo() before", str(chosen))
    heads, tied = _heads(model)
    if chosen.head and tied:
        head, embedding = next(iter(tied.items()))
        name = next(n for n, m in layers if m is head)
        checks.refuse(_OP, "recipe", f"head=False: the weight of {name} is that of {embedding}", "head=True")
    done = Fp8Layers(chosen, bool(emulate), group, recompute)
    for name, module in layers:
        why = _why_not(name, module, filter, module in heads and not chosen.head)
        if why is None:
            done._add(name, module)
        else:
            done.kept[name] = why
    if group is not None:
        try:
            done._compare(group)
        except ValueError:
            done.undo()
            raise
    return done


def _owner(op: str, model: nn.Module) -> Fp8Layers:
    for module in model.modules():
        if (layer := _owned(module)) is not None:
            return layer.owner
    checks.refuse(op, "model", "one that warpsmith.amp.fp8 has converted", type(model).__name__)


def fp8_state(model: nn.Module) -> dict[str, Any]:
    """What a converted model knows beside its parameters: recipe, names, and for delayed scales their history. For
    ``Checkpointer.save(..., extra=...)`` or ``safetensors``; no copies.

    Raises:
        ValueError: a model that :func:`fp8` has not converted.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        >>> done = warpsmith.amp.fp8(model)
        >>> warpsmith.amp.fp8_state(model)["layers"]
        ['0']
    """
    done = _owner("fp8_state", model)
    state: dict[str, Any] = {"recipe": asdict(done.recipe), "layers": list(done._modules)}
    state["counts"] = [torch.cat([s.x_counts, s.dy_counts]) for s in done._states()]
    if done.recipe.amax == "delayed":
        states = done._states()
        history, scales = done._tensors(states[0].x_amax.device)
        state |= {"history": history, "scales": scales, "known": [s.x_scale is not None for s in states]}
    return state


@torch.no_grad()
def load_fp8_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Goes on with what :func:`fp8_state` returned, of the same layers and the same recipe.

    Raises:
        ValueError: the state of other layers or of another recipe, or a model that :func:`fp8` has not converted.
            Nothing has changed.
    """
    done = _owner(_LOAD, model)
    needed = {"recipe", "layers", "counts", *(("history", "scales", "known") if done.recipe.amax == "delayed" else ())}
    if not isinstance(state, dict) or not needed <= state.keys():
        checks.refuse(_LOAD, "state", "what fp8_state returned", checks.value_text(state))
    if state["recipe"] != asdict(done.recipe):
        checks.refuse(_LOAD, "state", f"one of the recipe {done.recipe}", str(Fp8Recipe(**state["recipe"])))
    if list(state["layers"]) != list(done._modules):
        differ = sorted(set(state["layers"]) ^ set(done._modules))
        got = f"one of {len(state['layers'])}, and {', '.join(differ[:3]) or 'their order'} differ"
        checks.refuse(_LOAD, "state", f"one of the model's {len(done._modules)} layers", got)
    states = done._states()
    for mine, counts in zip(states, state["counts"], strict=True):
        mine.x_counts.copy_(counts[:2])
        mine.dy_counts.copy_(counts[2:])
    if done.recipe.amax != "delayed":
        return
    history, scales = done._tensors(states[0].x_amax.device)
    history.copy_(state["history"])
    scales.copy_(state["scales"])
    for i, (mine, known) in enumerate(zip(states, state["known"], strict=True)):
        mine.x_scale, mine.dy_scale = (scales[i, 0], scales[i, 1]) if known else (None, None)
        mine.has_run = False
        for largest in (mine.x_amax, mine.dy_amax):
            largest.zero_()
