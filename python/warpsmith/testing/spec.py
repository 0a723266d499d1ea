"""The declaration of an op from which its tests are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from warpsmith.testing.law import ROUNDING_STEPS_SIM_FLOAT32
from warpsmith.testing.tensors import Random

Inputs = dict[str, Any]
FEW_ELEMENTS = 12


@dataclass(frozen=True)
class Case:
    """One line of an op's case table.

    Args:
        shape: of the op's main input; the spec's ``inputs`` derives the other shapes from it.
        dtype: of every floating input that ``dtypes`` does not name.
        layout: how inputs lie in memory, one of ``warpsmith.testing.LAYOUTS``.
        layouts: layouts of single inputs, by name, and of single upstream gradients (``grad_<output>``).
        dtypes: dtypes of single inputs, by name, e.g. ``{"weight": torch.float32}``.
        options: anything else that the spec's ``inputs`` reads.
        wanted: the inputs whose gradients are asked for; default: those of all that are differentiable.
        unused: outputs that no gradient comes from.

    Example:
        >>> import torch
        >>> str(Case((4, 8), torch.bfloat16, "transposed"))
        '4x8-bfloat16-transposed'
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)) or "scalar", str(self.dtype).removeprefix("torch.")]
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [f"{name}_{str(dtype).removeprefix('torch.')}" for name, dtype in self.dtypes.items()]
        parts += [f"{name}_{value}" for name, value in self.options.items()]
        parts += [f"{name}_{layout}" for name, layout in self.layouts.items()]
        parts += [f"wanted_{name}" for name in self.wanted] + [f"unused_{name}" for name in self.unused]
        return "-".join(parts)

    def but(self, **changes: Any) -> Case:
        """This case with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class BadInput:
    """An input that must be refused.

    Args:
        label: names the test.
        change: takes the good inputs (a dict, tensors on the device) and returns the bad ones.
        match: regular expression that the message must contain.
        error: type of the exception. A ValueError must also have the form ``op: argument: expected X, got Y``.
        fake: whether fake and meta tensors must be refused with the same words (not so for conditions on values).
        devices: where this is bad.
    """

    label: str
    change: Callable[[Inputs], Inputs]
    match: str
    error: type[BaseException] = ValueError
    fake: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class OpSpec:
    """Everything the tests need to know about an op.

    Args:
        name: the op's snake_case name, as its error messages begin.
        op: the public function.
        reference: its definition in plain PyTorch, with the same parameter names; differentiable.
        inputs: ``inputs(case, rng)`` returns the arguments by name: float64 tensors (rounded to the case's dtypes by
            the harness), integer and boolean tensors and other values as they are. ``rng`` is a
            :class:`warpsmith.testing.Random`.
        cases: the case table of the error law. Sizes below, at and above vector, warp and block widths, and odd ones,
            belong here.
        differentiable: names of the inputs that have gradients.
        outputs: names of the outputs.
        baseline: plain PyTorch in the same dtype, whose error is the measure; default: ``reference``.
        oracle: ``oracle(case, **inputs)`` on float64 inputs; default: ``reference``. Needed where an argument's
            default depends on the dtype.
        laid_out: inputs to which a case's layout applies; default: all floating tensors with a dimension.
        expanded: inputs to which the layout ``expanded`` applies; default: as ``laid_out``. Where rows that are all
            alike would make a gradient zero but for rounding, the law would compare two draws of noise.
        layouts: the layouts every dtype is tried with; default: all.
        zero_sizes: whether each dimension may be zero. If not, ``bad_inputs`` must say what is refused.
        one_element: whether a shape of ones is a valid problem.
        batched: inputs whose first dimension is a batch of independent problems, as all outputs' is then; gradients
            of the other inputs are sums over it. Gives tests with more than 65,535 rows, and on CUDA with more than
            2^31 elements.
        edge_inputs: inputs in which single elements become 0, subnormal, huge, inf and nan; default: the
            differentiable ones.
        edges_beside_options: of ``edge_inputs``, those in which one element is infinite or NaN beside the table's
            options; default: all. Where a row that is ignored has a gradient of 0, autograd gives the references NaN.
        edge_steps: rounding steps of a row's largest result that an edge value may cost beyond the law. More than 1
            where a backward works from rounded results, whose rounding the edge value multiplies.
        gradcheck_cases: small float64 cases; default: the smallest nonempty case of the table.
        double_backward: whether second derivatives are claimed. If not, they must be refused.
        func_transforms: whether ``torch.func.grad`` and ``vmap`` are claimed.
        opcheck: ops of the dispatcher to check, each with ``args(inputs)`` giving its positional arguments, or None:
            those that the first case gives it, forward or backward, or gives an op whose arguments begin alike.
        traced: qualified name of the op that must appear in exported graphs, e.g. ``"warpsmith::rms_norm"``.
        autocast: ``autocast(inputs, dtype)`` returns the outputs' dtypes under autocast to ``dtype``; default:
            nothing is cast. Float64 never is.
        bad_inputs: what must be refused.
        floor_bytes: ``floor_bytes(case)`` returns the least bytes moved, by direction: ``{"forward": n, "backward":
            n}``: of the inputs that ``laid_out`` names, their gradients, and outputs of as many dimensions.
        bytes_beside: ``bytes_beside(case, inputs)`` returns what the simulated kernels read and write beside the floor:
            ``{"forward": (read, written), "backward": ..., "inference": ...}``, the last where a forward without
            gradients differs, and under ``"<input> alone"`` what that gradient alone writes beside itself; its
            docstring has the reasons. A direction that is missing has nothing.
        bytes_cases: of which the simulated kernels' bytes are counted; default: those of one dtype.
        devices: device types on which the op exists.
        float64_devices: devices on which it takes float64.
        repeated_cases: cases whose bits are compared over repeats, beside one of each dtype.
        thread_counts: on the CPU, the numbers of threads with which the same bits are asked for. None where matrix
            products are torch's: those of a BLAS may depend on it.
        random_cases: how many are drawn; on the simulated kernels a quarter of that.
        redraw: ``redraw(draw, st, case)`` draws the options of a random case anew, and mends sizes that do not go with
            them; ``st`` is ``hypothesis.strategies``. Default: any sizes go with any options.
        sim_elements: the largest case, in elements of ``shape``, that runs on the simulated kernels, a million times
            slower than a GPU.
        sim_float32_steps: rounding steps that the law allows beside PyTorch's error in float32 on the simulated
            kernels, where PyTorch's side is its CPU kernel.
        draws: where a result is beyond the bound, PyTorch's error is the largest of so many draws of the inputs: that
            of a sum of few rows can be small by luck. Random cases have draws of their own.
        backward_kernels: whether the backward launches any on the sim.
        of_torch: on a GPU its kernels are torch's: others in deterministic mode and behind torch.compile, and meta
            gradients may have other strides.
        sim_far: whether the last rows of ``batched`` inputs belong to the last blocks of a grid, so that those beyond
            2^31 elements run there.
        far_cases: of which rows run there beside those of the table's cases without options.
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[Case, Random], Inputs]
    cases: Sequence[Case]
    differentiable: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("output",)
    baseline: Callable[..., Any] | None = None
    oracle: Callable[..., Any] | None = None
    laid_out: tuple[str, ...] | None = None
    expanded: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    zero_sizes: bool = True
    one_element: bool = True
    batched: tuple[str, ...] = ()
    edge_inputs: tuple[str, ...] | None = None
    edges_beside_options: tuple[str, ...] | None = None
    edge_steps: int = 1
    gradcheck_cases: Sequence[Case] | None = None
    double_backward: bool = False
    func_transforms: bool = False
    opcheck: Mapping[Any, Callable[[Inputs], tuple[Any, ...]] | None] = field(default_factory=dict)
    traced: str | None = None
    autocast: Callable[[Inputs, torch.dtype], tuple[torch.dtype, ...]] | None = None
    bad_inputs: Sequence[BadInput] = ()
    floor_bytes: Callable[[Case], Mapping[str, int]] | None = None
    bytes_beside: Callable[[Case, Inputs], Mapping[str, tuple[int, int]]] | None = None
    bytes_cases: Sequence[Case] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    float64_devices: tuple[str, ...] = ("cpu",)
    repeated_cases: Sequence[Case] = ()
    thread_counts: tuple[int, ...] = (1, 2, 3)
    random_cases: int = 400
    redraw: Callable[[Callable[..., Any], Any, Case], Case] | None = None
    sim_elements: int = 2**14
    sim_float32_steps: int = ROUNDING_STEPS_SIM_FLOAT32
    draws: int = 1
    sim_far: bool = True
    backward_kernels: bool = True
    of_torch: bool = False
    far_cases: Sequence[Case] = ()

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError(f"{self.name}: cases: expected at least one Case, got none")

    def cases_on(self, device: str) -> list[Case]:
        """The table's cases whose dtypes the op takes on a device."""
        wide_allowed = device in self.float64_devices
        found = [c for c in self.cases if wide_allowed or torch.float64 not in (c.dtype, *c.dtypes.values())]
        return found if device != "sim" else self.few_enough_for_sim(found)

    def few_enough_for_sim(self, cases: Sequence[Case]) -> list[Case]:
        """Those of the cases that run on the simulated kernels."""
        return [c for c in cases if math.prod(c.shape) <= self.sim_elements]

    def base_case(self, dtype: torch.dtype | None = None) -> Case:
        """The ordinary case (of a dtype) that checks of a single case use: the first that is contiguous and has no zero
        size. Cases of few elements or with sizes of one come late, and without ``dtype`` those of float64 too: not
        every device has it."""
        ordinary = [c for c in self.cases if c.layout == "contiguous" and math.prod(c.shape) > 1]
        if dtype is not None:
            ordinary = [c for c in ordinary if c.dtype == dtype and not c.dtypes]
        if not ordinary:
            wanted = "" if dtype is None else f" {dtype}"
            raise ValueError(f"{self.name}: cases: expected a contiguous{wanted} case with elements, got none")
        return min(
            ordinary,
            key=lambda c: (c.dtype == torch.float64, len(c.shape) < 2, 1 in c.shape, math.prod(c.shape) < FEW_ELEMENTS),
        )

    def smallest_case(self) -> Case:
        """The case with the fewest elements that still has more than one."""
        many = [c for c in self.cases if math.prod(c.shape) > 1 and c.layout == "contiguous"]
        return min(many or [self.base_case()], key=lambda c: math.prod(c.shape))
