"""What only a CUDA device can show: no synchronisation, graph capture, streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from warpsmith.testing.inputs import make_inputs
from warpsmith.testing.run import as_leaves, assert_same_bits, flatten, run, upstream, wanted_inputs
from warpsmith.testing.spec import Case, OpSpec
from warpsmith.testing.tensors import repeat_batch

DELAY_CYCLES = 20_000_000  # about 10 ms: long enough that work on a wrong stream overtakes


@contextmanager
def no_waits() -> Iterator[None]:
    """Makes the host's waits for the device, within torch's operators, errors."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def check_no_sync(spec: OpSpec) -> None:
    """Forward and backward run with torch's synchronisation check set to raise."""
    case = spec.base_case()
    inputs = make_inputs(spec, case, "cuda")
    grads = upstream(spec, case, run(spec.op, spec, case, inputs).outputs)
    torch.cuda.synchronize()
    with no_waits():
        run(spec.op, spec, case, inputs, grads=grads)


def check_graph_capture(spec: OpSpec) -> None:
    """Forward and backward are captured in one CUDA graph; each replay, with other inputs, gives the bits of eager
    mode."""
    case = spec.base_case()
    static = make_inputs(spec, case, "cuda")
    grads = upstream(spec, case, run(spec.op, spec, case, static).outputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(spec.op, spec, case, static, grads=grads)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(spec.op, spec, case, static, grads=grads)
    for step in range(3):
        for value in static.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.copy_(value.roll(step + 1, 0))
        graph.replay()
        replayed = {k: v.clone() for k, v in captured.all().items()}
        eager = run(spec.op, spec, case, static, grads=grads)
        assert_same_bits(f"{spec.name}: graph replay {step}", eager.all(), replayed)


def check_side_streams(spec: OpSpec, streams: int = 4) -> None:
    """On a side stream the op waits for that stream's earlier work: its inputs are written there late, behind a long
    kernel."""
    case: Case = spec.base_case()
    inputs = make_inputs(spec, case, "cuda")
    expected = run(spec.op, spec, case, inputs)
    grads = upstream(spec, case, expected.outputs)
    torch.cuda.synchronize()
    results = []
    for stream in [torch.cuda.Stream() for _ in range(streams)]:
        with torch.cuda.stream(stream):
            late = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
            torch.cuda._sleep(DELAY_CYCLES)
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    late[name].copy_(value)
            results.append((run(spec.op, spec, case, late, grads=grads), late))
    torch.cuda.synchronize()
    for i, (result, _) in enumerate(results):
        assert_same_bits(f"{spec.name}: side stream {i}", expected.all(), result.all())


def check_out_of_memory(spec: OpSpec) -> None:
    """An output that does not fit is torch.OutOfMemoryError, forward and backward; with memory again, the op works."""
    case = spec.base_case()
    few = make_inputs(spec, case, "cuda")
    times = 2**26 // few[spec.batched[0]].numel() + 1  # outputs far larger than what a cached block may have free
    inputs = {k: repeat_batch(v, times) if k in spec.batched else v for k, v in few.items()}
    expected = run(spec.op, spec, case, inputs)
    grads = upstream(spec, case, expected.outputs)
    leaves = as_leaves(inputs, wanted_inputs(spec, inputs))
    outputs = flatten(spec.op(**leaves), spec.outputs)
    graph = {n: y for n, y in outputs.items() if y.requires_grad}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        filling = _take_what_is_cached()  # blocks that other tensors keep from being given back have room of their own
        _expect_out_of_memory(spec, "forward", lambda: spec.op(**inputs))
        if graph:
            wanted = [leaves[n] for n in wanted_inputs(spec, inputs)]
            given = [grads[n] for n in graph]
            _expect_out_of_memory(spec, "backward", lambda: torch.autograd.grad(list(graph.values()), wanted, given))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del filling
    assert_same_bits(f"{spec.name} after OutOfMemoryError", expected.all(), run(spec.op, spec, case, inputs).all())


def _take_what_is_cached() -> list[Tensor]:
    taken = []
    for size in (2**28, 2**26, 2**24):
        try:
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    return taken


def _expect_out_of_memory(spec: OpSpec, direction: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{spec.name} {direction}: expected torch.OutOfMemoryError, got {got}") from error
    raise AssertionError(f"{spec.name} {direction}: expected torch.OutOfMemoryError, but there was memory")
