"""What a captured step asks of CUDA. Tests of its logic replace this class by one that needs no GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from warpsmith.train.random_state import random_state
from warpsmith.train.syncs import waits


class CudaGraphs:
    """Captures and replays functions on one device."""

    @staticmethod
    def serves(device: torch.device) -> bool:
        return device.type == "cuda"

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self.device = device
        own = torch.cuda.default_generators[device.index or 0]
        self._generators = [own, *(g for g in generators if g is not own)]
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Runs what it encloses on the stream on which captures run, in order with the current stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Captures a function. Returns what replays it, and the function's result, whose tensors a replay fills.

        All captures share their memory: a replay overwrites the results of other captures.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators[1:]:  # torch registers the default one
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        # In the mode "thread_local" a thread of a data loader may pin memory meanwhile.
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # it says again that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._mend()
                raise
        return graph.replay, result

    def forget(self) -> None:
        """All captures have been dropped: torch does not let others use their memory."""
        self._pool = torch.cuda.graph_pool_handle()

    def _mend(self) -> None:
        """Takes allocator and generators out of a capture that torch leaves half-ended when it fails."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)
        for generator in self._generators:
            generator.graphsafe_set_state(generator.clone_state())

    def watched(self, found: Callable[[FrameType], None]) -> contextlib.AbstractContextManager[None]:
        """Calls ``found`` for every wait of the host."""
        return waits(found)

    def random_state(self) -> list[Tensor]:
        return [g.get_state() for g in self._generators]

    def host_random_state(self) -> dict[str, Any]:
        """The generators whose numbers a replay repeats."""
        return {name: value for name, value in random_state().items() if name != "cuda"}

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
