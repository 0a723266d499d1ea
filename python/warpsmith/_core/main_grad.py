"""Float32 tensors to which a backward adds a weight's gradient: what may be one, and who sums it over ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith._core.of_tensors import OfTensors

reductions = OfTensors[list[Any]]()  # by parameter: weak references to what reduces its gradient and its main_grad
_wrappers = OfTensors[Any]()  # by parameter: a weak reference to the DDP or FSDP module around it, or None
_parameters = OfTensors[Any]()  # by main_grad that is reduced over ranks: a weak reference to its parameter
# Modules under DDP whose hook reduces main_grads: whether it has done so since their last forward.
_is_reduced: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
PLAIN = (Tensor, nn.Parameter)


class Destination(NamedTuple):
    """Where a backward adds the weight's gradient. Kept apart from the saved tensors: the graph of one that has been
    written to cannot be walked again."""

    main_grad: Tensor | None
    parameter: Tensor | None = None  # given where its main_grad is reduced over ranks, without a gradient beside it
    op: str = ""

    @classmethod
    def of(cls, op: str, main_grad: Tensor | None) -> Destination:
        """In a forward, behind :func:`check_main_grad`."""
        reference = None if main_grad is None else _parameters.get(main_grad)
        if reference is None or torch._C._are_functorch_transforms_active():  # which want a gradient
            return cls(main_grad)
        return cls(main_grad, reference(), op)

    def takes(self, wanted: bool) -> Tensor | None:
        """The tensor, to which the caller adds the weight's gradient now; None if that is not wanted."""
        if not wanted or self.main_grad is None:
            return None
        if self.parameter is not None:
            for shards in (found := _shards_of(self.parameter)):
                shards.adds_to_main_grad(self.parameter)
            wrapper = None if found else _known(self.parameter)
            if wrapper is not None and _is_reduced.get(wrapper, False) and wrapper.require_backward_grad_sync:
                raise RuntimeError(
                    f"{self.op}: main_grad: rank {dist.get_rank()}: a backward after DistributedDataParallel reduced "
                    "the gradients, which it would not reduce: add the losses for one backward, or run forward and "
                    "backward of all but the last under no_sync(); call the DDP module, not its .module"
                )
        return self.main_grad

    def nothing_for(self, weight: Tensor, zeros: Tensor | None = None) -> Tensor | None:
        """The parameter's own gradient: zeros, since hooks wait for one; the given zeros, if they fit. None where
        main_grad is reduced over ranks: torch calls the hooks of what reduces it without a gradient, too."""
        if self.parameter is not None:
            return None
        return zeros if zeros is not None and zeros.dtype == weight.dtype else torch.zeros_like(weight)


def _begins(wrapper: nn.Module, _: Any) -> None:
    if torch.is_grad_enabled():
        _is_reduced[wrapper] = False


def have_reduced(parameters: Iterable[Tensor]) -> None:
    """Says that DDP's hook has reduced all gradients of the module that has these parameters."""
    wrapper = next(filter(None, map(_known, parameters)), None)
    if wrapper is not None and wrapper in _is_reduced:
        _is_reduced[wrapper] = True


def _shards_of(parameter: Tensor) -> list[Any]:
    """What reduces a parameter for optimizers that are alive."""
    return [shards for reference in reductions.get(parameter) or () if (shards := reference()) is not None]


def _bytes_of(t: Tensor) -> tuple[int, int]:
    """First and last byte, plus one, of a tensor with elements."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def _storage_of(t: Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()


def _refuse_shared_bytes(op: str, argument: str, main_grad: Tensor, inputs: dict[str, Tensor | None]) -> None:
    first, end = _storage_of(main_grad)
    for name, t in inputs.items():
        if type(t) not in PLAIN or t.is_meta:  # type: ignore[union-attr]
            continue
        other_first, other_end = _storage_of(t)  # type: ignore[arg-type]
        if first < other_end and other_first < end and t.numel():  # type: ignore[union-attr]
            (own, own_end), (other, other_end) = _bytes_of(main_grad), _bytes_of(t)  # type: ignore[arg-type]
            if own < other_end and other < own_end:
                checks.refuse(op, argument, f"other memory than that of {name}", f"bytes that {name} holds")


def check_main_grad(
    op: str, main_grad: Tensor, weight: Tensor, argument: str = "main_grad", **inputs: Tensor | None
) -> None:
    """Refuses a place for the weight's gradient that is the place of something else, has a gradient itself, or that
    nobody sums over ranks where the weight's gradient is summed."""
    if torch.compiler.is_compiling():
        checks.refuse(op, argument, "None under torch.compile", "a tensor")
    if not isinstance(main_grad, Tensor):
        checks.refuse_type(op, argument, "a tensor", main_grad)
    if main_grad.requires_grad:
        checks.refuse(op, argument, "a tensor that requires no gradient", "one that does")
    if main_grad.is_neg():
        checks.refuse(op, argument, "a tensor that holds its values", "one with the negative bit")
    if type(main_grad) in PLAIN and not main_grad.is_meta and main_grad.numel():
        _refuse_shared_bytes(op, argument, main_grad, {"weight": weight, **inputs})
    _parameters.pop(main_grad)
    if isinstance(weight, Tensor) and weight.requires_grad and dist.is_available() and dist.is_initialized():
        _check_reduced(op, argument, main_grad, weight)


def _check_reduced(op: str, argument: str, main_grad: Tensor, weight: Tensor) -> None:
    parameter = weight if weight._base is None else weight._base
    shards, wrapper = _shards_of(parameter), None
    if not shards:
        wrapper = _wrapper_of(parameter)
        if wrapper is None:
            return
        if not isinstance(wrapper, nn.parallel.DistributedDataParallel):
            remedy = "weight.grad_dtype = torch.float32 gives it a gradient in float32"
            checks.refuse(op, argument, f"None under fully_shard, which does not reduce it: {remedy}", "a tensor")
        if wrapper.process_group.size() == 1:
            return
        if not any(getattr(hook, "reduces_main_grad", False) for hook, _ in wrapper._comm_hooks):
            remedy = "register warpsmith.distributed.accurate_hook, which reduces weight.main_grad"
            checks.refuse(op, argument, f"None under DistributedDataParallel, or a hook: {remedy}", "a tensor")
    reduced = getattr(parameter, "main_grad", None)
    if reduced is None or reduced.numel() != main_grad.numel() or reduced.data_ptr() != main_grad.data_ptr():
        by = "ShardedOptimizer" if shards else "accurate_hook"
        checks.refuse(op, argument, f"weight.main_grad, which {by} reduces over ranks", "another tensor")
    if wrapper is not None and wrapper not in _is_reduced:
        _is_reduced[wrapper] = False
        wrapper.register_forward_pre_hook(_begins)
    _parameters[main_grad] = weakref.ref(parameter)


def is_gathered(parameter: Tensor) -> bool:
    """Whether it is what fully_shard has put together of its shards, and will free."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(_wrapper_of(parameter), FSDPModule)


def _wrapper_of(parameter: Tensor) -> nn.Module | None:
    """The DistributedDataParallel or fully sharded module that holds a parameter."""
    active: Any = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if active is not None and not parameter.is_leaf:
        return active
    if active is not None and _known(parameter) is not active:
        _remember(active)
    if parameter not in _wrappers:
        _find_wrappers()
    _wrappers.setdefault(parameter, None)
    return _known(parameter)


def _known(parameter: Tensor) -> nn.Module | None:
    reference = _wrappers.get(parameter)
    return None if reference is None else reference()


def _remember(wrapper: nn.Module) -> None:
    _wrappers.update((p, weakref.ref(wrapper)) for p in wrapper.parameters())


def _find_wrappers() -> None:
    """Outside of a wrapper's forward nothing leads from a parameter to it: all objects are asked, once for all
    parameters that there are. Not so beside fully sharded modules, which hide those that are not gathered."""
    from torch.distributed.fsdp import FSDPModule

    wrappers, parameters = [], []
    for o in gc.get_objects():
        if issubclass(type(o), (nn.parallel.DistributedDataParallel, FSDPModule)):
            wrappers.append(o)
        elif type(o) is nn.Parameter:
            parameters.append(o)
    if not any(isinstance(wrapper, FSDPModule) for wrapper in wrappers):
        _wrappers.update((p, None) for p in parameters if p not in _wrappers)
    for wrapper in wrappers:
        _remember(wrapper)
