"""cross_entropy under the law, and what only it has: torch's semantics, stats, labels, the plan."""

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from warpsmith.reference.cross_entropy import cross_entropy as reference
from warpsmith.testing import BadInput, Case, OpSpec, cpu_threads, measure, op_tests, sim
from warpsmith.testing.sim import is_loaded

from tests.ops.public_calls import NO_FLOAT64_ON_CUDA, but, floor_bytes, in_call, raw_ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEFAULTS = {"reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0, "ignore_index": -100}


def inputs(case, rng):
    classes = case.shape[-1]
    logits = rng.normal(case.shape, std=case.options.get("std", 2.0), mean=case.options.get("offset", 0.0))
    target = rng.integers(case.shape[:-1], 0, max(classes, 1))
    ignored = rng.uniform(case.shape[:-1]) < 0.3
    ignored.view(-1)[:1] = False  # one row counts
    values = {k: case.options.get(k, v) for k, v in DEFAULTS.items()}
    weight = rng.uniform((classes,), 0.1, 2.0).float() if case.options.get("class_weight") else None
    if weight is not None and case.dtype == FP64:
        weight = weight.double()
    target = target.where(~ignored, values["ignore_index"])
    return {"logits": logits, "target": target, "class_weight": weight, **values}


def loss_of(**arguments):
    return reference(**arguments)[0]


def plain(logits, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    """Plain PyTorch as users have it: softcap in the dtype, the loss itself in float32."""
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    z = logits if logits.dtype == FP64 else logits.float()
    weight = None if class_weight is None else class_weight.to(z.dtype)
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    flat, labels = z.reshape(-1, z.shape[-1]), target.reshape(-1)
    rows = F.cross_entropy(flat, labels, reduction="none", **options).view(target.shape)
    loss = rows if reduction == "none" else F.cross_entropy(flat, labels, reduction=reduction, **options)
    if not z_loss:
        return loss
    # The exact result: exp(z - logsumexp) would lose the digits that the largest logit has before the point.
    largest = z.detach().amax(-1).nan_to_num() if z.dtype == FP64 else z.new_zeros(())
    lse = (z - largest[..., None]).logsumexp(-1) + largest
    extra = (z_loss * lse.square()).where(target != ignore_index, 0)
    if reduction == "none":
        return loss + extra
    if reduction == "sum":
        return loss + extra.sum()
    counted = target != ignore_index
    label = target.where(counted, 0)
    per_row = torch.ones_like(extra) if weight is None else weight[label]
    return loss + extra.sum() / per_row.where(counted, 0).sum()


def options(**given):
    return {"options": given}


EVERYTHING = {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0}
WIDTHS = (1, 2, 7, 8, 33, 128, 257, 1000, 1024, 1025, 4099)
CASES = [
    *(Case((7, width), dtype) for width in WIDTHS for dtype in (BF16, FP32)),
    *(Case((7, width), FP16) for width in (1, 8, 257, 1000)),
    *(Case((3, 4, width), FP64) for width in (1, 33, 256)),
    *(Case((6, 300), dtype, options={"reduction": "none"}) for dtype in (BF16, FP32, FP16)),
    *(Case((6, 300), dtype, options={"reduction": "sum"}) for dtype in (BF16, FP32, FP16)),
    *(Case((6, 300), dtype, options={"label_smoothing": 0.1}) for dtype in (BF16, FP32)),
    *(Case((6, 300), dtype, options={"z_loss": 1e-3}) for dtype in (BF16, FP32, FP16)),
    *(Case((6, 300), dtype, options={"softcap": 5.0}) for dtype in (BF16, FP32)),
    *(Case((9, 65), dtype, options={"class_weight": True}) for dtype in (BF16, FP32)),
    *(Case((9, 65), dtype, options={"class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-2, "reduction": r})
      for dtype in (BF16, FP32, FP64) for r in ("none", "mean")),
    Case((3, 4099), FP32, options=EVERYTHING),  # sums over classes of several pieces
    Case((5, 300), FP32, options={"offset": 1e4, "std": 1.0}),
    Case((5, 300), FP32, options={"std": 1e4}),
    Case((5, 300), BF16, options={"std": 1e4}),
    Case((5, 300), FP32, options={"offset": -1e4, "std": 1.0, "label_smoothing": 0.1, "reduction": "none"}),
    Case((4, 40), FP32, options={"ignore_index": 3}),
    Case((40,), FP32),
    Case((2, 3, 5, 64), BF16),
    Case((600, 12), FP32),
    Case((8200, 2), BF16),  # sums over rows, and of class weights, by a second launch
    Case((2, 8200), FP32, options=EVERYTHING),
    Case((70_000, 3), FP32),
    Case((3, 50304), BF16),
    Case((2, 50257), FP32),
    Case((1, 262144), BF16),
    *(Case((1, width), BF16) for width in (28_009, 108_008)),  # a cluster's
    *(Case((2, 3, 40), BF16, options={"reduction": "none"}, layouts={"grad_loss": layout})
      for layout in ("every_second", "transposed", "expanded")),
]  # fmt: skip


def op(**arguments):
    return warpsmith.cross_entropy(arguments.pop("logits"), arguments.pop("target"), **arguments)


def bytes_beside(case, inputs):
    """Rows that do not count are not read. The threads of a row read its target, and all threads the denominator, which
    the first kernel makes of the targets and the last divides losses by; both sum more than 8,192 rows in several
    blocks, of losses three terms. Four results of a row are kept. With mean and
    sum the gradient is made in the forward, not of float16; the backward reads and writes it for another factor than 1.
    Where it is made in the backward, the threads of a row read four numbers."""
    reduction = case.options.get("reduction", "mean")
    mean, rows, unit = reduction == "mean", inputs["target"].numel(), case.shape[-1] * case.dtype.itemsize
    skipped = unit * int((inputs["target"] == inputs["ignore_index"]).sum())
    problem = {"rows": rows, "classes": case.shape[-1], "dtype": str(case.dtype).removeprefix("torch.")}
    problem["aligned"] = rows == 1 or unit % 16 == 0

    def forward(gradient):
        plan = sim.plan("cross_entropy", gradient=gradient, **problem)["forward"]
        read = rows * plan["threads_a_row"] * 8 - skipped + mean * (rows * 8 + plan["blocks"] * plan["threads"] * 4 + 4)
        total, blocks = reduction != "none", -(-rows // 8192)
        partial = (mean + 3 * total) * 4 * blocks * (blocks > 1)
        written = rows * 16 + gradient * rows * unit + mean * 4 + total * 4
        return read + total * rows * 4 + partial, written + partial

    early = reduction != "none" and case.dtype != FP16
    plan = sim.plan("cross_entropy", **problem)["backward"]
    threads = plan["blocks"] * plan["threads"]
    late = rows * plan["threads_a_row"] * 20 - skipped + mean * threads * 4
    backward = rows * unit + (threads * 4 if early else late)
    return {"forward": forward(early), "inference": forward(False), "backward": (backward, 0)}


def traced_arguments(good):
    eager = raw.cross_entropy_with_gradient
    return *in_call(op, eager)[eager.default](good), False


def of_rows(**good):
    return op(**{**good, "reduction": "none"})


raw = torch.ops.warpsmith


def some_classes(draw, st, case):
    """Of one or two classes a gradient is all cancellation. In float64 the reference is torch's own formula, which has
    the rounding of an offset in its exponents."""
    options = {n: v for n, v in case.options.items() if n != "offset" or case.dtype != FP64}
    return case.but(shape=(*case.shape[:-1], max(4, case.shape[-1])), options=options)


SPEC = OpSpec(
    name="cross_entropy",
    op=op,
    reference=loss_of,
    baseline=plain,
    inputs=inputs,
    edges_beside_options=(),  # ignored rows
    cases=CASES,
    differentiable=("logits",),
    outputs=("loss",),
    laid_out=("logits",),
    redraw=some_classes,
    random_cases=2000,
    zero_sizes=False,
    gradcheck_cases=[
        Case((3, 5), FP64),
        Case((4, 3), FP64, options={"reduction": "none", "label_smoothing": 0.1, "class_weight": True}),
        Case((4, 3), FP64, options={"reduction": "sum", "z_loss": 0.1, "softcap": 2.0}),
    ],
    # Rows that CPU threads share, with every option, and rows that fill a GPU.
    repeated_cases=[Case((700, 96), FP32, options=EVERYTHING), Case((2, 50257), FP32), Case((256, 50304), BF16)],
    traced="warpsmith::cross_entropy",
    opcheck=raw_ops("cross_entropy", "_with_gradient", "_with_gradient_", "_scale_")
    | in_call(of_rows, raw.cross_entropy_backward, raw.cross_entropy_backward_)
    | {raw.cross_entropy.default: traced_arguments},
    bad_inputs=[
        BadInput("no classes", but(logits=lambda g: g["logits"][..., :0]), "logits: expected at least one class"),
        BadInput("label too large", but(target=lambda g: g["target"].clone().fill_(g["logits"].shape[-1])),
                 r"target: expected classes in \[0, \d+\) or ignore_index -100, got \d+ at position 0", fake=False,
                 devices=("cpu",)),
        BadInput("negative label", but(target=lambda g: g["target"].clone().fill_(-1)), "got -1 at position 0",
                 fake=False, devices=("cpu",)),
        BadInput("label too large, checked", but(target=lambda g: g["target"].clone().fill_(g["logits"].shape[-1]),
                                                 check_labels=lambda g: True), r"got \d+ at position 0", fake=False),
        BadInput("weight with gradient",
                 but(class_weight=lambda g: torch.ones(g["logits"].shape[-1]).requires_grad_()),
                 "class_weight: expected a tensor without gradient", fake=False),
        NO_FLOAT64_ON_CUDA,
    ],
    floor_bytes=floor_bytes(1, 1),
    bytes_beside=bytes_beside,
    sim_elements=160_000,
    bytes_cases=[c for c in CASES if "class_weight" not in c.options],
)  # fmt: skip

TestCrossEntropy = op_tests(SPEC)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Where ops run by their kernels, which know what the host does not.
KERNELS = ["cpu"] if is_loaded() else [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("labels", ["some ignored", "all ignored", "none ignored", "no rows"])
def test_is_torchs_loss(reduction, smoothing, weighted, labels):
    torch.manual_seed(0)
    x = torch.randn(0 if labels == "no rows" else 6, 9, requires_grad=True)
    target = torch.randint(0, 9, x.shape[:1])
    if labels == "some ignored":
        target[::2] = -100
    if labels == "all ignored":
        target[:] = -100
    weight = torch.rand(9) if weighted else None
    ours = warpsmith.cross_entropy(x, target, class_weight=weight, reduction=reduction, label_smoothing=smoothing)
    theirs = F.cross_entropy(x, target, weight=weight, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    (grad,) = torch.autograd.grad(ours.sum(), x)
    (expected,) = torch.autograd.grad(theirs.sum(), x)
    if labels == "all ignored":
        assert not grad.any()
    else:
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(10))
def test_logits_beyond_the_softcap_obey_the_error_law(seed, device):
    """There little is left of 1 - tanh^2, and what is left must not be rounding errors."""
    g = torch.Generator().manual_seed(seed)
    x, target = (60 * torch.randn(16, 500, generator=g)).to(device), torch.randint(500, (16,), generator=g).to(device)

    def gradient(loss, x, target):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf, target), leaf)[0]

    def capped(x, target):
        return F.cross_entropy(30 * torch.tanh(x / 30), target)

    ours = gradient(lambda x, t: warpsmith.cross_entropy(x, t, softcap=30.0), x, target)
    exact = gradient(capped, x.cpu().double(), target.cpu())
    error = measure("grad_logits", ours, exact, gradient(capped, x, target))
    assert error.ok, error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_stats(device, dtype, softcap):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 700, device=device).to(dtype)
    x[0, 0, 400] = x[0, 0, 20:22] = 9.0  # the first of equal logits, of a vector too
    x[0, 1] = float("-inf")
    x[1, 1, 3:] = float("-inf")
    x.requires_grad_()
    target = x.argmax(-1)
    target[1:] = torch.randint(0, 700, (3, 5), device=device)
    target[3, 2:] = -100
    loss, stats = warpsmith.cross_entropy(x, target, softcap=softcap, return_stats=True)
    expected_loss, lse, argmax, accuracy = reference(x, target, softcap=softcap)
    torch.testing.assert_close(loss, expected_loss, equal_nan=True)
    torch.testing.assert_close(stats.lse, lse, atol=1e-5, rtol=1e-6)
    assert torch.equal(stats.argmax, argmax)
    assert stats.argmax[0, 0] == 20
    torch.testing.assert_close(stats.accuracy, accuracy)
    assert not any(t.requires_grad for t in stats)


@pytest.mark.parametrize("device", DEVICES)
def test_lse_of_nan_and_infinities_is_torchs(device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, nan], [1.0, nan], [-inf, -inf], [inf, 1.0], [-inf, 1.0]], device=device)
    _, stats = warpsmith.cross_entropy(x, torch.zeros(5, dtype=torch.int64, device=device), return_stats=True)
    torch.testing.assert_close(stats.lse, x.logsumexp(-1), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_stats_of_rows_that_several_blocks_add_up(device):
    x, target = torch.randn(8200, 2, device=device), torch.arange(8200, device=device) % 2
    target[::7] = -100
    loss, stats = warpsmith.cross_entropy(x, target, return_stats=True)
    expected, *_, accuracy = reference(x, target)
    torch.testing.assert_close((loss, stats.accuracy), (expected, accuracy))


def test_stats_do_not_depend_on_the_number_of_threads():
    x, target, found = torch.randn(700, 96), torch.arange(700) % 96, []
    for count in (1, 2):
        with cpu_threads(count):
            found.append(warpsmith.cross_entropy(x, target, return_stats=True)[1])
    assert all(map(torch.equal, *found))


def test_accuracy_without_rows_that_count_is_nan():
    _, stats = warpsmith.cross_entropy(torch.zeros(2, 3), torch.full((2,), -100), return_stats=True)
    assert stats.accuracy.isnan()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_infinite_and_equal_logits(device, reduction):
    x = torch.zeros(3, 6, device=device)
    x[0, 1:] = float("-inf")
    x[1] = float("-inf")
    x.requires_grad_()
    target = torch.tensor([0, 2, 5], device=device)
    ours = warpsmith.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(ours, F.cross_entropy(x, target, reduction="none"), equal_nan=True)
    assert ours[0] == 0
    found, expected = (
        torch.autograd.grad(f(x, target, reduction=reduction).sum(), x)[0]
        for f in (warpsmith.cross_entropy, F.cross_entropy)
    )
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("classes", [5, 16, 21, 100])  # below, at and beside the width of a vector of the CPU
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 4.0}, {"z_loss": 0.1}, {"weighted": True, "softcap": 4.0}], ids=str
)
def test_gradients_beside_infinite_logits(device, classes, options):
    torch.manual_seed(1)
    x = torch.randn(6, classes)
    x[:, 1::3] = float("-inf")
    target = torch.arange(6) % 2 * 3  # classes 0 and 3, whose logits are finite
    weight = torch.rand(classes) if options.get("weighted") else None
    numbers = {k: v for k, v in options.items() if k != "weighted"}
    ours, exact = x.to(device).requires_grad_(), x.double().requires_grad_()
    found = warpsmith.cross_entropy(
        ours, target.to(device), class_weight=None if weight is None else weight.to(device), **numbers
    )
    expected = reference(exact, target, class_weight=None if weight is None else weight.double(), **numbers)[0]
    torch.testing.assert_close(found.cpu(), expected.float())
    (grad,), (exact_grad,) = torch.autograd.grad(found, ours), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(grad.cpu(), exact_grad.float(), rtol=1e-4, atol=1e-6)
    if "softcap" not in options:
        assert not grad[:, 1::3].any()


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("classes", [30, 50304])
def test_labels_out_of_range_on_a_gpu_give_nan(classes, device):
    logits = torch.randn(5, classes, device=device, requires_grad=True)
    target = torch.tensor([3, classes, -1, -100, 2**40], device=device)
    loss = warpsmith.cross_entropy(logits, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False, True]
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.isnan().all(-1).tolist() == [False, True, True, False, True]
    assert not grad[3].any()
    assert warpsmith.cross_entropy(logits, target).isnan()


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_logits_on_a_gpu():
    rows, classes = 17000, 128256
    few = torch.randn(100, classes, device="cuda", dtype=BF16)
    target = torch.randint(0, classes, (100,), device="cuda")
    one = warpsmith.cross_entropy(few, target, reduction="none")
    (grad_one,) = torch.autograd.grad(warpsmith.cross_entropy(few.requires_grad_(), target, reduction="sum"), few)
    many = few.detach().repeat(rows // 100, 1).requires_grad_() * 1
    labels = target.repeat(rows // 100)
    loss = warpsmith.cross_entropy(many, labels, reduction="sum", inplace_backward=True)
    torch.testing.assert_close(loss, one.sum() * (rows // 100))
    (grad,) = torch.autograd.grad(loss, many)
    assert torch.equal(grad[-100:], grad_one)
    assert torch.equal(grad[8000:8100], grad_one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "classes", [*range(1, 40), *(2**k + d for k in range(6, 22) for d in (-1, 0, 8)), 50257, 128256]
)
def test_every_plan_covers_its_row_and_fits_the_chip(classes, dtype):
    vector = 16 // (2 if dtype == "bfloat16" else 4)
    for aligned in (True, False):
        plan = warpsmith.plan("cross_entropy", rows=1000, classes=classes, dtype=dtype, aligned=aligned)
        for c in plan.values():
            assert c["threads"] % 32 == 0
            assert 32 <= c["threads"] <= 512
            assert c["why"]
        c = plan["forward"]
        assert c["blocks"] % c["cluster"] == 0
        assert c["shared_bytes"] <= 227 * 1024 - 4096
        if c["kernel"] == "resident":
            slots = c["vectors_of_a_thread"]
            assert slots * c["threads_a_row"] * vector >= classes + (0 if aligned else vector - 1)


@pytest.mark.parametrize("classes", [2048, 32000, 50257, 128256])
def test_the_sums_behind_a_gradient_do_not_depend_on_its_time(classes):
    early, late = (
        warpsmith.plan("cross_entropy", rows=8192, classes=classes, gradient=gradient)["forward"]
        for gradient in (True, False)
    )
    assert all(early[key] == late[key] for key in ("kernel", "cluster", "threads_a_row", "vectors_of_a_thread"))


def test_plan_says_which_kernel_runs():
    def kernel(**problem):
        c = warpsmith.plan("cross_entropy", rows=8, **problem)["forward"]
        return c["kernel"], c["cluster"]

    assert kernel(classes=10) == ("resident", 1)
    assert kernel(classes=128256)[0] == "resident"
    assert kernel(classes=128256)[1] > 1
    assert kernel(classes=128256, code_capability=80, max_shared_bytes=163 * 1024) == ("looped", 1)
    assert kernel(classes=50304, code_capability=80, max_shared_bytes=163 * 1024) == ("resident", 1)
    assert kernel(classes=4_000_000) == ("looped", 1)
