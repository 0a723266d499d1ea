"""The parts of linear losses that are no matrix product: gradients that are scaled, cast or added, and column sums."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import warpsmith
from torch.testing import assert_close
from warpsmith.reference.linear_loss import linear_log_prob as reference
from warpsmith.testing import bitwise_equal, measure, sim

from tests.optim.adamw_runs import ON_SIM, ORDERS, in_order, moved

OPS = torch.ops.warpsmith
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)]
# factor, denominator: no division by 0
FACTORS = [(1.0, None), (3.0, None), (0.25, 3.0), (2.0, 0.0), (65536.0, 4000.0)]


def random(count, dtype, offset=0, seed=0):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.empty(count + offset, dtype=dtype)[offset:].copy_(values)


def scalars(factor, denominator):
    return torch.tensor(factor), None if denominator is None else torch.tensor(denominator)


@pytest.mark.parametrize(("factor", "denominator"), FACTORS)
@pytest.mark.parametrize(("dtype", "out"), PAIRS, ids=str)
def test_scaled_cast_and_added_gradients(dtype, out, factor, denominator):
    """Each argument aligned or not, over more elements than one turn of a small machine's blocks takes."""
    by = torch.tensor(factor if not denominator else torch.tensor(factor) / denominator)
    given = scalars(factor, denominator)
    for count, offset, of_sum in ((0, 0, 0), (1, 0, 0), (9, 0, 1), (5000, 1, 0), (40_003, 0, 1), (100_003, 0, 0)):
        x = random(count, dtype, offset)
        want = x.float() * by
        for order in ORDERS[:2]:
            with in_order(order):
                got = OPS.linear_cross_entropy_scaled(x, *given, out)
                assert bitwise_equal(got, want.to(out))
                if dtype == out:
                    inside = random(count, dtype, offset)
                    OPS.linear_cross_entropy_scale_(inside, *given)
                    assert bitwise_equal(inside, want.to(dtype))
                    total, taken = random(count, FP32, of_sum, 1), random(count, dtype, offset)
                    expected = total.double() + want.double()
                    OPS.linear_cross_entropy_add_(total, taken, *given)
                    assert_close(total.double(), expected, rtol=3e-7, atol=1e-6 * float(by.abs().clamp(min=1)))
                    assert not taken.any()


TURN = 8 * 256 * 8  # elements that the blocks of one multiprocessor take in a turn; a thread takes several at once


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_what_lies_behind_a_gradient_stays(dtype):
    """The last element lies a little before and behind the ends of turns."""
    factor, behind = torch.tensor(3.0), 8
    for count in (turns * TURN + few for turns in (1, 3, 4, 7) for few in (-3, 5)):
        x, total = random(count + behind, dtype), random(count + behind, FP32, 0, 1)
        scaled, taken, added = x.clone(), x.clone(), total.clone()
        scaled[:count] *= 3
        taken[:count] = 0
        added[:count] += 3 * x[:count].float()
        inside, given, summed = x.clone(), x.clone(), total.clone()
        with sim.machine(multiprocessors=1) if ON_SIM else nullcontext():
            OPS.linear_cross_entropy_scale_(inside[:count], factor, None)
            OPS.linear_cross_entropy_add_(summed[:count], given[:count], factor, None)
        assert bitwise_equal(inside, scaled) and bitwise_equal(given, taken)
        assert_close(summed, added, rtol=3e-7, atol=1e-6)
        assert bitwise_equal(summed[count:], total[count:])


@pytest.mark.skipif(not ON_SIM, reason="the sim counts bytes")
def test_a_factor_of_1_moves_no_element():
    count, threads = 8192, 8192 // 8

    floor = 4 * threads  # a factor for each
    x, total, one, three = random(count, BF16), random(count, FP32), torch.ones(()), torch.tensor(3.0)
    assert moved(lambda: OPS.linear_cross_entropy_scale_(x, one, None)) == (floor, 0)
    assert moved(lambda: OPS.linear_cross_entropy_scale_(x, three, None)) == (2 * count + floor, 2 * count)
    assert moved(lambda: OPS.linear_cross_entropy_add_(total, x, three, None)) == (6 * count + floor, 6 * count)
    assert moved(lambda: OPS.linear_cross_entropy_scaled(total, three, None, BF16)) == (
        4 * count + 4 * threads,
        2 * count,
    )


# Few rows and many, that is one slice and several, of columns that are whole vectors and not.
ROWS = [(33, 300), (20, 7), (150, 257), (20, 2047), (700, 130), (193, 1025), (1100, 64)]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("rows", "classes"), ROWS)
def test_gradients_of_a_bias_are_sums_over_rows_and_chunks(rows, classes, dtype):
    hidden, weight, bias = (random(n, dtype, 0, i).view(s) for i, (n, s) in enumerate(
        ((rows * 8, (rows, 8)), (classes * 8, (classes, 8)), (classes, (classes,)))))  # fmt: skip
    target = torch.arange(rows) % classes
    up = random(rows, FP32, 0, 3)

    def gradient(op, wide=None, **more):
        given = [t if wide is None else t.to(wide) for t in (hidden, weight, bias)]
        given[2] = given[2].clone().requires_grad_()
        found = op(*given[:2], target, bias=given[2], **more)
        log_prob = found[0] if isinstance(found, tuple) else found
        return torch.autograd.grad((log_prob * up.to(log_prob.dtype)).sum(), given[2])[0]

    exact, plain = gradient(reference, torch.float64), gradient(reference)
    for chunk in (None, *(n * (classes + 8) * dtype.itemsize for n in (64, 512))):
        found = []
        for order in ORDERS:
            with in_order(order):
                found.append(gradient(warpsmith.linear_log_prob, max_chunk_bytes=chunk))
        assert all(bitwise_equal(a, b) for a, b in itertools.pairwise(found))
        assert (error := measure("grad_bias", found[0], exact, plain)).ok, str(error)
