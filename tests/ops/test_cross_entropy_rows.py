"""The kernels of cross_entropy on the sim: as linear losses call them, rows beyond 2^31 elements, too long for a chip,
or several for a block, and results that are exact."""

import pytest
import torch
import warpsmith
from warpsmith.testing import Case, OpSpec, bitwise_equal, op_tests, sim
from warpsmith.testing.checks import kernels, numerics

from .test_cross_entropy import BF16, FP16, FP32, SPEC

RAW = torch.ops.warpsmith
NONE, SUM = 0, 2  # reductions, as raw ops count them
pytestmark = pytest.mark.skipif(not sim.is_loaded(), reason="no simulated kernels in this process (--sim)")
ON_SIM = pytest.mark.parametrize("device", ["cpu"])
NUMBERS = (0.0, 0.0, 0.0)  # label smoothing, z loss, softcap


def log_prob(op):
    """Rows of logits as a linear layer makes them: of an identity, whose products are exact."""

    def call(logits, target, save_logits, temperature):
        hidden, options = torch.eye(len(logits), dtype=logits.dtype), {}
        if op is warpsmith.linear_log_prob:
            options["save_logits"] = save_logits
        return op(hidden, logits.t(), target, temperature=temperature, **options)

    return call


def log_prob_inputs(case, rng):
    rows, classes = case.shape
    target = rng.integers((rows,), 0, classes)
    options = {"save_logits": True, "temperature": 1.0, **case.options}
    return {"logits": rng.normal(case.shape, std=2.0), "target": target, **options}


# A gradient in a forward of its own, of logits that are made again, and in a backward, of logits that were kept.
LOG_PROB = OpSpec(
    name="rows_of_linear_log_prob",
    op=log_prob(warpsmith.linear_log_prob),
    reference=log_prob(warpsmith.reference.linear_log_prob),
    inputs=log_prob_inputs,
    cases=[
        Case((rows, classes), dtype, options={"save_logits": saved})
        for rows, classes in ((6, 24), (3, 1), (5, 37), (6, 1032), (3, 2060), (2, 8196))
        for dtype in (BF16, FP32, FP16)
        for saved in (True, False)
    ]
    + [Case((5, 300), dtype, options={"temperature": 1.3}) for dtype in (BF16, FP32)],
    differentiable=("logits",),
    outputs=("log_prob", "logsumexp", "entropy"),
    layouts=("contiguous", "padded_rows"),
    zero_sizes=False,
    edge_inputs=(),
    sim_elements=17_000,
    devices=(),
)
if sim.is_loaded():
    TestRowsOfLinearLogProb = op_tests(LOG_PROB)


def problem(rows, classes, dtype=BF16):
    draw = torch.Generator().manual_seed(classes)
    return torch.randn(rows, classes, generator=draw).to(dtype), torch.randint(classes, (rows,), generator=draw)


def rows_results(logits, target, dloss):
    """lse, argmax, largest, sum and gradient of each row, the last made early and late."""
    early = RAW.cross_entropy_with_gradient(logits, target, None, -100, SUM, *NUMBERS, True)
    _, lse, argmax, _, nothing, largest, total, gradient = early
    late = RAW.cross_entropy_backward(dloss, logits, target, None, largest, total, nothing, False, -100, *NUMBERS)
    return lse, argmax, largest, total, gradient, late


@ON_SIM
@pytest.mark.parametrize("classes", [40, 1200, 60_000, 200_000])
def test_rows_beyond_2_31_elements_have_the_bits_of_others(classes, device):
    near = (*problem(3, classes), torch.randn(3))
    before = kernels.FAR // classes + 1
    expected = rows_results(*near)
    with sim.machine(multiprocessors=kernels.ENOUGH_MULTIPROCESSORS, last_blocks=kernels.FAR_BLOCKS):
        found = rows_results(*(kernels.far(t, before) for t in near))
    assert all(bitwise_equal(t[before:], e) for t, e in zip(found, expected, strict=True))


@ON_SIM
def test_rows_far_apart_hold_their_gradient(device):
    logits, target = problem(3, 1200)
    gradient = rows_results(logits, target, torch.ones(3))[-2]
    apart = kernels.apart(logits)
    RAW.cross_entropy_with_gradient_(apart, target, None, -100, SUM, *NUMBERS, True)
    assert bitwise_equal(apart, gradient)
    RAW.cross_entropy_scale_(apart, torch.tensor(2.0))
    assert bitwise_equal(apart, gradient * 2)


@ON_SIM
@pytest.mark.parametrize("case", [c for c in SPEC.cases_on("sim") if c.shape[-1] <= 1025], ids=str)
def test_rows_too_long_for_the_chip_obey_the_error_law(case, device):
    with sim.machine(shared_bytes=4096):
        numerics.check_error_law(SPEC, case, "sim")


@ON_SIM
@pytest.mark.parametrize(("rows", "classes"), [(2100, 40), (40, 2301), (20, 28_009)])
def test_a_block_that_takes_rows_in_turn(rows, classes, device):
    logits, target = problem(rows, classes)
    expected = RAW.cross_entropy_forward(logits, target, None, -100, NONE, *NUMBERS, True)
    for seed in range(3):
        with sim.machine(seed=seed, multiprocessors=1):
            found = RAW.cross_entropy_forward(logits, target, None, -100, NONE, *NUMBERS, True)
        assert all(map(bitwise_equal, found, expected))


@ON_SIM
@pytest.mark.parametrize(
    ("classes", "dtype"), [(500, BF16), (8192, BF16), (32_000, BF16), (50_304, BF16), (50_257, FP16), (30_001, FP32)]
)
def test_early_and_late_gradients_have_the_same_bits(classes, dtype, device):
    logits, target = problem(4, classes, dtype)
    *_, early, late = rows_results(logits, target, torch.ones(()))
    assert bitwise_equal(early, late)


CERTAIN = [*((BF16, m) for m in (0.3, -1.7, -411.0, 1e4, 65536.0, -7e4, 3e38)), *((FP16, m) for m in (0.3, 37.3, 1e4)),
           (FP32, 37.3)]  # fmt: skip


@ON_SIM
@pytest.mark.parametrize("classes", [1, 40, 2200])
@pytest.mark.parametrize(("dtype", "magnitude"), CERTAIN)
def test_certain_rows_have_no_loss_and_no_gradient(dtype, magnitude, classes, device):
    """Exactly, at any magnitude: one class has all of the probability."""
    logits = torch.full((2, classes), magnitude - max(400.0, abs(magnitude) / 16)).to(dtype)
    target = torch.tensor([0, (classes - 1) // 2])
    logits.scatter_(1, target[:, None], magnitude)
    loss, *_, total, gradient = RAW.cross_entropy_with_gradient(logits, target, None, -100, SUM, *NUMBERS, True)
    assert loss == 0 and (total == 1).all() and not gradient.any()
    assert not rows_results(logits, target, torch.randn(2))[-1].any()


@ON_SIM
@pytest.mark.parametrize("classes", [65, 2500, 30_001])
def test_small_terms_beside_a_large_one_are_added(classes, device):
    """What the others add would be lost if they were added one by one: the sum is right to half an ulp."""
    logits = (-16 - torch.arange(classes) % 7 / 8).repeat(4, 1)
    for row in range(4):
        logits[row, row * classes // 4] = 1.0
    total = RAW.cross_entropy_forward(logits, torch.zeros(4, dtype=torch.int64), None, -100, SUM, *NUMBERS, True)[-1]
    exact = (logits.double() - 1).exp().sum(1)
    assert ((total - exact).abs() <= 0.501 * 2**-23 * exact).all()


@ON_SIM
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("classes", [1, 19, 1200])
def test_entropy_of_rows_that_are_hard(classes, dtype, device):
    """Where one class has all of the probability there is no entropy, to the last bit; equal logits have the most."""
    logits = torch.full((3, classes), -1e4)
    logits[0, classes // 2] = 1e4
    logits[2] = torch.where(torch.arange(classes) % 2 == 1, 6e4, 5e4)
    logits = logits.to(dtype)
    entropy = log_prob(warpsmith.linear_log_prob)(logits, torch.zeros(3, dtype=torch.int64), True, 1.0)[2]
    exact = torch.distributions.Categorical(logits=logits.double()).entropy()
    assert entropy[0] == 0
    torch.testing.assert_close(entropy.double(), exact, rtol=4e-6, atol=2e-6)


@ON_SIM
def test_an_entropy_kept_for_nobody_changes_no_gradient(device):
    logits, target = problem(100, 1200)
    logits *= 8  # enough that rounding would show
    leaf = logits.clone().requires_grad_()
    upstream = torch.randn(100)
    (found,) = torch.autograd.grad(log_prob(warpsmith.linear_log_prob)(leaf, target, True, 1.0)[0], leaf, upstream)
    (expected,) = torch.autograd.grad(warpsmith.cross_entropy(leaf, target, reduction="none"), leaf, -upstream)
    assert torch.equal(found, expected)


@ON_SIM
@pytest.mark.parametrize("columns", [5, 700])
def test_scaling_by_one_writes_nothing(columns, device):
    gradient = torch.randn(3, columns + 3).bfloat16()[:, :columns]
    before = gradient.clone()
    written = sim.counted(lambda: RAW.cross_entropy_scale_(gradient, torch.ones(())))[1][1]
    assert written == 0 and bitwise_equal(gradient, before)


@ON_SIM
def test_too_many_classes_are_refused(device):
    with pytest.raises(ValueError, match="classes: expected at most 2147483584, got 2147483648"):
        warpsmith.cross_entropy(torch.empty(1, 2**31, dtype=BF16), torch.zeros(1, dtype=torch.int64))
