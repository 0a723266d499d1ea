"""Every reason for which a call of ``warpsmith.nn.functional`` is torch's, with every option, beside torch: the same
values and gradients, or an error of both."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as theirs
import warpsmith.nn.functional as ours

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def draw(*shape, dtype=F32):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def norms(bias):
    """Dtypes of x and its parameters, by the reason that they give, times what is there and eps."""
    dtypes = {"fused": (F32, F32, F32), "weight is": (F32, BF16, BF16), "two dtypes": (BF16, F32, BF16),
              "wide weight": (F16, F64, F64), "no float": (torch.complex64, F32, F32)}  # fmt: skip
    for (x, w, b), eps in itertools.product(dtypes.values(), (1e-5, 0.1, -1.0, math.nan, math.inf, 0.0)):
        for with_weight, with_bias in itertools.product((True, False), (True, False) if bias else (False,)):
            given = {"weight": draw(8, dtype=w)} if with_weight else {}
            given |= {"bias": draw(8, dtype=b)} if with_bias else {}
            yield {"input": draw(3, 8, dtype=x), "normalized_shape": (8,), "eps": eps, **given}


def losses():
    targets = {"classes": torch.tensor([0, 4, 2, 1]), "bytes": torch.tensor([0, 4, 2, 1], dtype=torch.uint8),
               "ignored": torch.tensor([-100, 4, 2, 2]), "probabilities": draw(4, 5).softmax(1),
               "int32": torch.tensor([0, 4, 2, 1], dtype=torch.int32)}  # fmt: skip
    weights = {"none": None, "same": draw(5).abs(), "wide": draw(5, dtype=F64).abs()}
    options = (("mean", "sum", "none", "other"), (0.0, 0.3, 1.0, 1.5), (-100, 2))
    for target, weight in itertools.product(targets.values(), weights.values()):
        for reduction, smoothing, ignored in itertools.product(*options):
            more = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
            yield {"input": draw(4, 5), "target": target, "weight": weight, **more}


def layers():
    dtypes = ((F32, F32, F32), (BF16, BF16, BF16), (F32, BF16, F32), (F16, F16, F32), (F64, F64, F64), (F32, F32, F64))
    shapes = ((3, 8), (8,), (2, 3, 8), (0, 8), (), (3, 7))
    weights = ((5, 8), (8,), (0, 8), (5, 8, 1))
    for (x, w, b), shape, of_weight in itertools.product(dtypes, shapes, weights):
        for bias in (None, (5,), (4,), (1,), ()):
            given = {} if bias is None else {"bias": draw(*bias, dtype=b)}
            yield {"input": draw(*shape, dtype=x), "weight": draw(*of_weight, dtype=w), **given}


def attentions():
    masks = {"none": None, "bool": draw(4, 6) > 0, "float": draw(4, 6), "wide": draw(4, 6, dtype=F64)}
    for dtype, width, mask in itertools.product((F32, F64, BF16), (8, 12, 264), masks.values()):
        for causal, scale, gqa in itertools.product((False, True), (None, 0.3), (False, True)):
            q, k, v = draw(2, 2, 4, width), draw(2, 1 if gqa else 2, 6, width), draw(2, 1 if gqa else 2, 6, width)
            mask = mask.to(dtype) if mask is not None and mask.dtype == F32 else mask
            more = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": gqa}
            yield {"query": q.to(dtype), "key": k.to(dtype), "value": v.to(dtype), **more}
            yield {"query": q.to(dtype), "key": k.to(dtype), "value": v.to(dtype)[..., :0], **more}


CALLS = {
    "layer_norm": lambda: norms(True),
    "rms_norm": lambda: norms(False),
    "linear": layers,
    "cross_entropy": losses,
    "scaled_dot_product_attention": attentions,
}


def outcome(function, given):
    """(output, gradients of everything), or the type of the error."""
    leaves = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    wanted = [t.requires_grad_() for t in leaves.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    torch.manual_seed(0)
    try:
        y = function(**leaves)
        if y.is_complex() or not wanted:
            return [y.detach()]
        up = draw(*y.shape) if y.dim() else torch.tensor(0.7)
        return [y.detach(), *torch.autograd.grad(y, wanted, up.to(y.dtype), allow_unused=True)]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", CALLS)
def test_every_reason_with_every_option(name):
    refused = count = 0
    for given in CALLS[name]():
        expected, found = outcome(getattr(theirs, name), given), outcome(getattr(ours, name), given)
        halves = any(isinstance(t, torch.Tensor) and t.dtype in (BF16, F16) for t in given.values())
        what = {n: t.dtype if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        count += 1
        if isinstance(expected, type) or isinstance(found, type):
            assert isinstance(expected, type) and isinstance(found, type), f"{name} {what}: {found}, torch {expected}"
            refused += 1
            continue
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None), what
            if a is not None:
                coarse = {"rtol": 4e-2, "atol": 4e-2} if halves else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(b, a, equal_nan=True, msg=lambda m, w=what: f"{name} {w}: {m}", **coarse)
    assert count > 30 and refused < count
