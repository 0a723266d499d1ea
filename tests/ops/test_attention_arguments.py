"""Arguments of attention and attention_varlen that are of a wrong Python type, or that do not go together."""

import numpy as np
import pytest
import torch
import warpsmith
from warpsmith.testing import bitwise_equal

CU = torch.tensor([0, 2, 6], dtype=torch.int32)


def attention(**changes):
    q = torch.zeros(1, 6, 2, 8, requires_grad=changes.pop("requires_grad", False))
    return warpsmith.attention(**{"q": q, "k": q, "v": q, **changes})


def attention_varlen(**changes):
    q = torch.zeros(6, 2, 8, requires_grad=changes.pop("requires_grad", False))
    return warpsmith.attention_varlen(
        **{"q": q, "k": q, "v": q, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, **changes}
    )


def test_a_wrong_type_is_named_under_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="^attention: k: expected a tensor or"):
        attention(k=[1])


@pytest.mark.parametrize("op", [attention, attention_varlen])
def test_values_without_keys_are_refused(op):
    """The raw op would take q for three packed tensors and then read keys that are not there."""
    shape = (1, 6, 3, 2, 8) if op is attention else (6, 3, 2, 8)
    with pytest.raises(ValueError, match=f"^{op.__name__}: k: expected a tensor beside v, got None$"):
        op(q=torch.zeros(shape), k=None)
    with pytest.raises(ValueError, match=f"^{op.__name__}: k: expected a tensor beside v, got None$"):
        op(k=None, kv_heads=1)


@pytest.mark.parametrize("heads", [0, -1])
def test_heads_along_q_are_counted_from_one(heads):
    with pytest.raises(ValueError, match=f"^attention: kv_heads: expected an integer >= 1, or None, got {heads}$"):
        attention(k=None, v=None, kv_heads=heads)


@pytest.mark.parametrize("argument", ["max_seqlen_q", "max_seqlen_k"])
def test_a_length_beyond_every_offset_is_refused(argument):
    """The CPU would go over 2^54 blocks of queries without a token."""
    with pytest.raises(ValueError, match=rf"^attention_varlen: {argument}: expected at most 2147483647.* got {2**62}$"):
        attention_varlen(**{argument: 2**62})


def test_integers_of_numpy_are_integers():
    torch.manual_seed(0)
    q = torch.randn(6, 4, 8)
    two, four = np.int64(2), np.int32(4)
    out = warpsmith.attention_varlen(q, q, q, CU, max_seqlen_q=four, max_seqlen_k=np.int64(4), window_size=(two, -1))
    assert bitwise_equal(out, warpsmith.attention_varlen(q, q, q, CU, max_seqlen_q=4, window_size=(2, -1)))
    heads = warpsmith.attention(q[None], kv_heads=np.int64(1))
    assert bitwise_equal(heads, warpsmith.attention(q[None], kv_heads=1))


@pytest.mark.parametrize("shape", [(2, 4, 0, 1), (0, 5), (1, 4, 0, 5)])
def test_a_bias_without_elements_has_a_gradient_without_elements(shape):
    q = torch.zeros(2, 0, 4, 8)
    k, sink = torch.zeros(2, 5, 4, 8), torch.zeros(4, requires_grad=True)
    bias = torch.zeros(shape, requires_grad=True)
    for op in (warpsmith.attention, torch.compile(warpsmith.attention, backend="aot_eager", fullgraph=True)):
        out = op(q, k, k, bias=bias, sink=sink)
        of_bias, of_sink = torch.autograd.grad(out.sum(), (bias, sink))
        assert of_bias.shape == shape
        assert of_sink.shape == (4,) and not of_sink.any()


def test_torch_names_the_op_whose_result_was_overwritten():
    q = torch.ones(1, 3, 2, 8, requires_grad=True)
    out = warpsmith.attention(q, q, q)
    assert out.grad_fn.name() == "attentionBackward" and "attentionBackward" in repr(out)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*output 0 of attention"):
        out.sum().backward()


def test_raw_ops_refuse_what_crashed_or_hung():
    """C++ programs and graphs call them without the checks of the Python functions."""
    q, cu = torch.zeros(6, 3, 2, 8), torch.tensor([0, 6], dtype=torch.int32)

    def raw(q, k, v, offsets, longest):
        rest = 2, 0, True, -1, -1, None, 0.0, 0.0, True
        return torch.ops.warpsmith.attention(q, k, v, offsets, offsets, *[None] * 4, longest, longest, *rest)

    for device in ("cpu", "meta"):
        with pytest.raises((ValueError, RuntimeError), match="k: expected a tensor beside v, got None"):
            raw(q.to(device), None, q[:, 0].to(device), cu.to(device), 6)
    with pytest.raises((ValueError, RuntimeError), match=f"max_seqlen_q: expected at most {2**31 - 1}.*, got {2**62}"):
        raw(q[:, 0], q[:, 1], q[:, 2], cu, 2**62)


@pytest.mark.not_on_sim(reason="in float64")
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softmax_scale": 1e39}, r"softmax_scale: expected at most 2\^127 in size, got 1e\+39"),
        ({"softmax_scale": -1e39}, r"softmax_scale: expected at most 2\^127 in size, got -1e\+39"),
        ({"softcap": 1e39}, r"softcap: expected at most 2\^127, got 1e\+39"),
        ({"softcap": 1e-40}, r"softcap: expected at least 2\^-127 of softmax_scale, got 1e-40"),
    ],
)
def test_numbers_that_overflow_float32_are_refused(device, options, words):
    q = torch.zeros(1, 4, 1, 64, device=device)
    with pytest.raises(ValueError, match=f"attention: {words}"):
        warpsmith.attention(q, q, q, **options)
    if device == "cpu":
        assert warpsmith.attention(*(q.double(),) * 3, **options).isfinite().all()
