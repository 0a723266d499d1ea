"""What linear_cross_entropy's losses are: ignored rows, labels, stats; and its gradients: made chunk by chunk in the
forward, kept, scaled, given away or added to main_grad."""

import re

import pytest
import torch
import warpsmith
from warpsmith.reference.linear_loss import linear_cross_entropy as reference
from warpsmith.testing import bitwise_equal

from .test_attention_reported import bytes_held
from .test_linear_loss import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    FP64,
    IGNORED,
    ON_CUDA,
    SMALL_CHUNK,
    gradients,
    on_both,
    peak_bytes,
    problem,
)


@on_both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_ignored_rows_have_gradients_of_exact_zeros(dtype, reduction, device):
    hidden, weight, target = problem(dtype, device=device)
    found, _ = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction, z_loss=0.1)
    assert not found[target == IGNORED].any()
    assert found[target != IGNORED].any(-1).all()


@on_both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("rows", [50, 0])
def test_all_rows_ignored_is_as_in_torch(rows, dtype, reduction, device):
    hidden, weight, target = problem(dtype, rows, device=device)
    target.fill_(IGNORED)
    plain = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), target, reduction=reduction)
    loss = warpsmith.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    torch.testing.assert_close(loss, plain, equal_nan=True)
    found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction)
    assert not any(g.any() for g in found)
    assert [g.shape for g in found] == [hidden.shape, weight.shape]


@on_both
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_stats(reduction, device):
    hidden, weight, target = problem(device=device)
    leaf = weight.clone().requires_grad_()
    options = {"reduction": reduction, "max_chunk_bytes": 2000}
    loss, stats = warpsmith.linear_cross_entropy(hidden, leaf, target, return_stats=True, **options)
    expected = reference(hidden, weight, target, reduction=reduction, return_stats=True)
    torch.testing.assert_close((loss.detach(), *stats), expected)
    assert loss.requires_grad
    assert not any(t.requires_grad for t in stats)
    plain = warpsmith.linear_cross_entropy(hidden, leaf, target, **options)
    assert bitwise_equal(loss.detach(), plain.detach())


def test_under_autocast_gradients_reach_float32_parameters():
    hidden, weight, target = problem()
    with torch.autocast("cpu", BF16):
        found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target)
    by_hand = gradients(warpsmith.linear_cross_entropy, hidden.bfloat16(), weight.bfloat16(), target)
    assert all(bitwise_equal(a, b.float()) for a, b in zip(found, by_hand, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("label", [33, -1, 2**40, -(2**40)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_out_of_range_are_nan_on_cuda(label, reduction):
    hidden, weight, target = problem(BF16, device="cuda")
    target[7] = label
    loss = warpsmith.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    assert (loss if reduction == "mean" else loss[7]).isnan()


@on_both
def test_four_bf16_chunks_stay_within_two_eps(device):
    hidden, weight, target = problem(BF16, rows=512, device=device)
    options = {"max_chunk_bytes": 128 * 40 * 2, "dw_dtype": BF16}
    assert warpsmith.plan("linear_cross_entropy", rows=512, classes=33, max_chunk_bytes=128 * 40 * 2)["chunks"] == 4
    found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, **options)[1]
    exact = gradients(reference, hidden.double(), weight.double(), target)[1]
    assert (found.double() - exact).abs().max() <= 2 * torch.finfo(BF16).eps * exact.abs().max()


def test_a_loss_scale_saves_float16_gradients_from_underflow():
    hidden, weight, target = problem(FP16, rows=4000, classes=800)
    scale = 2.0**16
    found = gradients(warpsmith.linear_cross_entropy, hidden, weight * 0.01, target, up=scale)
    exact = gradients(reference, hidden.double(), (weight * 0.01).double(), target, up=scale)
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-3 * b.norm()  # a gradient divided by 4,000 first loses a third


def kept_by(loss):
    """What a loss keeps for its backward, beside its leaves."""
    saved = loss.grad_fn.saved_tensors
    return [t for t in saved if t is not None and t.numel() and not t.requires_grad]


@on_both
def test_kept_gradients_are_given_away_without_a_copy(device):
    hidden, weight, target = problem(BF16, device=device)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = warpsmith.linear_cross_entropy(*leaves, target)
    kept = [t.data_ptr() for t in kept_by(loss)]
    loss.backward()
    assert [t.grad.data_ptr() for t in leaves] == kept


def test_two_losses_of_one_weight_add_up():
    hidden, weight, target = problem()
    leaf = weight.clone().requires_grad_()
    for part in (slice(0, 20), slice(20, 50)):
        warpsmith.linear_cross_entropy(hidden[part], leaf, target[part], reduction="sum").backward()
    whole = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction="sum")[1]
    torch.testing.assert_close(leaf.grad, whole)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, SMALL_CHUNK])
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        *((dtype, "cpu") for dtype in DTYPES),
        *(pytest.param(dtype, "cuda", marks=ON_CUDA) for dtype in (BF16, FP16, FP32)),
    ],
)
def test_main_grad_takes_the_weights_gradient(dtype, chunk, reduction, device):
    hidden, weight, target = problem(dtype, device=device)
    expected = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction, up=3.0)
    exact = gradients(reference, hidden.double(), weight.double(), target, reduction=reduction, up=3.0)[1]
    main_grad = torch.full(weight.shape, 0.5, dtype=FP64 if dtype == FP64 else FP32, device=device)
    waited = []
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    leaves[1].register_post_accumulate_grad_hook(lambda p: waited.append(p.grad.abs().max().item()))
    options = {"reduction": reduction, "max_chunk_bytes": chunk, "main_grad": main_grad}
    loss = (warpsmith.linear_cross_entropy(*leaves, target, **options) * 3.0).sum()
    assert (main_grad == 0.5).all()  # nothing before the backward
    loss.backward()
    assert waited == [0.0]
    assert leaves[1].grad.dtype == dtype
    torch.testing.assert_close(leaves[0].grad, expected[0])
    limit = 4 * torch.finfo(dtype).eps * exact.abs().max() + 1e-6
    assert (main_grad.double() - 0.5 - exact).abs().max() <= limit


def test_main_grad_adds_up_over_micro_batches_and_walks():
    hidden, weight, target = problem()
    main_grad, leaf = torch.zeros(33, 16), weight.clone().requires_grad_()
    loss = warpsmith.linear_cross_entropy(hidden, leaf, target, main_grad=main_grad)
    loss.backward(retain_graph=True)
    loss.backward()
    once = gradients(warpsmith.linear_cross_entropy, hidden, weight, target)[1]
    torch.testing.assert_close(main_grad, 2 * once)


def test_main_grad_is_refused_under_compile():
    hidden, weight, target = problem()
    weight.requires_grad_()
    compiled = torch.compile(
        lambda: warpsmith.linear_cross_entropy(hidden, weight, target, main_grad=torch.zeros(33, 16)),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match="main_grad: expected None under torch.compile"):
        compiled()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_inputs_cost_nothing(frozen, reduction):
    hidden, weight, target = problem()
    leaf = (weight if frozen == "hidden" else hidden).clone().requires_grad_()
    given = (hidden, leaf) if frozen == "hidden" else (leaf, weight)
    loss = warpsmith.linear_cross_entropy(*given, target, reduction=reduction)
    if reduction == "mean":
        assert [t.numel() for t in kept_by(loss)] == [leaf.numel()]
    loss.sum().backward()
    both = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, reduction=reduction)
    assert bitwise_equal(leaf.grad, both[frozen == "hidden"])


@pytest.mark.parametrize(
    ("problem", "chunk_rows", "chunks"),
    [
        ({"rows": 4096, "classes": 128256}, 4096, 1),
        ({"rows": 4096, "classes": 128256, "max_chunk_bytes": 1024 * 128256 * 2}, 1024, 4),
        ({"rows": 32768, "classes": 50304}, 8192, 4),
        ({"rows": 5000, "classes": 128256}, 2560, 2),
        ({"rows": 7, "classes": 128256, "max_chunk_bytes": 1}, 1, 7),
        ({"rows": 0, "classes": 10}, 1, 0),
        ({"rows": 1000, "classes": 50257, "dtype": "float32", "cuda": False}, 256, 4),
    ],
)
@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_log_prob"])
def test_plan_tells_the_chunks(op, problem, chunk_rows, chunks):
    plan = warpsmith.plan(op, **problem)
    assert (plan["chunk_rows"], plan["chunks"]) == (chunk_rows, chunks)
    assert plan["why"]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("bound", [{}, {"max_chunk_bytes": 1024}], ids=["one_chunk", "chunks"])
def test_plan_tells_the_dtype_of_the_weights_sum(dtype, bound):
    hidden, weight, target = problem(dtype)
    loss = warpsmith.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), target, **bound)
    (kept,) = (t for t in kept_by(loss) if t.shape == weight.shape)
    sizes = {"rows": len(hidden), "classes": len(weight), "hidden_size": weight.shape[1]}
    plan = warpsmith.plan("linear_cross_entropy", **sizes, dtype=dtype, cuda=False, **bound)
    assert plan["dw_dtype"] == str(kept.dtype).removeprefix("torch.")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_than_2_31_logits_in_one_chunk(reduction):
    hidden, weight, target = problem(BF16, rows=20_000, width=64, classes=128_256, device="cuda")
    assert hidden.shape[0] * weight.shape[0] > 2**31
    options = {"reduction": reduction, "dw_dtype": FP32, "max_chunk_bytes": 2**33}
    found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, **options)
    expected = gradients(
        warpsmith.linear_cross_entropy, hidden, weight, target, **{**options, "max_chunk_bytes": 2**29}
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2 * torch.finfo(BF16).eps * b.float().abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("dw_dtype", "bytes_an_element"), [(BF16, 2), (FP32, 6)])
def test_memory_is_bounded_by_the_chunk(dw_dtype, bytes_an_element):
    hidden, weight, target = problem(BF16, rows=4096, width=64, classes=32768, device="cuda")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    chunk = 2**25
    options = {"max_chunk_bytes": chunk, "dw_dtype": dw_dtype}
    used = peak_bytes(lambda: warpsmith.linear_cross_entropy(*leaves, target, **options).backward(), leaves)
    assert used <= chunk + 2 * hidden.numel() + bytes_an_element * weight.numel() + 2**20


SIZES = {"rows": 512, "classes": 4096, "hidden_size": 64}


@pytest.mark.parametrize("max_bytes", [2**24, 5 * 2**20, 3 * 2**20, 2**21])
def test_a_bound_on_all_bounds_all(max_bytes):
    """The plan's peak bounds what is allocated, and is at most 256 KiB (statistics, partial sums) above it. In float32,
    because torch's float32 products on the CPU allocate nothing themselves."""
    hidden, weight, target = problem(FP32, rows=512, width=64, classes=4096)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    plan = warpsmith.plan("linear_cross_entropy", **SIZES, dtype=FP32, cuda=False, max_bytes=max_bytes)
    assert plan["fits"] and plan["peak_bytes"] <= max_bytes

    def step():
        for t in leaves:
            t.grad = None
        warpsmith.linear_cross_entropy(*leaves, target, max_bytes=max_bytes).backward()

    step()
    for t in leaves:  # gradients freed during the count would be subtracted from it
        t.grad = None
    assert plan["peak_bytes"] - 2**18 <= bytes_held("cpu", step) <= plan["peak_bytes"]


def test_a_bound_on_all_changes_nothing_but_rounding():
    hidden, weight, target = problem(BF16, rows=512, width=64, classes=4096)
    expected = gradients(warpsmith.linear_cross_entropy, hidden, weight, target)
    chosen = []
    for max_bytes in (2**24, 3 * 2**20, 3 * 2**19):
        plan = warpsmith.plan("linear_cross_entropy", **SIZES, cuda=False, max_bytes=max_bytes)
        chosen.append((plan["chunks"] > 1, plan["dw_dtype"]))
        found = gradients(warpsmith.linear_cross_entropy, hidden, weight, target, max_bytes=max_bytes)
        for a, b in zip(found, expected, strict=True):
            assert (a.float() - b.float()).abs().max() <= 2 * torch.finfo(BF16).eps * b.float().abs().max()
    assert chosen == [(False, "bfloat16"), (True, "float32"), (True, "bfloat16")]
    half = warpsmith.plan("linear_cross_entropy", **SIZES, dtype="float16", cuda=False, max_bytes=2**23)
    assert half["dw_dtype"] == "float32"


def test_a_smaller_bound_never_holds_more():
    """With `max_chunk_bytes` it may: 4,096 x 4,096 x 128,256 takes 3.19 GB in four chunks and 2.14 GB in one."""
    sizes = {"rows": 4096, "classes": 128256, "hidden_size": 4096}
    one, four = (warpsmith.plan("linear_cross_entropy", **sizes, max_chunk_bytes=b) for b in (2**31, 2**28))
    assert four["peak_bytes"] > one["peak_bytes"]
    bounds = [2**22 * k for k in range(300, 1200, 50)]
    plans = [warpsmith.plan("linear_cross_entropy", **sizes, max_bytes=b) for b in bounds]
    for bound, plan in zip(bounds, plans, strict=True):
        assert plan["fits"] and plan["peak_bytes"] <= bound


def test_a_bound_that_nothing_fits_names_the_least_that_does():
    hidden, weight, target = problem(BF16, rows=512, width=64, classes=4096)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: max_bytes: expected at least (\d+) for this") as bad:
        warpsmith.linear_cross_entropy(hidden, weight, target, max_bytes=10**5)
    least = int(re.search(r"at least (\d+)", str(bad.value))[1])
    warpsmith.linear_cross_entropy(hidden, weight, target, max_bytes=least)
    with pytest.raises(ValueError, match="max_bytes: expected None beside max_chunk_bytes or dw_dtype, got 9"):
        warpsmith.linear_cross_entropy(hidden, weight, target, max_bytes=9, max_chunk_bytes=9)


@pytest.mark.gpu
@pytest.mark.parametrize("max_bytes", [2**28, 3 * 2**26, 2**26, 2**25])
def test_a_bound_on_all_bounds_the_card(max_bytes):
    hidden, weight, target = problem(BF16, rows=4096, width=256, classes=32768, device="cuda")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    sizes = {"rows": 4096, "classes": 32768, "hidden_size": 256}
    plan = warpsmith.plan("linear_cross_entropy", **sizes, max_bytes=max_bytes)
    used = peak_bytes(lambda: warpsmith.linear_cross_entropy(*leaves, target, max_bytes=max_bytes).backward(), leaves)
    assert used <= plan["peak_bytes"] + 2**20 <= max_bytes + 2**20
