"""DTensors in ops that treat each row by itself: every rank computes the rows that it holds, and nothing is sent where
only whole rows are shared out, as tensor parallelism's ``SequenceParallel`` does around its norms.

What is not shared out by rows (parts of rows, sums that wait for other ranks) is gathered first, as torch's own norms
do. Parameters are whole on every rank, and their gradients wait for the sum over the ranks (``Partial``).
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith._core import checks

PLAIN = {Tensor, nn.Parameter}  # the common types, which need no look at what else there is


def is_dtensor(t: Any) -> bool:
    """Without importing ``torch.distributed.tensor``, which takes longer than all of this package: who has a DTensor
    has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def refuse(op: str, names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Raises for the first DTensor of an op that does not take any, or not beside plain tensors."""
    for name, t in zip(names, inputs, strict=False):
        if is_dtensor(t):
            expected = "a plain tensor, as DTensor.to_local() and full_tensor() give, or FSDP to its modules' forward"
            checks.refuse(op, name, expected, f"a DTensor with placements {t.placements}")


def _check_all(op: str, names: Sequence[str], inputs: Sequence[Any], check: Callable) -> None:
    """Raises what the op would, before the first collective and by the shapes of the whole tensors: all ranks alike."""
    mesh = inputs[0].device_mesh
    for name, t in zip(names, inputs, strict=True):
        if name == "seed" and t is not None:  # the mask is a function of an element's place in the whole tensor
            checks.refuse(op, names[0], "no DTensor where elements are dropped", f"one on {mesh}")
        found = getattr(t, "device_mesh", None)
        if isinstance(t, Tensor) and found != mesh:
            got = "a tensor of this rank alone" if found is None else f"one on {found}"
            checks.refuse(op, name, f"a DTensor on the mesh of {names[0]}, {mesh}", got)
    with torch.no_grad():
        check(*(torch.empty(t.shape, dtype=t.dtype, device="meta") if isinstance(t, Tensor) else t for t in inputs))


def on_local_rows(
    op: str, names: Sequence[str], rows: int, inputs: Sequence[Any], call: Callable, check: Callable
) -> Any:
    """``call`` on what each rank holds of ``inputs``, whose first is a DTensor.

    names: of the inputs, for messages.
    rows: so many of the inputs hold rows, the others are parameters. The placements of the first hold for them all.
    check: the op on meta tensors.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    _check_all(op, names, inputs, check)
    x = inputs[0]
    mesh, last = x.device_mesh, x.dim() - 1
    placements = tuple(p if p.is_shard() and p.dim != last else Replicate() for p in x.placements)
    whole = (Replicate(),) * mesh.ndim
    partial = tuple(Partial() if p.is_shard() else p for p in placements)

    def local(i: int, t: Any) -> Any:
        if not isinstance(t, DTensor):
            return t
        wanted = placements if i < rows else whole
        if t.placements != wanted:  # of none to make, the backward would sum the gradients of parameters at once
            t = t.redistribute(placements=wanted)
        return t.to_local(grad_placements=placements if i < rows else partial)

    def shared_out(y: Tensor, like: DTensor) -> DTensor:
        shape = torch.Size((*like.shape[:-1], y.shape[-1]))  # a packed row gives half of its columns
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=stride)

    found = call(*(local(i, t) for i, t in enumerate(inputs)))
    return tuple(shared_out(y, x) for y in found) if isinstance(found, tuple) else shared_out(found, x)
