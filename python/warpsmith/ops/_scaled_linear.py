"""scaled_linear: its recipes, the casts of weights that are kept, fakes and gradients."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from warpsmith import _C
from warpsmith._core import checks
from warpsmith._core.captures import capturing
from warpsmith._core.library import (
    Gradients,
    Saved,
    Wants,
    _once,
    _without_wrapper,
    call_raw,
    differentiable,
    is_batched,
    raw,
    register_fake,
)
from warpsmith._core.main_grad import PLAIN, is_gathered
from warpsmith._core.pending import note, note_later, settled
from warpsmith.ops import _quantize
from warpsmith.ops._linear import capability, under_autocast
from warpsmith.ops._quantize import blocks_of
from warpsmith.ops._shared_casts import BY_ROWS, let_go, of_columns, of_gradients, of_rows, place_of, source_of

SCALED = "scaled_linear"
RECIPE = "Fp8Recipe"
SCALINGS, ACCUMULATE = ("row", "tensor", "block"), ("auto", "fast", "float32")  # by their numbers in the options
FLAGS: dict[str, int] = _C.SCALED_FLAGS  # of the options: csrc/kernels/linear/linear_ops.h
_EMULATE, _WATCH, _HIGH = FLAGS["emulate"], FLAGS["watch"], FLAGS["wgrad_high"]
_OF_WEIGHTS = (0, 1, 3)  # the numbers of quantize_fp8's scalings: a weight's blocks are squares
_BLOCK = SCALINGS.index("block")
_E4M3 = torch.float8_e4m3fn
_WEIGHT_GRADIENTS, _GRADIENTS, _AMAX = ("fp8", "high"), ("e4m3", "e5m2"), ("current", "delayed")


@dataclass(frozen=True)
class Fp8Recipe:
    """How a linear layer casts to 8-bit floats.

    Args:
        scaling: what has a scale of its own: "row" (each row of a factor, along which is summed), "tensor", or "block"
            (128 terms of a row; of a weight 128 by 128).
        amax: "current": each scale is that of the values that are cast. "delayed", with "tensor" alone: those of x and
            of the gradient are known before, from the largest values of earlier steps.
        history: of how many steps delayed scales hold the largest value.
        margin: powers of two that delayed scales leave above it: 1 lets values be twice as large as those of the last
            steps. 8-bit floats lose by it what underflows alone.
        grad_dtype: "e4m3" or "e5m2", of the gradient.
        wgrad: "fp8", or "high": the weight's gradient is a product of what was not cast.
        power_of_two: whether scales are powers of two.
        accumulate: how 8-bit products are summed on the card: "fast", "float32", or "auto": fast up to 16,384 terms.
        head: whether :func:`warpsmith.amp.fp8` takes the output layer too.

    Example:
        >>> import warpsmith
        >>> warpsmith.amp.Fp8Recipe("tensor", amax="delayed").history
        16
    """

    scaling: str = "row"
    amax: str = "current"
    history: int = 16
    margin: int = 1
    grad_dtype: str = "e4m3"
    wgrad: str = "fp8"
    power_of_two: bool = True
    accumulate: str = "auto"
    head: bool = False

    options: ClassVar[int]  # as the raw ops take them
    how: ClassVar[int]  # what the bytes of a cast depend on; even
    is_delayed: ClassVar[bool]
    reads_x: ClassVar[bool]  # the weight's gradient reads x, not its bytes

    def __post_init__(self) -> None:
        for argument, words in (
            ("scaling", SCALINGS),
            ("amax", _AMAX),
            ("grad_dtype", _GRADIENTS),
            ("wgrad", _WEIGHT_GRADIENTS),
            ("accumulate", ACCUMULATE),
        ):
            _quantize.number_of(RECIPE, argument, getattr(self, argument), words)
        checks.flags(RECIPE, power_of_two=self.power_of_two, head=self.head)
        checks.sizes(RECIPE, 1, history=self.history)
        checks.refuse_non_int(RECIPE, "margin", self.margin)
        if not 0 <= self.margin <= 64:
            checks.refuse(RECIPE, "margin", "an int from 0 to 64", checks.value_text(self.margin))
        if self.amax == "delayed" and self.scaling != "tensor":
            checks.refuse(RECIPE, "amax", f"'current' with scaling {self.scaling!r}", "'delayed'")
        scaling, of_gradients = SCALINGS.index(self.scaling), (self.grad_dtype == "e5m2", self.wgrad == "high")
        is_set = dict(zip(("grad_e5m2", "wgrad_high", "power_of_two"), (*of_gradients, self.power_of_two), strict=True))
        flags = sum(FLAGS[flag] for flag, wanted in is_set.items() if wanted)
        object.__setattr__(self, "options", scaling + 4 * ACCUMULATE.index(self.accumulate) + flags)
        object.__setattr__(self, "is_delayed", self.amax == "delayed")
        object.__setattr__(self, "how", 4 * scaling + 2 * bool(self.power_of_two))
        object.__setattr__(self, "reads_x", self.scaling == "block" or self.wgrad == "high")

    @property
    def grad_float8(self) -> torch.dtype:
        """The dtype of the gradient's bytes."""
        return torch.float8_e5m2 if self.grad_dtype == "e5m2" else _E4M3


class Fp8State:
    """What a layer keeps on its device: scales that are known before a step (None: computed), the largest magnitudes
    since the last step, and how many elements were saturated and not finite, of x and of the gradient. ``recomputes``:
    the backward makes the bytes of x again where what they are made of is kept anyway; "all": of SwiGLU's too."""

    def __init__(self, device: torch.device, recomputes: bool | str = False) -> None:
        self.recomputes = recomputes
        self.x_scale: Tensor | None = None
        self.dy_scale: Tensor | None = None
        self._totals = [
            *(torch.zeros((), dtype=torch.float32, device=device) for _ in range(2)),
            *(torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2)),
        ]
        self.device = self._totals[0].device
        self.has_run = False  # since the last step, with gradients

    x_amax = property(lambda self: settled(self._totals[0]))
    dy_amax = property(lambda self: settled(self._totals[1]))
    x_counts = property(lambda self: settled(self._totals[2]))
    dy_counts = property(lambda self: settled(self._totals[3]))

    def totals(self) -> list[Tensor]:
        """The same four, without what is pending: where ops add to, and what steps write to."""
        return self._totals


# ---- what runs where


_OF_DEFAULTS = {scaling: Fp8Recipe(scaling) for scaling in SCALINGS}


def as_recipe(op: str, recipe: object) -> Fp8Recipe:
    """A recipe, or one that is all defaults but for its scaling."""
    if isinstance(recipe, Fp8Recipe):
        return recipe
    if not isinstance(recipe, str):
        checks.refuse_type(op, "recipe", "an Fp8Recipe or a string", recipe)
    if recipe not in SCALINGS:
        checks.refuse(op, "recipe", f"an Fp8Recipe or one of {', '.join(map(repr, SCALINGS))}", repr(recipe))
    return _OF_DEFAULTS[recipe]


def is_emulated(op: str, recipe: Fp8Recipe, device: torch.device, emulate: bool) -> bool:
    """Whether products are multiplied in float32: asked for, or on the CPU. A card that lacks them is refused."""
    if emulate or device.type != "cuda":
        return True
    if not torch.cuda.is_available():  # a fake tensor
        return False
    major, minor = capability(device)
    name = f"sm_{major}{minor}"
    if (major, minor) < (8, 9):
        checks.refuse(op, "recipe", "a card of sm_89 or newer, or emulate=True", name)
    if recipe.scaling != "tensor" and (major, minor) != (9, 0):
        expected = f"scaling 'tensor' on {name} (row and block scales run on sm_90 alone), or emulate=True"
        checks.refuse(op, "recipe", expected, repr(recipe.scaling))
    return False


@functools.cache
def _has_products(scaling: str, device: torch.device) -> bool:
    return not is_emulated(SCALED, _OF_DEFAULTS[scaling], device, False)


# ---- casts of weights, kept while the weight stays as it is


class _Kept:
    """Casts of one weight. Its own bytes are kept for all forwards; the transposed ones, of another byte a weight, only
    where a backward needs them again: from the second on of the same weight, or where the weight never changes."""

    def __init__(self, key: tuple[Any, ...], pointer: int, weight: Tensor) -> None:
        self.pointer, self.storage = pointer, StorageWeakRef(weight.untyped_storage())
        self.of = weakref.ref(weight, functools.partial(_drop, id(weight)))
        self.begin(key)

    def begin(self, key: tuple[Any, ...]) -> None:
        """Of the values that the weight has now, of which nothing was made yet."""
        self.key = key
        self.data: Tensor | None = None
        self.scale: Tensor | None = None
        self.turned: tuple[Tensor, Tensor] | None = None
        self.backwards = 0
        self.has_gradient = False  # a backward has given the weight one

    def addresses(self) -> tuple[int, int, int]:
        """Where a step writes bytes and scales: a Float8Rows of csrc/common/float8_scale.h."""
        assert self.data is not None and self.scale is not None
        return self.data.data_ptr(), self.scale.data_ptr(), 0

    def follow_step(self) -> None:
        """Of the values that a step gives the weight, which has written their bytes and is not counted yet."""
        version, shape, stride, stream, steps, *others = self.key
        made = self.data, self.scale
        self.begin((version, shape, stride, stream, steps + 1, *others))
        self.data, self.scale = made


_kept: dict[int, _Kept] = {}  # by the id of a parameter: a WeakIdKeyDictionary takes 0.8 us to find it


def _drop(place: int, _: Any) -> None:
    _kept.pop(place, None)


_is_freed = torch.Storage._expired  # type: ignore[attr-defined]
in_fp8 = WeakIdKeyDictionary()  # weights of layers that amp.fp8 has converted: name and recipe, to compare over ranks
_captured = WeakIdKeyDictionary()  # parameters that are part of a CUDA graph: its replays change them unseen


class Steps:
    """How many steps optimizers took: fused ones leave no trace in a parameter's version."""

    count = 0
    captured = False  # a step is part of a CUDA graph, of parameters that it does not name
    hook: Any = None

    @classmethod
    def watch(cls) -> None:
        if cls.hook is None:
            cls.hook = register_optimizer_step_post_hook(cls.add)

    @classmethod
    def add(cls, of: torch.optim.Optimizer | Sequence[Tensor], *_: Any) -> None:
        cls.count += 1
        of_rows.clear()
        of_columns.clear()
        of_gradients.clear()
        if capturing():  # replays are not counted
            params = [p for g in of.param_groups for p in g["params"]] if isinstance(of, torch.optim.Optimizer) else of
            cls.captured |= any(type(p) is not nn.Parameter for p in params)
            _captured.update((p, True) for p in params)
            _kept.clear()


def kept_of(weight: Tensor) -> _Kept | None:
    """The casts of a weight."""
    kept = _kept.get(id(weight))
    return None if kept is None or kept.of() is not weight else kept


def forget(weight: Tensor) -> None:
    """Frees the casts of a weight."""
    _kept.pop(id(weight), None)


def _may_be_kept(weight: Tensor) -> bool:
    """Not what is no parameter or has no version, what a captured graph changes, and what fully_shard has gathered and
    will free."""
    if type(weight) is not nn.Parameter or not weight.is_leaf or weight.is_inference():
        return False
    if Steps.captured or weight in _captured:
        return False
    Steps.watch()
    return not (dist.is_available() and dist.is_initialized() and is_gathered(weight))


def _current(weight: Tensor, how: int, training: bool, passed: bool, stream: int | None) -> _Kept | None:
    """The casts of a weight as it is; None where each call must cast. ``training``: casts of an evaluation are its own.
    ``passed``: a gradient goes through to the input. So a frozen weight is the base of adapters, and cast once; else it
    may be a teacher, which averages its student by weight.data behind each step."""
    if stream is None:
        if type(weight) is nn.Parameter:
            _captured[weight] = True
            forget(weight)
        return None
    kept = kept_of(weight)
    if kept is None and not _may_be_kept(weight):
        return None
    steps = 0 if passed and not weight.requires_grad else Steps.count
    pointer = weight.data_ptr()
    key = weight._version, weight.shape, weight.stride(), stream, steps, training, how
    if kept is None or kept.pointer != pointer or _is_freed(kept.storage.cdata):
        kept = _kept[id(weight)] = _Kept(key, pointer, weight)
    elif kept.key != key:
        kept.begin(key)
    return kept


def kept_by_rows(weight: Tensor) -> _Kept | None:
    """The cast of a trained weight as it is, by rows and powers of two, if there is one on the current stream."""
    kept = kept_of(weight)
    if kept is None or not weight.requires_grad:
        return None
    stream = place_of(weight)
    kept = None if stream is None else _current(weight, BY_ROWS, True, False, stream)
    return kept if kept is not None and kept.data is not None else None


def _cast(weight: Tensor, recipe: Fp8Recipe, turned: bool) -> tuple[Tensor, Tensor]:
    return call_raw(_eager_cast, weight, recipe.options & 3, bool(recipe.power_of_two), turned)


def _for_forward(weight: Tensor, recipe: Fp8Recipe, training: bool, passed: bool, stream: int | None) -> _Kept | None:
    """With bytes and scales of a weight. None: the op makes them."""
    if not training and weight.requires_grad:  # averages are swapped in and out by weight.data, which leaves no trace
        forget(weight)
        return None
    kept = _current(weight, recipe.how, training, training and passed, stream)
    if kept is None:
        return None
    if kept.has_gradient and weight.grad is None:  # it is used up: perhaps by a loop that edits weight.data
        kept.begin(kept.key)
    if kept.data is None:
        kept.data, kept.scale = _cast(weight, recipe, False)
    return kept


def _for_dx(weight: Tensor, recipe: Fp8Recipe, stream: int | None) -> tuple[Tensor | None, ...]:
    """Bytes and scales of a weight, and the same turned, as the gradient of x needs them. None: the op makes them."""
    kept = _current(weight, recipe.how, True, True, stream)
    if kept is None:
        return _NO_CASTS
    kept.backwards += 1
    if kept.turned is None and (kept.backwards > 1 or not weight.requires_grad):
        kept.turned = _cast(weight, recipe, True)
    turned, scale = kept.turned or (None, None)
    return (None, None, turned, scale) if recipe.scaling == "block" else (kept.data, kept.scale, turned, None)


# ---- casts of x, shared by layers of the same x, and made by its producer (_shared_casts.py)


def may_keep_rows(x: Tensor) -> bool:
    """Whether layers of what is made of x would find its cast: in eager mode, with gradients, without autocast (which
    may give them another tensor)."""
    return (
        not is_compiling()
        and x.dtype in _quantize.FLOATS
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and is_plain(x, x, None)
        and not x.is_inference()
        and place_of(x) is not None
    )


# ---- fakes: the checks of csrc/bindings/linear_scaled.cpp, in its order


def _check_features(op: str, weight: Tensor) -> None:
    for what, n in (("in_features", weight.shape[1]), ("out_features", weight.shape[0])):
        if checks.known(n % 16 != 0):
            checks.refuse(op, "weight", f"{what} that are a multiple of 16", str(n))


def _check_weight(op: str, weight: Tensor, of: Tensor, by_out: bool) -> None:
    name = "dy" if by_out else "x"
    _quantize.check_dtype(op, name, of.dtype, _quantize.FLOATS)
    checks.at_least_one_dimension(op, name, of)
    checks.dtype_beside(op, "weight", weight, of.dtype)
    size = of.shape[-1]
    if weight.dim() != 2 or checks.known(weight.shape[0 if by_out else 1] != size):
        checks.refuse(
            op, "weight", f"shape ({size}, K)" if by_out else f"shape (N, {size})", checks.shape_text(weight.shape)
        )
    _check_features(op, weight)
    checks.same_device(op, "weight", weight, of)


def _scaling_of(op: str, options: int) -> int:
    scaling, accumulate = options & 3, options >> 2 & 3
    if not 0 <= options < 512 or scaling == 3 or accumulate == 3:
        checks.refuse(op, "options", "the options of a recipe, as linear_ops.h has them", str(options))
    return scaling


def _check_cast(op: str, argument: str, data: Tensor, shape: Sequence[Any], like: Tensor) -> None:
    checks.exactly(op, argument, data, _E4M3, shape, like)
    if not data.is_contiguous():
        checks.refuse(op, argument, "a contiguous tensor", "other strides")


def _check_bytes(op: str, a: Any, names: Sequence[str], shape: Any, scaling: int, like: Tensor) -> None:
    data, scale = (getattr(a, name) for name in names)
    if data is None or scale is None:
        if (data is None) != (scale is None):
            expected, got = ("None", "a tensor") if data is None else ("a tensor", "None")
            checks.refuse(op, names[1], f"{expected} beside {names[0]}", got)
        return
    _check_cast(op, names[0], data, shape, like)
    rows, columns = shape
    blocks = blocks_of(rows), blocks_of(columns)
    checks.exactly(op, names[1], scale, torch.float32, ((rows, 1), (), blocks, (rows, blocks[1]))[scaling], like)


_SHARED = (0, 1, 3)  # of x: a block is 128 terms of a row


def _cast_rows(x: Tensor, scaling: int) -> Any:
    """The rows of bytes that x has in a forward."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()
    return (rows + 15) // 16 * 16 if scaling == 2 else rows


def _check_given(op: str, argument: str, scale: Tensor | None, scaling: int, like: Tensor) -> None:
    if scale is None:
        return
    if scaling != 1:
        checks.refuse(op, argument, "None: these scales are computed", "a tensor")
    checks.exactly(op, argument, scale, torch.float32, (), like)


_OF_X, _OF_WEIGHT = ("x_data", "x_data_scale"), ("weight_data", "weight_scale")


def _fake(a: Any) -> tuple[Tensor | None, ...]:
    x, weight, scaling = a.x, a.weight, _scaling_of(SCALED, a.options)
    _check_weight(SCALED, weight, x, by_out=False)
    if a.bias is not None:
        checks.parameter(SCALED, "bias", a.bias, x, weight.shape[:1])
    _check_bytes(SCALED, a, _OF_WEIGHT, weight.shape, scaling, x)
    _check_given(SCALED, "x_scale", a.x_scale, scaling, x)
    _check_given(SCALED, "dy_scale", a.dy_scale, scaling, x)
    if a.dy_counts is not None:
        checks.exactly(SCALED, "dy_counts", a.dy_counts, torch.int64, (2,), x)
    if a.dy_amax is not None:
        checks.exactly(SCALED, "dy_amax", a.dy_amax, torch.float32, (), x)
    rows, columns = shape = _cast_rows(x, scaling), x.shape[-1]
    _check_bytes(SCALED, a, _OF_X, shape, _SHARED[scaling], x)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if a.x_data is not None:
        return y, None, None, None, None
    scales = ((rows, 1), (), (rows, blocks_of(columns)))[scaling]
    return (
        y,
        x.new_empty((2,), dtype=torch.int64),
        x.new_empty((), dtype=torch.float32) if a.options & _WATCH else None,
        x.new_empty(shape, dtype=_E4M3),
        x.new_empty(scales, dtype=torch.float32) if a.x_scale is None else None,
    )


def _check_turned(op: str, a: Any, names: Sequence[str], shape: Any, scaling: int, like: Tensor) -> None:
    if scaling in (2, 3):
        _check_bytes(op, a, names, shape, scaling, like)
        return
    data, scale = (getattr(a, name) for name in names)
    if scale is not None:
        checks.refuse(op, names[1], "None: these bytes have the scales of others", "a tensor")
    if data is not None:
        _check_cast(op, names[0], data, shape, like)


def _fake_backward(a: Any) -> tuple[Tensor | None, ...]:
    op, dy, x, weight, bias = f"{SCALED}_backward", a.dy, a.x, a.weight, a.bias
    scaling, high = _scaling_of(op, a.options), bool(a.options & _HIGH)
    _check_weight(op, weight, dy, by_out=True)
    if bias is not None:
        checks.parameter(op, "bias", bias, dy, weight.shape[:1])
    out, columns = weight.shape
    rows, terms = _cast_rows(dy, 0), _cast_rows(dy, 2)
    _check_bytes(op, a, _OF_X, (rows, columns), _SHARED[scaling], dy)
    _check_bytes(op, a, _OF_WEIGHT, (out, columns), scaling, dy)
    _check_turned(op, a, ("turned", "turned_scale"), (columns, out), _OF_WEIGHTS[scaling], dy)
    _check_given(op, "dy_scale", a.dy_scale, scaling, dy)
    shape = columns, terms
    _check_turned(op, a, ("x_turned", "x_turned_scale"), shape, scaling, dy)
    blocks, by_casts = scaling == _BLOCK, a.want_dweight and not high
    if a.want_dweight and (high or blocks) and x is None:
        checks.refuse(op, "x", "a tensor when the weight's gradient is wanted", "None")
    if by_casts and not blocks and a.x_data is None:
        checks.refuse(op, "x_data", "a tensor when the weight's gradient is wanted", "None")
    if a.want_dbias and bias is None:
        checks.refuse(op, "bias", "a tensor when its gradient is wanted", "None")
    if x is not None:
        checks.alike(op, "x", x, dy, (*dy.shape[:-1], columns))
    if a.sum is not None:
        checks.alike(op, "sum", a.sum, dy, (*dy.shape[:-1], columns))
        if not a.want_dx:
            checks.refuse(op, "sum", "None where the gradient of x is not wanted", "a tensor")
    is_new = by_casts and a.x_turned is None
    return (
        dy.new_empty((*dy.shape[:-1], columns)) if a.want_dx else None,
        weight.new_empty(weight.shape) if a.want_dweight else None,
        bias.new_empty(bias.shape) if a.want_dbias else None,
        dy.new_empty((2,), dtype=torch.int64),
        dy.new_empty((), dtype=torch.float32) if a.options & _WATCH else None,
        dy.new_empty(shape, dtype=_E4M3) if is_new else None,
        dy.new_empty((columns, blocks_of(terms)), dtype=torch.float32) if is_new and blocks else None,
    )


def _fake_cast(weight: Tensor, scaling: int, power_of_two: bool, turned: bool) -> tuple[Tensor, Tensor]:
    op = f"{SCALED}_cast"
    if not 0 <= scaling < len(SCALINGS):
        checks.refuse(op, "scaling", "0 (row), 1 (tensor) or 2 (block)", str(scaling))
    _quantize.check_dtype(op, "weight", weight.dtype, _quantize.FLOATS)
    if weight.dim() != 2:
        checks.refuse(op, "weight", "two dimensions", checks.shape_text(weight.shape))
    _check_features(op, weight)
    shape = tuple(reversed(weight.shape)) if turned else tuple(weight.shape)
    scales = ((weight.shape[0], 1), (), tuple(map(blocks_of, shape)))[scaling]
    return weight.new_empty(shape, dtype=_E4M3), weight.new_empty(scales, dtype=torch.float32)


register_fake((SCALED, f"{SCALED}_forward"), _fake, named=True)
register_fake(f"{SCALED}_inference", lambda a: _fake(a)[0], named=True)
register_fake(f"{SCALED}_backward", _fake_backward, named=True)
register_fake(f"{SCALED}_cast", _fake_cast)

# ---- in eager mode, of plain tensors: with casts that are kept and shared

_eager_forward = _without_wrapper(raw.scaled_linear_forward.default)
_eager_inference = _without_wrapper(raw.scaled_linear_inference.default)
_eager_backward = _without_wrapper(raw.scaled_linear_backward.default)
_eager_cast = _without_wrapper(raw.scaled_linear_cast.default)
_NO_CASTS = (None,) * 4
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # a quarter of the time for one device
_in_transform, _is_tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing


def is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is one of eager mode, of plain tensors, outside of transforms."""
    if type(x) not in PLAIN or type(weight) not in PLAIN or not (bias is None or type(bias) in PLAIN):
        return False
    return not (is_compiling() or _in_transform() or _is_tracing() or forward_ad._current_level >= 0)


def layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Fp8Recipe, state: Fp8State | None, emulate: bool
) -> Tensor:
    """A layer: ``scaled_linear`` of a recipe, a state and a flag that are such."""
    if not isinstance(x, Tensor) or (_any_autocast() and torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")):
        wide = weight.dtype is torch.float32  # cast to 8 bits as it is
        x, narrow, bias = under_autocast(SCALED, x=x, weight=None if wide else weight, bias=bias)
        weight = weight if wide else narrow
    run = in_eager if is_plain(x, weight, bias) else in_graph
    return run(x, weight, bias, recipe, state, emulate)


def _has_hooks(parameter: Tensor) -> bool:
    """A sum that passes a layer would call them without a gradient, where nobody uses what the layer has made. Those of
    a ShardedOptimizer know it."""
    hooks = parameter._post_accumulate_grad_hooks
    if parameter._backward_hooks:
        return True
    return bool(hooks) and not all(hasattr(hook, "may_be_passed") for hook in hooks.values())


def in_eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Fp8Recipe, state: Fp8State | None, emulate: bool
) -> Tensor:
    """A layer of plain tensors."""
    options = recipe.options
    if emulate or not x.is_cuda or not _has_products(recipe.scaling, x.device):
        options += _EMULATE
    stream, training = place_of(weight), torch.is_grad_enabled()
    if training:  # each argument costs: torch asks it what it is
        if x.requires_grad and not x.is_leaf:  # a leaf's gradients are added by torch: nobody waits for them
            held, version = of_gradients.held, x._version
            last = held[3] if held and held[0]() is x and held[2] == version else x
            gives = not (_has_hooks(weight) or (bias is not None and _has_hooks(bias)))
            made = _apply(last, weight, bias, (recipe, state, options, stream, x, gives))
            if not gives:
                return made
            y, alias = made
            of_gradients.held = weakref.ref(x, let_go), weakref.ref(y, let_go), version, alias
            return y
        if x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad):
            return _apply(x, weight, bias, (recipe, state, options, stream, x, False))
    return _forward(x, weight, bias, recipe, state, options, stream, training, False)[0]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    state: Fp8State | None,
    options: int,
    stream: int | None,
    training: bool,
    keeps: bool,
) -> tuple[Any, ...]:
    """y; bytes and scale of x, and their source. ``keeps``: for a backward, and for other layers of x; else they may be
    left out."""
    x_scale, how, made, source = None if state is None else state.x_scale, recipe.how, (), None
    if state is not None and training and recipe.is_delayed:
        options += _WATCH
        how += 1
    finds = x_scale is None and training and stream is not None
    if finds:
        made = of_rows.find(x, stream, how)
    kept = _for_forward(weight, recipe, training, x.requires_grad, stream)
    casts = (None, None) if kept is None else (kept.data, kept.scale)
    given = x, weight, bias, *casts, x_scale, *(made[:2] or (None, None)), options
    if made:
        data, scale, counts, amax, source = made
        y = call_raw(_eager_inference, *given)
    elif keeps or (state is not None and training):
        y, counts, amax, data, scale = call_raw(_eager_forward, *given)
        if finds and keeps and not x.is_inference():
            of_columns.clear()  # of a forward before: a loop may have written to it by x.data
            Steps.watch()  # x may be stepped, too
            source = source_of(x) if how == BY_ROWS and x.requires_grad else None
            of_rows.keep(x, stream, how, data, scale, counts, amax, source)
    else:
        return (call_raw(_eager_inference, *given),)
    if state is not None and training:
        state.has_run = True
        x_amax, _, x_counts, _ = state.totals()
        note_later(x_counts, counts, stream)
        if recipe.is_delayed:
            note_later(x_amax, amax, stream)
    return y, data, scale if x_scale is None else x_scale, source


def _pass_on(ctx: Any, total: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backward of a layer whose y has no gradient. torch frees what a node has kept once it has run; a later
    backward may ask for that of y."""
    if total is not None and not _keeps_graph():
        with contextlib.suppress(RuntimeError):  # freed before, or changed: then nobody may ask for it
            ctx.call = (*ctx.call[:4], *ctx.saved_tensors)
    return total, None, None, None


def _gradients(ctx: Any, dy: Tensor, total: Tensor | None = None) -> tuple[Tensor | None, ...]:
    of_rows.clear()  # layers of one x have all run forward
    of_gradients.clear()
    recipe, totals, options, source, *kept = ctx.call
    x, weight, bias, data, scale, dy_scale, *made_of = kept or ctx.saved_tensors
    if kept and not _keeps_graph():
        ctx.call = ctx.call[:4]
    want_dx, want_dweight, want_dbias, _ = ctx.needs_input_grad
    plain, stream = not is_batched(dy) and not _in_transform(), place_of(dy)
    casts = _for_dx(weight, recipe, stream) if want_dx else _NO_CASTS
    of = x if recipe.scaling == "block" else data if source is None else source
    finds = want_dweight and recipe.wgrad == "fp8" and plain and stream is not None
    turned = of_columns.find(of, stream, recipe.how) if finds else ()
    if source is not None and want_dweight:
        data, scale = turned[2:] or source.cast(*made_of)
    if totals is not None and recipe.is_delayed:
        options += _WATCH
    given = x, weight, bias, data, scale, *casts, dy_scale, *(turned[:2] or (None, None))
    wanted = want_dx, want_dweight, want_dbias
    found = call_raw(_eager_backward, dy, *given, options, *wanted, *(() if total is None else (total,)))
    dx, dweight, dbias, counts, amax, *new = found
    if finds and not turned:
        of_columns.keep(of, stream, recipe.how, *new, *(() if source is None else (data, scale)))
    if want_dweight and (kept := kept_of(weight)) is not None:
        kept.has_gradient = True
    if totals is not None and plain:  # of several gradients in one nobody counts them
        _, dy_amax, _, dy_counts = totals
        note_later(dy_counts, counts, stream)
        if recipe.is_delayed:
            note_later(dy_amax, amax, stream)
    return dx, dweight, dbias, None


_gradients_once = _once(SCALED, _gradients)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Any) -> Any:
        """Instead of x an alias may be given, with x in the call. `gives`: another alias beside y."""
        recipe, state, options, stream, x, gives = call
        y, data, scale, source = _forward(x, weight, bias, recipe, state, options, stream, True, True)
        # The totals as they are now: a layer that is moved gets others.
        totals, dy_scale = (None, None) if state is None else (state.totals(), state.dy_scale)
        recomputes, made_of = state is not None and state.recomputes, ()
        if source is not None and (recomputes == "all" or recomputes and not source.in_all):
            made_of = source.tensors()
        ctx.call = recipe, totals, options, source if made_of else None
        if not weight.requires_grad:
            ctx.save_for_backward(None, weight, bias, None, None, dy_scale)
        elif recipe.reads_x:
            ctx.save_for_backward(x, weight, bias, None, None, dy_scale)
        elif made_of:
            ctx.save_for_backward(None, weight, bias, None, None, dy_scale, *made_of)
        else:
            ctx.save_for_backward(None, weight, bias, data, scale, dy_scale)
        ctx.set_materialize_grads(False)  # zeros would cost kernels, and their share of every gradient
        return (y, x.detach()) if gives else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return _pass_on(ctx, total)
        return _gradients(ctx, dy, total) if not torch.is_grad_enabled() else _gradients_once(ctx, dy, total)


_Eager.__name__ = _Eager.__qualname__ = SCALED
_Eager._backward_cls.__name__ = _Eager._backward_cls.__qualname__ = f"{SCALED}Backward"
_apply = super(torch.autograd.Function, _Eager).apply  # without its wrapper, which looks for transforms

# ---- in graphs and transforms, and of other tensors


def in_graph(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Fp8Recipe, state: Fp8State | None, emulate: bool
) -> Tensor:
    """Any layer: each call casts, and nothing is kept."""
    options = recipe.options + _EMULATE * is_emulated(SCALED, recipe, x.device, emulate)
    records = state is not None and torch.is_grad_enabled() and (is_compiling() or not _in_transform())
    watch = records and recipe.is_delayed
    options += _WATCH * watch
    known: tuple[Tensor | None, ...] = _NO_CASTS
    if state is not None:
        x_amax, dy_amax, x_counts, dy_counts = state.totals() if records else _NO_CASTS
        known = state.x_scale, state.dy_scale, dy_counts, dy_amax if watch else None
    x_scale, *of_dy = known
    y, counts, amax = scaled_linear(x, weight, bias, None, None, x_scale, None, None, options, *of_dy)
    if records:
        state.has_run = True  # type: ignore[union-attr]
        note(x_counts, counts)
        note(x_amax, amax)
    return y


def _save(inputs: Any, outputs: Any) -> dict[str, Any]:
    *_, data, scale = outputs
    if inputs.x_data is not None:
        data, scale = inputs.x_data, inputs.x_data_scale
    trains = inputs.weight.requires_grad
    by_value = inputs.options & _HIGH or inputs.options & 3 == _BLOCK  # the weight's gradient reads x, not its bytes
    return {
        "x": inputs.x if trains and by_value else None,
        "x_data": data if trains and not by_value else None,
        "x_data_scale": (scale if inputs.x_scale is None else inputs.x_scale) if trains and not by_value else None,
        "weight": inputs.weight,
        "bias": inputs.bias,
        "dy_scale": inputs.dy_scale,
        "dy_counts": inputs.dy_counts,
        "dy_amax": inputs.dy_amax,
        "options": inputs.options,
    }


def _backward(saved: Saved, wants: Wants, dy: Tensor | None, *_: Any) -> Gradients:
    if dy is None:
        return {}
    given = dy, saved.x, saved.weight, saved.bias, saved.x_data, saved.x_data_scale, *_NO_CASTS, saved.dy_scale
    inputs = *given, None, None, saved.options, wants.x, wants.weight, wants.bias
    dx, dweight, dbias, counts, amax, *_ = call_raw(raw.scaled_linear_backward.default, *inputs)
    if not is_batched(dy) and not _in_transform():  # several gradients in one: nobody counts them
        note(saved.dy_counts, counts)
        note(saved.dy_amax, amax)
    return {"x": dx, "weight": dweight, "bias": dbias}


scaled_linear = differentiable(
    SCALED, forward=raw.scaled_linear_forward.default, public=3, save=_save, backward=_backward
)
