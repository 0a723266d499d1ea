"""The 8-bit cast of a tensor, shared by layers that are given the same one: q, k and v; gate and up. One of them makes
it, or the op that made the tensor."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpsmith._core.library import _without_wrapper, call_raw, raw
from warpsmith._core.pending import stream_of

# torch.cuda.is_current_stream_capturing without its Python; absent in CPU builds of torch.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
BY_ROWS = 2  # Fp8Recipe.how of scales of rows that are powers of two


def place_of(t: Tensor) -> int | None:
    """The current stream of a tensor's device; None while it is captured."""
    if not t.is_cuda:
        return 0
    return None if _is_capturing() else stream_of(t)


class Source:
    """How the bytes of x are made once more in a backward, of tensors that others keep for theirs: so layers of x keep
    none. Itself it keeps nothing alive. ``in_all``: only for layers that make all again."""

    def __init__(self, cast: Callable[..., Any], *tensors: Tensor, in_all: bool = False) -> None:
        self.cast, self.in_all, self._of = cast, in_all, tuple(map(weakref.ref, tensors))

    def tensors(self) -> tuple[Tensor, ...]:
        """What a layer keeps for :meth:`cast`, which gives bytes and scale; () where it is no longer there."""
        found = tuple(t for of in self._of if (t := of()) is not None)
        return found if len(found) == len(self._of) else ()


def key_of(t: Tensor | Source, stream: int | None) -> tuple[Any, ...]:
    """Where a tensor with a version is, and as of when. Another stream would have to wait for what this one makes."""
    if isinstance(t, Source):
        return (stream,)
    return t._version, t.data_ptr(), t.shape, t.stride(), stream


class _Shared:
    """The last cast of a tensor, of its rows (of x, in a forward) or its columns (in a backward), until another is cast
    or an optimizer steps. The tensor is known as the Python object that it is: layers of one x are given the same."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.of: Any = _nobody
        self.key: tuple[Any, ...] = ()
        self.made: tuple[Any, ...] = ()

    def find(self, x: Tensor | Source | None, stream: int | None, how: int) -> tuple[Any, ...]:
        """What was kept of a cast, or ()."""
        return self.made if x is not None and self.of() is x and self.key == (key_of(x, stream), how) else ()

    def keep(self, x: Tensor | Source, stream: int | None, how: int, *made: Any) -> None:
        self.of, self.key, self.made = weakref.ref(x), (key_of(x, stream), how), made


def _nobody() -> None:
    pass


of_rows, of_columns = _Shared(), _Shared()


class _Chain:
    """The last layer that read a tensor x with a gradient: an alias of x, which this layer gave beside its y. The next
    layer of x gets the alias as its input. So this layer is given the sum of the later ones' gradients, and its product
    adds it to its own."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.held: tuple[Any, ...] = ()  # weak references to x and y, the version of x, the alias


of_gradients = _Chain()


def let_go(dead: Any) -> None:
    """The alias holds a graph and the memory of x, so it goes with x and with y."""
    held = of_gradients.held
    if held and (dead is held[0] or dead is held[1]):
        of_gradients.clear()


_quantize = _without_wrapper(raw.quantize_fp8.default)
_kept_anyway: Any = _nobody  # the last result that its own backward reads


def keeps(y: Tensor) -> None:
    """Tells of an op whose backward reads its result: layers that read it, or views of it, need not keep its bytes."""
    global _kept_anyway
    _kept_anyway = weakref.ref(y if y._base is None else y._base)


def source_of(x: Tensor) -> Source | None:
    """Of such a result."""
    kept = _kept_anyway()
    return Source(_cast_rows, x) if kept is not None and (x is kept or x._base is kept) else None


def _cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    return call_raw(_quantize, rows, None, 0, 0, torch.float8_e4m3fn, True, False)[:2]


_with_cast: dict[str, Callable[[], Callable]] = {}


def leave_cast(op: str, build: Callable[..., Callable], source: Callable[..., Source | None] | None = None) -> None:
    """Tells of an op whose raw op ``<op>_fp8`` gives the cast of y's rows by powers of two behind what ``<op>_forward``
    gives. ``build``: ``differentiable`` of the op, but for its forward. ``source``: of its inputs and outputs."""
    raw_op = _without_wrapper(getattr(raw, op + "_fp8").default)

    def forward(*inputs: Any) -> Any:
        y, *others, data, scale, counts = raw_op(*inputs)
        of_columns.clear()
        made_of = None if source is None else source(inputs, (y, *others))
        of_rows.keep(y, place_of(y), BY_ROWS, data, scale, counts, None, made_of)
        return (y, *others) if others else y

    _with_cast[op] = functools.partial(build, forward=forward, registers=False)


@functools.cache
def with_cast(op: str) -> Callable:
    """The function of an op that leaves the cast of y where layers of 8-bit floats look for that of their x. Where
    there is no gradient to make nobody would find it, and none is made."""
    return _with_cast[op]()


def fake_rows(y: Tensor) -> tuple[Tensor, ...]:
    """The fake of such a cast: bytes, scales, counts."""
    rows = y.shape[:-1].numel()
    made = ((rows, y.shape[-1]), torch.float8_e4m3fn), ((rows, 1), torch.float32), ((2,), torch.int64)
    return tuple(y.new_empty(shape, dtype=dtype) for shape, dtype in made)
