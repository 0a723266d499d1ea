"""The checks of the C++ binding, for fake and meta tensors: same conditions, same words."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ")"


def value_text(value: object) -> str:
    """A value in a message, without its type, or the type alone where the value is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = str(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return type(value).__name__
    return text if len(text) <= 100 and "\n" not in text else type(value).__name__


def quoted_text(value: object) -> str:
    """The same, a string in quotation marks."""
    return repr(value) if isinstance(value, str) else value_text(value)


def refuse(op: str, argument: str, expected: str, got: str) -> NoReturn:
    """Raises the one form of error for bad input: op, argument, what was expected and what came."""
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def refuse_type(op: str, argument: str, expected: str, value: object, hint: str = "") -> NoReturn:
    """The same for what is of another Python type: a TypeError, with a hint of what was meant where there is one."""
    got = type(value).__name__
    if isinstance(value, int) and value.bit_length() > 128:
        got = value_text(value)
    elif isinstance(value, (tuple, list)):
        got = f"the {got} {value_text(value)}"
    elif isinstance(value, (bool, int, float, str)):
        got = f"the {got} {value!r}"
    raise TypeError(f"{op}: {argument}: expected {expected}, got {got if value is not None else 'None'}{hint}")


def _is_numpy(value: object, kinds: str) -> bool:
    """Whether it is one value of NumPy of one of these kinds: a scalar or an array without dimensions."""
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return kind is not None and kind in kinds and getattr(value, "ndim", 1) == 0


def is_flag(value: object) -> bool:
    """Whether it is True or False: Python's, NumPy's or a symbolic one. No number is, and no tensor."""
    return isinstance(value, (bool, torch.SymBool)) or _is_numpy(value, "b")


def is_number(value: object) -> bool:
    """Whether it stands for one number of float64: Python's, NumPy's and symbolic ones; not True, and no tensor."""
    if isinstance(value, (bool, Tensor)):
        return False
    if isinstance(value, int):  # a traced integer may be unknown: it cannot be compared
        return torch.compiler.is_compiling() or abs(value) < 2**1024 - 2**970  # what rounds to infinity begins there
    if isinstance(value, (float, torch.SymInt, torch.SymFloat)):
        return True
    return _is_numpy(value, "fiuV") if hasattr(value, "dtype") else hasattr(value, "__float__")


def is_integer(value: object) -> bool:
    """Whether it stands for one integer: Python's, NumPy's and symbolic ones; not True, and no tensor."""
    if isinstance(value, (int, torch.SymInt)):  # first: torch.compile traces no hasattr of symbolic integers
        return not isinstance(value, bool)
    if isinstance(value, Tensor) or not hasattr(value, "__index__"):
        return False
    return _is_numpy(value, "iu") if hasattr(value, "dtype") else True


def is_int64(value: object) -> bool:
    """Whether it stands for one integer of 64 bits."""
    if not is_integer(value):
        return False
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):  # it may be unknown: it cannot be compared
        return True
    return -(2**63) <= operator.index(value) < 2**63  # type: ignore[arg-type]


def tensors(op: str, optional: bool = False, **values: object) -> None:
    """Refuses what is no tensor; ``optional``: None is fine."""
    for argument, value in values.items():
        if not isinstance(value, Tensor) and not (optional and value is None):
            refuse_type(op, argument, "a tensor" + " or None" * optional, value)


def flags(op: str, **values: object) -> None:
    """Refuses what is neither True nor False: "False" and [0] would be true."""
    for argument, value in values.items():
        if value is not True and value is not False and not is_flag(value):
            refuse_type(op, argument, "True or False", value)


def refuse_non_int(op: str, argument: str, value: object, least: float = -math.inf) -> None:
    """Refuses what is no whole number: a float, True, a tensor; and one below the least."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse_type(op, argument, "an int", value)
    if value < least:
        refuse(op, argument, f"at least {least}", value_text(value))


def refuse_non_int64(op: str, argument: str, value: object, expected: str = "an integer of 64 bits") -> None:
    """Refuses what is no integer of 64 bits: a float, True, a tensor, 2**63."""
    if not is_int64(value):
        refuse_type(op, argument, expected, value)


def refuse_non_number(op: str, argument: str, value: object, expected: str = "a number") -> None:
    """Refuses what is no number of Python or NumPy within float64: a string, True, a tensor, 2**2000."""
    if type(value) is not float and not is_number(value):
        refuse_type(op, argument, expected, value)


def refuse_non_eps(op: str, eps: float | None, otherwise: bool = False) -> None:
    """Refuses an eps that the ops refuse. ``otherwise``: None stands for one."""
    if eps is None and otherwise:
        return
    refuse_non_number(op, "eps", eps, "a finite number >= 0" + ", or None" * otherwise)
    if not 0 <= eps < math.inf:  # type: ignore[operator]
        refuse(op, "eps", "a finite number >= 0", value_text(eps))


def sizes(op: str, least: int = 0, **values: object) -> None:
    """Refuses what is no number of elements."""
    for argument, value in values.items():
        refuse_non_int64(op, argument, value, "an integer")
        if value < least:  # type: ignore[operator]
            refuse(op, argument, f"a number >= {least}", str(value))


def finite(op: str, argument: str, value: float, dtype: torch.dtype) -> None:
    """Refuses what is not finite in the arithmetic of a dtype: float64's own, float32 for every other."""
    wide = dtype == torch.float64
    if not abs(value) <= torch.finfo(torch.float64 if wide else torch.float32).max:
        refuse(op, argument, "a finite number" if wide else "a finite number of float32", f"{value:g}")


def _is_settled(condition: Any) -> bool:
    return isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling()  # it shows a SymBool as a bool


def known(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold. Under torch.compile one on a size that comes from data is not, and
    the op itself looks when it runs."""
    if _is_settled(condition):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def possible(condition: Any) -> bool:
    """Whether a condition on sizes is not known to fail."""
    if _is_settled(condition):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def device_of(t: Tensor) -> torch.device:
    """The device of a tensor; inside a kernel of the Meta key a fake tensor says "meta" and keeps its own aside."""
    return getattr(t, "fake_device", None) or t.device


def wide_dtype(t: Tensor) -> torch.dtype:
    """The dtype of sums, losses and statistics beside a tensor."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def float_dtype(op: str, argument: str, t: Tensor) -> torch.dtype:
    if t.dtype not in FLOAT_DTYPES:
        refuse(op, argument, "float32, float16, bfloat16 or (on the CPU) float64", dtype_text(t.dtype))
    if t.dtype == torch.float64 and device_of(t).type == "cuda":
        refuse(op, argument, "float32, float16 or bfloat16 on CUDA", "float64")
    return t.dtype


def dtype_beside(op: str, argument: str, t: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight, bias, residual or table beside an activation of ``dtype``: the same, or float32 beside 16
    bits."""
    got, half = float_dtype(op, argument, t), dtype.itemsize == 2
    if got != dtype and not (half and got == torch.float32):
        refuse(op, argument, dtype_text(dtype) + (" or float32" if half else ""), dtype_text(got))
    return got


def same_device(op: str, argument: str, t: Tensor, like: Tensor) -> None:
    if device_of(t) != device_of(like):
        refuse(op, argument, f"a tensor on {device_of(like)}", f"a tensor on {device_of(t)}")


def dtype_is(op: str, argument: str, t: Tensor, dtype: torch.dtype) -> None:
    if t.dtype != dtype:
        refuse(op, argument, dtype_text(dtype), dtype_text(t.dtype))


def same_dtype(op: str, argument: str, t: Tensor, like: Tensor) -> None:
    dtype_is(op, argument, t, like.dtype)


def same_shape(op: str, argument: str, t: Tensor, shape: Sequence[int]) -> None:
    if len(t.shape) != len(shape) or any(known(a != b) for a, b in zip(t.shape, shape, strict=True)):
        refuse(op, argument, f"shape {shape_text(shape)}", shape_text(t.shape))


def exactly(op: str, argument: str, t: Tensor, dtype: torch.dtype, shape: Sequence[int], like: Tensor) -> None:
    """Refuses a tensor of another dtype or shape, or on another device than ``like``."""
    dtype_is(op, argument, t, dtype)
    same_shape(op, argument, t, shape)
    same_device(op, argument, t, like)


def alike(op: str, argument: str, t: Tensor, like: Tensor, shape: Sequence[int] | None = None) -> None:
    """Refuses a tensor of another dtype or device than ``like``, or of another shape, by default that of ``like``."""
    exactly(op, argument, t, like.dtype, like.shape if shape is None else shape, like)


def offsets(op: str, argument: str, t: Tensor, like: Tensor) -> None:
    """Refuses what cannot hold the offsets of packed sequences. Their entries are not read."""
    dtype_is(op, argument, t, torch.int32)
    if t.dim() != 1 or known(t.shape[0] < 2):
        refuse(op, argument, "shape (sequences + 1)", shape_text(t.shape))
    same_device(op, argument, t, like)


def parameter(op: str, argument: str, t: Tensor, like: Tensor, shape: Sequence[int]) -> None:
    """The same for a parameter beside an activation: its dtype may be float32 beside 16 bits."""
    dtype_beside(op, argument, t, like.dtype)
    same_shape(op, argument, t, shape)
    same_device(op, argument, t, like)


def pair(op: str, like: Tensor, shape: Sequence[int], **parameters: Tensor | None) -> None:
    """Two parameters or statistics of one dtype, each of which may be missing."""
    found: Tensor | None = None
    for name, t in parameters.items():
        if t is not None:
            if found is not None:
                same_dtype(op, name, t, found)
            parameter(op, name, t, like, shape)
            found = t


def main_grad(op: str, t: Tensor | None, weight: Tensor, argument: str = "main_grad", transposed: bool = False) -> None:
    """Refuses what cannot hold a weight's sums of gradients. ``transposed``: it may lie as the weight's transpose."""
    if t is None:
        return
    float_dtype(op, argument, t)
    exactly(op, argument, t, wide_dtype(weight), weight.shape, weight)
    if not (t.is_contiguous() or (transposed and t.t().is_contiguous())):
        refuse(op, argument, "a contiguous tensor" + " or its transpose" * transposed, "other strides")


def overwritable(op: str, argument: str, t: Tensor) -> None:
    """Refuses what an op must not write in place. torch refuses most of it too, but only after the write."""
    if t.is_neg():
        expected = "a tensor that holds its values, as resolve_neg() gives, to be written in place"
        refuse(op, argument, expected, "one with the negative bit")
    if not (t.requires_grad and torch.is_grad_enabled()):
        return
    base = t._base if t._is_view() else t
    if base is not None and base.is_leaf and base.requires_grad:
        refuse(op, argument, "no leaf that requires a gradient to be written in place", "one")
    if t._is_view() and torch._C._autograd._get_creation_meta(t) != torch._C._autograd.CreationMeta.DEFAULT:
        expected = "a view that torch lets be written in place, a slice"
        refuse(op, argument, expected, "one of several outputs, as of split")


def keepable(op: str, argument: str, t: Tensor | None) -> None:
    """Refuses what autograd cannot keep for a backward. torch refuses it too, but only after an op's own write."""
    if t is not None and t.is_inference():
        expected = "a tensor made outside torch.inference_mode(), to be kept for the backward"
        refuse(op, argument, expected, "one made inside")


def at_least_one_dimension(op: str, argument: str, t: Tensor) -> None:
    if t.dim() == 0:
        refuse(op, argument, "at least one dimension", "a tensor without dimensions")


def number(op: str, argument: str, value: object, expected: str, fits: Callable[[Any], bool]) -> None:
    """Refuses what is no number, and a number that does not fit."""
    refuse_non_number(op, argument, value, expected)
    if not fits(value):
        refuse(op, argument, expected, value_text(value))


def one_of(op: str, argument: str, value: object, allowed: Sequence[object]) -> None:
    """Refuses what is none of some names and numbers. No number equals one of another type: True and 1.0 are not 1."""
    if not any(type(value) is type(known) and value == known for known in allowed):
        refuse(op, argument, f"one of {', '.join(map(str, allowed))}", value_text(value))


def count(op: str, argument: str, value: object, expected: str, least: int) -> None:
    """Refuses what is no whole number from ``least`` on that 64 bits hold."""
    if type(value) is not int or not least <= value < 2**63:
        refuse(op, argument, expected, quoted_text(value))


def counts(op: str, argument: str, value: Any, least: int) -> tuple[int, int]:
    """One whole number from ``least`` on for both dimensions of an image, or one for each."""
    both = value if isinstance(value, (tuple, list)) else (value,)
    expected = f"a whole number >= {least}, or two"
    if len(both) not in (1, 2):
        refuse(op, argument, expected, value_text(value))
    for number in both:
        count(op, argument, number, expected, least)
    return both[0], both[-1]
