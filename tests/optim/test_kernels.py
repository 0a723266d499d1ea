"""The kernels of lists of tensors at their edges, on every device: each argument misaligned alone, values at which
quick arithmetic gives way, hyperparameters on the device, bytes moved."""

import copy
import math

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.optim import EMA
from warpsmith.testing import bitwise_equal

from .adamw_runs import (
    ON_SIM,
    ORDERS,
    assert_same_bits,
    in_order,
    make_params,
    moved,
    on_each_device,
    set_grads,
    states_of,
)
from .optimizers import EVERY, LAMB, LION, Options
from .test_layouts import LAYOUTS

raw = torch.ops.warpsmith
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [(None, FP32), (None, BF16), (None, FP16), ("master", BF16), ("master", FP16), ("bf16_states", FP32)]
KINDS += [("bf16_sr", BF16), ("bf16_kahan", BF16), ("remainder", BF16)]
EIGHT = [
    Options("AdamW", {}, "8bit"),
    Options("Adam", {"weight_decay": 0.1}, "8bit"),
    LION,
    Options("SGD", {"momentum": 0.9}, "8bit"),
]
EIGHT = [(options, "8bit", dtype) for options in EIGHT for dtype in (FP32, BF16, FP16)]
ALL = [(o, p, d) for o in EVERY for p, d in KINDS if o is not LAMB or p == "master" or d == FP32 and p is None]
MAPS = {"exp_avg_sq": 11_792, "exp_avg": 6_672, "momentum_buffer": 6_672}  # bytes of a CodeMap
CHUNK = 1024  # elements of a list that a block takes, where there are few
of_kernels = pytest.mark.parametrize("device", ["cpu"])  # chosen under --sim by this
counted = pytest.mark.skipif(not ON_SIM, reason="the sim counts bytes")


def problem(options, precision, dtype, device="cpu", elems=2500, count=1, grad_dtype=None):
    """As after a step: one tensor, or several alike, with gradients."""
    params = make_params(dtype, device, [(elems,)] * count)
    optimizer = options.ours(params, lr=1e-2, **({} if precision is None else {"precision": precision}))
    set_grads(params, 0)
    optimizer.step()
    set_grads(params, 1)
    for p in params if grad_dtype else ():
        p.grad_dtype = None
        p.grad = p.grad.to(grad_dtype)
    return optimizer, params


def misalign(optimizer, params):
    """Misaligns one tensor of each parameter: the first parameter, the second's gradient, a state of each other one."""
    names = [name for name, t in optimizer.state.get(params[0], {}).items() if t.numel() > 1]
    params[0].data = LAYOUTS["misaligned"](params[0].detach())
    params[1].grad = LAYOUTS["misaligned"](params[1].grad)
    for p, name in zip(params[2:], names, strict=False):
        optimizer.state[p][name] = LAYOUTS["misaligned"](optimizer.state[p][name])
    assert len(names) + 2 <= len(params)


@on_each_device
@pytest.mark.parametrize(("options", "precision", "dtype"), [*ALL, *EIGHT], ids=str)
def test_each_argument_misaligned_alone(options, precision, dtype, device):
    for grad_dtype in (dtype, BF16 if dtype == FP32 else FP32):
        elems = 5000 if precision == "8bit" else 2500
        (a, odd), (b, plain) = (problem(options, precision, dtype, device, elems, 6, grad_dtype) for _ in range(2))
        misalign(a, odd)
        a.step()
        b.step()
        if options is LAMB:  # adds up squares in another order
            assert_close(odd, plain, rtol=1e-6, atol=1e-7)
            continue
        assert_same_bits(odd, plain)
        assert_same_bits(states_of(a, odd) if a.state else [], states_of(b, plain) if b.state else [])


@on_each_device
@pytest.mark.parametrize("options", [o for o in EVERY if o is not LAMB], ids=str)
def test_what_is_fused_beside_a_misaligned_argument(options, device):
    finals = []
    for odd in (True, False):
        optimizer, params = problem(options, None, FP32, device, 300, 8)
        ema = EMA(params, 0.75)
        copies = [torch.empty_like(p, dtype=FP16, requires_grad=False) for p in params]
        if odd:
            misalign(optimizer, params)
            ema.averages[6] = LAYOUTS["misaligned"](ema.averages[6])
            copies[7] = LAYOUTS["misaligned"](copies[7])
        optimizer.fuse(ema=ema, copies=dict(zip(params, copies, strict=True)), zero_grads=True)
        optimizer.step()
        finals.append([*params, *ema.averages, *copies, *(p.grad for p in params)])
    assert_same_bits(*finals)


@on_each_device
@pytest.mark.parametrize("own", [True, False], ids=["own", "other"])  # the gradients' dtype
@pytest.mark.parametrize(("options", "precision", "dtype"), [*ALL, *EIGHT], ids=str)
def test_repeats_of_steps_and_of_skipped_ones(options, precision, dtype, own, device):
    # LAMB's last block adds up more chunks than half of its threads.
    elems = 150_001 if options is LAMB else 5000 if precision == "8bit" else 2061
    grad_dtype = dtype if own else BF16 if dtype == FP32 else FP32
    finals = []
    for order in ORDERS:
        optimizer, params = problem(options, precision, dtype, device, elems, 2, grad_dtype)
        with in_order(order):
            optimizer.step()
        finals.append([*params, *(states_of(optimizer, params) if optimizer.state else [])])
        assert_same_bits(finals[-1], finals[0])
    kept = copy.deepcopy(finals[-1])
    for found in (1.0, 2.0, math.nan):
        optimizer.found_inf = torch.tensor(found, device=device)
        optimizer.step()
        assert_same_bits(finals[-1], kept)


@on_each_device
@pytest.mark.parametrize("options", EVERY, ids=str)
def test_hyperparameters_and_rates_are_read_on_the_device(options, device):
    """Each group's values on the device count; the host's are set to other numbers, and must not be used."""
    (a, ours), (b, others) = (problem(options, None, FP32, device, 100) for _ in range(2))
    for optimizer, params in ((a, ours), (b, others)):
        params += make_params(device=device, shapes=[(70,), (2050,)])
        for p, decay in zip(params[1:], (0.125, 0.0), strict=True):
            p.grad = torch.ones_like(p)
            more = {} if "weight_decay" not in optimizer.defaults else {"weight_decay": decay}
            optimizer.add_param_group({"params": [p], **more})
    b.device_constants = {row: t.to(device) for row, t in a.host_constants().items()}
    for group in b.param_groups:
        for name in ("betas", "eps", "weight_decay", "alpha", "lr_decay", "use_nvlamb"):
            if name in group:
                group[name] = (0.5, 0.25) if name == "betas" else 0.75
    for lr in (
        torch.tensor([0.25]),
        torch.tensor([0.5], dtype=torch.float64),
    ):  # one element, one dimension: the device's
        for there, here in zip(b.param_groups, a.param_groups, strict=True):
            there["lr"], here["lr"] = lr.to(device), lr.item()
        a.step()
        b.step()
        assert_same_bits(ours, others)


# (gradient, first moment, second moment) of an element, and what AdamW makes of 1 without eps and decay.
SPECIAL = [
    ((2.0**100, 0.0, 0.0), 1.0),  # its square is infinite: the step is 0
    ((0.0, 2.0**-3, 0.0), -math.inf),  # divides by 0
    ((0.0, 0.0, 0.0), math.nan),  # 0 by 0
    ((0.0, 2.0**-60, 2.0**-120), 1 - 2.0**-5),  # a ratio of numbers that are small
    ((math.nan, 0.5, 0.5), math.nan),
    ((0.0, 0.5, math.inf), 1.0),
]


@on_each_device
@pytest.mark.parametrize("grad_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("precision", "dtype"), [(None, BF16), (None, FP32), ("master", BF16)], ids=str)
def test_special_elements_leave_their_neighbours_alone(precision, dtype, grad_dtype, device):
    """In eights and one by one."""
    results = []
    for place in ("plain", "misaligned"):
        optimizer, (p,) = problem(Options("AdamW", {"betas": (0.5, 0.5), "eps": 0.0, "weight_decay": 0.0}, "halves"),
                                  precision, dtype, device, 64, 1, grad_dtype)  # fmt: skip
        optimizer.param_groups[0]["lr"] = 2.0**-5
        state = optimizer.state[p]
        for t in (p.data, *(state[n] for n in ("exp_avg", "exp_avg_sq", "master") if n in state)):
            t.fill_(0.5 if t.data_ptr() in (state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()) else 1.0)
        state["step"].zero_()
        for i, ((grad, m, v), _) in enumerate(SPECIAL):
            p.grad[9 * i + 3], state["exp_avg"][9 * i + 3], state["exp_avg_sq"][9 * i + 3] = grad, m, v
        p.data = LAYOUTS[place](p.detach())
        optimizer.step()
        results.append([p, state])
        got = p.detach().cpu().float()
        for i, (_, want) in enumerate(SPECIAL):
            assert_close(got[9 * i + 3], torch.tensor(want).to(dtype).float(), equal_nan=True)
        others = [i for i in range(64) if i % 9 != 3 or i >= 9 * len(SPECIAL)]
        assert got[others].isfinite().all()
    assert_same_bits(*results)


def test_lion_takes_no_step_from_nothing_and_keeps_a_nan():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([0.0, math.nan, -1e-30])
    warpsmith.optim.Lion([p], lr=0.5, weight_decay=0.0).step()
    assert_close(p.detach(), torch.tensor([1.0, math.nan, 1.5]), equal_nan=True)


def test_a_float32_comes_back_from_its_halves():
    """A step from 0 makes -gradient of a parameter, bit by bit, and the next step reads it."""
    high = torch.arange(0, 0x10000, 37, dtype=torch.int64)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (high[:, None] << 16 | low).flatten().to(torch.int32).view(FP32)
    x = x[~((x.abs() < 2.0**-126) & (x != 0))]
    p = nn.Parameter(torch.zeros(len(x), dtype=BF16))
    p.grad_dtype, p.grad = None, -x
    optimizer = warpsmith.optim.SGD([p], lr=1.0, precision="remainder")
    for _ in range(2):
        optimizer.step()
        back = (p.detach().float().view(torch.int32) + optimizer.state[p]["remainder"].to(torch.int32)).view(FP32)
        finite = x.isfinite()
        assert torch.equal(back[finite], x[finite])
        tie = x.view(torch.int32) & 0xFFFF == 0x8000
        assert_close(p.detach()[~tie], x.to(BF16)[~tie], rtol=0, atol=0, equal_nan=True)
        p.grad.zero_()


@pytest.mark.parametrize("precision", ["bf16_sr", "bf16_kahan", "remainder"])
def test_infinities_and_nan_of_refined_parameters_stay(precision):
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=BF16)
    p = nn.Parameter(values.clone())
    optimizer = warpsmith.optim.SGD([p], lr=2.0**-5, precision=precision)
    p.grad = torch.zeros_like(p)
    for _ in range(2):
        optimizer.step()
        assert_close(p.detach(), values, rtol=0, atol=0, equal_nan=True)


def test_random_rounding_of_elements_beyond_2_to_the_32():
    """Elements keep their numbers wherever the tensor is cut."""
    first, cut = 2**32 - 700, 701
    results = []
    for cuts in ([1500], [cut, 1500 - cut]):
        params, begin = [], first
        for part in torch.linspace(-1, 1, 1500).to(BF16).split(cuts):
            params.append(nn.Parameter(part.clone()))
            params[-1].first_element, params[-1].grad = begin, part.clone()
            begin += len(part)
        warpsmith.optim.AdamW(params, lr=2.0**-9, precision="bf16_sr").step()
        results.append(torch.cat([p.detach() for p in params]))
    assert bitwise_equal(*results)


@counted
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("options", "precision", "dtype"), [*ALL, *EIGHT], ids=str)
def test_a_step_reads_and_writes_each_array_once(options, precision, dtype, beside):
    elems, chunks = 6 * CHUNK, 6
    for grad_dtype in (FP32, BF16):
        optimizer, (p,) = problem(options, precision, dtype, "cpu", elems, 1, grad_dtype)
        state = optimizer.state.get(p, {})
        read = {**state, "param": p, "grad": p.grad}
        if "master" in state:  # stands for the parameter
            del read["param"]
        written = {**state, "param": p}
        fuses = beside and options is not LAMB and precision != "8bit"
        if fuses:
            ema = EMA([p], 0.75)
            copies = {p: torch.empty_like(p, dtype=BF16, requires_grad=False)} if dtype == FP32 else {}
            optimizer.fuse(ema=ema, copies=copies, zero_grads=True)
            read["average"] = written["average"] = ema.averages[0]
            written |= {"copy": copies.get(p, p[:0]), "zeros": p.grad}
        optimizer.step()  # uploads the addresses
        got = moved(optimizer.step)
        sizes = [
            sum(t.numel() * t.element_size() for n, t in arrays.items() if n != "step") for arrays in (read, written)
        ]
        if options is LAMB:  # values and moments twice, two sums a chunk, and a ratio for every thread
            twice = p if "master" not in state else state["master"]
            sizes[0] += elems * (twice.element_size() + 8) + 16 * chunks + 8 * 256 * chunks
            sizes[1] += 16 * chunks + 8
        if precision == "8bit":  # the maps, for each block
            sizes[0] += chunks * sum(MAPS[name] for name in state if name in MAPS)
        assert got == tuple(sizes)


def lists(dtypes=(FP32, BF16, FP16), sizes=(0, 1, 7, 8, 9, 4096, 4097, 9001)):
    """Of every dtype and size, at three alignments in turn."""
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=draw).to(d) for d in dtypes for n in sizes]
    return [torch.empty(len(v) + 3, dtype=v.dtype)[i % 3 :][: len(v)].copy_(v) for i, v in enumerate(values)]


def norm_of(tensors, order):
    return torch.cat([t.double().flatten() for t in tensors]).norm(order)


@of_kernels
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_repeats_of_norms_and_clips_of_mixed_lists(order, device):
    tensors = lists()
    finals = []
    for number in ORDERS:
        with in_order(number):
            norm, _ = raw.grad_norm(tensors, order)
            clipped = [t.clone() for t in tensors]
            raw.clip_grads(clipped, norm, 0.5)
            finals.append([norm, *clipped])
            assert_same_bits(finals[-1], finals[0])
    assert_close(finals[0][0].double(), norm_of(tensors, order), rtol=3e-7, atol=0)
    factor = (0.5 / (finals[0][0] + 1e-6)).item()
    for t, c in zip(tensors, finals[0][1:], strict=True):
        assert_close(c.double(), t.double() * factor, rtol=1.01 * torch.finfo(t.dtype).eps, atol=4e-8)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_one_bad_element_at_the_edge_of_a_chunk_is_seen(dtype, order):
    for place in (0, 4095, 4096, 8999):
        tensors = [torch.ones(100), torch.ones(9000, dtype=dtype)]
        for bad in (math.nan, -math.inf):
            tensors[1][place] = bad
            assert_close(raw.grad_norm(tensors, order)[0], torch.tensor(abs(bad)), equal_nan=True)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_parts_cut_where_chunks_begin_have_the_norm_of_the_whole(order):
    whole = [torch.randn(2 * 65536 + 777, generator=torch.Generator().manual_seed(i)).to(d)
             for i, d in enumerate((FP32, BF16))]  # fmt: skip
    total = sum(t.numel() for t in whole)
    parts = [raw.grad_norm_partials([part], order, total) for t in whole for part in t.split(65536)]
    assert_same_bits(raw.grad_norm_finish(torch.cat(parts), order, False), raw.grad_norm(whole, order))


@of_kernels
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3000.0, 2.0**-20])
def test_repeats_of_checks_their_norm_and_divisor(scale, order, device):
    """found_inf is NaN before: the check must write it, not add to it."""
    tensors = lists(sizes=(5001, 5001))
    norm = norm_of(tensors, order).item() / scale
    for max_norm in (0.0, 1e-3, 1e6, math.inf):
        finals = []
        for number in ORDERS:
            found, counts = torch.tensor(math.nan), torch.zeros(len(tensors), dtype=torch.int64)
            with in_order(number):
                got = raw.grad_check(tensors, order, torch.tensor(scale), max_norm, found, counts)
            finals.append([*got, found, counts])
            assert_same_bits(finals[-1], finals[0])
        got, _, divisor = finals[0][:3]
        assert_close(got.item(), norm, rtol=3e-7, atol=0)
        factor = min(1.0, max_norm / (norm + 1e-6))
        wanted = math.inf if factor == 0 else scale / factor
        assert_close(divisor.item(), wanted, rtol=0 if factor == 1 else 1e-6, atol=0)
        assert found == 0 and not counts.any()


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_a_scale_of_two_to_the_n_changes_no_bit_of_the_norm(order):
    """Squares of scaled gradients may be larger than float32."""
    x = torch.randn(9001, generator=torch.Generator().manual_seed(0))
    norms = []
    for scale in (1.0, 2.0**-90, 2.0**16, 2.0**90):
        found, counts = torch.tensor(math.nan), torch.zeros(1, dtype=torch.int64)
        norms.append(raw.grad_check([x * scale], order, torch.tensor(scale), 1.0, found, counts)[0])
        assert found == 0
    assert len({norm.item() for norm in norms}) == 1


@of_kernels
@pytest.mark.parametrize("unscales", [False, True])
def test_repeats_of_counts_of_bad_values(unscales, device):
    tensors = [torch.ones(9001, dtype=d) for d in (FP32, BF16, FP16)] + [torch.ones(10)]
    tensors[1][[0, 4095, 4096, 9000]] = math.nan
    tensors[2][8191], tensors[2][17] = -math.inf, 60000.0  # twice that is not finite once it is stored in float16
    tensors[3][9] = 3e38  # nor this in float32
    for number in ORDERS:
        found, counts = torch.zeros(()), torch.full((4,), 0 if unscales else 77)  # a check writes them all
        with in_order(number):
            if unscales:
                raw.unscale_grads([t.clone() for t in tensors], torch.tensor(2.0), found, counts)
            else:
                raw.grad_check(tensors, 2.0, torch.tensor(0.5), 1.0, found, counts)
        assert found == 1 and counts.tolist() == [0, 4, 2 if unscales else 1, 1]


@pytest.mark.parametrize("inverse", [2.0**-10, 1 / 3000])
def test_unscaling_rounds_each_product_once(inverse):
    tensors = lists(sizes=(9001, 9001, 0))
    scaled = [t.clone() for t in tensors]
    found, counts = torch.zeros(()), torch.zeros(len(tensors), dtype=torch.int64)
    raw.unscale_grads(scaled, torch.tensor(inverse), found, counts)
    assert found == 0 and not counts.any()
    assert_same_bits(scaled, [(t.float() * torch.tensor(inverse)).to(t.dtype) for t in tensors])


@pytest.mark.parametrize("planted", [1.0, 2.0**70, math.inf])
@pytest.mark.parametrize("scale", [1.0, 3000.0, 2.0**16])
def test_known_sums_give_the_bits_of_a_check_that_reads(scale, planted):
    tensors = lists((FP32, BF16, FP16), (9001, 4097))
    tensors[3][-1] = planted
    known = raw.grad_norm_partials(tensors, 2.0, 0)
    results = []
    for sums in (None, known):
        found, counts = torch.tensor(math.nan), torch.full((len(tensors),), 77)
        given = (tensors, 2.0, torch.tensor(scale), 1.0, found, counts, 0, sums)
        if ON_SIM and sums is not None and planted == 1.0:
            read, _ = moved(lambda given=given: raw.grad_check(*given))
            assert read < 16 * 256 * len(known) + 8192  # a sum and a flag for each thread of a chunk: no gradient
        results.append([*raw.grad_check(*given), found, counts])
    assert_same_bits(*results)


@counted
def test_bytes_of_norms_checks_and_clips():
    tensors = [torch.ones(8192), torch.ones(4096, dtype=BF16)]
    chunks, threads, size, table = 3, 256, 8192 * 4 + 4096 * 2, 8 * (2 * 4 + 3)
    assert moved(lambda: raw.grad_norm(tensors, 2.0)) == (size + 8 * chunks, table + 8 * chunks + 8 + 4)
    # A factor of 1 writes nothing, and reads an element of each block.
    assert moved(lambda: raw.clip_grads(tensors, torch.tensor(0.5), 1.0)) == (4 * threads * chunks, table)
    assert moved(lambda: raw.clip_grads(tensors, torch.tensor(2.0), 1.0)) == (size + 4 * threads * chunks, table + size)
    given = (torch.tensor(2.0), 1.0, torch.zeros(()), torch.zeros(2, dtype=torch.int64))
    read, written = moved(lambda: raw.grad_check(tensors, 2.0, *given))
    # Besides the sums: the scale for 512 threads and each thread of the sums, and found_inf for those that then return.
    assert read == size + 8 * chunks + 4 * 512 + 8 * threads * chunks and written == table + 8 * chunks + 8 + 4 + 4 + 4


@of_kernels
@pytest.mark.parametrize("weight", [0.0, 0.001, 0.4999, 0.7, 1.0])
def test_repeats_of_averages_of_mixed_lists(weight, device):
    values = lists(sizes=(0, 1, 3, 4, 5, 1023, 4096, 4097, 9001))
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(len(v) + 1, generator=draw)[i % 2 :][: len(v)] for i, v in enumerate(values)]
    for found in (0.0, 1.0):
        finals = []
        for number in ORDERS:
            averages = [torch.empty(len(a) + 1)[i % 2 :][: len(a)].copy_(a) for i, a in enumerate(start)]
            with in_order(number):
                raw.average_weights(averages, values, weight, torch.tensor(found))
            finals.append(averages)
            assert_same_bits(averages, finals[0])
        for a, before, v in zip(finals[0], start, values, strict=True):
            want = before.double() + weight * (v.double() - before.double()) * (1 - found)
            exact = found or weight in (0.0, 1.0)
            assert_close(a.double(), want, rtol=0 if exact else 3e-7, atol=0 if exact else 5e-7)


@counted
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_bytes_of_averages(dtype):
    value, average = torch.ones(8192, dtype=dtype), torch.zeros(8192)
    read, written = moved(lambda: raw.average_weights([average], [value], 0.5, None))
    assert read - 4 * 256 * 2 <= 8192 * (4 + dtype.itemsize) <= read and written == 4 * 8192 + 8 * (5 + 2)


@of_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_repeats_of_the_mean_over_ranks_of_any_stride(offset, dtype, device):
    """Added in float32 from rank 0 on: 2^24 + 1 is 2^24."""
    for ranks, elems, stride in ((1, 7, 8), (2, 4099, 4099), (5, 9001, 9016), (40, 65, 72)):
        place = torch.randn(ranks * stride + 4, generator=torch.Generator().manual_seed(ranks)).to(dtype)[offset:]
        parts = place.as_strided((ranks, elems), (stride, 1), place.storage_offset())
        parts[0, :4] = torch.tensor([math.nan, math.inf, 2.0**24, 6e4]).to(dtype)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for number in ORDERS[:2]:
            out = torch.empty(elems + 4, dtype=dtype)[offset:][:elems]
            own, as_float = parts[ranks - 1].clone(), torch.empty(elems)
            with in_order(number):
                raw.rank_mean(parts, own, ranks - 1, [out, as_float])
            want = (total / ranks).to(dtype)
            assert_close(out, want, rtol=0, atol=0, equal_nan=True)
            assert_close(as_float, want.float(), rtol=0, atol=0, equal_nan=True)


@counted
def test_bytes_of_the_mean_over_ranks():
    parts, own, peer = torch.ones(4, 8192, dtype=BF16), torch.ones(8192), torch.ones(8192, dtype=BF16)
    assert moved(lambda: raw.rank_mean(parts, own, 2, [own, peer])) == (8192 * (3 * 2 + 4), 8192 * (4 + 2))
