"""What an op refuses it refuses before it has written anything; what peers found otherwise, and values that once
passed in silence."""

import gc

import pytest
import torch
import warpsmith
from torch.utils.checkpoint import checkpoint
from warpsmith.testing import bitwise_equal

from tools import families

GATED = [getattr(warpsmith, row.name) for row in families.rows("GATED")]
TARGET = torch.tensor([0, 3, 1, 4])


def logits_of(leaf):
    return leaf * 1


def leaf_of(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*shape).to(dtype).requires_grad_()


def made_under_inference(t):
    with torch.inference_mode():
        return t.clone()


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_halves_of_few_rows_with_inplace_backward(op, rows):
    """An expert without tokens: ``h.chunk(2, -1)`` of (0, 32)."""
    x = leaf_of(rows, 32)
    gate, up = (x * 1).chunk(2, -1)
    op(gate, up, inplace_backward=True).sum().backward()
    (expected,) = torch.autograd.grad(op(*x.chunk(2, -1)).sum(), x)
    assert bitwise_equal(x.grad, expected)


def rope_inputs():
    angles = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1])
    return leaf_of(2, 4, 3, 4) * 1, leaf_of(2, 4, 1, 4) * 1, angles.cos(), angles.sin()


@pytest.mark.parametrize("which", ["cos", "sin", "position_offset"])
def test_rope_in_place_with_tables_of_inference_mode(which):
    q, k, cos, sin = rope_inputs()
    given = {"cos": cos, "sin": sin, "position_offset": torch.zeros((), dtype=torch.int64)}
    given[which] = made_under_inference(given[which])
    before = q.detach().clone(), k.detach().clone()
    with pytest.raises(ValueError, match=rf"^rope: {which}: expected a tensor made outside torch.inference_mode\(\)"):
        warpsmith.rope(q, k, **given, inplace=True)
    assert bitwise_equal(q.detach(), before[0]) and bitwise_equal(k.detach(), before[1])
    with torch.no_grad():  # which keeps nothing
        warpsmith.rope(q, k, **given, inplace=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("which", ["target", "class_weight"])
def test_cross_entropy_in_place_with_tensors_of_inference_mode(which, reduction):
    logits = logits_of(leaf_of(4, 5))
    given = {"target": TARGET, "class_weight": torch.ones(5)}
    given[which] = made_under_inference(given[which])
    before = logits.detach().clone()
    with pytest.raises(ValueError, match=f"^cross_entropy: {which}: expected a tensor made outside"):
        warpsmith.cross_entropy(logits, **given, reduction=reduction, inplace_backward=True)
    assert bitwise_equal(logits.detach(), before)


def test_cross_entropy_in_place_over_chunks_is_refused_at_once():
    logits = logits_of(leaf_of(4, 5))
    before = logits.detach().clone()
    for part, target in zip(logits.chunk(2), TARGET.chunk(2), strict=True):
        with pytest.raises(ValueError, match="^cross_entropy: logits: expected a view that torch lets be written"):
            warpsmith.cross_entropy(part, target, inplace_backward=True)
    assert bitwise_equal(logits.detach(), before)


def negative(*shape):
    """A real tensor with the negative bit, without a graph."""
    return torch.view_as_complex(torch.randn(*shape, 2)).conj().imag


def test_the_negative_bit_is_not_written_through():
    q, k, cos, sin = rope_inputs()
    lazy = negative(2, 4, 3, 4)
    before = lazy.clone()
    for which, pair in (("q", (lazy, None)), ("k", (q, lazy[:, :, :1]))):
        with pytest.raises(ValueError, match=rf"^rope: {which}: expected a tensor that holds its values"):
            warpsmith.rope(*pair, cos, sin, inplace=True)
    z = torch.view_as_complex(leaf_of(4, 5, 2) * 1)
    with pytest.raises(ValueError, match="^cross_entropy: logits: expected a tensor that holds its values"):
        warpsmith.cross_entropy(z.conj().imag, TARGET, inplace_backward=True)
    main_grad = torch.view_as_complex(torch.zeros(5, 3, 2)).conj().imag
    with pytest.raises(ValueError, match="main_grad: expected a tensor that holds its values"):
        warpsmith.linear_cross_entropy(leaf_of(4, 3), leaf_of(5, 3), TARGET, main_grad=main_grad)
    assert torch.equal(lazy, before)


@pytest.mark.parametrize("op", GATED)
def test_gated_gradients_are_not_written_over_negative_bits(op):
    z = leaf_of(3, 8, 2)

    def gradient(**options):
        gate = torch.view_as_complex(z * 1).conj().imag
        (found,) = torch.autograd.grad(op(gate, gate.detach().clone(), **options).sum(), z)
        return found

    assert bitwise_equal(gradient(inplace_backward=True), gradient())


@pytest.mark.parametrize("options", [{}, {"inplace_backward": True}])
def test_a_checkpoint_keeps_no_gradient_of_the_logits(options):
    """The backward makes the gradient again, as everything that a checkpoint drops."""
    hidden, weight, target = leaf_of(31, 8), leaf_of(67, 8), torch.zeros(31, dtype=torch.int64)

    def loss_of(h):
        return warpsmith.cross_entropy(h @ weight.T, target, **options)

    loss = checkpoint(loss_of, hidden, use_reentrant=False)
    gc.collect()
    assert not [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (31, 67)]
    found = torch.autograd.grad(loss, [hidden, weight])
    expected = torch.autograd.grad(loss_of(hidden), [hidden, weight])
    assert all(bitwise_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_several_upstream_gradients_at_once(dtype, reduction):
    logits = leaf_of(4, 5, dtype=dtype)
    loss = warpsmith.cross_entropy(logits, TARGET, reduction=reduction)
    upstream = torch.tensor([1.0, 0.5, -2.0])
    (found,) = torch.autograd.grad(loss, logits, upstream, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(loss, logits, g, retain_graph=True)[0] for g in upstream]
    torch.testing.assert_close(found, torch.stack(one_by_one), rtol=0, atol=0)


def test_jacobians_of_losses():
    logits = leaf_of(4, 5)
    hidden, weight = leaf_of(4, 3), leaf_of(5, 3)
    cases = [
        (lambda x: warpsmith.cross_entropy(x, TARGET), logits),
        (lambda x: warpsmith.cross_entropy(x, TARGET, reduction="none"), logits),
        (lambda x: warpsmith.linear_cross_entropy(x, weight, TARGET), hidden),
        (lambda x: warpsmith.linear_cross_entropy(hidden, x, TARGET, reduction="none"), weight),
    ]
    for loss, x in cases:
        whole, rows = (torch.autograd.functional.jacobian(loss, x, vectorize=v) for v in (True, False))
        torch.testing.assert_close(whole, rows)


def test_several_upstream_gradients_do_not_fit_into_the_logits():
    loss = warpsmith.cross_entropy(logits_of(leaf_of(4, 5)), TARGET, inplace_backward=True)
    with pytest.raises(ValueError, match="inplace_backward: expected one upstream gradient, got several at once"):
        torch.autograd.grad(loss, loss.grad_fn.saved_tensors[0], torch.ones(2), is_grads_batched=True)


@pytest.mark.parametrize(("name", "shape"), [("rms_norm", (4,)), ("layer_norm", 4)])
def test_torchs_arguments_of_a_norm_are_told_where_they_belong(name, shape):
    words = f"^{name}: weight: expected a tensor or None, got the .*torch's.*warpsmith.nn.functional.{name}"
    with pytest.raises(TypeError, match=words):
        getattr(warpsmith, name)(torch.ones(2, 4), shape)


def test_a_large_whole_temperature_has_a_backward():
    hidden, weight = leaf_of(4, 3), leaf_of(5, 3)
    for temperature in (2**70, 2.0**70):
        log_prob, *_ = warpsmith.linear_log_prob(hidden, weight, TARGET, temperature=temperature)
        grads = torch.autograd.grad(log_prob.sum(), [hidden, weight])
        assert all(g.isfinite().all() for g in grads)


def test_a_place_for_the_gradient_that_is_no_place_of_its_own():
    hidden, weight = leaf_of(4, 3), leaf_of(5, 3)
    before = weight.detach().clone()
    flat = torch.zeros(40)
    view = flat[:15].view(5, 3)
    bad = {
        "other memory than that of weight": (hidden, weight, weight.detach()),
        "other memory than that of hidden": (flat[12:24].view(4, 3), weight, view),
        "a tensor that requires no gradient": (hidden, weight, torch.zeros(5, 3, requires_grad=True)),
    }
    for words, (h, w, main_grad) in bad.items():
        with pytest.raises(ValueError, match=f"^linear_cross_entropy: main_grad: expected {words}"):
            warpsmith.linear_cross_entropy(h, w, TARGET, main_grad=main_grad)
    with pytest.raises(TypeError, match="main_grad: expected a tensor, got the str 'x'"):
        warpsmith.linear_cross_entropy(hidden, weight, TARGET, main_grad="x")
    neighbour = flat[15:27].copy_(hidden.detach().flatten()).view(4, 3)
    warpsmith.linear_cross_entropy(neighbour, weight, TARGET, main_grad=view).backward()
    assert view.any() and torch.equal(neighbour, hidden)
    assert bitwise_equal(weight.detach(), before)


def test_what_torch_takes_beside_ours():
    """uint8 classes, and a 16-bit weight beside float32 activations."""
    logits, hidden, weight = leaf_of(4, 5), leaf_of(4, 3), leaf_of(5, 3)
    for loss in (
        lambda t, **o: warpsmith.cross_entropy(logits, t, **o),
        lambda t, **o: warpsmith.linear_cross_entropy(hidden, weight, t, **o),
    ):
        wide, narrow = (loss(t, return_stats=True) for t in (TARGET, TARGET.to(torch.uint8)))
        assert torch.equal(wide[0], narrow[0]) and torch.equal(wide[1].argmax, narrow[1].argmax)
        grads = [torch.autograd.grad(found[0], [logits, hidden, weight], allow_unused=True) for found in (wide, narrow)]
        assert all(a is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))
    log_probs = [warpsmith.linear_log_prob(hidden, weight, t)[0] for t in (TARGET, TARGET.to(torch.uint8))]
    assert torch.equal(*log_probs)
    norm, theirs = warpsmith.nn.RMSNorm(5).bfloat16(), torch.nn.RMSNorm(5).bfloat16()
    found, expected = norm(logits), theirs(logits)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert norm.weight.grad.dtype == torch.bfloat16


def test_rope_says_which_layout_it_wants():
    """transformers has (batch, heads, tokens, head_dim)."""
    q, k = torch.randn(2, 8, 16, 4), torch.randn(2, 2, 16, 4)
    cos = torch.ones(2, 16, 4)
    hint = r"; q and k are \(batch, tokens, heads, head_dim\): transpose\(1, 2\) of \(batch, heads, tokens, head_dim\)"
    for device in ("cpu", "meta"):
        given = [t.to(device) for t in (q, k, cos, cos)]
        with pytest.raises(ValueError, match=rf"^rope: k: expected the shape of q .*{hint}$"):
            warpsmith.rope(*given)
        with pytest.raises(ValueError, match=rf"^rope: cos: expected shape .*{hint}$"):
            warpsmith.rope(given[0], None, *given[2:])
    with pytest.raises(
        ValueError, match=r"^rope: k: expected the shape of q but for its heads, \(.*got \(2, 3, 4, 4\)$"
    ):
        warpsmith.rope(q, torch.randn(2, 3, 4, 4), cos, cos)
