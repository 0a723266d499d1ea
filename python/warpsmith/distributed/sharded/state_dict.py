"""The state of a ``ShardedOptimizer`` for ``torch.distributed.checkpoint``: each rank writes and reads its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from warpsmith._core import checks
from warpsmith._core.raw_step import COUNTER
from warpsmith._core.tensor_list import describe
from warpsmith.distributed.sharded import checks as sharded_checks

if TYPE_CHECKING:
    from warpsmith.distributed.sharded.optimizer import ShardedOptimizer

_OP = "ShardedState.load_state_dict"


class FlatTensor(Tensor):
    """A one-dimensional tensor of which this process has some ranges: what torch.distributed.checkpoint asks of a
    tensor that lies on several ranks. No operation works on it."""

    ranges: dict[int, Tensor]  # by their first element

    @staticmethod
    def __new__(cls, numel: int, ranges: dict[int, Tensor]) -> FlatTensor:
        like = next(iter(ranges.values()))
        self = Tensor._make_wrapper_subclass(cls, (numel,), dtype=like.dtype, device=like.device)
        self.ranges = ranges
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: expected a whole tensor, got one for torch.distributed.checkpoint")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatTensor({self.numel()}, from {', '.join(map(str, self.ranges))})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([begin]), t.shape) for begin, t in self.ranges.items()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.ranges[index.offset[0]]


class ShardedState(Stateful):
    """The state of a :class:`ShardedOptimizer` in a checkpoint of ``torch.distributed.checkpoint``.

    Each rank writes the states of its own elements, about 1 / N of all, and reads those that it owns, whatever the
    number of ranks that wrote them. Parameters and states then have the bits of the saved ones. The parameters
    themselves are not in it: save the model beside it.

    Args:
        optimizer: whose state is saved, or loaded.

    In the checkpoint a state is one-dimensional: ``state.<parameter>.<name>``, elements as they lie in memory, with the
    parameter's place among all of the optimizer. Hyperparameters of groups are ``param_groups.<group>.<name>``. A
    parameter that has not been stepped is saved with the states that its first step would make.

    Takes host memory for this rank's states while it saves or loads. On CUDA the host waits. The files are torch's:
    unlike those of :class:`warpsmith.train.Checkpointer` they contain pickles, so load only what you trust.

    Raises:
        ValueError: groups or memory layouts other than those of the optimizer that was saved, or a precision that does
            not fit. The optimizer has not changed then. Other sizes, and states that the checkpoint lacks, are refused
            by ``torch.distributed.checkpoint``.

    Source: the protocol of torch.distributed.checkpoint (``Stateful``; tensors as DTensor describes them to it).

    Example:
        >>> import tempfile, torch, warpsmith
        >>> import torch.distributed.checkpoint as dcp
        >>> from warpsmith.distributed import ShardedOptimizer, ShardedState
        >>> with warpsmith.distributed.init(device="cpu"), tempfile.TemporaryDirectory() as folder:
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW, lr=1e-3)
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
        ...     parts = {"model": model.state_dict(), "optimizer": ShardedState(optimizer)}
        ...     metadata = dcp.save(parts, checkpoint_id=folder)
        ...     other = ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW)
        ...     dcp.load({"model": model.state_dict(), "optimizer": ShardedState(other)}, checkpoint_id=folder)
        >>> other.param_groups[0]["lr"]
        0.001
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's states, in host memory. ``torch.distributed.checkpoint`` calls it."""
        optimizer = self._optimizer
        shards, states = optimizer._shards, dict[str, dict[str, Any]]()
        ranges: dict[tuple[str, str], dict[int, Tensor]] = {}
        for f, tensor in zip(shards.fragments, optimizer._tensors, strict=True):
            key = self._key(f.param)
            for name, value in self._states_of(tensor).items():
                host = value.detach().to("cpu", copy=True)
                if name == COUNTER:
                    states.setdefault(key, {})[name] = host
                else:
                    ranges.setdefault((key, name), {})[f.start] = host
                    states.setdefault(key, {})[name] = shards.params[f.param].numel()
        for (key, name), parts in ranges.items():
            states[key][name] = FlatTensor(states[key][name], parts)
        groups = {
            str(g): {**sharded_checks.values_of(own), "layouts": [_layout(p) for p in whole["params"]]}
            for g, (own, whole) in enumerate(zip(optimizer.param_groups, optimizer._whole.param_groups, strict=True))
        }
        return {"state": states, "param_groups": groups, "sizes": self._sizes()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what was read into a dictionary of :meth:`state_dict`. ``torch.distributed.checkpoint`` calls it."""
        optimizer = self._optimizer
        whole = optimizer._whole.param_groups
        if (sizes := state_dict["sizes"]) != self._sizes():
            checks.refuse(_OP, "param_groups", f"groups of {self._sizes()} parameters", str(sizes))
        groups = [dict(state_dict["param_groups"][str(g)]) for g in range(len(whole))]
        number = 0
        for group, own in zip(groups, whole, strict=True):
            layouts = group.pop("layouts")
            for layout, p in zip(layouts, own["params"], strict=True):
                if layout != _layout(p):
                    checks.refuse(_OP, describe(whole, number), f"the layout {_layout(p)}", layout)
                number += 1
        ids = iter(range(number))
        ranges = [
            {**group, "params": [next(ids) for _ in own["params"]]} for group, own in zip(groups, whole, strict=True)
        ]
        sharded_checks.check_state(whole, {"state": {}, "param_groups": ranges})
        states: dict[int, dict[str, Any]] = {}
        for n, f in enumerate(optimizer._shards.fragments):
            saved = state_dict["state"].get(self._key(f.param), {})
            states[n] = {name: v.clone() if name == COUNTER else v.ranges[f.start] for name, v in saved.items()}
        optimizer._load_own(states, groups)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer._whole.param_groups]

    def _key(self, param: int) -> str:
        return str(self._optimizer._trainable[param])

    def _states_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """A fragment's states; of one that has none yet, those that its first step would make."""
        inner = self._optimizer._inner
        if inner.state.get(tensor):
            return dict(inner.state[tensor])
        group = next(group for group in inner.param_groups if any(p is tensor for p in group["params"]))
        inner._prepare_state(tensor, group)
        return dict(inner.state.pop(tensor, {}))


def _layout(p: Tensor) -> str:
    return f"shape {tuple(p.shape)}, strides {p.stride()}"
