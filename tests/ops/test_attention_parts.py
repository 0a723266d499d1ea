"""Calls of the raw ops of attention that are parts of a larger one: ``dropout_place`` drops what that one drops, and a
backward of some keys takes out and lse of all."""

import pytest
import torch
import warpsmith
from warpsmith.reference.attention import attention as reference
from warpsmith.reference.attention import attention_varlen as of_sequences
from warpsmith.reference.attention import dropout_mask
from warpsmith.testing.law import measure
from warpsmith.testing.sim import is_loaded

from tests.ops.attention_cases import BF16, FP16, FP32, FP64, SEED

BATCH, QUERIES, KEYS, HEADS, P = 2, 70, 96, 6, 0.4  # 70: the blocks of 16 of a sequence do not end with it
# (first query, queries), (first key, keys), (first head, heads)
PARTS = [
    ((0, 48), (0, 96), (0, 6)),
    ((48, 22), (0, 96), (0, 6)),
    ((0, 70), (0, 96), (2, 3)),
    ((32, 20), (0, 96), (4, 2)),
]
KEY_PARTS = [((0, 70), (32, 64), (0, 6)), ((16, 40), (64, 20), (3, 1)), ((64, 6), (32, 32), (0, 2))]


def attend(q, k, v, place, cu=None, p=P, seed=SEED):
    longest = 0 if cu is None else QUERIES
    layout = 0 if cu is None else 2
    rest = (longest, longest, layout, 0, True, -1, -1, None, 0.0, p, True, place)
    return torch.ops.warpsmith.attention(q, k, v, cu, cu, None, None, None, seed.to(q.device), *rest)[:2]


def place_of(part):
    (first_query, _), (first_key, _), (first_head, _) = part
    return [first_query, QUERIES, first_key, first_head, HEADS]


def cut(t, part, tokens):
    first, length = part[tokens]
    first_head, heads = part[2]
    return t[:, first : first + length, first_head : first_head + heads]


def results(call, leaves, dout):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out, lse = call(*leaves)[:2]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_queries_and_heads_has_the_bits_of_the_whole(part, dtype):
    torch.manual_seed(1)
    q, dout = (torch.randn(BATCH, QUERIES, HEADS, 16).to(dtype) for _ in range(2))
    k, v = (torch.randn(BATCH, KEYS, HEADS, 16).to(dtype) for _ in range(2))
    options = {"dropout_p": P, "seed": SEED, "return_lse": True}
    whole = results(lambda *t: warpsmith.attention(*t, **options), (q, k, v), dout)
    leaves = cut(q, part, 0), cut(k, part, 1), cut(v, part, 1)
    own = results(lambda *t: attend(*t, place_of(part)), leaves, cut(dout, part, 0))
    first_query, queries = part[0]
    first_head, heads = part[2]
    assert torch.equal(own[0], cut(whole[0], part, 0))
    assert torch.equal(own[1], whole[1][:, first_head : first_head + heads, first_query : first_query + queries])
    assert torch.equal(own[2], cut(whole[2], part, 0))
    if queries == QUERIES:
        assert torch.equal(own[3], cut(whole[3], part, 1)) and torch.equal(own[4], cut(whole[4], part, 1))


def kept_by(device, dtype, part, p):
    """Which weights a part keeps, as its out shows them, and as the gradient of its values does."""
    (_, queries), (_, keys), (_, heads) = part
    dim = 64 if max(queries, keys) <= 64 else 128
    q, k = (torch.zeros(BATCH, n, heads, dim, dtype=dtype, device=device) for n in (queries, keys))

    def ones(rows):  # one 1 in each row: column j of out is the weight of key j
        return torch.eye(rows, dim, dtype=dtype, device=device)[None, :, None].expand(BATCH, rows, heads, dim)

    v = ones(keys).contiguous().requires_grad_()
    out, *_ = attend(q, k, v, place_of(part), p=p)
    (dv,) = torch.autograd.grad(out, v, ones(queries).contiguous())
    return (out.transpose(1, 2)[..., :keys] != 0).cpu(), (dv.permute(0, 2, 3, 1)[:, :, :queries] != 0).cpu()


def mask_of(part, p):
    """The part's share of the mask of the whole."""
    row_blocks = torch.arange(BATCH) * ((QUERIES + 15) // 16)
    (i, queries), (j, keys), (h, heads) = part
    whole = dropout_mask(SEED, row_blocks, HEADS, QUERIES, KEYS, p)
    own = whole[:, h : h + heads, i : i + queries, j : j + keys]
    assert torch.equal(own, dropout_mask(SEED, row_blocks, heads, queries, keys, p, place_of(part)))
    return own


def decisions():
    for dtype in (BF16, FP16, FP32):  # Hopper kernels take the first two
        yield "cpu", dtype
        yield pytest.param("cuda", dtype, marks=pytest.mark.gpu)
    yield "cpu", FP64


@pytest.mark.parametrize(("device", "dtype"), decisions())
@pytest.mark.parametrize("part", PARTS + KEY_PARTS)
def test_every_decision_of_a_part_is_the_wholes(part, device, dtype):
    for kept in kept_by(device, dtype, part, P):
        assert torch.equal(kept, mask_of(part, P))


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("part", PARTS + KEY_PARTS)
def test_error_law_of_gradients_of_a_part(part, dtype, device):
    torch.manual_seed(5)
    (_, queries), (_, keys), (_, heads) = part
    tensors = [torch.randn(BATCH, n, heads, 64, device=device).to(dtype) for n in (queries, keys, keys, queries)]
    options = {"dropout_p": P, "seed": SEED, "dropout_place": place_of(part), "return_lse": True}
    ours = results(lambda *t: attend(*t, place_of(part)), tensors[:3], tensors[3])
    plain = results(lambda *t: reference(*t, products=dtype, **options), tensors[:3], tensors[3])
    wide = [t.double() for t in tensors]
    exact = results(lambda *t: reference(*t, **options), wide[:3], wide[3])
    for name, got, one, want in zip(("out", "lse", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        error = measure(name, got, want, one)
        assert error.ok, error


def test_the_reference_of_a_part():
    torch.manual_seed(2)
    q, k, v = (torch.randn(BATCH, n, HEADS, 16, dtype=FP64) for n in (QUERIES, KEYS, KEYS))
    for part in PARTS + KEY_PARTS:
        leaves = cut(q, part, 0), cut(k, part, 1), cut(v, part, 1)
        want = reference(*leaves, dropout_p=P, seed=SEED, dropout_place=place_of(part))
        torch.testing.assert_close(attend(*leaves, place_of(part))[0], want)


def test_heads_of_packed_sequences():
    torch.manual_seed(3)
    q, k, v = (torch.randn(QUERIES, HEADS, 16) for _ in range(3))
    cu = torch.tensor([0, 21, 21, 60], dtype=torch.int32)
    whole = warpsmith.attention_varlen(q, k, v, cu, max_seqlen_q=QUERIES, dropout_p=P, seed=SEED)
    own, _ = attend(*(t[:, 2:5] for t in (q, k, v)), [0, QUERIES, 0, 2, HEADS], cu)
    assert torch.equal(own, whole[:, 2:5])


BAD = {
    "5 integers, got 4": [0, QUERIES, 0, 0],
    "integers from 0 to 2147483647, got -32": [0, QUERIES, -32, 0, HEADS],
    "integers from 0 to 2147483647, got 2147483648": [0, 2**31, 0, 0, HEADS],
    "a multiple of 16 as first query, got 8": [8, 2 * QUERIES, 0, 0, HEADS],
    "a multiple of 32 as first key, got 16": [0, QUERIES, 16, 0, HEADS],
    "at least 86 queries, got 85": [16, 85, 0, 0, HEADS],
    "keys that end at 2147483647 at most, got 2147483686": [0, QUERIES, 2**31 - 32, 0, HEADS],
    "at least 8 heads, got 7": [0, QUERIES, 0, 2, 7],
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("words", "place"), BAD.items())
def test_a_place_that_does_not_fit_is_refused(words, place, device):
    q = torch.zeros(1, QUERIES, HEADS, 8, device=device)
    inputs = (q, q, q, None, None, None, None, None, None, 0, 0, 0, 0, True, -1, -1, None, 0.0, P, True)
    forward, backward = torch.ops.warpsmith.attention_forward, torch.ops.warpsmith.attention_backward
    with pytest.raises(ValueError, match=f"attention: dropout_place: expected {words}"):
        forward(*inputs, place)
    out, lse, _ = forward(*inputs)
    with pytest.raises(ValueError, match=f"attention_backward: dropout_place: expected {words}"):
        backward(out, None, *inputs, out, lse, False, False, place)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_packed_sequences_have_no_first_query(device):
    q, cu = torch.zeros(QUERIES, HEADS, 8, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    for place, got in (([16, 100, 0, 0, HEADS], 16), ([0, 100, 32, 0, HEADS], 32)):
        with pytest.raises(ValueError, match=f"expected 0 as first query and first key with cu_seqlens, got {got}"):
            attend(q, q, q, place, cu)


def test_traced_with_a_place():
    torch.manual_seed(4)
    q, dout = (torch.randn(BATCH, 32, 2, 16) for _ in range(2))
    k, v = (torch.randn(BATCH, KEYS, 2, 16) for _ in range(2))
    for place in ([32, QUERIES, 0, 2, HEADS], None):

        def call(q, k, v, place=place):
            return attend(q, k, v, place)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for a, b in zip(results(call, (q, k, v), dout), results(compiled, (q, k, v), dout), strict=True):
            assert torch.equal(a, b)
    inputs = (q, k, v, *(None,) * 5, SEED, 0, 0, 0, 0, True, -1, -1, None, 0.0, P, True)
    torch.library.opcheck(torch.ops.warpsmith.attention.default, (*inputs, [32, QUERIES, 0, 2, HEADS]))


raw = torch.ops.warpsmith
KERNELS = [pytest.param("cuda", marks=pytest.mark.gpu), *(["cpu"] if is_loaded() else [])]
WHOLES = [(256, (64, 64), False), (256, (128, 128), False), (200, (72, 40), False), (256, (64, 64), True),
          (200, (128, 128), True)]  # fmt: skip


def backward_of_keys(out, lse, dout, q, k, v, rest):
    return raw.attention_backward(dout, None, q, k, v, *rest, out.detach(), lse.detach(), False, False)[:3]


def obey_the_ring(found, alone, exact, dtype):
    """One more rounding than those of a single call."""
    for name, got, one, want in zip(("dq", "dk", "dv"), found, alone, exact, strict=True):
        error, allowed = (float((t.double() - want).abs().max()) for t in (got, one))
        assert error <= 1.1 * allowed + torch.finfo(dtype).eps / 2 * float(want.abs().max()), (name, error, allowed)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("length", "dims", "causal"), WHOLES)
def test_error_law_of_keys_in_halves(length, dims, causal, dtype, device):
    """Each half is given out and lse of all keys, as a block of a ring is: together the gradients of one call.

    Some queries of a causal mask see keys of the other half alone."""
    torch.manual_seed(0)
    dim, dim_v = dims
    q, k, v, dout = (torch.randn(2, length, 2, n, device=device).to(dtype) for n in (dim, dim, dim_v, dim_v))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = warpsmith.attention(*leaves, causal=causal, return_lse=True)
    alone = torch.autograd.grad(out, leaves, dout)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(reference(*wide, causal=causal), wide, dout.double())
    middle, halves = length // 2, []
    for part in (slice(0, middle), slice(middle, length)):
        right = (length - part.stop) if causal else -1  # bottom right of a part's keys
        rest = *[None] * 6, 0, 0, 0, 0, True, -1, right, None, 0.0, 0.0, True
        halves.append(backward_of_keys(out, lse, dout, q, k[:, part], v[:, part], rest))
    found = halves[0][0].double() + halves[1][0], *(torch.cat(pair, 1) for pair in list(zip(*halves, strict=True))[1:])
    obey_the_ring(found, alone, exact, dtype)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("dim", [64, 128])
def test_error_law_of_packed_keys_in_halves(dim, device):
    torch.manual_seed(0)
    lengths = (70, 0, 3, 131)
    shape = sum(lengths) + 5, 2, dim
    q, k, v, dout = (torch.randn(shape, device=device).to(BF16) for _ in range(4))
    cu = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = warpsmith.attention_varlen(*leaves, cu, max_seqlen_q=131, return_lse=True)
    alone = torch.autograd.grad(out, leaves, dout)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(of_sequences(*wide, cu, max_seqlen_q=131), wide, dout.double())
    found = [torch.zeros_like(t, dtype=torch.float64) for t in exact]
    for half in range(2):
        parts = [n // 2 if half == 0 else n - n // 2 for n in lengths]
        at = torch.cat([
            torch.arange(n, device=device) + int(first) + half * (length // 2)
            for n, first, length in zip(parts, cu[:-1], lengths, strict=True)
        ])  # fmt: skip
        cu_k = torch.tensor([0, *parts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        rest = cu, cu_k, *[None] * 4, 131, max(parts), 2, 0, True, -1, -1, None, 0.0, 0.0, True
        dq, dk, dv = backward_of_keys(out, lse, dout, q, k[at], v[at], rest)
        found[0] += dq
        found[1][at], found[2][at] = dk.double(), dv.double()
    obey_the_ring(found, alone, exact, BF16)
