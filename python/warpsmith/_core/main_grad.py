"""Float32 tensors to which a backward adds a weight's gradient: what may be one, and who sums it over ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpsmith import _C
from warpsmith._core import checks
from warpsmith._core.of_tensors import OfTensors

reductions = OfTensors[list[Any]]()  # by parameter: weak references to what reduces its gradient and its main_grad
_wrappers = OfTensors[Any]()  # by parameter: a weak reference to the DDP or FSDP module around it, or None
# By main_grad that is reduced over ranks: weak references to its parameter and to what reduces it, which is DDP or not.
_reduced = OfTensors[tuple[Any, Any, bool]]()
# Modules under DDP whose hook reduces main_grads: whether it has done so since their last forward.
_is_reduced: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
PLAIN = (Tensor, nn.Parameter)
_DDP = nn.parallel.DistributedDataParallel
_HAS_RANKS = dist.is_available()
_place = _C.main_grads(Tensor.__dlpack_c_exchange_api__, PLAIN)
_FITS = -1


class Destination(NamedTuple):
    """Where a backward adds the weight's gradient. Kept apart from the saved tensors: the graph of one that has been
    written to cannot be walked again."""

    main_grad: Tensor | None
    parameter: Tensor | None = None  # given where its main_grad is reduced over ranks, without a gradient beside it
    op: str = ""

    @classmethod
    def of(cls, op: str, main_grad: Tensor | None) -> Destination:
        """In a forward, behind :func:`check_main_grad`."""
        found = None if main_grad is None else _reduced.get(main_grad)
        if found is None or torch._C._are_functorch_transforms_active():  # which want a gradient
            return cls(main_grad)
        return cls(main_grad, found[0](), op)

    def takes(self, wanted: bool) -> Tensor | None:
        """The tensor, to which the caller adds the weight's gradient now; None if that is not wanted."""
        if not wanted or self.main_grad is None:
            return None
        if self.parameter is not None:
            adds_to_main_grad(self.op, self.parameter)
        return self.main_grad

    def nothing_for(self, weight: Tensor, zeros: Tensor | None = None) -> Tensor | None:
        """The parameter's own gradient: zeros, since hooks wait for one; the given zeros, if they fit. None where
        main_grad is reduced over ranks: torch calls the hooks of what reduces it without a gradient, too."""
        if self.parameter is not None:
            return None
        return zeros if zeros is not None and zeros.dtype == weight.dtype else torch.zeros_like(weight)


def adds_to_main_grad(op: str, parameter: Tensor) -> None:
    """Tells what reduces the parameter's main_grad over ranks that a backward adds to it now."""
    if found := _shards_of(parameter):
        for shards in found:
            shards.adds_to_main_grad(parameter)
        return
    wrapper = _known(parameter)
    if wrapper is not None and wrapper.require_backward_grad_sync and _is_reduced.get(wrapper, False):
        raise RuntimeError(
            f"{op}: main_grad: rank {dist.get_rank()}: a backward after DistributedDataParallel reduced the gradients, "
            "which it would not reduce: add the losses for one backward, or run forward and backward of all but the "
            "last under no_sync(); call the DDP module, not its .module"
        )


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
    known = reductions.get(parameter)
    return [shards for reference in known if (shards := reference()) is not None] if known else []


def check_main_grad(
    op: str, main_grad: Tensor, weight: Tensor, argument: str = "main_grad", **inputs: Tensor | None
) -> None:
    """Refuses a place for the weight's gradient that is the place of something else, has a gradient itself, or that
    nobody sums over ranks where the weight's gradient is summed."""
    if torch.compiler.is_compiling():
        checks.refuse(op, argument, "None under torch.compile", "a tensor")
    if (place := _place(main_grad, weight, *inputs.values())) != _FITS:
        if not isinstance(main_grad, Tensor):
            checks.refuse_type(op, argument, "a tensor", main_grad)
        if main_grad.requires_grad:
            checks.refuse(op, argument, "a tensor that requires no gradient", "one that does")
        if main_grad.is_neg():
            checks.refuse(op, argument, "a tensor that holds its values", "one with the negative bit")
        if place >= 0:
            name = ("weight", *inputs)[place]
            checks.refuse(op, argument, f"other memory than that of {name}", f"bytes that {name} holds")
    if reduced_parameter(op, main_grad, weight, argument) is None:
        _reduced.pop(main_grad)


def reduced_parameter(op: str, main_grad: Tensor, weight: Tensor, argument: str = "main_grad") -> Tensor | None:
    """The weight's parameter, if main_grad is reduced over ranks in place of its gradient. Refuses a main_grad that
    would have to be."""
    if not (_HAS_RANKS and dist.is_initialized()):
        return None
    if (found := _reduced.get(main_grad)) is not None:  # what was found before holds while nothing of it changes
        known, reducer, is_ddp = found
        if known() is weight and (by := reducer()) is not None and getattr(weight, "main_grad", None) is main_grad:
            active = _DDP._active_ddp_module
            if not is_ddp or ((active is None or active is by) and _wrappers.get(weight) is reducer):
                return weight
    if not (isinstance(weight, Tensor) and weight.requires_grad):
        return None
    parameter = weight if weight._base is None else weight._base
    shards, wrapper = _shards_of(parameter), None
    if not shards:
        wrapper = _wrapper_of(parameter)
        if wrapper is None:
            return None
        if not isinstance(wrapper, _DDP):
            remedy = "weight.grad_dtype = torch.float32 gives it a gradient in float32"
            checks.refuse(op, argument, f"None under fully_shard, which does not reduce it: {remedy}", "a tensor")
        if wrapper.process_group.size() == 1:
            return None
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
    reducer = weakref.ref(shards[0] if wrapper is None else wrapper)
    _reduced[main_grad] = weakref.ref(parameter), reducer, wrapper is not None
    return parameter


def is_gathered(parameter: Tensor) -> bool:
    """Whether it is what fully_shard has put together of its shards, and will free."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(_wrapper_of(parameter), FSDPModule)


def _wrapper_of(parameter: Tensor) -> nn.Module | None:
    """The DistributedDataParallel or fully sharded module that holds a parameter."""
    active: Any = _DDP._get_active_ddp_module()
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
        if issubclass(type(o), (_DDP, FSDPModule)):
            wrappers.append(o)
        elif type(o) is nn.Parameter:
            parameters.append(o)
    if not any(isinstance(wrapper, FSDPModule) for wrapper in wrappers):
        _wrappers.update((p, None) for p in parameters if p not in _wrappers)
    for wrapper in wrappers:
        _remember(wrapper)
