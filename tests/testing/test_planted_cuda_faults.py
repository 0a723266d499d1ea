"""The checks that need a card must fail on an op with the fault each is there for, and pass one without."""

from dataclasses import replace

import pytest
import torch
from toy_op import SPEC, reference
from warpsmith.testing.checks import cuda

pytestmark = pytest.mark.gpu

# The toy's kernels are for the CPU; its definition runs everywhere.
RIGHT = replace(SPEC, op=reference, devices=("cuda",), batched=("x",))


def capturing():
    return torch.cuda.is_current_stream_capturing()


def planted(op):
    return replace(RIGHT, op=op)


@pytest.mark.parametrize(
    "check", [cuda.check_no_sync, cuda.check_graph_capture, cuda.check_side_streams, cuda.check_out_of_memory]
)
def test_the_right_op_passes(check):
    check(RIGHT)


def test_reading_device_memory_on_the_host_is_caught():
    def op(x, scale):
        return reference(x, scale) if float(scale.detach().sum()) < 1e30 else x

    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda.check_no_sync(planted(op))


def test_reading_in_the_backward_alone_is_caught():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * float(dy.sum() != 0)

    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda.check_no_sync(planted(lambda x, scale: Reads.apply(reference(x, scale))))


def test_an_op_that_cannot_be_captured_is_caught():
    def op(x, scale):
        torch.cuda.current_stream().synchronize()
        return reference(x, scale)

    with pytest.raises((RuntimeError, torch.AcceleratorError)):
        cuda.check_graph_capture(planted(op))
    torch.cuda.synchronize()


def test_values_kept_from_the_capture_are_caught():
    kept = []

    def op(x, scale):
        # The scale of the first call for ever: right while the inputs are the first ones, wrong in a replay.
        kept.append(scale.detach().clone())
        return reference(x, scale * 0 + kept[0])

    with pytest.raises(AssertionError, match="graph replay"):
        cuda.check_graph_capture(planted(lambda x, scale: op(x, scale) if capturing() else reference(x, scale)))


def test_another_stream_than_the_current_is_caught():
    wrong = torch.cuda.Stream()

    def op(x, scale):
        with torch.cuda.stream(wrong):
            return reference(x, scale)

    with pytest.raises(AssertionError, match="side stream"):
        cuda.check_side_streams(planted(op))


def test_a_disguised_allocation_failure_is_caught():
    def op(x, scale):
        try:
            return reference(x, scale)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("allocation failed") from error

    with pytest.raises(AssertionError, match="forward: expected torch.OutOfMemoryError, got RuntimeError"):
        cuda.check_out_of_memory(planted(op))


def test_an_op_that_needs_no_memory_is_caught():
    with pytest.raises(AssertionError, match="but there was memory"):
        cuda.check_out_of_memory(planted(lambda x, scale: x[:0]))
